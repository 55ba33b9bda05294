"""What ran is counted, said once, and refused where no fallback was asked for."""

import warnings

import pytest
import torch

import sagebwd
from sagebwd import SageConfig, usage
from sagebwd.config import PRESETS
from sagebwd.metrics import relative_l2
from sagebwd.reference import attention, exact_attention


def test_layers_that_ran_alike_share_a_row():
    assert str(sagebwd.report()).startswith("SageBwd: no integration has called it; your own calls")
    for layer in (3, 0, 1, 10, 2, 0):
        usage.record("Attention", "triton", layer)
    usage.record("Attention", "hopper", 4)
    usage.record("call", "reference")
    with pytest.warns(UserWarning, match="Attention runs in full precision, not in INT8: a bias"):
        usage.fall_back("Attention", "a bias", "sdpa", 5)
    usage.fall_back("Attention", "a bias", "sdpa", 6)  # said once
    assert str(sagebwd.report()).splitlines() == [
        "attention  layers   calls  ran",
        "Attention  5-6      2      full precision: a bias",
        "Attention  4        1      INT8 (hopper)",
        "Attention  0-3, 10  6      INT8 (triton)",
        "call                1      INT8 (reference)",
    ]
    rows = sagebwd.report(clear=True).rows
    assert rows[2] == usage.ReportRow("Attention", (0, 1, 2, 3, 10), "triton", "", 6)
    assert sagebwd.report().rows == ()
    with pytest.warns(UserWarning, match="a bias"):
        usage.fall_back("Attention", "a bias", "sdpa")


def test_without_a_fallback_the_call_is_refused_and_not_counted():
    usage.check_fallback("sdpa")
    with pytest.raises(ValueError, match="fallback is 'eager'; use 'error' or 'sdpa'"):
        usage.check_fallback("eager")
    with pytest.raises(NotImplementedError, match=r"does not compute a bias; drop it, or .* fallback='sdpa'"):
        usage.fall_back("Attention", "a bias", "error", fix="drop it")
    assert sagebwd.report().rows == ()


def test_a_tracer_counts_without_breaking_the_graph():
    def layer(x):
        usage.record("Attention", "triton", 0)
        return x + 1

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for _ in range(3):
        compiled(torch.zeros(2))
    [row] = sagebwd.report().rows
    assert row.name == "Attention"


# --- Large logits ------------------------------------------------------------------------------------------


S_AND_O_IN_16_BIT = SageConfig.strictly_causal(int8_matmuls=("dv", "dq", "dk"))


def draw_for(largest, n=256, head_dim=64):
    """q, k, v and grad_out, Gaussian, whose largest |q·k| / √D is this."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = torch.randn(4, 1, 2, n, head_dim, generator=generator)
    factor = (largest / (q @ k.mT).abs().max() * head_dim**0.5).sqrt()
    return q * factor, k * factor, v, grad_out


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name].is_int8("s_fwd")])
def test_gradients_err_by_a_tenth_at_the_largest_logit(preset):
    """What LARGEST_LOGIT is: by half of that where each token has its scale."""
    q, k, v, grad_out = draw_for(usage.LARGEST_LOGIT)
    found = attention(q, k, v, grad_out, config=PRESETS[preset])
    truth = exact_attention(q, k, v, grad_out)
    error = max(relative_l2(found.dq, truth.dq), relative_l2(found.dk, truth.dk))
    assert 0.05 < error < 0.13
    found = attention(q, k, v, grad_out, config=S_AND_O_IN_16_BIT)
    assert relative_l2(found.dq, truth.dq) < 0.012


def test_large_logits_are_warned_of_once():
    """Under smoothing those of K without its mean; where S is in 16 bit none are."""
    q, k, v, _ = draw_for(1.3 * usage.LARGEST_LOGIT)
    default, attend = SageConfig(), usage.counted_attention
    compiled = torch.compile(
        lambda *x: attend("compiled", *x, config=default), fullgraph=True, backend="eager"
    )
    for name in ("here", "there"):
        with pytest.warns(UserWarning, match=rf"^{name}: logits reach \d\d, .*diagnose"):
            attend(name, q, k, v, config=default)
    with warnings.catch_warnings(action="error"):
        attend("here", q, k, v, config=default)
        attend("16-bit S", q, k, v, config=S_AND_O_IN_16_BIT)
        attend("halved", q / 2, k, v, config=default)
        attend("scaled", q, k, v, config=default, scale=0.01)
        attend("smoothed", q / 2, k + 50, v, config=default)
        compiled(q, k, v)
    with pytest.warns(UserWarning, match=r"unsmoothed: logits reach \d\d\d"):
        attend("unsmoothed", q / 2, k + 50, v, config=SageConfig.strictly_causal())


def test_only_the_first_calls_are_looked_at(monkeypatch):
    q, k, v, _ = draw_for(2 * usage.LARGEST_LOGIT, n=8)
    monkeypatch.setattr(usage, "LOOKS", 2)
    for _ in range(2):
        usage.counted_attention("here", q / 4, k, v, config=SageConfig())
    with warnings.catch_warnings(action="error"):
        usage.counted_attention("here", q, k, v, config=SageConfig())
