"""scripts.bench.attention: what it counts, what it refuses to report, and its files."""

import functools
import json
import math
import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from scripts.bench import attention as bench
from scripts.bench import attention_peers as peers
from scripts.bench import attention_tables as tables
from scripts.bench import attention_timing as timing
from scripts.bench.attention_peers import Implementation, Shape
from scripts.bench.attention_tables import Row
from scripts.output import write_tables

SIZES = ["--lengths", "40", "24", "--tokens", "80", "--width", "64", "--head-dims", "32"]
SMALL = ["--device", "cpu", *SIZES, "--repetitions", "2"]
SHAPE = Shape(batch=2, heads=2, tokens=24, head_dim=16, causal=True)


def exact_sdpa(shape):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)


def measure(*implementations):
    """{(name, mode): row} of one small shape."""
    rows = timing.measure_shape(SHAPE, list(implementations), bench.parse_arguments(SMALL))
    return {(row.implementation, row.mode): row for row in rows}


# --- Counting -----------------------------------------------------------------------------------------------


def test_flops_are_the_usual_count():
    full = Shape(batch=2, heads=3, tokens=100, head_dim=16, causal=False)
    assert timing.flops(full, "forward") == 4 * 2 * 3 * 100 * 100 * 16
    assert timing.flops(full, "backward") == 2.5 * timing.flops(full, "forward")
    assert (
        timing.flops(full, "both") == timing.flops(full, "both, graph") == 3.5 * timing.flops(full, "forward")
    )
    causal = Shape(batch=2, heads=3, tokens=100, head_dim=16, causal=True)
    assert timing.flops(causal, "both") == timing.flops(full, "both") / 2
    # Of ten tokens, the first three see 1, 2 and 3 keys, and the others 4.
    window = Shape(batch=2, heads=3, tokens=10, head_dim=16, causal=False, left=3, right=0)
    assert timing.flops(window, "forward") == 4 * 2 * 3 * 16 * (1 + 2 + 3 + 7 * 4)


def test_shapes_keep_the_tokens_and_the_width():
    options = ["--device", "cpu", "--lengths", "1024", "32768", "--masks", "full"]
    assert bench.shapes_of(bench.parse_arguments(options)) == [
        Shape(16, 32, 1024, 64, False),
        Shape(1, 32, 32768, 64, False),
        Shape(16, 16, 1024, 128, False),
        Shape(1, 16, 32768, 128, False),
    ]


def test_rows_of_windows_are_not_those_of_full_attention():
    rows = [
        {"implementation": name, "mode": "both", "shape": {**vars(shape), "causal": False}, "median_ms": time}
        for name, shape, time in (
            ("sagebwd", SHAPE, 2.0),
            ("x", SHAPE, 3.0),
            ("x", replace(SHAPE, left=5), 9.0),
        )
    ]
    assert tables.relative_times(rows, "both", 16, False) == {"sagebwd": {24: 1.0}, "x": {24: 1.5}}


def test_a_mask_may_be_a_window(capsys):
    options = ["--device", "cpu", "--lengths", "1024", "--head-dims", "64", "--masks"]
    shapes = bench.shapes_of(bench.parse_arguments([*options, "causal", "1024,0", ",7", "9,"]))
    assert [shape.mask for shape in shapes] == ["causal", "window 1024,0", "window -1,7", "window 9,-1"]
    assert [shape.window for shape in shapes] == [None, (1024, 0), (-1, 7), (9, -1)]
    for wrong in ("window", "1024", "1,2,3", ",", "1.5,0"):
        with pytest.raises(SystemExit):
            bench.parse_arguments([*options, wrong])
        assert f"{wrong!r}; use causal, full or a window such as 1024,0" in capsys.readouterr().err


def test_inputs_lie_token_by_token():
    inputs = timing.draw_inputs(SHAPE, torch.bfloat16, torch.device("cpu"), seed=3)
    for x in inputs:
        assert x.shape == (2, 2, 24, 16)
        assert x.stride() == (24 * 32, 16, 32, 1)
    assert [x.requires_grad and x.is_leaf for x in inputs] == [True, True, True, False]


