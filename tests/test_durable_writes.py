"""The order of fsync and rename: a name that is on the disk has its content there, too.

After a power failure a file system may have kept a rename and lost what was written before it. No test can
cut the power, so these watch the calls: what is renamed was synced before, and nothing is deleted, or called
done, that relies on a rename which is not on the disk yet.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from data import sources
from data.prepare import prepare
from data.recipe import Recipe
from data.settings import DataSettings
from data.sources import jsonl
from tests.trainer.conftest import train_here
from trainer.start import TrainingDirectory

__all__ = ["train_here"]


class Calls(list):
    """("sync", path, lines of JSON), ("rename", from, to) and ("delete", path), in order."""

    def renames_to(self, path):
        return [i for i, (what, *paths) in enumerate(self) if what == "rename" and paths[1] == path]

    def syncs_of(self, path):
        return [i for i, (what, *paths) in enumerate(self) if what == "sync" and paths[0] == path]

    def assert_synced_before(self, path, index):
        """Under this name, or under another that it had before."""
        names = {path, *(self[i][1] for i in self.renames_to(path) if i < index)}
        assert any(i < index for name in names for i in self.syncs_of(name)), (
            f"{path.name} is not on the disk"
        )


@pytest.fixture
def calls(monkeypatch):
    """What is synced, renamed and deleted from here on."""
    calls = Calls()
    fsync = os.fsync

    def sync(handle):
        number = handle if isinstance(handle, int) else handle.fileno()
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        calls.append(("sync", path, path.read_text() if path.suffix == ".jsonl" else ""))
        fsync(number)

    def watched(name, module, what):
        function = getattr(module, name)

        def call(*paths, **options):
            calls.append((what, *(Path(path) for path in paths if isinstance(path, str | os.PathLike))))
            return function(*paths, **options)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(os, "fsync", sync)
    for name in ("rename", "replace"):
        watched(name, os, "rename")
    watched("rmtree", shutil, "delete")
    return calls


def test_what_a_run_names_is_on_the_disk(tmp_path, calls, train_here, monkeypatch):
    """Checkpoints are not ahead of the metrics, and a folder with a config has the weights, too."""
    folder, weights, metrics = (tmp_path / name for name in ("checkpoints", "weights", "metrics.jsonl"))
    monkeypatch.setattr(
        TrainingDirectory, "note_checkpoint", lambda _, step: calls.append(("published", step))
    )
    few = ("steps=4", "checkpoint_every=2", "keep_checkpoints=1", "sample_tokens=0", "probe.every=0")
    train_here(tmp_path, *few)
    for step in (2, 4):
        (named,) = calls.renames_to(folder / f"step_{step:08d}")
        written, published = calls[named][1], calls.index(("published", step))
        calls.assert_synced_before(written, named)
        for place in (folder, tmp_path):
            assert any(named < i < published for i in calls.syncs_of(place))
        synced = [calls[i][2] for i in calls.syncs_of(metrics) if i < named]
        assert f'"step": {step},' in synced[-1]
    files = [file.name for file in (folder / "step_00000004").iterdir()]
    assert "seal.json" in files
    for name in files:
        calls.assert_synced_before(written / name, named)
    *_, deleted = (i for i, call in enumerate(calls) if call == ("delete", folder / "step_00000002"))
    assert any(named < i < deleted for i in calls.syncs_of(folder)), "deletes what alone is surely there"

    (done,) = calls.renames_to(tmp_path / "DONE")
    for path in (weights / "model.safetensors", weights / "config.json", weights):
        calls.assert_synced_before(path, done)
    assert metrics.read_text() == [calls[i][2] for i in calls.syncs_of(metrics) if i < done][-1]
    assert any(i > done for i in calls.syncs_of(tmp_path))
    (model,), (config,) = (calls.renames_to(weights / x) for x in ("model.safetensors", "config.json"))
    assert model < config


def test_shards_and_manifest_get_their_names_when_they_are_on_the_disk(tmp_path, calls, monkeypatch):
    for module in (sources, jsonl):
        monkeypatch.setattr(module, "UNIT_BYTES", 4000)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"document {n} " * 9}) + "\n" for n in range(120)))
    root = str(tmp_path / "data")
    text = Recipe(DataSettings(source="jsonl", path=str(texts), tokenizer="bytes", processes=1, root=root))
    prepare(text)
    folder = text.folder
    shards, records = sorted(folder.glob("*.bin")), sorted(folder.glob("unit_*.json"))
    assert len(shards) > len(records) > 1
    for path in (*shards, *records):
        named = calls.renames_to(path)
        assert named, path.name
        for index in named:
            calls.assert_synced_before(calls[index][1], index)
    for path in shards:  # train_00003.bin is complete before unit_00003.json says so
        record = folder / f"unit_{path.stem.rpartition('_')[2]}.json"
        assert max(calls.renames_to(path)) < min(calls.renames_to(record))
