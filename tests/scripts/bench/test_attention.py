"""scripts.bench.attention: what it counts, what it refuses to report, its files, and two checkouts."""

import json
import math
import shutil
import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from scripts.bench import attention as bench
from scripts.bench import registry, tables, timing
from scripts.bench.registry import PEERS, Implementation, Shape
from scripts.bench.tables import Row

SIZES = ["--lengths", "40", "24", "--tokens", "80", "--width", "64", "--head-dims", "32"]
SMALL = ["--device", "cpu", *SIZES, "--repetitions", "2"]
SHAPE = Shape(batch=2, heads=2, tokens=24, head_dim=16, causal=True)
WINDOW = replace(SHAPE, causal=False, left=5, right=2)
CPU = torch.device("cpu")


def exact_sdpa(shape, device=CPU):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)


def measure(*implementations, shape=SHAPE):
    """{(name, mode): row} of one small shape."""
    rows = timing.measure_shape(shape, list(implementations), bench.parse_arguments(SMALL))
    return {(row.implementation, row.mode): row for row in rows}


def statuses(name, shape):
    """Of all modes of a peer."""
    return {row.status for row in measure(Implementation(name, PEERS[name].load()), shape=shape).values()}


# --- Counting -----------------------------------------------------------------------------------------------


def test_flops_are_the_usual_count():
    full = Shape(batch=2, heads=3, tokens=100, head_dim=16, causal=False)
    assert full.flops == 4 * 2 * 3 * 100 * 100 * 16
    assert replace(full, causal=True).flops == full.flops / 2
    # Of ten tokens, the first three see 1, 2 and 3 keys, and the others 4.
    window = Shape(batch=2, heads=3, tokens=10, head_dim=16, causal=False, left=3, right=0)
    assert window.flops == 4 * 2 * 3 * 16 * (1 + 2 + 3 + 7 * 4)
    (row,) = timing.add_times([Row("sagebwd", full, "backward")], {"sagebwd": [2.0]}, {})
    assert row.tflops == pytest.approx(2.5 * full.flops / 2e-3 / 1e12)


def test_a_mask_may_be_a_window(capsys):
    options = ["--device", "cpu", "--lengths", "1024", "--head-dims", "64", "--masks"]
    shapes = bench.shapes_of(bench.parse_arguments([*options, "causal", "1024,0", ",7", "9,"]))
    assert [shape.mask for shape in shapes] == ["causal", "window 1024,0", "window -1,7", "window 9,-1"]
    assert [shape.window for shape in shapes] == [None, (1024, 0), (-1, 7), (9, -1)]
    for wrong in ("window", "1024", "1,2,3", ",", "1.5,0"):
        with pytest.raises(SystemExit):
            bench.parse_arguments([*options, wrong])
        assert repr(wrong) in capsys.readouterr().err


def test_times_give_medians_percentiles_and_ratios():
    times = {"sagebwd": [2.0, 1.0, 9.0], "FlashAttention-2": [4.0, 3.0, 5.0], "cuDNN": [1.0, 1.0, 1.0]}
    rows = [Row(name, SHAPE, "both") for name in (*times, "FlexAttention")]
    own, flash, cudnn, untimed = timing.add_times(rows, times, {"sagebwd": 2.5})
    assert (own.median_ms, own.host_ms, flash.median_ms) == (2, 2.5, 4)
    assert (own.p10_ms, own.p90_ms) == pytest.approx((1.2, 7.6))
    assert own.speedup == {"FlashAttention-2": 2, "cuDNN": 0.5}
    assert cudnn.speedup == {"FlashAttention-2": 4, "cuDNN": 1}
    assert untimed == rows[-1]


def test_implementations_take_turns_and_so_do_inputs():
    calls = []
    runners = {name: [lambda x=(name, n): calls.append(x) for n in range(2)] for name in "ab"}
    times = timing.time_in_turn(runners, repetitions=3, warm_up=1, device=CPU)
    assert calls == [(name, n) for n in (1, 0, 1, 0) for name in "ab"]
    assert [len(times[name]) for name in "ab"] == [3, 3]


# --- Those that are wrong, and those that cannot ------------------------------------------------------------


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


def wrong_dk(shape, device):
    return lambda q, k, v: exact_sdpa(shape)(q, WrongGradient.apply(k), v)


def wrong_last_head(shape, device):
    """Only in the last sequence."""

    def attend(q, k, v):
        out = exact_sdpa(shape)(q, k, v)
        return torch.cat([out[:-1], torch.cat([out[-1:, :-1], 1.1 * out[-1:, -1:]], 1)])

    return attend


def not_a_number(shape, device):
    return lambda q, k, v: exact_sdpa(shape)(q, k, v) * math.nan


def no_build(shape, device):
    raise ValueError(f"no kernel for {shape.tokens} tokens\nand more")