def test_times_give_medians_percentiles_and_ratios():
    times = {
        "sagebwd": [2.0, 1.0, 9.0],
        "FlashAttention-2": [4.0, 3.0, 5.0],
        "cuDNN": [1.0, 1.0, 1.0],
    }
    rows = [Row(name, SHAPE, "both") for name in (*times, "FlexAttention")]
    ours, flash, cudnn, untimed = timing.add_times(rows, times, {})
    assert (ours.median_ms, flash.median_ms) == (2, 4)
    assert (ours.p10_ms, ours.p90_ms) == pytest.approx((1.2, 7.6))
    assert ours.tflops == pytest.approx(timing.flops(SHAPE, "both") / 2e-3 / 1e12)
    assert ours.speedup == {"FlashAttention-2": 2, "cuDNN": 0.5}
    assert cudnn.speedup == {"FlashAttention-2": 4, "cuDNN": 1}
    assert untimed == rows[-1]


def test_the_host_time_is_that_until_the_call_returns(monkeypatch):
    """With a clock of its own: each call takes one tick more than the one before, and waiting none."""
    clock = iter([0.0, 0.001, 1.0, 1.002, 2.0, 2.003, 3.0, 3.004, 4.0, 4.005])
    waited = []
    monkeypatch.setattr(timing, "synchronize", waited.append)
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    assert timing.host_time(lambda: None, torch.device("cuda")) == pytest.approx(3)
    assert len(waited) == 6
    assert timing.host_time(lambda: None, torch.device("cpu")) is None


def test_tables_say_which_times_are_the_hosts():
    rows = [Row(name, SHAPE, "both") for name in ("sagebwd", "cuDNN")]
    rows = timing.add_times(rows, {"sagebwd": [2.0], "cuDNN": [1.0]}, {"sagebwd": 2.5, "cuDNN": 0.125})
    assert [row.host_ms for row in rows] == [2.5, 0.125]
    [note] = tables.host_note(rows)
    assert note.endswith("the time is the host's (1 of 2 rows)")
    header, _, ours, _ = tables.detail_table(rows)
    columns = [cell.strip() for cell in header.split("|")]
    assert ours.split("|")[columns.index("host")].strip() == "2.500"
    untimed = [Row("sagebwd", SHAPE, "both")]
    assert tables.host_note(untimed) == []
    assert "host" not in tables.detail_table(untimed)[0]


def test_ratios_need_the_other_one():
    (row,) = timing.add_times([Row("sagebwd", SHAPE, "both")], {"sagebwd": [1.0]}, {})
    assert row.speedup == {}


def test_implementations_take_turns_and_so_do_inputs():
    calls = []
    runners = {name: [lambda x=(name, n): calls.append(x) for n in range(2)] for name in "ab"}
    times = timing.time_in_turn(runners, repetitions=3, warm_up=1, device=torch.device("cpu"))
    turns = [(name, n) for n in (1, 0, 1, 0) for name in "ab"]
    assert calls == turns
    assert [len(times[name]) for name in "ab"] == [3, 3]
    assert all(time >= 0 for values in times.values() for time in values)


# --- Accuracy -----------------------------------------------------------------------------------------------


def test_a_right_implementation_passes_with_its_errors():
    rows = measure(Implementation("good", exact_sdpa))
    assert {mode for _, mode in rows} == {"both", "forward", "backward"}
    for row in rows.values():
        assert row.status == "passed"
        assert row.reason is None
        assert row.tflops > 0
        assert row.p10_ms <= row.median_ms <= row.p90_ms
        assert list(row.errors) == ["out", "dq", "dk", "dv"]
        assert all(cosine > 0.999 and 0 < error < 0.02 for cosine, error in row.errors.values())


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


def wrong_dk(shape):
    return lambda q, k, v: exact_sdpa(shape)(q, WrongGradient.apply(k), v)


def wrong_last_head(shape):
    """Only in the last sequence."""

    def attend(q, k, v):
        out = exact_sdpa(shape)(q, k, v)
        return torch.cat([out[:-1], torch.cat([out[-1:, :-1], 1.1 * out[-1:, -1:]], 1)])

    return attend


def not_a_number(shape):
    return lambda q, k, v: exact_sdpa(shape)(q, k, v) * math.nan


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (wrong_dk, "dK has relative L2 error 0.1"),
        (wrong_last_head, "O has relative L2 error 0.0"),
        (not_a_number, "O has relative L2 error nan"),
    ],
)
def test_a_wrong_result_gets_no_speed(build, reason):
    rows = measure(Implementation("wrong", build), Implementation("good", exact_sdpa))
    for mode in ("both", "forward", "backward"):
        wrong, good = rows["wrong", mode], rows["good", mode]
        assert wrong.status == "failed accuracy"
        assert reason in wrong.reason
        assert "allowed: 0.02" in wrong.reason
        assert wrong.errors.keys() == good.errors.keys()
        assert wrong.median_ms is wrong.p10_ms is wrong.p90_ms is wrong.tflops is None
        assert good.status == "passed"
    text = "\n".join(tables.detail_table([rows["wrong", "both"]]))
    assert "failed accuracy" in text
    assert f"{rows['wrong', 'both'].errors['dk'][1]:.4f}" in text


