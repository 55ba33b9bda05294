"""Pictures: all of results/ can be drawn again from its numbers, in colours that can be told apart."""

import shutil

import pytest
from PIL import Image

from scripts.paper import drawing, render
from scripts.paper.loss_pictures import gaps_of, variant_styles
from scripts.paper.result_files import Results
from tests.cli import ROOT
from trainer.style import ATTENTION

RESULTS = ROOT / "results"


#: Beginnings of the names of pictures that a benchmark or an example draws as it measures.
DRAWN_ONCE = ("bench_", "finetune_video_lora")


def test_every_picture_of_the_paper_can_be_drawn_again():
    there = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.png")}
    again = render.pictures(Results(RESULTS)).keys()
    assert {name for name in there if not name.startswith(DRAWN_ONCE)} == again


def test_no_two_series_look_alike():
    looks = [*ATTENTION.values(), *drawing.OTHERS]
    assert len({(look.color, look.marker) for look in looks}) == len(looks)


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "layers",
        "equal_loss",
        "gradient_bias",
        "gradient_bias_325m",
        "gradient_bias_325m_no_qk_norm",
        "gradient_error",
        "gradient_formats",
        "large_logits",
        "one_batch",
    ],
)
def test_the_committed_tables_are_those_of_the_committed_numbers(name, tmp_path):
    render.files(Results(RESULTS))[f"{name}.md"](tmp_path / "made.md")
    assert (tmp_path / "made.md").read_text() == (RESULTS / f"{name}.md").read_text()


def test_pictures_are_small_and_whole(tmp_path):
    for name in ("table1.json", "error_against_time.json", "finetune.json.gz", "layers.json.gz"):
        shutil.copy(RESULTS / name, tmp_path)
    render.main([str(tmp_path)])
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    expected = ["error_against_time", "finetune", "layers", "layers_smoothing", "table1"]
    assert pictures == [f"{name}.png" for name in expected]
    for name in pictures:
        with Image.open(tmp_path / name) as picture:
            width, height = picture.size
        assert width < 1400
        assert height < 1100
        assert (tmp_path / name).stat().st_size < 120_000


def test_one_picture_alone_and_one_that_is_not_there(tmp_path, capsys):
    shutil.copy(RESULTS / "table1.json", tmp_path)
    render.main([str(tmp_path), "table1.png"])
    assert (tmp_path / "table1.png").exists()
    with pytest.raises(SystemExit):
        render.main([str(tmp_path), "layers.png"])
    assert "layers.png cannot be made from" in capsys.readouterr().err


def test_no_two_settings_of_a_picture_look_alike():
    variants = ["full precision", "SageBwd", "SageBwd, paper", "SageBwd, accurate", "SageBwd, consistent"]
    variants += ["full precision, no QK-norm", "SageBwd, no QK-norm", "SageBwd, no smoothing"]
    looks = variant_styles(variants)
    assert len({(look.color, look.dashes) for look in looks.values()}) == len(variants)
    assert looks["SageBwd"].color == looks["SageBwd, no QK-norm"].color
    names = ["sagebwd", "sagebwd consistent", "cuDNN", "FlashAttention-2", "sagebwd smooth V"]
    assert len({(look.color, look.marker) for look in drawing.styles(names).values()}) == len(names)
    assert drawing.styles(["default"]) == {"default": drawing.styles(["SageBwd"])["SageBwd"]}


def test_gaps_are_to_the_mean_of_a_repeated_seed():
    def run(variant, seed, *loss):
        return {"variant": variant, "seed": seed, "curve": {"tokens": [1, 2], "loss": list(loss)}}

    group = [run("a", 1, 1.0, 2.0), run("a", 1, 3.0, 2.0), run("b", 1, 3.0, 3.0), run("b", 2, 9.0, 9.0)]
    found = gaps_of(group[2:], group, "a")
    assert [list(gap) for _, gap in found] == [[1.0, 1.0]]  # seed 2 of the first variant was not run