def no_backward(shape, device):
    return lambda q, k, v: exact_sdpa(shape)(q.detach(), k.detach(), v.detach())


def test_what_is_wrong_or_refuses_is_listed_without_a_speed_and_the_others_are_measured():
    expected = {
        wrong_dk: ("failed accuracy", "dK has relative L2 error 0.1"),
        wrong_last_head: ("failed accuracy", "O has relative L2 error 0.0"),
        not_a_number: ("failed accuracy", "O has relative L2 error nan"),
        no_build: ("refused", "ValueError: no kernel for 24 tokens"),
        no_backward: ("refused", ""),
        exact_sdpa: ("passed", ""),
    }
    rows = measure(*(Implementation(build.__name__, build) for build in expected))
    for (name, mode), row in rows.items():
        status, reason = expected[globals()[name]]
        assert row.status == status, name
        assert (reason in row.reason) if row.reason else status == "passed"
        assert (row.median_ms is row.p10_ms is row.p90_ms is row.tflops is None) == (status != "passed")
        if status == "failed accuracy":
            assert row.errors.keys() == rows["exact_sdpa", mode].errors.keys()
    assert len(rows) == len(expected) * 3
    assert rows["no_build", "both"].reason == "ValueError: no kernel for 24 tokens"  # its first line
    text = "\n".join(tables.not_measured({"FlexAttention": "left out by --without"}, list(rows.values())))
    assert "- FlexAttention: left out by --without" in text
    assert "- no_build: refused: ValueError: no kernel for 24 tokens (3 rows; first: both, causal, " in text


def test_too_little_memory_for_a_shape_is_a_reason(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing, "draw_sets", no_memory)
    rows = measure(Implementation("good", exact_sdpa))
    assert {row.reason for row in rows.values()} == {"OutOfMemoryError: CUDA out of memory"}


def test_absent_and_broken_packages_are_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for package in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, package, None)
    options = ["--configs", "default", "paper", "default", "--without", "flex", "--kernels", "ampere"]
    found, absent = registry.find_implementations(bench.parse_arguments(options))
    assert [(implementation.name, implementation.bound) for implementation in found] == [
        ("sagebwd", 0.06),
        ("sagebwd (ampere)", 0.06),
        ("sagebwd paper", 0.12),
        ("sagebwd paper (ampere)", 0.12),
        ("FlashAttention-2", 0.02),
        ("cuDNN", 0.02),
    ]
    assert absent["FlexAttention"] == "left out by --without"
    assert absent["flash_attn package"].startswith("ModuleNotFoundError: import of flash_attn halted")
    assert {"FlashAttention-3", "FlashAttention-4", "SDPA math"} <= absent.keys()


# --- Peers --------------------------------------------------------------------------------------------------