def test_the_bound_is_the_implementation_s_own():
    row = measure(Implementation("coarse", wrong_dk, bound=0.12))["coarse", "both"]
    assert row.status == "passed"
    assert row.errors["dk"][1] == pytest.approx(0.1, abs=0.01)


# --- Those that cannot --------------------------------------------------------------------------------------


def test_who_refuses_a_shape_is_listed_and_the_others_are_measured():
    def no_build(shape):
        raise ValueError(f"no kernel for {shape.tokens} tokens\nand more")

    def no_backward(shape):
        return lambda q, k, v: exact_sdpa(shape)(q.detach(), k.detach(), v.detach())

    rows = measure(
        Implementation("unbuilt", no_build),
        Implementation("detached", no_backward),
        Implementation("good", exact_sdpa),
    )
    for mode in ("both", "forward", "backward"):
        assert rows["unbuilt", mode].status == rows["detached", mode].status == "refused"
        assert rows["unbuilt", mode].reason == "ValueError: no kernel for 24 tokens"
        assert rows["detached", mode].reason.startswith("RuntimeError: element 0 of tensors does not require")
        assert rows["good", mode].status == "passed"
    lines = tables.not_measured({"FlexAttention": "left out by --without"}, list(rows.values()))
    assert "- FlexAttention: left out by --without" in lines
    assert (
        "- unbuilt: refused: ValueError: no kernel for 24 tokens "
        "(3 rows; first: both, causal, D 16, N 24)" in lines
    )


def test_forward_only_peers_have_a_forward():
    rows = measure(Implementation("inference", exact_sdpa, has_backward=False))
    assert rows["inference", "forward"].status == "passed"
    assert list(rows["inference", "forward"].errors) == ["out"]
    for mode in ("both", "backward"):
        assert rows["inference", mode].status == "refused"
        assert rows["inference", mode].reason == "it has no backward"
        assert rows["inference", mode].tflops is None
        tables.detail_table([rows["inference", mode]])


def test_too_little_memory_for_a_shape_is_a_reason(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing, "draw_sets", no_memory)
    rows = measure(Implementation("good", exact_sdpa))
    assert {row.reason for row in rows.values()} == {"OutOfMemoryError: CUDA out of memory"}


def test_reasons_that_pytorch_gives_as_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text in (
            "CuDNN attention kernel not used because:",
            "Head size must be a multiple of 8 (Triggered internally at somewhere.cpp:12.)",
            "Flash attention has been runtime disabled.",
        ):
            warnings.warn(text, stacklevel=1)
    reason = peers.explain(RuntimeError("No available kernel. Aborting execution."), caught)
    assert (
        reason == "RuntimeError: No available kernel. Aborting execution. Head size must be a multiple of 8"
    )
    assert peers.explain(ValueError("other"), caught) == "ValueError: other"
    assert peers.explain(ValueError()) == "ValueError: no message"


def test_absent_and_broken_packages_are_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setitem(sys.modules, "sageattention", types.ModuleType("sageattention"))
    options = ["--configs", "default", "strictly-causal", "paper", "default", "--without", "flex"]
    options += ["--kernels", "ampere"]
    found, absent = peers.find_implementations(bench.parse_arguments(options))
    assert [(implementation.name, implementation.bound) for implementation in found] == [
        ("sagebwd", 0.06),
        ("sagebwd (ampere)", 0.06),
        ("sagebwd strictly causal", 0.06),
        ("sagebwd strictly causal (ampere)", 0.06),
        ("sagebwd paper", 0.12),
        ("sagebwd paper (ampere)", 0.12),
        ("FlashAttention-2", 0.02),
        ("cuDNN", 0.02),
    ]
    assert absent["FlexAttention"] == "left out by --without"
    assert absent["flash_attn package"].startswith("ModuleNotFoundError: import of flash_attn halted")
    assert absent["FlashAttention-3"].startswith("ModuleNotFoundError")
    assert absent["FlashAttention-4"].startswith("ModuleNotFoundError")
    assert absent["SageAttention"].startswith("ImportError: cannot import name 'sageattn'")
    assert absent["SDPA math"] == "measured with --device cpu only"


WINDOW = replace(SHAPE, causal=False, left=5, right=2)


