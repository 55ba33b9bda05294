import logging
import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import sagebwd
import sagebwd.reference
from model.config import LlamaConfig
from model.llama import Llama
from sagebwd import SageConfig
from sagebwd.reference import exact_attention
from tests.cli import assert_same_weights, losses, metrics
from tests.inputs import draw, largest_logit
from trainer import probe
from trainer.probe import Captured, Probe, capture, exact_layer

SHAPE = LlamaConfig(
    vocab_size=64, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, d_head=8, d_ffn=48, max_context=64,
    rope_theta=1e4, norm_eps=1e-6, qk_norm=True, tie_embeddings=True, init_std=0.2,
)  # fmt: skip

FULL = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("elements_at_once", [1, 2 * 4 * 37 * 5, 2**22])  # 1, 5 and all queries at a time
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_exact_layer_is_float64_attention(monkeypatch, elements_at_once, kv_heads):
    monkeypatch.setattr(probe, "ELEMENTS_AT_ONCE", elements_at_once)
    q, k, v, grad_out = draw(4, kv_heads, sigma=2.0)
    found, statistics = exact_layer(Captured(q, k, v, q, {}, grad_out))
    wanted = exact_attention(q, k, v, grad_out, is_causal=True, matrices=True)
    for name in ("o", "dq", "dk", "dv"):
        expected = getattr(wanted, {"o": "out"}.get(name, name))
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5, msg=name)
    for name, matrix in (("p_rms", wanted.p), ("dp_rms", wanted.dp), ("ds_rms", wanted.ds)):
        assert statistics[name] == pytest.approx(matrix.square().mean().sqrt().item(), rel=1e-5)
    assert statistics["largest_logit"] == pytest.approx(largest_logit(q, k), rel=1e-5)


@pytest.fixture
def llama():
    torch.manual_seed(1)
    return Llama(SHAPE, FULL)


@pytest.fixture
def batch():
    tokens = torch.randint(64, (2, 34), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]  # 33 tokens: odd


def test_captured_gradients_are_those_of_a_backward_pass(llama, batch):
    captured = capture(llama, [1, 3], *batch, autocast=nullcontext)
    outs, attend = [], llama.layers[0].self_attn.attend

    def attend_and_keep(*arguments, **settings):
        outs.append(attend(*arguments, **settings))
        outs[-1].retain_grad()
        return outs[-1]

    for layer in llama.layers:
        layer.self_attn.attend = attend_and_keep
    sum(llama(inputs[None], targets[None]) for inputs, targets in zip(*batch, strict=True)).backward()
    for layer in (1, 3):
        got = captured[layer]
        assert got.q.shape == got.out.shape == got.grad_out.shape == (2, 4, 33, 8)
        assert got.k.shape == got.v.shape == (2, 2, 33, 8)
        both = torch.cat([outs[layer].grad, outs[layer + SHAPE.n_layers].grad])  # a pass for each sequence
        torch.testing.assert_close(got.grad_out, both, rtol=1e-4, atol=1e-8)


def test_it_leaves_model_gradients_and_random_state_alone(llama, batch, compose_settings):
    llama.layers[0].self_attn.q_norm.weight.data[3] = -2.5
    llama.norm.weight.grad = torch.ones(32)
    attends = [layer.self_attn.attend for layer in llama.layers]
    state, weights = torch.get_rng_state(), {n: p.clone() for n, p in llama.named_parameters()}
    llama.layers[2].eval()
    measuring = make_probe(compose_settings("model=llama_debug"), llama)
    measured = measuring.measure(*batch, autocast=nullcontext)
    assert measuring.measure(*batch, autocast=nullcontext, is_main=False) == {}  # such ranks only take part
    with pytest.raises(ValueError, match="one target per token"):
        capture(llama, [0], batch[0], batch[1][:, 1:], autocast=nullcontext)
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, p in llama.named_parameters() if p.grad is not None] == ["norm.weight"]
    assert torch.equal(llama.norm.weight.grad, torch.ones(32))
    assert all(torch.equal(p, weights[name]) for name, p in llama.named_parameters())
    assert all(layer.self_attn.attend is attend for layer, attend in zip(llama.layers, attends, strict=True))
    assert [layer.training for layer in llama.layers] == [True, True, False, True]
    assert measured["probe/layer_0/q_gain"] == 2.5
    assert measured["probe/layer_2/k_gain"] == 1.0
    assert {key.split("/")[1] for key in measured} == {"layer_0", "layer_2", "layer_3", "seconds"}
    assert measured["probe/seconds"] > 0


CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


def backend_of(settings):
    shape = settings.model
    return settings.attention.build(**CPU, d_head=shape.d_head, is_gqa=shape.is_gqa)


def make_probe(settings, llama):
    return Probe(settings, llama, backend_of(settings), **CPU)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_a_compiled_model_is_not_compiled_again(llama, batch, compose_settings):
    torch.compiler.reset()  # what other tests compiled
    compiled = torch.compile(llama, backend="eager")
    loss = compiled(*batch)
    make_probe(compose_settings("model=llama_debug"), llama).measure(*batch, autocast=nullcontext)
    assert torch.equal(compiled(*batch), loss)
    torch.compiler.reset()