def attend_here(q, k, v, causal, window_size=(-1, -1)):
    """(B, N, H, D) → the same, as packages do it; None is no limit, too."""
    left, right = (-1 if n is None else n for n in window_size)
    shape = Shape(q.shape[0], q.shape[2], q.shape[1], q.shape[3], causal, left, right)
    out = registry.load_math()(shape, CPU)(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for packages that need a GPU; flash-attn-4 also returns the logsumexp."""
    package, package_4 = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    package.flash_attn_func = attend_here
    package_4.flash_attn_func = lambda *x, **options: (attend_here(*x, **options), None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package_4)


@pytest.mark.parametrize("shape", [SHAPE, WINDOW], ids=["causal", "window"])
def test_all_compute_the_same(shape, packages):
    implementations, _ = registry.find_implementations(bench.parse_arguments(SMALL))
    assert {row.reason for row in measure(*implementations, shape=shape).values()} == {None}
    assert statuses("flash_attn", shape) == {"passed"}
    assert statuses("fa4", shape) == {"passed"}
    assert shape == SHAPE or statuses("cudnn", shape) == {"refused"}


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (100, 0), (-1, 64), (70, 30)])
def test_peers_on_a_gpu_compute_the_same(window):
    shape = Shape(2, 2, 1024, 64, False, *window)
    arguments = bench.parse_arguments(["--repetitions", "1"])
    implementations = [Implementation(name, PEERS[name].load()) for name in ("flash", "flex")]
    rows = timing.measure_shape(shape, implementations, arguments)
    assert {row.status for row in rows} == {"passed"}, [row.reason for row in rows]


# --- The command --------------------------------------------------------------------------------------------


def test_the_command_measures_all_rows(tmp_path):
    bench.main([*SMALL, "--configs", "default", "paper", "--out", str(tmp_path / "new" / "v1.2")])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["v1.2.json", "v1.2.md", "v1.2.png"]
    report = json.loads((tmp_path / "new" / "v1.2.json").read_text())
    rows = report["rows"]
    found = {(row["implementation"], row["mode"], *row["shape"].values()) for row in rows}
    assert len(rows) == len(found) == 3 * 3 * 2 * 2
    assert ("sagebwd paper", "backward", 2, 2, 40, 32, True, -1, -1) in found
    assert ("SDPA math", "forward", 3, 2, 24, 32, False, -1, -1) in found
    ran = {(row["implementation"], row["kernels"], row["status"]) for row in rows}
    sage = {(name, "reference", "passed") for name in ("sagebwd", "sagebwd paper")}
    assert ran == {*sage, ("SDPA math", None, "passed")}
    assert all(row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] and row["tflops"] > 0 for row in rows)
    assert (report["settings"]["repetitions"], report["shapes"]) == (2, "4 of 4")
    assert report["absent"]["cuDNN"] == "measured with --device cuda only"
    row = next(row for row in rows if row["mode"] == "both" and row["shape"]["tokens"] == 24)
    section = (tmp_path / "new" / "v1.2.md").read_text().split("## Forward + backward, causal, D 32")[1]
    line = next(line for line in section.splitlines() if line.startswith("| SageBwd  ") and "| 24 |" in line)
    assert f" {row['median_ms']:.3f} " in line
    assert all(f" {error:.4f} " in line for _, error in row["errors"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu", "--width", "100"], "--width 100 is not a multiple of head size 64"),
        (["--device", "cpu", "--graphs"], "CUDA graphs need a GPU"),
        (["--device", "tpu"], "use cuda, cuda:<number> or cpu"),
        (["--device", "cpu", "--base", "nowhere"], "--base nowhere holds no sagebwd/"),
    ],
)
def test_refuses_bad_options(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_two_checkouts_are_compared(tmp_path, capsys, monkeypatch):
    """The other one has another O under a causal mask, within the bound. This one runs in this process."""
    measure_tree = bench.measure_tree

    def measure_here(tree, arguments):
        if tree != str(bench.ROOT):
            return measure_tree(tree, arguments)
        bench.print_rows(json.dumps(vars(arguments), default=str))
        return tables.rows_of({"rows": json.loads(capsys.readouterr().out)})

    monkeypatch.setattr(bench, "measure_tree", measure_here)
    base = tmp_path / "base" / "sagebwd"
    shutil.copytree(bench.ROOT / "sagebwd", base, ignore=shutil.ignore_patterns("__pycache__"))
    with (base / "__init__.py").open("a") as file:
        file.write("\n_right = sage_attention\ndef sage_attention(q, k, v, **options):\n")
        file.write("    return _right(q, k, v, **options) * (1.02 if options['is_causal'] else 1)\n")
    options = ["--lengths", "24", "--tokens", "48", "--modes", "forward", "--repetitions", "1"]
    sizes = ["--device", "cpu", "--width", "32", "--head-dims", "16"]
    out = tmp_path / "out"
    bench.main([*options, *sizes, "--base", str(base.parent), "--rounds", "1", "--out", str(out)])
    causal, full = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert (causal["shape"]["causal"], causal["bits"], full["bits"]) == (True, "differ", "same")
    assert all(row["base_ms"] > 0 and row["here_ms"] > 0 for row in (causal, full))
    assert f" {full['base_ms']:.3f} " in capsys.readouterr().out


def test_a_pair_is_the_best_of_all_rounds():
    def row(ms, digest):
        return Row("sagebwd", SHAPE, "both", median_ms=ms, digest=digest)

    pair = bench.pair_up([row(2.0, "a"), row(3.0, "a")], [row(5.0, "a"), row(4.0, "a")])
    assert (pair["base_ms"], pair["here_ms"], pair["bits"]) == (2.0, 4.0, "same")
    assert bench.cells_of(pair)[1:] == ["2.000", "4.000", "0.500", "same"]
    assert bench.pair_up([row(2.0, "a")], [row(2.0, "b")])["bits"] == "differ"
    assert bench.pair_up([row(2.0, "a"), row(2.0, "b")], [row(2.0, "a")] * 2)["bits"] == "do not repeat"
    refused = Row("sagebwd", SHAPE, "both", "refused", "no kernel")
    assert bench.cells_of(bench.pair_up([row(2.0, "a")], [refused]))[1:] == ["2.000", "", "", "no kernel"]


@pytest.mark.gpu
def test_on_a_gpu_every_mode_and_baseline(tmp_path):
    out = tmp_path / "bench"
    shapes = ["--lengths", "300", "1024", "--tokens", "1024", "--width", "256", "--repetitions", "3"]
    bench.main([*shapes, "--graphs", "--without", "flex", "--out", str(out)])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    chosen = [row for row in rows if row["implementation"] in ("sagebwd", "FlashAttention-2")]
    assert len(chosen) == 2 * len(tables.MODES) * 2 * 2 * 2
    for row in chosen:
        assert (row["status"], row["reason"]) == ("passed", None)
        assert row["median_ms"] > 0
        assert row["extra_memory"] >= 0
        assert row["speedup"]["FlashAttention-2"] > 0
