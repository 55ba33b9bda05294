"""Files of strangers and of failing disks: readers give what was written, or say what is wrong."""

import json
import os
import warnings

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
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


class Reader:
    """A file as it is written, and what reads it."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.file = self.write()
        self.content = self.file.read_bytes()
        self.read()

    def give(self, content):
        """Read other content. Fails for an exception that no user should see."""
        self.file.write_bytes(content)
        said = "nothing"
        try:
            self.read()
        except (ValueError, OSError, TrainingError) as error:
            said = str(error)
        assert 0 < len(said) < 100_000

    def text(self, tree):
        return json.dumps(tree, indent=1)


class Seal(Reader):
    def write(self):
        model, optimizer = make()
        train_step(model, optimizer)
        extra = {"settings": Settings(seed=1).recorded(), "data": "a", "tokenizer": "bytes"}
        checkpoints(self.folder / "checkpoints").save(1, model, optimizer, extra)
        self.path = self.folder / "checkpoints" / "step_00000001"
        return self.path / "seal.json"

    def read(self):
        check_checkpoint(self.path, verify_seal(self.path), Settings(seed=1))

    def text(self, tree):
        if isinstance(tree, dict):
            return seal_text({name: value for name, value in tree.items() if name != CHECKSUM})
        return json.dumps(tree)


class Metadata(Seal):
    def write(self):
        super().write()
        self.files = {file.name for file in self.path.iterdir()}
        self.state = {"model": make()[0].state_dict()}
        return self.path / ".metadata"

    def read(self):
        with warnings.catch_warnings(action="ignore"):
            load_safely(self.state, self.path, self.files, alone=True)


class Done(Reader):
    def write(self):
        (self.folder / "metrics.jsonl").write_text("")
        RunDirectory(self.folder).finish()
        return self.folder / "DONE"

    def read(self):
        RunDirectory(self.folder).check()

    text = Seal.text


class Config(Reader):
    def write(self):
        stored = Settings(sample_prompt="${x}").recorded()
        for group in (stored, *(value for value in stored.values() if isinstance(value, dict))):
            group |= {name: 1 for name, value in group.items() if value == "???"}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(stored))
        return self.folder / "config.yaml"

    def read(self):
        stored = identity.read(self.file)
        identity.changes(stored, Settings())
        assert os.environ["HOME"] not in str(read_settings(RunDirectory(self.folder)))


class Metrics(Reader):
    def write(self):
        lines = [{"step": n, "tokens": 8 * n, "loss": 2.5, "val_loss/a": 3.0, "mfu": None} for n in (1, 2)]
        lines += [{"step": 2, "tokens": 16, "val_loss": 3.5, "sample": "x"}]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.folder / "metrics.jsonl"

    def read(self):
        records = read_metrics(self.file)
        runs = [compare.Run(self.folder, name, name, {}, records, None) for name in "ab"]
        compare.table(runs, {"b": "a"})
        list(_losses(records, 2))

    def text(self, tree):
        return json.dumps(tree) + "\n"


class UnitOfText(Reader):
    def write(self):
        shard = self.folder / "train_00000.bin"
        np.arange(100, dtype="<u2").tofile(shard)
        self.shard = Shard(shard.name, 100, 1, chunk_checksums(shard), f"{100:08x}{99:08x}")
        self.counts = {"skipped": 1, "unknown": 2, "decoded": 9, "changed": 3}
        UnitRecord("a", {"train": self.shard, "val": None}, self.counts).write(self.folder, 0)
        return self.folder / "unit_00000.json"

    def read(self):
        record = UnitRecord.read(self.folder, 0)
        for shard in filter(None, record.shards.values() if record else ()):
            shard.is_intact_in(self.folder, np.dtype("<u2"))


class ManifestOfText(UnitOfText):
    def write(self):
        super().write()
        recipe, shards = {"tokenizer": "bytes"}, {"train": [self.shard], "val": []}
        Manifest("a", recipe, 257, shards, [{"name": "a"}], self.counts).write(self.folder)
        return self.folder / "manifest.json"

    def read(self):
        if manifest := Manifest.read(self.folder):
            manifest.documents("train")
            list(manifest.losses())
            tokens = TokenShards.open(self.folder, manifest, "train", full=True)
            assert tokens.window(0, len(tokens)).tolist() in ([*range(100)], [])  # a list of no shards


class TokenizerOfOthers(Reader):
    def write(self):
        words = {chr(97 + i): i for i in range(26)} | {"ab": 26}
        made = Tokenizer(models.BPE(words, [("a", "b")]))
        made.add_special_tokens(["<end>"])
        made.save(str(self.folder / "tokenizer.json"))
        return self.folder / "tokenizer.json"

    def read(self):
        loaded = tokenizers.load(str(self.file))
        loaded.decode(loaded.encode("abba"))


READERS = [Seal, Metadata, Done, Config, Metrics, UnitOfText, ManifestOfText, TokenizerOfOthers]


@pytest.fixture(scope="module")
def reader(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("reader") / "files")


@pytest.mark.parametrize("reader", READERS, indirect=True)
@settings(max_examples=80)
@given(edits=edits)
def test_bytes_that_changed(reader, edits):
    reader.give(edited(reader.content, edits))


@pytest.mark.parametrize("reader", [r for r in READERS if r not in (Config, Metadata)], indirect=True)
@settings(max_examples=80)
@given(place=st.integers(0, 999), value=values)
def test_values_that_changed(reader, place, value):
    """Checksums are right: anyone can make one."""
    tree = json.loads(reader.content.splitlines()[0] if isinstance(reader, Metrics) else reader.content)
    reader.give(reader.text(with_value(tree, place, value)).encode())
