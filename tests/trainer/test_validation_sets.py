import json
import math
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from common.errors import SettingsError, TrainingError
from data.corpus import ValidationSet
from model.config import LlamaConfig
from model.llama import Llama
from scripts import show_batch
from trainer.checks import check
from trainer.distributed import Ranks
from trainer.export import model_card
from trainer.loop import described, validation_loss, validation_record
from trainer.run_directory import read_metrics

SHORT = ("steps=6", "checkpoint_every=3", "eval_every=6", "sample_tokens=0", "probe.every=4")


def test_losses_are_weighted_and_bits_counted_over_bytes():
    """Three sets by hand: val_loss is 0.75 · 2 + 0.25 · 4, over 0.75 · 4 + 0.25 · 2 bytes per token."""
    sets = [ValidationSet("a", None, 0.75), ValidationSet("b", None, 0.25), ValidationSet("c", None, 0.0)]
    record = validation_record(sets, [2.0, 4.0, 8.0], [4.0, 2.0, 1.0])
    assert record["val_loss"] == pytest.approx(2.5)
    assert record["val_bits_per_byte"] == pytest.approx(2.5 / math.log(2) / 3.5)
    assert record["val_bits_per_byte/b"] == pytest.approx(2.0 / math.log(2))
    assert described(record) == (
        "validation loss 2.5000, 1.0305 bits per byte; a 2.0000, 0.7213; b 4.0000, 2.8854; c 8.0000, 11.5416"
    )
    alone = [ValidationSet(None, None, 1.0), ValidationSet("x", None, 0.0)]
    record = validation_record(alone, [3.0, 1.0], [0.0, 2.0])
    assert record.keys() == {"val_loss", "val_bits_per_byte", "val_loss/x", "val_bits_per_byte/x"}
    assert record["val_loss"] == 3.0
    assert math.isnan(record["val_bits_per_byte"])  # a text of end-of-text tokens alone


@pytest.fixture
def mixed(tmp_path):
    """The overrides of a run on three parts of a book to one of numbers, with code to validate on."""
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.\n" * 800)
    lines = [json.dumps({"text": " ".join(map(str, range(i, i + 40)))}) + "\n" for i in range(100)]
    (tmp_path / "numbers.jsonl").write_text("".join(lines))
    (tmp_path / "code.txt").write_text("def f(x):\n    return x\n" * 60)
    sources = {"book.path": f"{tmp_path}/book.txt", "numbers.path": f"{tmp_path}/numbers.jsonl"}
    sources |= {"book.weight": 3, "numbers.weight": 1}
    named = (f"data.sources.{name}={value}" for name, value in sources.items())
    return "data=mixture", "data.tokenizer=bytes", *named, f"data.validation.code={tmp_path}/code.txt"


def loss_of(trainer, tokens):
    rows = torch.stack([torch.from_numpy(tokens.window(64 * i, 65).astype("int64")) for i in range(8)])
    with torch.no_grad():
        logits = trainer.llama(rows[:, :-1])
    return float(F.cross_entropy(logits.double().flatten(0, 1), rows[:, 1:].flatten()))