def measure_window(name, build):
    rows = timing.measure_shape(WINDOW, [Implementation(name, build, 0.06)], bench.parse_arguments(SMALL))
    assert {row.mode for row in rows} == {"both", "forward", "backward"}
    return {row.status for row in rows}, rows[0].reason


def test_peers_take_the_same_window(monkeypatch):
    package = types.ModuleType("flash_attn")
    package.flash_attn_func = lambda q, k, v, *, causal, window_size: F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=peers.is_visible(replace(WINDOW, left=window_size[0], right=window_size[1]))(
            None, None, torch.arange(24)[:, None], torch.arange(24)
        ),
    ).transpose(1, 2)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    ours = functools.partial(peers.build_sagebwd, peers.CONFIGS["default"][1])
    package_4 = types.ModuleType("flash_attn.cute")  # None is no limit, and the logsumexp is returned, too
    package_4.flash_attn_func = lambda *x, causal, window_size: (
        package.flash_attn_func(*x, causal=causal, window_size=[-1 if n is None else n for n in window_size]),
        None,
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package_4)
    assert measure_window("sagebwd", ours) == ({"passed"}, None)
    for name in ("math", "flash_attn", "fa4"):
        assert measure_window(name, peers.PEERS[name].load()) == ({"passed"}, None)
    status, reason = measure_window("cudnn", peers.PEERS["cudnn"].load())
    assert status == {"refused"}
    assert reason == "ValueError: PyTorch's cuDNN takes no window"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(100, 0), (-1, 64), (70, 30)])
def test_peers_on_a_gpu_take_the_same_window(window):
    shape = Shape(1, 2, 1024, 64, False, *window)
    arguments = bench.parse_arguments(["--repetitions", "1"])
    names = ("flash", "flex")
    implementations = [Implementation(name, peers.PEERS[name].load()) for name in names]
    rows = timing.measure_shape(shape, implementations, arguments)
    assert {row.status for row in rows} == {"passed"}, [row.reason for row in rows]


@pytest.mark.parametrize("with_lse", [False, True])
def test_packages_with_tokens_before_heads(monkeypatch, with_lse):
    def flash_attn_func(q, k, v, *, causal):
        assert q.is_contiguous()
        assert q.shape == (2, 24, 2, 16)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return (out.transpose(1, 2), None) if with_lse else out.transpose(1, 2)

    package = types.ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    rows = measure(Implementation("flash_attn", peers.PEERS["flash_attn"].load()))
    assert {row.status for row in rows.values()} == {"passed"}


