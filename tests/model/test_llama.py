import math
import sys

import pytest
import torch
import torch.nn.functional as F

from model.generate import generate
from model.llama import Llama, RMSNorm, RotaryEmbedding, norm_and_rotate, rotary_tables, rotate
from model.loss import linear_cross_entropy
from tests.cli import run_fresh


def test_rotary_tables_are_exact_at_the_last_position():
    cos, sin = RotaryEmbedding(max_context=4096, d_head=64, theta=10000.0)(4096)
    assert cos.dtype == sin.dtype == torch.float32
    for pair in range(32):
        angle = 4095 * 10000.0 ** (-pair / 32)
        assert cos[-1, 0, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin[-1, 0, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotation_of_bfloat16_is_done_in_float32():
    cos, sin = RotaryEmbedding(max_context=50, d_head=8, theta=100.0)(50)
    x = torch.randn(1, 50, 2, 8).bfloat16()
    assert rotate(x, cos, sin).dtype == torch.float32
    torch.testing.assert_close(rotate(x, cos, sin), rotate(x.float(), cos, sin), atol=0, rtol=0)


@pytest.mark.parametrize("changed", [0, 7, 18])
def test_no_logit_depends_on_a_later_token(make_model, tokens, changed):
    model = make_model(n_kv_heads=2)
    before = model(tokens)
    tokens[:, changed] = (tokens[:, changed] + 1) % 61
    after = model(tokens)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert ((before - after)[:, changed:].abs().amax(dim=(0, 2)) > 1e-3).all()


class Recorded(list):
    """Full-precision attention and what it is called with."""

    def __call__(self, q, k, v, *, is_causal, enable_gqa):
        self.append((q, k, v, is_causal, enable_gqa))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_receives_views_without_copies(make_config, tokens, kv_heads):
    calls = Recorded()
    Llama(make_config(n_kv_heads=kv_heads), calls)(tokens)
    assert len(calls) == 3  # layers
    for q, k, v, is_causal, enable_gqa in calls:
        assert q.shape == (3, 4, 19, 10)
        assert k.shape == v.shape == (3, kv_heads, 19, 10)
        assert all(x.transpose(1, 2).is_contiguous() for x in (q, k, v))  # (B, N, H, D) in memory
        assert is_causal
        assert enable_gqa == (kv_heads != 4)


def test_initial_weights_have_the_configured_spread(make_config):
    model = Llama(
        make_config(vocab_size=400, d_model=128, d_head=32, d_ffn=384, tie_embeddings=False, init_std=0.03),
        F.scaled_dot_product_attention,
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
            continue
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.03 / math.sqrt(6) if is_residual else 0.03
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(parameter.mean().item()) < 0.03 * expected, name


def test_autocast_runs_products_and_the_residual_stream_in_bfloat16(make_config, tokens):
    model, residual_dtypes = Llama(make_config(init_std=0.2), calls := Recorded()), set()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: residual_dtypes.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens), model(tokens, tokens.roll(-1, 1))
    loss.backward()
    assert residual_dtypes == {x.dtype for call in calls for x in call[:3]} == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert loss.item() == pytest.approx(model(tokens, tokens.roll(-1, 1)).item(), rel=0.02)


def test_only_the_gains_of_qk_norm_start_elsewhere_and_they_learn(make_config, tokens):
    models = {}
    for gain in (1.0, 4.0):
        torch.manual_seed(0)
        models[gain] = Llama(make_config(qk_norm_gain=gain), F.scaled_dot_product_attention)
    usual = dict(models[1.0].named_parameters())
    models[4.0](tokens, tokens.roll(-1, 1)).backward()
    for name, parameter in models[4.0].named_parameters():
        factor = 4 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1
        assert torch.equal(parameter, factor * usual[name]), name
        assert parameter.grad.abs().max() > 0, name


def test_too_many_tokens_and_targets_of_another_shape_are_refused(make_model, tokens):
    with pytest.raises(ValueError, match=r"33 tokens .* raise model.max_context=32"):
        make_model()(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(3, 18\) do not match tokens \(3, 19\)"):
        make_model()(tokens, tokens[:, 1:])


def test_a_model_trains_where_triton_is_not_installed():
    """As on macOS and Windows, and with PyTorch's wheels for CPUs."""
    code = """
import sys
sys.modules["triton"] = None  # to import it is an error now
import torch
import torch.nn.functional as F
from model.config import LlamaConfig
from model.llama import Llama
config = LlamaConfig(vocab_size=7, d_model=8, n_layers=1, n_heads=2, d_head=4, d_ffn=8, max_context=5)
tokens = torch.arange(5)[None]
Llama(config, F.scaled_dot_product_attention)(tokens, tokens).backward()
"""
    run_fresh([sys.executable, "-c", code])


ROUNDING = 2.0**-9  # of one value to bfloat16, relative, at most


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def test_the_gain_of_a_norm_is_not_rounded():
    """Gains of 1 + 2⁻¹⁰ are 1 in bfloat16; the result, rounded once, is at most a step away."""
    norm = RMSNorm(64, eps=1e-6)
    with torch.no_grad():
        norm.weight.fill_(1 + 2.0**-8 - 2.0**-12)  # 1 in bfloat16
    x = torch.randn(200, 64).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight[0].double()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.to(torch.float32).bfloat16())


def test_a_normed_head_is_rounded_once_after_the_rotation():
    norm = RMSNorm(32, eps=1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    cos, sin = (x.float() for x in rotary_tables(16, 32, 100.0))
    x = torch.randn(2, 16, 3, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm_and_rotate(x, norm, cos, sin)
    halves = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    first, second = halves.chunk(2, -1)
    c, s = cos.double(), sin.double()
    exact = torch.cat((first * c - second * s, second * c + first * s), -1)
    same = (found == exact.float().bfloat16()).double().mean()
    assert same > 0.999  # rounded twice, one in five differs


def test_gradients_of_the_head_are_summed_over_chunks_in_float32():
    """100 chunks: in bfloat16 a sum loses what is smaller than a 256th of it."""
    tokens, channels, words = 800, 16, 24
    x = (1 + 0.1 * torch.randn(tokens, channels)).bfloat16().float()
    weight = (0.1 * torch.randn(words, channels)).bfloat16().float().requires_grad_()
    targets = torch.randint(words, (tokens,))
    gradients = []
    for chunk in (8, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets, chunk)
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss, weight)
        assert gradient.dtype == torch.float32
        gradients.append(gradient)
    exact = weight.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x.double() @ exact.mT, targets), exact)
    # Chunks round their own products; their sum adds nothing to that.
    assert relative(gradients[0], wanted) < 1.5 * relative(gradients[1], wanted) + ROUNDING


def test_greedy_continuation_is_the_likeliest_token_each_time(make_model, tokens):
    model = make_model()
    out = generate(model, tokens, 9, temperature=0)
    assert out.shape == (3, 28)
    assert torch.equal(out[:, :19], tokens)
    # The model is causal, so one pass over the result gives the logits that each token was taken from.
    assert torch.equal(out[:, 19:], model(out)[:, 18:-1].argmax(-1))


def test_samples_follow_the_model(make_model):
    model, prompt = make_model(), torch.tensor([[5, 9]])
    logits = model(prompt)[0, -1].double()
    sampled = generate(model, prompt.expand(20_000, 2), 1, temperature=1.7, top_k=6)[:, -1]
    likeliest = logits.topk(6).indices
    expected = torch.zeros(61, dtype=torch.float64)
    expected[likeliest] = (logits[likeliest] / 1.7).softmax(-1)
    frequencies = sampled.bincount(minlength=61) / 20_000
    assert set(sampled.unique().tolist()) == set(likeliest.tolist())
    torch.testing.assert_close(frequencies.double(), expected, atol=0.015, rtol=0)  # four standard errors


def test_padding_of_the_vocabulary_is_never_sampled(make_model, tokens):
    out = generate(make_model(), tokens % 7, 40, temperature=50.0, top_k=None, vocab_size=7)
    assert out.max() == 6


def test_prompt_longer_than_the_context_is_cropped(make_model):
    model = make_model(max_context=8)
    prompt = torch.randint(61, (2, 20))
    out = generate(model, prompt, 3, temperature=0)
    assert torch.equal(out[:, :20], prompt)
    assert torch.equal(out[:, 20:], generate(model, prompt[:, -8:], 3, temperature=0)[:, 8:])


def test_seed_decides_and_the_global_generator_is_untouched(make_model, tokens):
    model = make_model()
    state = torch.get_rng_state()
    first = generate(model, tokens, 8, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(generate(model, tokens, 8, seed=3), first)
    assert not torch.equal(generate(model, tokens, 8, seed=4), first)


REFUSED = {
    "at least one token": ((1, 0), {}),
    r"shape \(4,\)": ((4,), {}),
    "new_tokens=-1": ((1, 4), {"new_tokens": -1}),
    "temperature=-0.5": ((1, 4), {"temperature": -0.5}),
    "temperature=nan": ((1, 4), {"temperature": float("nan")}),
    "top_k=0": ((1, 4), {"top_k": 0}),
}


@pytest.mark.parametrize("told", REFUSED)
def test_bad_arguments_are_refused(make_model, told):
    shape, options = REFUSED[told]
    with pytest.raises(ValueError, match=told):
        generate(make_model(), torch.zeros(shape, dtype=torch.int64), **{"new_tokens": 3} | options)