def test_a_mixture_trains_validates_and_resumes(train_here, mixed, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    run = tmp_path / "run"
    trainer = train_here(run, *SHORT, *mixed)
    assert "data: book: 0.75 of the sequences, 1,152 tokens; it is read 0.05 times" in caplog.text
    assert "data: numbers: 0.25 of the sequences, 384 tokens; it is read 0.0" in caplog.text
    records = read_metrics(run / "metrics.jsonl")
    found = next(record for record in records if "val_loss" in record)
    losses = {one.name: loss_of(trainer, one.tokens) for one in trainer.corpus.validation}
    assert losses.keys() == {"book", "numbers", "code"}
    for name, loss in losses.items():
        assert found[f"val_loss/{name}"] == pytest.approx(loss, rel=1e-5)
        if name != "numbers":  # ASCII, and within one document: a token is a byte
            assert found[f"val_bits_per_byte/{name}"] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert found["val_loss"] == pytest.approx(0.75 * losses["book"] + 0.25 * losses["numbers"], rel=1e-5)

    card = model_card(trainer.settings, trainer.directory, 6, records)
    assert "| text | 0.75 of text files, 0.25 of jsonl files |" in card
    show_batch.main([str(run), "--step", "6", "--characters", "20"])
    shown = capsys.readouterr().out
    assert shown.count(" of book, epoch 0") == 3
    assert shown.count(" of numbers, epoch 0") == 1
    assert "stormy night" in shown or "dark and" in shown

    shutil.rmtree(run / "checkpoints" / "step_00000006")
    other = [override.replace("numbers.weight=1", "numbers.weight=2") for override in mixed]
    with pytest.raises(TrainingError, match=r"(?s)other set.*data.sources.numbers.weight was 1, is now 2"):
        train_here(run, *SHORT, *other)
    (tmp_path / "moved").mkdir()
    for name in ("book.txt", "numbers.jsonl", "code.txt"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    moved = [text.replace(f"={tmp_path}", f"={tmp_path}/moved") for text in mixed]
    train_here(run, *SHORT, *moved, "hardware.micro_batch=2")
    again = read_metrics(run / "metrics.jsonl")
    for one, other in zip(records, again, strict=True):
        for key in one.keys() & {"loss", "val_loss", "val_loss/book", "val_loss/code"}:
            assert other[key] == pytest.approx(one[key], rel=1e-6)
    (tmp_path / "moved" / "book.txt").write_text("The rain fell in torrents.\n" * 800)
    with pytest.raises(TrainingError, match="was trained on other text"):
        train_here(run, *SHORT, *moved)


def test_validation_sets_change_nothing_else(train_here, mixed, tmp_path):
    book = (*SHORT, "data=text", f"data.path={tmp_path}/book.txt", "data.tokenizer=bytes")
    named = train_here(tmp_path / "named", *book, mixed[-1])
    plain = train_here(tmp_path / "plain", *book)
    for ours, theirs in zip(*(read_metrics(one.directory.metrics) for one in (named, plain)), strict=True):
        extra = {"val_loss/code", "val_bits_per_byte/code"}
        assert ours.keys() - theirs.keys() == (extra if "val_loss" in ours else set())
        for key in theirs.keys() & {"loss", "grad_norm", "val_loss", "val_bits_per_byte"}:
            assert ours[key] == theirs[key]
    assert named.directory.is_finished_with(plain.settings)


def test_what_cannot_be_trained_is_named(compose_settings, mixed, tmp_path):
    for told, overrides in {
        "train_sequences=4 has no meaning with data=mixture": (*mixed, "train_sequences=4"),
        "data.path is missing: data.val_path alone": ("data=text", f"data.val_path={tmp_path}/book.txt"),
    }.items():
        with pytest.raises(SettingsError, match=told):
            check(compose_settings("experiment=debug", *overrides), 1)


def test_a_validation_set_that_is_too_short_is_found_before_the_first_step(train_here, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(TrainingError, match=r"short-bytes-.*has 10 tokens, too few .*context=64"):
        train_here(tmp_path / "run", *SHORT, f"data.validation.short={tmp_path}/short.txt")


SMALL = LlamaConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2, d_head=16, d_ffn=96, max_context=32)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return Llama(SMALL, F.scaled_dot_product_attention)


def batches_of(*sizes, context=8):
    tokens = torch.randint(64, (sum(sizes), context + 1), generator=torch.Generator().manual_seed(1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split(list(sizes))]


def evaluate(model, batches, ranks=Ranks, **options):
    how = {"micro_batch": 4, "ranks": ranks(0, 1, torch.device("cpu")), "autocast": nullcontext}
    return validation_loss(model, batches, **how, **options)


class OneOfSeveral(Ranks):
    """A rank among others that have up to three batches."""

    def largest(self, value):
        return max(value, 3)


def test_ranks_of_a_sharded_model_call_it_equally_often(llama):
    calls = []
    llama.register_forward_hook(lambda *_: calls.append(1))
    for sizes in ((4, 4, 3), (4, 2), (1,)):
        calls.clear()
        batches = batches_of(*sizes)
        together = evaluate(llama, batches, OneOfSeveral, in_step=True)
        assert len(calls) == 3
        assert together == evaluate(llama, batches)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_a_smaller_batch_is_not_compiled_for(llama):
    torch.compiler.reset()  # what other tests compiled
    batches = batches_of(4, 4, 3, 2)
    expected = evaluate(llama, batches)
    assert evaluate(torch.compile(llama, backend="eager"), batches) == pytest.approx(expected, rel=1e-6)
    torch.compiler.reset()
