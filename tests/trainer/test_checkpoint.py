import errno
import json
import logging
import os
import pickle
import re
import shutil
import threading
from concurrent import futures
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from common.errors import TrainingError
from tests import warm
from tests.cli import flip
from trainer.checkpoint import Checkpoints, _reason, load_alone, read_metadata
from trainer.distributed import Ranks
from trainer.divergence import not_finite
from trainer.run_directory import (
    CHECKSUM,
    SEAL,
    _checksum,
    checkpoints_in,
    read_seal,
    verify_seal,
    write_seal,
)

ALONE = Ranks(0, 1, torch.device("cpu"))
FULL_DISK = r"step 2 .*the disk is full"


def make(seed=0):
    """Embedding and head share their weight, as in the Llama trained here."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 7), nn.Linear(7, 11, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer


def trained():
    """A model and its optimizer after a step."""
    made = make()
    train_step(*made)
    return made


def train_step(model, optimizer, inputs=None):
    model(torch.arange(11) if inputs is None else inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    moments = [value for state in optimizer.state.values() for value in state.values()]
    local = (x.to_local() if isinstance(x, DTensor) else x for x in (*model.parameters(), *moments))
    return [x.detach().clone() for x in local]


def assert_same(left, right):
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Waiting(Checkpoints):
    def save(self, *state):
        super().save(*state)
        self.wait()


def checkpoints(folder, keep=2, kind=Waiting):
    return kind(folder, keep=keep, ranks=ALONE)


def assert_restores(folder, step, expected):
    other = make(seed=1)
    assert checkpoints(folder).load_newest(*other)["step"] == step
    assert_same(state_of(*other), expected)


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_outlives_later_ones_that_are_damaged(tmp_path):
    model, optimizer = trained()
    for step in (1, 3, 4):
        checkpoints(tmp_path, keep=3).save(step, model, optimizer, {})
    for step in (3, 4):
        (tmp_path / f"step_{step:08d}" / SEAL).unlink()
    checkpoints(tmp_path, keep=1).save(2, model, optimizer, {})
    assert [path.name for path in checkpoints_in(tmp_path)] == [f"step_{step:08d}" for step in (2, 3, 4)]


def cut_the_seal(folder):
    (folder / SEAL).write_text('{"step": 2, "fi')


def put_another_there(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_00000001"), folder)


@pytest.mark.parametrize("damage", [cut_the_seal, put_another_there])
def test_falls_back_to_the_one_before_and_says_so(tmp_path, caplog, damage):
    model, optimizer = make()
    expected = {}
    for step in (1, 2):
        train_step(model, optimizer)
        checkpoints(tmp_path).save(step, model, optimizer, {})
        expected[step] = state_of(model, optimizer)
    damage(tmp_path / "step_00000002")
    with caplog.at_level(logging.WARNING):
        assert_restores(tmp_path, 1, expected[1])
    assert "step_00000002 is damaged" in caplog.text
    checkpoints(tmp_path).save(2, model, optimizer, {})  # replaces the damaged one
    assert_restores(tmp_path, 2, expected[2])


def test_the_seal_protects_itself(tmp_path):
    """Each of its bytes is damaged in turn: that is noticed, or what it says is the same."""
    checkpoints(tmp_path).save(1, *make(), {"recent": [[1.5, 0.25]], "settings": {"seed": 1}})
    folder = tmp_path / "step_00000001"
    file, whole = folder / SEAL, read_seal(folder)
    content, noticed = file.read_bytes(), 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        try:
            assert read_seal(folder) == whole
        except ValueError:
            noticed += 1
    assert noticed > 0.8 * len(content)  # the others are spaces
    file.write_bytes(content[:-1])
    with pytest.raises(TrainingError, match=r"every checkpoint in .* is damaged"):
        checkpoints(tmp_path).load_newest(*make())


def test_the_folder_of_a_run_that_was_removed_is_not_made_again(tmp_path):
    run = tmp_path / "run"
    run_checkpoints = checkpoints(run / "checkpoints")
    with pytest.raises(TrainingError, match=f"step 2 .*{run} was removed while the run trains"):
        run_checkpoints.save(2, *make(), {})
    assert not run.exists()


@pytest.mark.parametrize("cause", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_what_torch_says_of_a_full_disk_is_told_as_that(cause):
    """The operating system's word is in its context, which another rank does not send with the text."""
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__context__ = cause
    assert _reason(dcp.CheckpointException("", {1: (error, None)})).startswith("the disk is full")


@pytest.fixture
def gate(monkeypatch):
    opened = threading.Event()
    save = dcp.save
    monkeypatch.setattr(dcp, "save", lambda *state, **where: opened.wait(30) and save(*state, **where))
    yield opened
    opened.set()


