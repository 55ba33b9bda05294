import json
import shutil
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
import yaml

from common.errors import TrainingError
from data.loader import evaluation_batches, stack_sequences
from data.tokens import TokenShards
from model import backends
from model.config import LlamaConfig
from model.llama import Llama
from sagebwd.metrics import relative_l2
from tests.cli import losses, metrics
from trainer.probe import capture, errors, exact_layer

END, CONTEXT = 60, 12
SHAPE = LlamaConfig(
    vocab_size=61, d_model=24, n_layers=1, n_heads=4, n_kv_heads=2, d_head=8, d_ffn=40, max_context=CONTEXT,
    init_std=0.2,
)  # fmt: skip
#: Where separators lie in two sequences of 12 tokens.
SEPARATORS = {
    "none": ((), ()),
    "first": ((0,), (0,)),
    "last": ((11,), (11,)),
    "everywhere": (range(12), range(12)),
    "in a row": ((3, 4, 5), (10, 11)),
    "different numbers": ((2,), (0, 1, 6, 9, 11)),
    "one sequence": ((), (4,)),
}
BACKENDS = {"fpa": {"backend": "fpa"}, "sagebwd": {"backend": "sagebwd", "smooth_q": True}}


def build(name):
    how = {"device": torch.device("cpu"), "dtype": torch.float32, "d_head": SHAPE.d_head, "is_gqa": True}
    return backends.build(BACKENDS[name], longest_document=CONTEXT, **how)


def model(name):
    torch.manual_seed(3)
    llama = Llama(SHAPE, build(name).attend)
    for parameter in llama.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return llama


def batch(case):
    """(inputs, targets, boundaries), as the loader makes them."""
    tokens = np.random.default_rng(4).integers(0, END, 2 * CONTEXT + 1).astype(np.uint16)
    for row, places in enumerate(SEPARATORS[case]):
        tokens[[row * CONTEXT + place for place in places]] = END
    return stack_sequences(TokenShards([tokens]), np.arange(2), CONTEXT, separator=END)


def documents(row, separator):
    ends = [i + 1 for i, token in enumerate(row.tolist()) if token == separator]
    return [slice(*pair) for pair in pairwise(dict.fromkeys((0, *ends, len(row))))]


def loss_alone(llama, inputs, targets, separator):
    """The mean over the tokens of a batch, each document computed by itself."""
    losses = [
        F.cross_entropy(llama(row[None, one])[0], wanted[one], reduction="sum")
        for row, wanted in zip(inputs, targets, strict=True)
        for one in documents(row, separator)
    ]
    return torch.stack(losses).sum() / inputs.numel()


@pytest.mark.parametrize("case", SEPARATORS)
@pytest.mark.parametrize("name", BACKENDS)
def test_loss_and_gradients_are_those_of_each_document_alone(name, case):
    llama, (inputs, targets, cu_seqlens) = model(name), batch(case)
    weights = dict(llama.named_parameters())
    expected = loss_alone(llama, inputs, targets, END)
    gradients = torch.autograd.grad(expected, [*weights.values()])
    loss = llama(inputs, targets, cu_seqlens)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    # With documents of one token, those of Q and K are zero, up to the rounding of INT8.
    noise = (1e-7 if name == "fpa" else 1e-6) * torch.stack([wanted.norm() for wanted in gradients]).norm()
    found = torch.autograd.grad(loss, [*weights.values()])
    for key, one, wanted in zip(weights, found, gradients, strict=True):
        assert (one - wanted).norm() <= 1e-5 * wanted.norm() + noise, key
    with torch.no_grad():
        together, full_precision = (x(inputs, cu_seqlens=cu_seqlens) for x in (llama, model("fpa")))
    error = relative_l2(together, full_precision)
    assert error == 0 if name == "fpa" else 0 < error < 0.05


@pytest.mark.parametrize("name", BACKENDS)
def test_batches_with_other_numbers_of_documents_are_not_compiled_again(name):
    torch.compiler.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    llama = model(name)
    compiled = torch.compile(llama, backend=counted, dynamic=False, fullgraph=True)
    counts = set()
    for case in ("none", "one sequence", "first", "last"):
        inputs, targets, cu_seqlens = batch(case)
        counts.add(len(cu_seqlens.unique()) - 1)
        loss = compiled(inputs, targets, cu_seqlens)
        torch.testing.assert_close(loss, llama(inputs, targets, cu_seqlens))
        loss.backward()
    assert counts == {2, 3, 4}
    assert counted.frame_count == 1
    torch.compiler.reset()


def test_the_probe_measures_attention_as_the_documents_see_it():
    llama, (inputs, targets, cu_seqlens) = model("sagebwd"), batch("different numbers")
    captured = capture(llama, [0], inputs, targets, cu_seqlens, autocast=nullcontext)[0]
    found = errors(captured, build("fpa").attend, exact_layer(captured)[0])
    assert all(found[f"{x}_l2"] < 1e-5 for x in ("o", "dq", "dk", "dv"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "short.jsonl"
    lengths = np.random.default_rng(5).integers(0, 60, 400)
    path.write_text("".join(json.dumps({"text": ("abc def. " * 8)[:n]}) + "\n" for n in lengths))
    return "data=jsonl", f"data.path={path}", "data.tokenizer=bytes", "data.val_fraction=0.2"


def test_a_run_trains_and_validates_with_the_mask_and_goes_on(text, train_here, tmp_path):
    masked = (*text, "data.mask_documents=true", "hardware.micro_batch=2")
    run = tmp_path / "run"
    trained = train_here(run, *masked)
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["mask_documents"] is True

    torch.manual_seed(trained.settings.seed)
    first = Llama(trained.settings.model, trained.backend.attend)
    expected = [loss_alone(first, x, y, 256) for x, y, _ in trained.loader.micro_batches(0)]
    assert losses(run)[0] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    how = {"context": 64, "sequences": 8, "micro_batch": 8, "separator": 256}
    inputs, targets, _ = next(evaluation_batches(trained.corpus.val, **how))
    found = [record["val_loss"] for record in metrics(run) if "val_loss" in record][-1]
    assert found == pytest.approx(loss_alone(trained.llama, inputs, targets, 256).item(), rel=1e-5)

    whole = losses(run)
    shutil.rmtree(trained.checkpoints.folder / "step_00000008")
    train_here(run, *masked)
    assert losses(run) == whole
    with pytest.raises(TrainingError, match=r"data\.mask_documents was True, is now False"):
        train_here(run, *text, "hardware.micro_batch=2")
