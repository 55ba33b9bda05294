"""What diagnose() says of a model, against float64 attention; and that the model stays as it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sagebwd
from sagebwd import SageConfig, diagnose, sage_attention
from sagebwd.config import PRESETS
from sagebwd.metrics import relative_l2, small_rows_left
from sagebwd.reference import exact_attention

N, HEADS, KV_HEADS, D = 40, 4, 2, 16


class Attention(nn.Module):
    """Causal, with shared heads; ``gain`` makes logits large."""

    def __init__(self, attend, gain=1.0, **settings):
        super().__init__()
        self.attend, self.gain, self.settings = attend, gain, settings
        self.qkv = nn.Linear(HEADS * D, (HEADS + 2 * KV_HEADS) * D, bias=False)
        self.out = nn.Linear(HEADS * D, HEADS * D, bias=False)

    def heads(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).transpose(1, 2).split((HEADS, KV_HEADS, KV_HEADS), 1)
        return q * self.gain, k * self.gain, v

    def forward(self, x):
        out = self.attend(*self.heads(x), is_causal=True, enable_gqa=True, **self.settings)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers and something random, and something that counts."""

    def __init__(self, attend, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Attention(attend, **settings), Attention(attend, **settings)
        self.norm = nn.BatchNorm1d(HEADS * D)

    def forward(self, x):
        x = x + F.dropout(self.first(x), 0.3)
        return self.norm((x + self.second(x)).transpose(1, 2)).transpose(1, 2)


def draw():
    return torch.randn(2, N, HEADS * D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 1.0, 3.0])], ids=["plain", "sinks"])
def test_errors_are_those_to_float64_attention_at_the_same_inputs(sinks):
    """In a model of one attention, whose dO is known."""
    layer, x = Attention(sage_attention, sinks=sinks), draw()
    found = diagnose(layer, x)
    assert [row.name for row in found.layers] == ["Attention"]
    q, k, v = (t.detach() for t in layer.heads(x))
    along = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    grad_out = (along @ layer.out.weight.detach()).unflatten(-1, (HEADS, D)).transpose(1, 2)

    def results(config):
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = sage_attention(*leaves, is_causal=True, enable_gqa=True, sinks=sinks, config=config)
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    exact = exact_attention(q, k, v, grad_out, is_causal=True, sinks=sinks)
    truth = [exact.out, exact.dq, exact.dk, exact.dv]
    for name, config in PRESETS.items():
        own = results(config)
        expected = [relative_l2(a, b) for a, b in zip(own, truth, strict=True)]
        assert [*found.layers[0].errors[name].values()] == pytest.approx(expected, rel=1e-3), name
        left = min(small_rows_left(a, b) for a, b in zip(own[1:3], truth[1:3], strict=True))
        assert found.layers[0].small_rows[name] == pytest.approx(left, rel=1e-3), name
    s = (q.double() @ k.double().repeat_interleave(2, 1).mT * D**-0.5).tril()
    assert found.layers[0].largest_logit == pytest.approx(s.abs().max().item())
    assert found.layers[0].gradient_error("16 bit") < 1e-5
    assert found.recommended == "default"


@pytest.mark.parametrize("kind", ["sagebwd", "sdpa", "compiled", "checkpoint"])
def test_a_model_stays_as_it_is_and_its_layers_are_named(kind):
    model = Model(sage_attention if kind == "sagebwd" else F.scaled_dot_product_attention)
    x, called = draw(), model
    if kind == "sdpa":  # found by its name in torch at every call
        model.first.attend = model.second.attend = lambda *x, **s: F.scaled_dot_product_attention(*x, **s)
    if kind == "compiled":
        model.first.attend = model.second.attend = sage_attention
        called = torch.compile(model, backend="eager")
        called(x)
    if kind == "checkpoint":
        attend = model.first.attend = model.second.attend = sage_attention
        model.first.attend = lambda *x, **s: checkpoint(attend, *x, use_reentrant=False, **s)
    model.first.qkv.weight.grad = kept = torch.ones_like(model.first.qkv.weight)
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    found = diagnose(called, x)
    assert [row.name.removeprefix("_orig_mod.") for row in found.layers] == ["first", "second"]
    assert found.int8_share == 1
    assert found.recommended == "default"
    assert found.cosines.keys() == PRESETS.keys()
    assert all(0.99 < cosine < 1 for cosine in found.cosines.values())  # with the same dropout in each
    assert model.first.qkv.weight.grad is kept
    assert model.second.qkv.weight.grad is None
    assert (kept == 1).all()
    assert all(map(torch.equal, buffers, model.buffers()))
    assert torch.equal(state, torch.get_rng_state())
    assert sagebwd.report().rows == ()


def test_what_stays_in_full_precision_is_listed_with_the_reason():
    class Biased(Model):
        def forward(self, x):
            bias = torch.zeros(1, HEADS, N, N).normal_()
            q, k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in self.first.heads(x))
            out = F.scaled_dot_product_attention(q, k, v, bias)
            return self.second(out.transpose(1, 2).flatten(2))

    found = diagnose(Biased(lambda *x, **s: F.scaled_dot_product_attention(*x, **s)), draw())
    assert [row.name for row in found.layers] == ["second"]
    assert found.int8_share == 0.5
    assert [row.calls for row in found.full_precision] == [1]
    assert "an additive mask" in str(found)
    with pytest.raises(ValueError, match="Linear calls neither sagebwd nor torch's scaled_dot_product"):
        diagnose(nn.Linear(3, 3), torch.ones(2, 3))
    frozen = Model(sage_attention).requires_grad_(False)
    with pytest.raises(ValueError, match="no output of the model has a gradient"):
        diagnose(frozen, draw())


def test_large_logits_need_full_precision():
    """Also where only the layer behind the attention is trained: its output alone is compared."""
    model = Model(sage_attention, gain=9.0, config=SageConfig.low_bias())
    found = diagnose(model, draw())
    assert found.layers[1].largest_logit > 100
    assert found.layers[1].gradient_error("int8_scores") > 0.1 > 3 * found.layers[1].gradient_error("16 bit")
    assert found.recommended is None
    assert "recommended: full-precision attention" in str(found)
    head = nn.Sequential(model.requires_grad_(False), nn.Linear(HEADS * D, 3))
    found = diagnose(head, draw())
    assert [*found.layers[0].errors["default"]] == ["o"]
    assert found.layers[0].gradient_error("default") == 0