def poll(checkpoints):
    """As the trainer does, which puts together what all ranks say."""
    writing, failed = checkpoints.status()
    checkpoints.poll(writing=writing, failed=failed)


def test_training_goes_on_while_the_state_of_the_save_is_written_and_is_restored_exactly(
    tmp_path, gate, caplog
):
    caplog.set_level(logging.INFO)
    model, optimizer = trained()
    expected = state_of(model, optimizer)
    background = checkpoints(tmp_path, kind=Checkpoints)
    background.save(1, model, optimizer, {"wandb_id": "abc"})
    for _ in range(3):
        train_step(model, optimizer)
        poll(background)
    assert not list(tmp_path.glob("step_*"))
    assert re.search(r"step 1: training paused 0\.\d\d s for a checkpoint", caplog.text)
    gate.set()
    background.wait()

    other, other_optimizer = make(seed=1)
    other(torch.arange(11)).sum().backward()  # of a step that did not come to its end
    restored = checkpoints(tmp_path).load_newest(other, other_optimizer)
    assert (restored["step"], restored["wandb_id"]) == (1, "abc")
    assert other[2].weight is other[0].weight
    assert_same(state_of(other, other_optimizer), expected)
    for _ in range(3):
        train_step(other, other_optimizer)
    assert_same(state_of(other, other_optimizer), state_of(model, optimizer))


def test_saves_in_a_row_wait_for_each_other(tmp_path):
    model, optimizer = make()
    background = checkpoints(tmp_path, kind=Checkpoints)
    expected = {}
    for step in (1, 2, 3):  # the copy in CPU memory is the same each time, and must not change under a write
        train_step(model, optimizer)
        background.save(step, model, optimizer, {})
        expected[step] = state_of(model, optimizer)
    background.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    for step in (3, 2):
        assert_restores(tmp_path, step, expected[step])
        file = next((tmp_path / f"step_{step:08d}").glob("*.distcp"))
        flip(file, file.stat().st_size // 2)  # the one before is read then


def test_memory_of_the_copy_is_used_again(tmp_path):
    model, optimizer = trained()
    stager = checkpoints(tmp_path)._stager

    def addresses():
        weights, moments = get_state_dict(model, optimizer)
        staged = stager.stage([weights, *moments["state"].values()])
        return [value.data_ptr() for tensors in staged for value in tensors.values()]

    first = addresses()
    train_step(model, optimizer)
    assert addresses() == first


def test_reserving_memory_changes_nothing(tmp_path):
    model, optimizer = make()
    background = checkpoints(tmp_path, kind=Checkpoints)
    background.reserve(model, optimizer)  # after a first step that was left out
    assert not optimizer.state
    train_step(model, optimizer)
    before = state_of(model, optimizer)
    background.reserve(model, optimizer)
    assert_same(state_of(model, optimizer), before)
    assert list(tmp_path.iterdir()) == []


def test_failure_in_the_background_is_raised_by_the_next_poll_or_save(tmp_path, monkeypatch):
    model, optimizer = make()
    background = checkpoints(tmp_path, kind=Checkpoints)
    background.save(1, model, optimizer, {})
    background.wait()
    monkeypatch.setattr(torch, "save", full)
    background.save(2, model, optimizer, {})
    futures.wait([background._writing])
    with pytest.raises(TrainingError, match=FULL_DISK):
        poll(background)
    poll(background)  # it is told once
    background.save(2, model, optimizer, {})
    with pytest.raises(TrainingError, match=FULL_DISK):
        background.save(3, model, optimizer, {})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    background.save(3, model, optimizer, {})
    background.wait()
    assert checkpoints(tmp_path).load_newest(*make())["step"] == 3


def test_close_hides_no_other_error(tmp_path, monkeypatch, caplog):
    background = checkpoints(tmp_path, kind=Checkpoints)
    monkeypatch.setattr(torch, "save", full)
    background.save(2, *make(), {})
    background.close()
    assert re.search(FULL_DISK, caplog.text)


def sharded(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))  # parts of unequal size
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def save_and_restore_shards(rank, folder):
    init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    background = Checkpoints(folder / "checkpoints", keep=2, ranks=Ranks(rank, 2, torch.device("cpu")))
    (model, optimizer), inputs = sharded(seed=0), torch.arange(14.0).view(2, 7)
    for step in (1, 2, 3):
        train_step(model, optimizer, inputs)
        background.save(step, model, optimizer, {})
        saved = state_of(model, optimizer)
        train_step(model, optimizer, inputs)  # must not reach what is being written
        flags = torch.tensor([float(flag) for flag in background.status()])
        writing, failed = background.ranks.mean(flags).tolist()
        background.poll(writing=writing > 0, failed=failed > 0)
    background.wait()
    other, other_optimizer = sharded(seed=1)
    assert background.load_newest(other, other_optimizer)["step"] == 3
    assert_same(state_of(other, other_optimizer), saved)
    assert not_finite(other, other_optimizer, background.ranks) == []
    if rank == 1:  # its part alone, of a bias of which rank 0 has another
        with torch.no_grad():
            other[1].bias.to_local()[-1] = float("nan")
    assert not_finite(other, other_optimizer, background.ranks) == ["1.bias"]
    background.close()
    destroy_process_group()


