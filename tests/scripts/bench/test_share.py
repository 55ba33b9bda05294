"""scripts.bench.share: what is wrong is not timed, what is slower is said, and the file can be submitted."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser

import pytest
import torch
import torch.nn.functional as F

from sagebwd import dispatch
from scripts.bench import measuring, share, submissions
from scripts.bench.registry import Implementation, Shape
from scripts.bench.tables import Row, verdicts

SMALL = ["--device", "cpu", "--lengths", "40", "24", "--tokens", "80", "--width", "64", "--head-dims", "32"]
SMALL += ["--repetitions", "1", "--warm-up", "1"]


def test_one_json_a_table_and_a_picture(tmp_path):
    share.main([*SMALL, "--masks", "causal", "--out", str(tmp_path / "mine")])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.json", "mine.md", "mine.png"]
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "mine.json").read_text(), parse_constant=pytest.fail)
    assert result["shapes"] == "2 of 2"
    assert {row["implementation"] for row in result["rows"]} == {"sagebwd", "sagebwd paper", "SDPA math"}
    assert {row["status"] for row in result["rows"]} == {"passed"}
    assert {row["kernels"] for row in result["rows"]} == {"reference", None}
    assert str(tmp_path) not in json.dumps(result)  # no path of the user
    assert "compute_capability" in submissions.fault_of(result)
    result["hardware"]["compute_capability"] = "8.9"
    assert submissions.fault_of(result) is None  # so a GPU's file lacks nothing
    text = (tmp_path / "mine.md").read_text()
    assert "| Forward + backward, causal, D 32 |" in text
    assert "- FlashAttention-2: measured with --device cuda only" in text


def exact(shape, device):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)


def wrong_with_a_mask(shape, device):
    return lambda q, k, v: exact(shape, device)(q, k, v) * (1.5 if shape.causal else 1)


def refuses(shape, device):
    raise ValueError("no kernel")


def test_what_is_wrong_anywhere_is_left_out():
    arguments = share.parse_arguments(SMALL)
    names = {"right": exact, "wrong": wrong_with_a_mask, "refuses": refuses}
    found = [Implementation(name, build) for name, build in names.items()]
    right, wrong = share.leave_out_wrong(found, arguments)
    assert [implementation.name for implementation in right] == ["right", "refuses"]
    assert wrong.keys() == {"wrong"}
    assert wrong["wrong"].startswith("failed accuracy: O has relative L2 error 0.5")
    assert wrong["wrong"].endswith("at causal, D 32, N 333")


def test_it_ends_when_the_time_is_over(tmp_path, monkeypatch, capsys):
    now = iter(range(0, 10**6, 40))  # each look at the clock is 40 seconds later
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(
        share, "measure_shape", lambda shape, *_: [Row("sagebwd", shape, "both", "refused", "no")]
    )
    arguments = share.parse_arguments([*SMALL, "--minutes", "3"])
    result = share.describe([], arguments) | {"absent": {}}
    rows = share.measure([], {"wrong": "why"}, arguments, 0, result, tmp_path / "out")
    assert [row.shape.tokens for row in rows if row.implementation == "sagebwd"] == [40, 40]  # both masks
    assert {(row.mode, row.reason) for row in rows if row.implementation == "wrong"} == {
        ("both", "why"), ("forward", "why"), ("backward", "why"),
    }  # fmt: skip
    assert "the 3 minutes are over: 2 shapes are left out" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["shapes"] == "2 of 4"


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("ImportError: /home/alice/venv/lib/x.so: undefined symbol", "ImportError: …/x.so: undefined symbol"),
        (r"no file 'C:\Users\Alice\x.dll'", "no file '…/x.dll'"),
        (
            "speed in TFLOP/s, O/dQ/dK; see https://x.org/a/b",
            "speed in TFLOP/s, O/dQ/dK; see https://x.org/a/b",
        ),
    ],
)
def test_the_file_names_no_folders(text, shared):
    assert share.without_folders({"absent": [text, 1, None]}) == {"absent": [shared, 1, None]}


def timed(name, tokens, ms):
    return Row(name, Shape(1, 2, tokens, 64, True), "both", median_ms=ms, tflops=1.0)


def test_the_verdict_names_what_is_faster():
    rows = [timed("sagebwd", 1024, 2.0), timed("cuDNN", 1024, 1.0), timed("FlashAttention-2", 1024, 3.0)]
    rows += [timed("sagebwd", 4096, 8.0), timed("cuDNN", 4096, 12.0), timed("FlashAttention-2", 4096, 10.0)]
    rows += [timed("sagebwd (ampere)", 4096, 4.0), timed("sagebwd paper", 4096, 1.0)]
    rows += [Row("sagebwd", Shape(1, 2, 16384, 64, True), "both", "refused", "no memory")]
    assert verdicts(rows) == [
        "causal, D 64: SageBwd is the fastest, 1.25 × FlashAttention-2 (N 4096)",
        "causal, D 64: SageBwd is slower, 0.50 × cuDNN (N 1024)",
        'causal, D 64: with kernels="ampere" 2.00 × what runs by default, 2.50 × FlashAttention-2 (N 4096)',
        "causal, D 64: use instead: cuDNN, torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)",
    ]
    ours = [timed("sagebwd", 64, 3.0), timed("sagebwd (ampere)", 64, 1.0), timed("cuDNN", 64, 2.0)]
    assert not [line for line in verdicts(ours) if "use instead" in line]  # the other kernels are faster
    assert verdicts([rows[1], rows[-1]]) == ["SageBwd was not timed: no memory"]
    assert verdicts([rows[1]]) == ["SageBwd was not timed: it was wrong, or there was no time"]


def test_nvidia_smi_is_read_as_it_writes():
    assert measuring.parse("450.00, [N/A], 2520, 10501", 4) == [450, None, 2520, 10501]
    assert measuring.parse(None, 2) == measuring.parse("No devices were found", 2) == [None, None]
    monitor = measuring.Monitor(torch.device("cpu"))
    assert set(monitor.medians().values()) == {None}
    monitor._seen = "".join(f"{clock}, 10501, [N/A], 60\n" for clock in (2400, 2500, 2600))
    assert monitor.medians()["sm_clock_mhz"] == 2500
    assert monitor.medians()["power_watts"] is None


def test_kernels_that_are_not_chosen_are_tried_where_they_can_run(monkeypatch, capsys):
    parser = ArgumentParser()
    for capability, kernels in (((8, 9), ["triton"]), ((9, 0), ["ampere", "triton"]), ((10, 0), ["triton"])):
        monkeypatch.setattr(dispatch, "gpu_of", lambda index, own=capability: dispatch.GPU("some GPU", own))
        assert share.kernels_to_try(torch.device("cuda"), parser) == kernels
    monkeypatch.setattr(dispatch, "gpu_of", lambda index: dispatch.GPU("an RTX 2080", (7, 5)))
    with pytest.raises(SystemExit):
        share.kernels_to_try(torch.device("cuda"), parser)
    assert "an RTX 2080 has no kernels: they need an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_the_file_can_be_submitted(tmp_path):
    sizes = ["--lengths", "1024", "--tokens", "1024", "--width", "256", "--masks", "causal"]
    share.main([*sizes, "--repetitions", "3", "--out", str(tmp_path / "mine")])
    result = json.loads((tmp_path / "mine.json").read_text())
    assert submissions.fault_of(result) is None
    assert result["hardware"]["max_sm_clock_mhz"] > 0


# --- What was submitted -------------------------------------------------------------------------------------


def test_all_submitted_files_are_right_and_the_page_shows_them():
    results = submissions.submitted()
    assert results
    page = submissions.PAGE.read_text(encoding="utf-8")
    assert submissions.renewed(page, results) == page, "run python -m scripts.bench.submissions"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda result, row: result["hardware"].pop("compute_capability"), "compute_capability"),
        (lambda result, row: row.update(mode="sideways"), "sideways"),
        (lambda result, row: row.update(median_ms=None), "passed, but median_ms is None"),
        (lambda result, row: row.update(tflops=2 * row["tflops"]), "follows from median_ms"),
        (lambda result, row: row.update(implementation="mine"), "no rows of 'sagebwd'"),
    ],
)
def test_a_bad_file_is_named(changed, message, tmp_path):
    (file,) = (submissions.ROOT / submissions.SUBMITTED).glob("*.json")
    result = json.loads(file.read_text())
    result["rows"] = result["rows"][:1]
    assert submissions.fault_of(result) is None
    changed(result, result["rows"][0])
    (tmp_path / "bad.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit, match=f"bad.json: .*{message}"):
        submissions.submitted(tmp_path)
