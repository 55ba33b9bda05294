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
import torch
import torch.nn.functional as F

import model.huggingface
from data import sources
from data.prepare import prepare
from data.recipe import Recipe
from data.settings import DataSettings
from data.sources import jsonl
from model.config import LlamaConfig
from model.llama import Llama
from tests.trainer.conftest import train_here
from trainer.checkpoint import Checkpoints
from trainer.distributed import Ranks
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


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, calls):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    folder = tmp_path / "checkpoints"
    ranks, published = Ranks(0, 1, torch.device("cpu")), ("published", folder)
    found = Checkpoints(folder, keep=1, ranks=ranks, published=lambda step: calls.append(published))
    for step in (1, 2):
        calls.clear()
        found.save(step, net, optimizer, {})
        found.wait()
        path = folder / f"step_{step:08d}"
        (named,) = calls.renames_to(path)
        written = calls[named][1]
        files = [file.name for file in path.iterdir()]
        assert "seal.json" in files
        for name in files:
            calls.assert_synced_before(written / name, named)
        calls.assert_synced_before(written, named)
        for place in (folder, folder.parent):
            assert named < calls.syncs_of(place)[-1] < calls.index(published)
    deleted = calls.index(("delete", folder / "step_00000001"))
    assert any(named < i < deleted for i in calls.syncs_of(folder)), (
        "deletes the only one that is surely there"
    )


def test_a_checkpoint_is_not_ahead_of_the_metrics_on_the_disk(tmp_path, calls, train_here):
    train_here(tmp_path, "steps=4", "checkpoint_every=2", "sample_tokens=0", "probe.every=0")
    for step in (2, 4):
        (named,) = calls.renames_to(tmp_path / "checkpoints" / f"step_{step:08d}")
        synced = [calls[i][2] for i in calls.syncs_of(tmp_path / "metrics.jsonl") if i < named]
        assert f'"step": {step},' in synced[-1]


def test_a_run_is_done_when_its_weights_and_curve_are_on_the_disk(tmp_path, calls):
    directory = TrainingDirectory(tmp_path / "run")
    directory.weights.mkdir(parents=True)
    left = [directory.weights / "model.safetensors", directory.weights / "config.json", directory.metrics]
    for path in left:
        path.write_text("{}")
    directory.finish()
    (done,) = calls.renames_to(tmp_path / "run" / "DONE")
    for path in (*left, directory.weights):
        calls.assert_synced_before(path, done)
    assert any(i > done for i in calls.syncs_of(directory.path))


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


def test_a_folder_with_a_config_has_the_weights_too(tmp_path, calls):
    shape = LlamaConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, d_head=8, d_ffn=24, max_context=8)
    model.huggingface.save(Llama(shape, F.scaled_dot_product_attention), tmp_path)
    (weights,), (config,) = (calls.renames_to(tmp_path / x) for x in ("model.safetensors", "config.json"))
    assert weights < config
