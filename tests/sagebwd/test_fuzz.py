"""The fuzz of tests/sagebwd/fuzz.py: a few of its cases, and that its bound finds broken kernels."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd import SageConfig
from sagebwd.window import Window
from tests.sagebwd import fuzz
from tests.sagebwd.noise_model import EXACT, Attention, Rounding

CASES = 20


@pytest.mark.parametrize("index", range(CASES))
def test_random_attention(index):
    """More on demand: python -m tests.sagebwd.fuzz --cases 2000."""
    found, sets = fuzz.run_case(1, index)
    assert sets
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_attention_on_a_gpu(first):
    for index in range(first, first + 25):
        found, _ = fuzz.run_case(2, index, "cuda")
        assert not found, "\n".join(found)


def test_cases_cover_what_they_should():
    """Some of each kind are among the first 300, and a case is the same whenever it is drawn."""
    cases = [fuzz.draw_case(0, index) for index in range(300)]
    kinds = {
        "documents": lambda case: case.boundaries,
        "an empty document": lambda case: any((x.diff() == 0).any() for x in case.boundaries.values()),
        "groups": lambda case: case.inputs["q"].shape[1] > case.inputs["k"].shape[1],
        "lengths apart": lambda case: case.inputs["q"].shape[2] != case.inputs["k"].shape[2],
        "one key": lambda case: case.inputs["k"].shape[2] == 1,
        "expanded": lambda case: any(0 in x.stride() for x in case.inputs.values()),
        "strided channels": lambda case: any(x.stride(3) > 1 for x in case.inputs.values()),
        "a window": lambda case: case.window.is_sliding,
        "a query without keys": lambda case: not fuzz._visible(case, *lengths(case)).any(1).all(),
        "poisoned": lambda case: case.poison,
        "large logits": lambda case: largest_logit(case) > 1e4,
        "a preset": lambda case: case.config == SageConfig.consistent(),
    }
    for name, holds in kinds.items():
        assert sum(bool(holds(case)) for case in cases) >= 5, name
    assert len({case.dtype for case in cases}) == 3
    again = fuzz.draw_case(0, 7)
    assert all(torch.equal(again.inputs[name], x) for name, x in cases[7].inputs.items())


def lengths(case):
    return case.inputs["q"].shape[2], case.inputs["k"].shape[2]


def largest_logit(case):
    q, k = (case.inputs[name].double().nan_to_num(0.0, 0.0, 0.0) for name in "qk")
    return q.norm(dim=-1).max() * k.norm(dim=-1).max() * q.shape[-1] ** -0.5


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", [SageConfig(), SageConfig.paper(), SageConfig(smooth_q=True)])
def test_without_noise_the_model_is_attention(is_causal, config):
    """Independent truth: torch's attention and autograd in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, n, 24) for heads, n in ((4, 70), (2, 50), (2, 50), (4, 70))]
    q, k, v, grad_out = (torch.randn(shape, generator=generator, dtype=torch.float64) + 1 for shape in shapes)
    model = Attention(q, k, v, grad_out, 0.2, Rounding(config, torch.float16), Window.of(is_causal))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    out = scaled_dot_product_attention(q, keys, values, is_causal=is_causal, scale=0.2)
    wanted = (out, *torch.autograd.grad(out, leaves, grad_out))
    for found, expected in zip(model.run(EXACT), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_bound_is_one():
    """Of outputs that are not zero, most have a bound below their own size, and hardly any have none."""
    sizes = {name: [] for name in fuzz.NAMES}
    for index in range(20):
        case = fuzz.draw_case(4, index)
        if case.boundaries or case.poison:
            continue
        inputs = (case.inputs[name].double() for name in fuzz.INPUTS)
        scale = case.inputs["q"].shape[-1] ** -0.5 if case.scale is None else case.scale
        attention = Attention(*inputs, scale, Rounding(case.config, case.dtype), case.window)
        for name, bounds in fuzz.bound(case, attention).items():
            exact = getattr(attention.run(EXACT), name).norm(dim=-1)
            sizes[name].append((bounds / exact)[exact > 1e-6].nan_to_num(torch.inf))
    for name, parts in sizes.items():
        found = torch.cat(parts)
        assert found.isfinite().double().mean() > 0.99, name
        assert found.median() < (0.2 if name in ("out", "dv") else 0.7), name


# --- Broken kernels ----------------------------------------------------------------------------------------


def without_the_last_key(case, name, device):
    k, v = (case.inputs[x] for x in "kv")
    if k.shape[2] == 1 or case.boundaries:
        return fuzz.attend(case, name, device)
    short = replace(case, inputs={**case.inputs, "k": k[:, :, :-1], "v": v[:, :, :-1]})
    found = fuzz.attend(short, name, device)
    zero = torch.zeros_like(found["dk"][:, :, :1])
    return found | {x: torch.cat((found[x], zero), 2) for x in ("dk", "dv")}


def with_another_mask(case, name, device):
    """Queries see one key fewer, but for the first."""
    if not case.is_causal:
        return fuzz.attend(case, name, device)
    q = case.inputs["q"]
    late = {x: y.roll(-1, 2) if x in ("q", "grad_out") else y for x, y in case.inputs.items()}
    found = fuzz.attend(replace(case, inputs=late), name, device)
    return found | {x: found[x].roll(1, 2) for x in ("out", "dq")} if q.shape[2] > 1 else found


def with_a_wider_window(case, name, device):
    """Every query sees one key more on the left."""
    left, right = case.window_size
    return fuzz.attend(replace(case, window_size=(left + 1, right)), name, device)


def with_interleaved_groups(case, name, device):
    """Query head h takes key head h % H_kv in place of h // group."""
    heads, kv_heads = (case.inputs[x].shape[1] for x in "qk")
    order = torch.arange(heads).unflatten(0, (-1, kv_heads)).T.flatten()
    mixed = {x: y[:, order] if x in ("q", "grad_out") else y for x, y in case.inputs.items()}
    found = fuzz.attend(replace(case, inputs=mixed), name, device)
    return found | {x: found[x][:, order.argsort()] for x in ("out", "dq")}


def across_documents(case, name, device):
    return fuzz.attend(replace(case, boundaries={}), name, device)


def that_hides_nan(case, name, device):
    return {x: y.nan_to_num(0.0) for x, y in fuzz.attend(case, name, device).items()}


def with_one_wrong_token(case, name, device):
    """Its last query's out and dq, and last key's dk and dv, as a tile that is not stored leaves them."""
    found = {x: y.clone() for x, y in fuzz.attend(case, name, device).items()}
    for x in found.values():
        x[:, :, -1] = 0
    return found


def with_another_scale(case, name, device):
    scale = case.inputs["q"].shape[-1] ** -0.5 if case.scale is None else case.scale
    return fuzz.attend(replace(case, scale=1.25 * scale), name, device)


def with_dq_of_the_other_sign(case, name, device):
    found = fuzz.attend(case, name, device)
    return found | {"dq": -found["dq"]}


FAULTS = {
    without_the_last_key: lambda case: case.inputs["k"].shape[2] > 1 and not case.boundaries,
    with_another_mask: lambda case: case.is_causal and case.inputs["q"].shape[2] > 1 and not case.boundaries,
    with_a_wider_window: lambda case: 0 <= case.window.left < case.inputs["q"].shape[2] - 1,
    with_interleaved_groups: lambda case: case.inputs["q"].shape[1] > case.inputs["k"].shape[1] > 1,
    across_documents: lambda case: len(case.boundaries.get("cu_seqlens", ())) > 2,
    that_hides_nan: lambda case: case.poison is not None,
    with_one_wrong_token: lambda case: True,
    with_another_scale: lambda case: case.scale != 0,
    with_dq_of_the_other_sign: lambda case: case.scale != 0,
}


@pytest.mark.parametrize("broken", FAULTS, ids=lambda fault: fault.__name__)
def test_broken_kernels_are_found(broken):
    """In at least three cases of eight. In others the fault is within the error of INT8: a last key of no
    weight, or a dQ that is noise because the rows of V are similar.
    """
    cases = [case for index in range(60) if FAULTS[broken](case := fuzz.draw_case(3, index))][:8]
    found = [case.index for case in cases if any(fuzz.problems(case, broken(case, "reference", "cpu")))]
    assert len(cases) > 4
    assert len(found) >= 3
