"""Checkpoints from a stranger: what they ask for is not done. Their seals are valid: anyone can make one."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from common.errors import TrainingError
from tests.trainer.test_checkpoint import assert_restores, checkpoints, make, state_of, train_step
from trainer.checkpoint import load_alone, read_metadata
from trainer.run_directory import CHECKSUM, SEAL, _checksum, read_seal, verify_seal, write_seal


class Calls:
    """Pickled, it is a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of a step."""
    model, optimizer = make()
    train_step(model, optimizer)
    checkpoints(tmp_path).save(1, model, optimizer, {})
    return tmp_path / "step_00000001"


def seal_again(folder):
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
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(function, ran)))
    seal_again(folder)
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
    model, optimizer = make()
    train_step(model, optimizer)
    checkpoints(tmp_path).save(1, model, optimizer, {})
    assert b"getattr" in (tmp_path / "step_00000001" / ".metadata").read_bytes()
    monkeypatch.undo()
    assert_restores(tmp_path, 1, state_of(model, optimizer))


@in_both_ways
def test_values_that_are_no_tensors_run_no_code(folder, tmp_path, load):
    """The optimizer's settings, which torch unpickles as well."""
    ran = tmp_path / "ran"
    model, optimizer = make()
    train_step(model, optimizer)
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
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(folder)
    with pytest.raises((TrainingError, ValueError), match="no file of this checkpoint"):
        load(folder)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "pipe", "gone"])
def test_a_seal_that_names_what_is_no_file_of_the_folder(folder, name):
    os.mkfifo(folder / "pipe")  # reading it would wait for ever
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
    (folder / ".metadata").write_bytes(content)
    seal_again(folder)
    with pytest.raises((TrainingError, ValueError), match=r"step_00000001 .*\.metadata"):
        load_to_train(folder)
