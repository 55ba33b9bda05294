"""The LoRA fine-tune of a video transformer, tiny and on a CPU."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed; pip install -e '.[dev]' (Python 3.11)")

EXAMPLE = Path(__file__).parents[2] / "examples/finetune_video_lora.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_video_lora", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_runs_learn_and_agree(example, tmp_path, capsys):
    out = tmp_path / "video"
    result = example.main(["--device", "cpu", "--steps", "16", "--repeats", "1", "--out", str(out)])
    assert result == json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert out.with_suffix(".png").stat().st_size > 5000
    assert "| step, s |" in capsys.readouterr().out
    full, sage = (result["runs"][name]["losses"] for name in ("native", "sagebwd"))
    assert full[0] == pytest.approx(sage[0], rel=1e-3)
    assert all(sum(losses[-4:]) < 0.95 * sum(losses[:4]) for losses in (full, sage))
    assert result["gradients"]["sagebwd"]["all"] > 0.998
    assert result["gradients"]["sagebwd"]["least"] < 1


@pytest.mark.parametrize(
    "options",
    [["--steps", "2"], ["--warm-up", "-1"], ["--repeats", "0"], ["--frames", "0"], ["--rank", "0"]],
    ids=" ".join,
)
def test_mistakes_are_named_before_it_trains(example, options, capsys):
    with pytest.raises(SystemExit):
        example.main(options)
    assert f"error: {options[0]} {options[1]}" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_runs_on_a_gpu_in_16_bit(example):
    result = example.main(["--device", "cuda", "--steps", "16", "--repeats", "1"])
    assert result["gradients"]["sagebwd"]["all"] > 0.99
    assert all(run["memory_gib"] > 0 for run in result["runs"].values())