def test_it_measures_the_runs_own_attention_or_the_default(compose_settings, llama, monkeypatch, caplog):
    settings = compose_settings("attention=sagebwd", "attention.granularity=block", "attention.block_q=32")
    own = make_probe(settings, llama)
    assert own.is_own
    assert own.backend.attend.keywords["config"] == SageConfig(granularity="block", block_q=32)
    assert own.attend_fpa is FULL
    of_fpa = make_probe(compose_settings("attention=fpa", "attention.sdpa=math"), llama)
    assert not of_fpa.is_own
    assert of_fpa.backend.attend.keywords["config"] == SageConfig()
    assert of_fpa.attend_fpa is not FULL  # the run's own kernel, math

    original = sagebwd.sage_attention

    def no_kernel(*arguments, kernels, **settings):
        if kernels != "reference":
            raise NotImplementedError("no kernel for it")
        return original(*arguments, kernels=kernels, **settings)

    monkeypatch.setattr(sagebwd, "sage_attention", no_kernel)
    caplog.set_level(logging.INFO, logger="model.backends")
    assert "kernels reference" in make_probe(compose_settings(), llama).backend.description
    assert "no kernel for it" in caplog.text


def build(settings, llama):
    return probe.build_probe(settings, llama, backend_of(settings), **CPU)


def test_where_sagebwd_does_not_run_only_its_own_runs_stop(compose_settings, monkeypatch, caplog, llama):
    assert build(compose_settings("probe.every=0"), llama) is None
    assert isinstance(build(compose_settings("model.n_kv_heads=4"), llama), Probe)

    def no_compiler(*arguments, **settings):
        raise RuntimeError("no compiler found")

    own = compose_settings("attention=sagebwd")
    backend = replace(backend_of(own), attend=no_compiler)
    monkeypatch.setattr(sagebwd, "sage_attention", no_compiler)
    assert build(compose_settings("attention=fpa"), llama) is None
    assert "training without the probe" in caplog.text
    assert "no compiler found" in caplog.text
    with pytest.raises(RuntimeError, match="no compiler found"):
        probe.build_probe(own, llama, backend, **CPU)


def alarm_of(settings, *layers):
    found = make_probe(settings, Llama(SHAPE, FULL))
    found.layers = layers
    return found


def measured(**errors):
    """Measurements of layer 5 alone, where all is well but for these."""
    values = {"o_l2": 9.0, "dq_l2": 0.1, "dk_l2": 0.1, "dv_l2": 0.1, "ds_rms": 1.2e-7, "largest_logit": 85.2}
    values |= {"fpa_dq_l2": 0.05, "fpa_dk_l2": 0.07, "fpa_dv_l2": 0.06}
    return {f"probe/layer_5/{name}": value for name, value in {**values, **errors}.items()}


def test_alarm_fires_once_and_again_only_after_it_was_well(compose_settings):
    settings = compose_settings("attention=sagebwd", "model.qk_norm=false", "attention.granularity=block")
    alarm = alarm_of(settings, 5)
    history = [0.1, 0.3, 0.31, 0.5, math.nan, 0.2, math.inf]
    fired = [alarm.warnings(10 * i, measured(dk_l2=error)) for i, error in enumerate(history)]
    assert [len(messages) for messages in fired] == [0, 0, 1, 0, 0, 0, 1]
    error, others = "dK of SageBwd has a relative L2 error of 0.31", "full-precision attention has 0.07"
    for text in ("step 20", "layer 5", error, others, "probe.alarm=0.3", "85.2"):
        assert text in fired[2][0]


def test_alarm_knows_layers_apart_names_the_worst_tensor_and_can_be_off(compose_settings):
    settings = compose_settings("attention=fpa", "model.qk_norm=true")
    values = measured(dq_l2=0.4, dv_l2=math.nan) | {key.replace("5", "6"): 0.4 for key in measured()}
    first, second = alarm_of(settings, 5, 6).warnings(1, values)
    assert re.search("layer 5.*dV of SageBwd would have", first)
    assert "layer 6" not in first
    assert "layer 6" in second
    settings.probe.alarm = None
    assert alarm_of(settings, 5, 6).warnings(1, values) == []


def test_training_with_the_probe_is_training_without_it_bit_for_bit(train_here, tmp_path, caplog):
    overrides = ("attention=sagebwd", "steps=6", "hardware.dtype=bfloat16")
    probing = ("probe.every=2", "probe.sequences=3", "probe.alarm=1e-4")
    train_here(tmp_path / "without", *overrides, "probe.every=0")
    train_here(tmp_path / "with", *overrides, *probing)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert_same_weights(tmp_path / "with", tmp_path / "without")
    records = [record for record in metrics(tmp_path / "with") if "probe/layer_1/dq_l2" in record]
    assert [(record["step"], record["tokens"]) for record in records] == [(2, 512), (4, 1024), (6, 1536)]
    assert 1e-4 < records[0]["probe/layer_1/dq_l2"] < 0.2
    assert records[0]["probe/layer_1/dq_small_rows"] == pytest.approx(1, abs=0.1)
    assert 1e-3 < records[0]["probe/layer_1/fpa_dv_l2"] < 1e-2  # bfloat16 has 8 bits
    assert "step 2, layer 1" in caplog.text
    assert (tmp_path / "with" / "probe.png").exists()
    assert not (tmp_path / "without" / "probe.png").exists()
