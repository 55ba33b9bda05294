"""Files of strangers and of failing disks: readers give what was written, or say what is wrong."""

import json
import os
import warnings

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from common.errors import TrainingError
from data import tokenizers
from data.shards import Manifest, Shard, UnitRecord, chunk_checksums
from data.tokens import TokenShards
from scripts import compare
from scripts.runs import read_settings
from tests.trainer.test_checkpoint import checkpoints, make, train_step
from trainer import identity
from trainer.checkpoint import load_safely
from trainer.export import _losses
from trainer.run_directory import CHECKSUM, RunDirectory, read_metrics, seal_text, verify_seal
from trainer.settings import Settings
from trainer.start import check_checkpoint

#: What a byte, or some, may turn into. Each has broken a reader of this kind somewhere.
PIECES = [
    *(b"", b"\0", b"\n", b"\xff", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-1", b"1.5", b"null", b"true"),
    *(b"1e400", b"NaN", b"Infinity", b"9" * 30, b"9" * 5000, b"[" * 5000, b'{"a":' * 5000, b'"\\ud800"'),
    *(b"../x", b"/dev/zero", b"${oc.env:HOME}", b"${", b"&a ", b"*a", b"!!int ''", b"<<: ", b"1:59:59"),
    *(b"r\xff\xff\x1f\x00", b"\x8e\xff\xff\xff\xff\x00\x00\x00\x00", b"h\x00", b"0", b"2", b"R", b"."),
]
edits = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.sampled_from([0, 0, 1, 1, 2, 5, 30, 1 << 20]),
        st.sampled_from(PIECES) | st.binary(max_size=6),
    ),
    min_size=1,
    max_size=4,
)


def nested(levels):
    return [nested(levels - 1)] if levels else []


