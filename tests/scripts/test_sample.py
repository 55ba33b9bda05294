"""Texts from every place that a run leaves weights in; the same model gives the same text."""

import shutil

import pytest
import torch

from scripts import sample
from scripts.export import export_checkpoint


def printed(capsys, *arguments):
    sample.main([*map(str, arguments), "--device", "cpu"])
    return capsys.readouterr().out


def test_a_run_its_checkpoint_and_its_export_say_the_same(trained, capsys, tmp_path):
    options = ("--prompt", "def main(", "--tokens", 20)
    said = printed(capsys, trained, *options)
    assert said.startswith("def main(")
    for place in ([trained / "weights"], [trained, "--step", 4]):
        assert said == printed(capsys, *place, *options)
    before = printed(capsys, trained, "--step", 2, *options, "--temperature", 0)
    exported = export_checkpoint(trained, 2, tmp_path / "export", "float32")
    assert before == printed(capsys, exported, *options, "--temperature", 0)
    unfinished = shutil.copytree(
        trained, tmp_path / "unfinished", ignore=shutil.ignore_patterns("weights", "DONE")
    )
    assert said == printed(capsys, unfinished, *options)
    assert said != printed(capsys, trained, *options, "--seed", 1)


def test_a_text_ends_where_the_model_ends_it_and_begins_after_another(trained, capsys, monkeypatch):
    def generate(llama, prompt, tokens, **_):
        return torch.cat((prompt, torch.tensor([[65, 27, 256, 67]])), dim=1)  # a terminal obeys 27

    monkeypatch.setattr(sample, "generate", generate)
    assert printed(capsys, trained, "--prompt", "ab") == "abA\\x1b\n"
    assert printed(capsys, trained) == "A\\x1b\n"


def test_what_cannot_be_is_told(trained, tmp_path):
    for place, options, told in (
        (trained, ("--step", "3"), "no checkpoint of step 3; there: 2, 4"),
        (trained, ("--temperature", "-1"), "temperature=-1.0 must be finite"),
        (tmp_path, (), "neither the directory of a run, nor a folder with weights"),
    ):
        with pytest.raises(SystemExit, match=told):
            sample.main([str(place), *options, "--device", "cpu"])