def test_flash_attention_4_takes_none_for_no_limit(monkeypatch):
    asked, package = [], types.ModuleType("flash_attn.cute")
    package.flash_attn_func = lambda q, k, v, **options: asked.append(options) or (v, None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    build = peers.PEERS["fa4"].load()
    for shape in (SHAPE, replace(WINDOW, right=-1)):
        build(shape)(*torch.randn(3, 2, 2, 24, 16))
    assert asked == [
        {"causal": True, "window_size": (None, None)},
        {"causal": False, "window_size": (5, None)},
    ]


# --- The command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder, the JSON and the Markdown of the whole command."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    options = ["--configs", "default", "paper", "--out", str(folder / "v1.2")]
    bench.main([*SMALL, *options])
    return folder, json.loads((folder / "v1.2.json").read_text()), (folder / "v1.2.md").read_text()


def test_rows_are_all_there_and_all_passed(run):
    rows = run[1]["rows"]
    found = [(row["implementation"], row["mode"], *row["shape"].values()) for row in rows]
    assert len(found) == len(set(found)) == 3 * 3 * 2 * 2
    assert ("sagebwd paper", "backward", 2, 2, 40, 32, True, -1, -1) in found
    assert ("SDPA math", "forward", 3, 2, 24, 32, False, -1, -1) in found
    assert {row["status"] for row in rows} == {"passed"}
    assert all(row["tflops"] > 0 and row["extra_memory"] is None for row in rows)


def test_json_says_how_to_measure_it_again(run):
    report = run[1]
    assert report["command"].startswith("python -m scripts.bench.attention --device cpu --lengths 40 24 ")
    assert report["hardware"]["name"] == "cpu"
    assert report["versions"]["torch"] == torch.__version__
    assert report["settings"]["repetitions"] == 2
    assert report["shapes"] == "4 of 4"
    assert report["configs"]["sagebwd paper"]["D 32"]["block_q"] == 128
    assert report["absent"]["cuDNN"] == "measured with --device cuda only"
    assert {"date", "commit"} <= report.keys()


def test_markdown_has_speed_and_accuracy(run):
    _, report, text = run
    row = next(row for row in report["rows"] if row["mode"] == "both" and row["shape"]["tokens"] == 24)
    line = next(
        line
        for line in text.split("## Forward + backward, causal, D 32")[1].splitlines()
        if line.startswith("| SageBwd  ") and "| 24 |" in line
    )
    assert f" {row['median_ms']:.3f} " in line
    assert f" {row['p10_ms']:.3f} – {row['p90_ms']:.3f} " in line
    for _, error in row["errors"].values():
        assert f" {error:.4f} " in line
    for title in ("Forward", "Backward"):
        for mask in ("causal", "full"):
            assert f"## {title}, {mask}, D 32" in text
    assert "- FlexAttention: measured with --device cuda only" in text


def test_pictures_are_written_and_nothing_else(run):
    folder = run[0]
    names = ["v1.2.json", "v1.2.md", "v1.2.png", "v1.2_forward.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names[2:]:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_files_hold_failures_and_no_nan(tmp_path):
    rows = [
        Row(
            "sagebwd",
            SHAPE,
            "both",
            "failed accuracy",
            "O has relative L2 error nan",
            errors={"out": (math.nan, math.inf)},
        ),
        Row("cuDNN", SHAPE, "both", "refused", "RuntimeError: no"),
    ]
    result = bench.describe_results([], bench.parse_arguments(SMALL)) | {"absent": {}, "shapes": "1 of 1"}
    write_tables(tmp_path / "bench", result, rows, tables.to_markdown(result, rows))
    tables.draw(rows, "both", tmp_path / "bench.png", result)

    stored = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert stored[0]["errors"]["out"] == [None, None]
    assert stored[0]["status"] == "failed accuracy"
    text = (tmp_path / "bench.md").read_text()
    assert "- SageBwd: failed accuracy: O has relative L2 error nan" in text
    assert "- cuDNN: refused: RuntimeError: no" in text
    assert (tmp_path / "bench.png").exists()


def test_the_overview_has_a_column_for_each_length():
    rows = [
        Row("sagebwd", Shape(1, 2, n, 16, True), mode, tflops=tflops)
        for mode in ("forward", "both")
        for n, tflops in ((1024, 123.4), (2048, 0.012))
    ]
    assert tables.overview(rows) == [
        "| Forward + backward, causal, D 16 | N 1024 | N 2048 |",
        "| -------------------------------- | -----: | -----: |",
        "| SageBwd                          |    123 |  0.012 |",
        "",
        "| Forward, causal, D 16 | N 1024 | N 2048 |",
        "| --------------------- | -----: | -----: |",
        "| SageBwd               |    123 |  0.012 |",
        "",
    ]


def test_the_legend_has_what_was_timed_anywhere_in_one_order():
    rows = [
        Row("cuDNN", SHAPE, "both", "refused"),
        Row("SageAttention", SHAPE, "both", "refused"),
        Row("FlexAttention", SHAPE, "both", tflops=1.0),
        Row("sagebwd", SHAPE, "both", tflops=1.0),
        Row("cuDNN", SHAPE, "both", tflops=1.0),
    ]
    rows.append(Row("sagebwd of old", SHAPE, "both", tflops=1.0))
    assert tables.names_with_speed(rows) == ["sagebwd", "cuDNN", "FlexAttention", "sagebwd of old"]


def test_draw_writes_the_same_tables_and_pictures_from_the_json(run, tmp_path, capsys):
    folder, _, text = run
    bench.main(["--draw", str(folder / "v1.2.json"), "--out", str(tmp_path / "again" / "v")])
    assert (tmp_path / "again" / "v.md").read_text() == text
    for ending in (".png", "_forward.png"):
        assert (tmp_path / "again" / f"v{ending}").read_bytes() == (folder / f"v1.2{ending}").read_bytes()
    assert not (tmp_path / "again" / "v.json").exists()
    assert f"{tmp_path}/again/v.md, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu", "--width", "100"], "--width 100 is not a multiple of head size 64"),
        (["--device", "cpu", "--graphs"], "CUDA graphs need a GPU"),
        (["--device", "tpu"], "use cuda, cuda:<number> or cpu"),
        (["--repetitions", "0"], "'0' is not a positive whole number"),
        (["--without", "everyone"], "invalid choice: 'everyone'"),
    ],
)
def test_refuses_bad_options(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_refuses_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        bench.main([])
    assert stop.value.code == 2
    assert "torch sees no GPU; run this where there is one, or use --device cpu" in capsys.readouterr().err


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
