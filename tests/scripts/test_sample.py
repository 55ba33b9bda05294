"""Texts from every place that a run leaves weights in; the same model gives the same text."""

import shutil

import pytest
import torch

from scripts import sample
from scripts.export import export_checkpoint


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "run"


@pytest.fixture
def run(kept, train_here):
    if not kept.exists():
        train_here(kept, "steps=4", "sample_tokens=0", "probe.every=0", "checkpoint_every=2")
    return kept


def printed(capsys, *arguments):
    sample.main([*map(str, arguments), "--device", "cpu"])
    return capsys.readouterr().out


def test_a_run_its_checkpoint_and_its_export_say_the_same(run, capsys, tmp_path):
    options = ("--prompt", "def main(", "--tokens", 20)
    said = printed(capsys, run, *options)
    assert said.startswith("def main(")
    assert said == printed(capsys, run / "weights", *options) == printed(capsys, run, "--step", 4, *options)
    before = printed(capsys, run, "--step", 2, *options, "--temperature", 0)
    exported = export_checkpoint(run, 2, tmp_path / "export", "float32")
    assert before == printed(capsys, exported, *options, "--temperature", 0)
    unfinished = shutil.copytree(
        run, tmp_path / "unfinished", ignore=shutil.ignore_patterns("weights", "DONE")
    )
    assert said == printed(capsys, unfinished, *options)
    assert said != printed(capsys, run, *options, "--seed", 1)


def test_a_text_ends_where_the_model_ends_it_and_begins_after_another(run, capsys, monkeypatch):
    def generate(llama, prompt, tokens, **_):
        return torch.cat((prompt, torch.tensor([[65, 27, 256, 67]])), dim=1)  # a terminal obeys 27

    monkeypatch.setattr(sample, "generate", generate)
    assert printed(capsys, run, "--prompt", "ab") == "abA\\x1b\n"
    assert printed(capsys, run) == "A\\x1b\n"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (("--step", "3"), "no checkpoint of step 3; there: 2, 4"),
        (("--temperature", "-1"), "temperature=-1.0 must be finite"),
    ],
)
def test_what_cannot_be_is_told(run, wrong, told):
    with pytest.raises(SystemExit, match=told):
        sample.main([str(run), *wrong, "--device", "cpu"])


def test_a_place_without_weights_is_told(tmp_path):
    with pytest.raises(SystemExit, match="neither the directory of a run, nor a folder with weights"):
        sample.main([str(tmp_path), "--device", "cpu"])
