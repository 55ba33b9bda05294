"""Every setting of the optimizers, at another value than its default, against the formula in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from model.config import LlamaConfig
from model.llama import Llama
from trainer.optimizer import build_optimizer, set_learning_rate
from trainer.settings import OptimizerSettings

#: None of these is a default.
SETTINGS = OptimizerSettings(
    lr=3e-2, min_lr_ratio=0.2, beta1=0.7, beta2=0.8, eps=0.05, weight_decay=0.3, grad_clip=0.2
)
MUON = replace(SETTINGS, name="muon", muon_lr=0.07, muon_lr_scale="original", muon_momentum=0.6)
RMS = replace(MUON, muon_lr=None, muon_lr_scale="match_rms_adamw")
SMALL = LlamaConfig(vocab_size=37, d_model=16, n_layers=1, n_heads=2, d_head=8, d_ffn=24, max_context=8)
STEPS = 3


def steps(settings):
    """The model after some steps; by name, its weights before in float64, and the gradients of each step."""
    torch.manual_seed(0)
    llama = Llama(SMALL, F.scaled_dot_product_attention)
    before = {name: x.detach().double() for name, x in llama.named_parameters()}
    gradients = {name: [torch.randn_like(x) for _ in range(STEPS)] for name, x in llama.named_parameters()}
    optimizer = build_optimizer(llama, settings)
    for step in range(STEPS):
        set_learning_rate(optimizer, settings.lr)
        for name, parameter in llama.named_parameters():
            parameter.grad = gradients[name][step].clone()
        optimizer.step()
    return llama, before, gradients


def by_adamw(x, gradients):
    """Loshchilov and Hutter's algorithm 2."""
    m = v = torch.zeros_like(x)
    decay = SETTINGS.weight_decay if x.dim() == 2 else 0.0
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m = SETTINGS.beta1 * m + (1 - SETTINGS.beta1) * g
        v = SETTINGS.beta2 * v + (1 - SETTINGS.beta2) * g**2
        direction = m / (1 - SETTINGS.beta1**t) / ((v / (1 - SETTINGS.beta2**t)).sqrt() + SETTINGS.eps)
        x = x - SETTINGS.lr * (direction + decay * x)
    return x


def by_muon(x, gradients, settings):
    """Nesterov momentum, its singular values taken near one by five Newton–Schulz iterations."""
    momentum, matches = torch.zeros_like(x), settings.muon_lr_scale == "match_rms_adamw"
    rate = settings.muon_lr or settings.lr
    size = 0.2 * max(x.shape) ** 0.5 if matches else max(1, x.shape[0] / x.shape[1]) ** 0.5
    for gradient in gradients:
        g = gradient.double()
        momentum = MUON.muon_momentum * momentum + (1 - MUON.muon_momentum) * g
        u, s, vt = torch.linalg.svd(g.lerp(momentum, MUON.muon_momentum), full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        x = (1 - rate * settings.weight_decay) * x - rate * size * (u @ s.diag() @ vt)
    return x


@pytest.mark.parametrize("settings", [SETTINGS, MUON, RMS], ids=["adamw", "muon", "rms"])
def test_weights_follow_the_formula(settings):
    llama, before, gradients = steps(settings)
    for name, found in llama.named_parameters():
        if settings.name == "muon" and name.endswith("_proj.weight"):
            wanted = by_muon(before[name], gradients[name], settings)
            moved = (wanted - before[name]).norm()
            assert (found.double() - wanted).norm() < 0.02 * moved, name  # torch iterates in bfloat16
        else:
            wanted = by_adamw(before[name], gradients[name])
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6, msg=name)


def test_gradients_are_clipped_to_the_norm_that_is_set(train_here, tmp_path):
    """As the optimizer sees them: AdamW hardly sees a factor of all gradients, so weights would not tell."""
    norms = []

    def note(optimizer, *_):
        gradients = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.cat(gradients).norm().item())

    hook = register_optimizer_step_pre_hook(note)
    try:
        train_here(tmp_path, "steps=3", "sample_tokens=0", "probe.every=0", "optimizer.grad_clip=0.05")
    finally:
        hook.remove()
    assert norms == pytest.approx([0.05] * 3, rel=1e-4)
