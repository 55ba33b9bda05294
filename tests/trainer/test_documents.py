"""data.mask_documents: a model of packed documents against float64, and against each document alone."""

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

from common.errors import SettingsError, TrainingError
from data.loader import evaluation_batches, stack_sequences
from data.tokens import TokenShards
from model import backends
from model.config import LlamaConfig
from model.llama import Llama
from sagebwd.metrics import relative_l2
from tests.cli import losses, metrics
from trainer.checks import check
from trainer.probe import capture, errors, exact_layer

END, CONTEXT = 60, 12
SHAPE = LlamaConfig(
    vocab_size=61, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_head=8, d_ffn=40, max_context=CONTEXT,
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
    """The documents of one sequence, as slices."""
    ends = [i + 1 for i, token in enumerate(row.tolist()) if token == separator]
    return [slice(*pair) for pair in pairwise(dict.fromkeys((0, *ends, len(row))))]


def explicit_loss(llama, inputs, targets, separator):
    """Loss in float64, with a matrix that says who sees whom; its gradients by name."""
    config = llama.config
    weights = {name: x.detach().double().requires_grad_() for name, x in llama.named_parameters()}

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * weights[f"{name}.weight"]

    def heads(x, name, turns):
        x = (x @ weights[f"{name}_proj.weight"].T).unflatten(-1, (-1, config.d_head)).transpose(0, 1)
        if turns is None:
            return x
        first, second = (norm(x, f"{name}_norm") if config.qk_norm else x).chunk(2, -1)
        return torch.view_as_real(torch.complex(first, second) * turns).movedim(-1, -2).flatten(-2)

    def logits(row):
        sees, position = torch.zeros(len(row), len(row), dtype=torch.bool), torch.zeros(len(row))
        for one in documents(row, separator):
            sees[one, one] = True
            position[one] = torch.arange(one.stop - one.start)
        frequency = config.rope_theta ** (-torch.arange(0, config.d_head, 2).double() / config.d_head)
        turns = torch.polar(torch.ones(()).double(), position.double()[:, None] * frequency)
        x = weights["embed_tokens.weight"][row]
        for layer in range(config.n_layers):
            at = f"layers.{layer}"
            y, own = norm(x, f"{at}.input_layernorm"), f"{at}.self_attn"
            q, k, v = (heads(y, f"{own}.{name}", turns if name != "v" else None) for name in "qkv")
            k, v = (z.repeat_interleave(config.n_heads // config.kv_heads, 0) for z in (k, v))
            scores = (q @ k.mT / config.d_head**0.5).masked_fill(~sees.tril(), -torch.inf)
            out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = x + out @ weights[f"{own}.o_proj.weight"].T
            y = norm(x, f"{at}.post_attention_layernorm")
            gate, up = (y @ weights[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
        return norm(x, "norm") @ weights["embed_tokens.weight"].T

    loss = F.cross_entropy(torch.cat([logits(row) for row in inputs]), targets.flatten())
    return loss, dict(zip(weights, torch.autograd.grad(loss, [*weights.values()]), strict=True))


@pytest.mark.parametrize("case", SEPARATORS)
def test_loss_and_gradients_are_those_of_an_explicit_mask(case):
    llama, (inputs, targets, cu_seqlens) = model("fpa"), batch(case)
    expected, gradients = explicit_loss(llama, inputs, targets, END)
    loss = llama(inputs, targets, cu_seqlens)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    total = torch.stack([wanted.norm() for wanted in gradients.values()]).norm()
    for name, parameter in llama.named_parameters():
        wanted = gradients[name]  # with documents of one token, zero for Q and K
        assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm() + 1e-7 * total, name


@pytest.mark.parametrize("case", SEPARATORS)
@pytest.mark.parametrize("name", BACKENDS)
def test_each_document_is_computed_as_if_it_were_alone(name, case):
    llama, (inputs, _, cu_seqlens) = model(name), batch(case)
    with torch.no_grad():
        together = llama(inputs, cu_seqlens=cu_seqlens)
        full_precision = model("fpa")(inputs, cu_seqlens=cu_seqlens)
        for row, found in zip(inputs, together, strict=True):
            for one in documents(row, END):
                torch.testing.assert_close(found[one], llama(row[None, one])[0], rtol=1e-4, atol=1e-5)
    error = relative_l2(together, full_precision)
    assert error == 0 if name == "fpa" else 0 < error < 0.05


def test_the_loss_of_a_batch_is_the_mean_over_its_tokens_and_a_separator_has_a_target():
    llama, (inputs, targets, cu_seqlens) = model("fpa"), batch("different numbers")
    logits = llama(inputs, cu_seqlens=cu_seqlens)
    assert logits.shape == (2, CONTEXT, SHAPE.vocab_size)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(llama(inputs, targets, cu_seqlens), expected)


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
    captured = capture(llama, [1], inputs, targets, cu_seqlens, autocast=nullcontext)[1]
    found = errors(captured, build("fpa").attend, exact_layer(captured)[0])
    assert all(found[f"{x}_l2"] < 1e-5 for x in ("o", "dq", "dk", "dv"))


# ---------------------------------------------------------------------- a run


@pytest.fixture
def text(tmp_path):
    """Settings of a text of short documents."""
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
    expected = [explicit_loss(first, x, y, 256)[0] for x, y, _ in trained.loader.micro_batches(0)]
    assert losses(run)[0] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    (inputs, targets, _) = next(
        evaluation_batches(trained.corpus.val, context=64, sequences=8, micro_batch=8, separator=256)
    )
    found = [record["val_loss"] for record in metrics(run) if "val_loss" in record][-1]
    assert found == pytest.approx(explicit_loss(trained.llama, inputs, targets, 256)[0].item(), rel=1e-5)

    whole = losses(run)
    shutil.rmtree(trained.checkpoints.folder / "step_00000008")
    train_here(run, *masked)
    assert losses(run) == whole
    with pytest.raises(TrainingError, match=r"data\.mask_documents was True, is now False"):
        train_here(run, *text, "hardware.micro_batch=2")


def test_an_attention_without_documents_is_refused_before_anything_is_read(compose_settings):
    settings = compose_settings("experiment=debug", "attention.sdpa=cudnn", "data.mask_documents=true")
    with pytest.raises(SettingsError, match=r"mask_documents=true: attention\.sdpa=cudnn takes no.*flash"):
        check(settings, 1)
    check(compose_settings("experiment=debug", "data.mask_documents=true", "attention=sagebwd"), 1)