numbers = st.integers(-3, 3) | st.integers(-(2**70), 2**70) | st.floats()
values = st.recursive(
    st.none()
    | st.booleans()
    | numbers
    | st.text(max_size=4)
    | st.sampled_from(["???", "x" * 300, "fpa", nested(30), nested(300)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def edited(content, edits):
    """The content with some bytes at places replaced by pieces."""
    for place, cut, piece in edits:
        at = place % (len(content) + 1)
        content = content[:at] + piece + content[at + cut :]
    return content


def with_value(tree, place, value):
    """The JSON with one of its values, which `place` chooses, replaced."""
    tree = {"": tree}
    nodes = [(tree, "")]
    for node, key in nodes:  # which grows
        inner = node[key]
        keys = inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        nodes += [(inner, key) for key in keys]
    node, key = nodes[place % len(nodes)]
    node[key] = value
    return tree[""]


def seal(folder):
    model, optimizer = make()
    train_step(model, optimizer)
    extra = {"settings": Settings(seed=1).recorded(), "data": "a", "tokenizer": "bytes"}
    checkpoints(folder).save(1, model, optimizer, extra)
    path = folder / "step_00000001"
    return path / "seal.json", lambda: check_checkpoint(path, verify_seal(path), Settings(seed=1))


def metadata(folder):
    path = seal(folder)[0].parent
    files, state = {file.name for file in path.iterdir()}, {"model": make()[0].state_dict()}

    def read():
        with warnings.catch_warnings(action="ignore"):
            load_safely(state, path, files, alone=True)

    return path / ".metadata", read


def done(folder):
    directory = RunDirectory(folder)
    directory.metrics.write_text("")
    directory.finish()
    return directory.done, directory.check


def config(folder):
    stored = Settings(sample_prompt="${x}").recorded()
    for group in (stored, *(value for value in stored.values() if isinstance(value, dict))):
        group |= {name: 1 for name, value in group.items() if value == "???"}
    directory = RunDirectory(folder)
    directory.config.write_text(yaml.safe_dump(stored))

    def read():
        identity.changes(identity.read(directory.config), Settings())
        assert os.environ["HOME"] not in str(read_settings(directory))

    return directory.config, read


def metrics(folder):
    lines = [{"step": n, "tokens": 8 * n, "loss": 2.5, "val_loss/a": 3.0, "mfu": None} for n in (1, 2)]
    lines += [{"step": 2, "tokens": 16, "val_loss": 3.5, "sample": "x"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read():
        records = read_metrics(folder / "metrics.jsonl")
        runs = [compare.Run(folder, name, name, {}, records, None) for name in "ab"]
        compare.table(runs, {"b": "a"})
        list(_losses(records, 2))

    return folder / "metrics.jsonl", read


COUNTS = {"skipped": 1, "unknown": 2, "decoded": 9, "changed": 3}


def shard_in(folder):
    path = folder / "train_00000.bin"
    np.arange(100, dtype="<u2").tofile(path)
    return Shard(path.name, 100, 1, chunk_checksums(path), f"{100:08x}{99:08x}")


def unit_of_text(folder):
    UnitRecord("a", {"train": shard_in(folder), "val": None}, COUNTS).write(folder, 0)

    def read():
        record = UnitRecord.read(folder, 0)
        for shard in filter(None, record.shards.values() if record else ()):
            shard.is_intact_in(folder, np.dtype("<u2"))

    return folder / "unit_00000.json", read


def manifest_of_text(folder):
    recipe, shards = {"tokenizer": "bytes"}, {"train": [shard_in(folder)], "val": []}
    Manifest("a", recipe, 257, shards, [{"name": "a"}], COUNTS).write(folder)

    def read():
        if manifest := Manifest.read(folder):
            manifest.documents("train")
            list(manifest.losses())
            tokens = TokenShards.open(folder, manifest, "train", full=True)
            assert tokens.window(0, len(tokens)).tolist() in ([*range(100)], [])  # a list of no shards

    return folder / "manifest.json", read


def tokenizer_of_others(folder):
    words = {chr(97 + i): i for i in range(26)} | {"ab": 26}
    made, file = Tokenizer(models.BPE(words, [("a", "b")])), folder / "tokenizer.json"
    made.add_special_tokens(["<end>"])
    made.save(str(file))

    def read():
        loaded = tokenizers.load(str(file))
        loaded.decode(loaded.encode("abba"))

    return file, read


#: Each writes a file, and returns it and what reads it.
READERS = [seal, metadata, done, config, metrics, unit_of_text, manifest_of_text, tokenizer_of_others]


@pytest.fixture(scope="module")
def reader(request, tmp_path_factory):
    """The file, its content and what reads it."""
    file, read = request.param(tmp_path_factory.mktemp("reader"))
    read()
    return file, file.read_bytes(), read


def give(file, content, read):
    """Read other content. Fails for an exception that no user should see."""
    file.write_bytes(content)
    said = "nothing"
    try:
        read()
    except (ValueError, OSError, TrainingError) as error:
        said = str(error)
    assert 0 < len(said) < 100_000


@pytest.mark.parametrize("reader", READERS, indirect=True)
@settings(max_examples=80)
@given(edits=edits)
@example(edits=[(0, 1 << 20, b"[" * 5000)])
def test_bytes_that_changed(reader, edits):
    file, content, read = reader
    give(file, edited(content, edits), read)


@pytest.mark.parametrize("reader", [r for r in READERS if r not in (config, metadata)], indirect=True)
@settings(max_examples=80)
@given(place=st.integers(0, 999), value=values)
def test_values_that_changed(reader, place, value):
    """Checksums are right: anyone can make one."""
    file, content, read = reader
    lines = file.name == "metrics.jsonl"
    tree = with_value(json.loads(content.splitlines()[0] if lines else content), place, value)
    if isinstance(tree, dict) and file.name in ("seal.json", "DONE"):
        text = seal_text({name: value for name, value in tree.items() if name != CHECKSUM})
    else:
        text = json.dumps(tree) + "\n"
    give(file, text.encode(), read)