def test_ranks_write_their_shards_in_the_background(tmp_path):
    ranks = [warm.SERVER.Process(target=save_and_restore_shards, args=(rank, tmp_path)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert len(list((tmp_path / "checkpoints" / "step_00000003").glob("*.distcp"))) == 2


class Calls:
    """Pickled, it is a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of a step."""
    checkpoints(tmp_path).save(1, *trained(), {})
    return tmp_path / "step_00000001"


def put_metadata(folder, content):
    """And seal it again."""
    (folder / ".metadata").write_bytes(content)
    contents = read_seal(folder)
    (folder / SEAL).unlink()
    write_seal(folder, {name: value for name, value in contents.items() if name != "files"})


def load_to_train(folder):
    checkpoints(folder.parent).load_newest(*make())


def load_moments(folder):
    load_alone({"optimizer": dcp.state_dict.get_state_dict(*make())[1]}, folder)


in_both_ways = pytest.mark.parametrize("load", [load_to_train, load_moments])


@in_both_ways
@pytest.mark.parametrize("function", [os.mkdir, Path.mkdir, torch.load])
def test_metadata_runs_no_code(folder, tmp_path, load, function):
    ran = tmp_path / "ran"
    put_metadata(folder, pickle.dumps(Calls(function, ran)))
    with pytest.raises((TrainingError, ValueError), match=r"asks for [\w.]+, which no checkpoint needs"):
        load(folder)
    assert not ran.exists()


@pytest.mark.parametrize("owner", [Metadata, torch.Size, os.path.join])
def test_metadata_takes_attributes_of_no_class(folder, owner):
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(getattr, owner, "__init__")))
    with pytest.raises(ValueError, match=r"it asks for .*which no checkpoint needs"):
        read_metadata(folder, {".metadata"})


def test_checkpoints_of_pythons_that_pickle_enums_as_attributes_are_read(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 do; others read both."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    model, optimizer = trained()
    checkpoints(tmp_path).save(1, model, optimizer, {})
    assert b"getattr" in (tmp_path / "step_00000001" / ".metadata").read_bytes()
    monkeypatch.undo()
    assert_restores(tmp_path, 1, state_of(model, optimizer))


@in_both_ways
def test_values_that_are_no_tensors_run_no_code(folder, tmp_path, load):
    """The optimizer's settings, which torch unpickles as well."""
    ran = tmp_path / "ran"
    model, optimizer = trained()
    weights, moments = dcp.state_dict.get_state_dict(model, optimizer)
    moments["param_groups"][0]["lr"] = Calls(os.mkdir, str(ran))
    shutil.rmtree(folder)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    write_seal(folder, {"step": 1})
    with pytest.raises((TrainingError, ValueError), match="mkdir"):
        load(folder)
    assert not ran.exists()


@in_both_ways
def test_files_outside_the_checkpoint_are_not_read(folder, tmp_path, load):
    shutil.copytree(folder, tmp_path / "other")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../other/{place.relative_path}"
    put_metadata(folder, pickle.dumps(metadata))
    with pytest.raises((TrainingError, ValueError), match="no file of this checkpoint"):
        load(folder)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "pipe", "gone"])
def test_a_seal_that_names_what_is_no_file_of_the_folder(folder, name):
    os.mkfifo(folder / "pipe")  # reading it would wait forever
    contents = read_seal(folder)
    sealed = {**contents, "files": {**contents["files"], name: "0 bytes, crc 00000000"}}
    (folder / SEAL).write_text(json.dumps({**sealed, CHECKSUM: _checksum(sealed)}))
    with pytest.raises(ValueError, match="is missing, or no file of this folder"):
        verify_seal(folder)


def test_a_file_of_another_size_is_not_read(folder):
    with open(folder / ".metadata", "r+b") as file:
        file.truncate(1 << 42)  # hours of zeros
    with pytest.raises(ValueError, match="is 4398046511104 bytes, was written as"):
        verify_seal(folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", pickle.dumps([1]), pickle.dumps(Metadata({}))])
def test_damaged_metadata_is_named(folder, content):
    put_metadata(folder, content)
    with pytest.raises((TrainingError, ValueError), match=r"step_00000001 .*\.metadata"):
        load_to_train(folder)
