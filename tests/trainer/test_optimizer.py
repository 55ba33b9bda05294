import itertools
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_wsd_schedule

from common.errors import TrainingError
from model.backends import fpa
from model.config import LlamaConfig
from model.llama import Llama
from trainer import parallel
from trainer.distributed import Ranks
from trainer.divergence import names_not_finite
from trainer.optimizer import build_optimizer, learning_rate, set_learning_rate
from trainer.settings import OptimizerSettings

ALONE = Ranks(0, 1, torch.device("cpu"))
#: None of these is a default.
SETTINGS = OptimizerSettings(
    lr=3e-2, min_lr_ratio=0.2, beta1=0.7, beta2=0.8, eps=0.05, weight_decay=0.3, grad_clip=0.2
)
MUON = replace(SETTINGS, name="muon", muon_lr=0.07, muon_lr_scale="original", muon_momentum=0.6)
RMS = replace(MUON, muon_lr=None, muon_lr_scale="match_rms_adamw")
SMALL = LlamaConfig(vocab_size=37, d_model=15, n_layers=2, n_heads=3, d_head=8, d_ffn=40, max_context=8)


def make_llama(**changes):
    torch.manual_seed(0)
    return Llama(replace(SMALL, **changes), F.scaled_dot_product_attention)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_has_the_matrices_of_the_blocks_and_adamw_all_else(tied):
    llama = make_llama(tie_embeddings=tied, qk_norm=True)
    names = {parameter: name for name, parameter in llama.named_parameters()}
    optimizer = build_optimizer(llama, MUON)
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    assert sorted(itertools.chain(*groups)) == sorted(names.values())  # every parameter once
    matrices, others, gains = groups
    assert len(matrices) == 7 * SMALL.n_layers
    assert all(name.startswith("layers.") and name.endswith("_proj.weight") for name in matrices)
    assert others == ["embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    assert all("norm" in name for name in gains)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.3, 0.3, 0.0]


def test_tensors_that_are_not_finite_are_named():
    tensors = {name: torch.ones(2, 3) for name in ("nan", "inf", "fine", "none")}
    tensors["nan"][1, 2], tensors["inf"][0, 0], tensors["fine"][0, 1] = torch.nan, -torch.inf, 3e38
    tensors["none"] = torch.ones(0)
    assert names_not_finite(tensors, ALONE) == ["nan", "inf"]


WSD = replace(SETTINGS, schedule="wsd", decay_ratio=0.2, min_lr_ratio=0.1)  # 16.6 steps of 83 are 17


def rates(steps, warmup_steps, settings=SETTINGS):
    how = {"steps": steps, "warmup_steps": warmup_steps, "settings": settings}
    return [learning_rate(step, **how) for step in range(steps)]


def of_torch(make_scheduler, steps):
    """The rate by a scheduler of torch, with the peak of SETTINGS, after 1 to `steps` steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=SETTINGS.lr)
    scheduler = make_scheduler(optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        yield scheduler.get_last_lr()[0]


@pytest.mark.parametrize(
    ("schedule", "floor", "make_scheduler"),
    [
        ("cosine", 0.1, lambda x: torch.optim.lr_scheduler.CosineAnnealingLR(x, T_max=90, eta_min=3e-3)),
        ("linear", 0.2, lambda x: torch.optim.lr_scheduler.LinearLR(x, 1.0, 0.2, total_iters=90)),
    ],
)
def test_a_schedule_matches_torchs(schedule, floor, make_scheduler):
    settings = replace(SETTINGS, schedule=schedule, min_lr_ratio=floor)
    assert rates(100, 10, settings)[10:] == pytest.approx([*of_torch(make_scheduler, steps=90)], rel=1e-9)


def test_no_warmup_starts_below_the_peak_and_never_rises():
    found = rates(50, 0)
    assert found == sorted(found, reverse=True)
    assert found[0] < SETTINGS.lr


def test_wsd_matches_transformers():
    how = {"num_decay_steps": 17, "num_training_steps": 83, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}
    theirs = of_torch(lambda x: get_wsd_schedule(x, 7, **how), steps=83)
    ours = rates(83, 7, WSD)
    assert ours[7:] == pytest.approx(list(theirs)[7:], rel=1e-9)  # theirs warms up from the floor, not from 0
    assert ours[:7] == pytest.approx([(step + 1) / 7 * WSD.lr for step in range(7)])


def test_wsd_decays_in_one_step_at_least_and_in_all_at_most():
    assert rates(3, 1, replace(WSD, decay_ratio=0.01, lr=1.0)) == [1, 1, 0.1]
    whole = rates(100, 3, replace(WSD, decay_ratio=1.0))[3:]
    assert whole == sorted(set(whole), reverse=True)


STEPS, DECAY = 3, 0.5  # the rate falls by this factor with each step


def steps(settings):
    """The model after some steps; by name, its weights before in float64, and the gradients of each step."""
    llama = make_llama(n_layers=1)
    before = {name: x.detach().double() for name, x in llama.named_parameters()}
    gradients = {name: [torch.randn_like(x) for _ in range(STEPS)] for name, x in llama.named_parameters()}
    optimizer = build_optimizer(llama, settings)
    for step in range(STEPS):
        set_learning_rate(optimizer, settings.lr * DECAY**step)
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
        x = x - SETTINGS.lr * DECAY ** (t - 1) * (direction + decay * x)
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
        rate *= DECAY
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


def test_clipping_returns_the_norm_before():
    model = torch.nn.Linear(3, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 3), 2.0), torch.full((2,), 1.0)
    assert parallel.clip_gradients(model, None).item() == pytest.approx(26**0.5)
    assert parallel.clip_gradients(model, 1.0).item() == pytest.approx(26**0.5)
    assert parallel.clip_gradients(model, 1.0).item() == pytest.approx(1.0, abs=1e-5)
    assert model.weight.grad.norm().item() == pytest.approx((24 / 26) ** 0.5, rel=1e-4)


RESUMED = {
    "muon": ("optimizer=muon", "optimizer.muon_lr=5e-3"),
    "nadam": ("optimizer._target_=torch.optim.NAdam", "optimizer.arguments.betas=[0.8,0.9]"),
    "no state": ("optimizer._target_=torch.optim.SGD",),
}


@pytest.mark.parametrize("name", RESUMED)
def test_it_is_saved_and_resumed(train_here, tmp_path, name):
    command = ("steps=4", "checkpoint_every=2", "sample_tokens=0", "probe.every=0", *RESUMED[name])
    whole = train_here(tmp_path / "run", *command)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    continued = train_here(tmp_path / "run", *command)
    for found, wanted in zip(continued.llama.parameters(), whole.llama.parameters(), strict=True):
        assert torch.equal(found, wanted)
        ours, theirs = continued.optimizer.state[found], whole.optimizer.state[wanted]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours)
    groups = continued.optimizer.param_groups
    assert [group["weight_decay"] for group in groups][-2:] == [0.1, 0]
    if name == "muon":
        assert groups[0]["lr_ratio"] == 5 / 3
    else:
        assert [group.get("betas", [0.8, 0.9]) for group in groups] == [[0.8, 0.9]] * 2


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("optimizer._target_=torch.optim.Nothing",), "Nothing"),
        (("optimizer._target_=torch.optim.NAdam", "optimizer.arguments.beta=1"), "beta"),
        (("optimizer._target_=torch_lion.Lion",), "(?s:.*)No module named 'torch_lion'"),
        (("optimizer._target_=torch.nn.Identity",), "is no torch.optim.Optimizer"),
    ],
)
def test_a_path_that_makes_no_optimizer_is_named(train_here, tmp_path, overrides, told):
    with pytest.raises(TrainingError, match=rf"optimizer\._target_=torch.*{told}"):
        train_here(tmp_path / "run", "steps=1", *overrides)


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator] = self.counts.get(operator, 0) + 1
        return operator(*args, **(kwargs or {}))


def step_of(hardware):
    llama = make_llama()
    wrapped, whole = parallel.place(llama, hardware, ALONE, saved_operators=fpa.SAVED_OPERATORS)
    assert wrapped is whole is llama
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
    with Counted() as ran:
        loss = whole(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    operators = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.aten.mm)
    return loss.detach(), [p.grad for p in llama.parameters()], *(ran.counts[x.default] for x in operators)


def test_recomputation_changes_no_bit_and_repeats_all_but_attention(compose_settings):
    hardware = compose_settings("experiment=debug").hardware
    loss, gradients, attention, products = step_of(hardware)
    hardware.recompute = "blocks"
    loss_again, gradients_again, attention_again, products_again = step_of(hardware)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert attention_again == attention == 2
    assert products_again > products
