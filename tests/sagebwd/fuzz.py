"""Random attentions against float64: `python -m tests.sagebwd.fuzz --cases 2000 --seed 0`.

Draws dtype, shapes, strides, expanded views, groups of heads, packed documents, lengths, windows, settings,
magnitudes and a planted NaN; runs every kernel set that can run the case; and compares each token of out, dq,
dk and dv with float64 attention. `--case N` runs one case of a seed again.

The bound is derived, not fitted. An error is at most FACTOR times the RMS of what noise of the size of the
rounding steps does (tests/sagebwd/noise_model.py), and a unit in the last place. Where the noise can change
which keys a query chooses, its effect has no RMS to speak of; there the bound is what any choice could give.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from sagebwd import SageConfig, dispatch, sage_attention
from sagebwd.config import MATMULS, PRESETS
from sagebwd.reference.documents import locate
from sagebwd.window import Window
from tests.sagebwd.kernels.inputs import VIEWS
from tests.sagebwd.noise_model import EXACT, Attention, Gradients, Noise, Rounding

NAMES = Gradients._fields
INPUTS = ("q", "k", "v", "grad_out")

#: Draws of noise whose RMS is taken: in turn with none, keys and queries that round alike.
DRAWS = 18

#: The error of a token is a sum of many roundings, or of one that all its channels share: at worst it is one
#: normal variable. Divided by an RMS over 18 draws that is Student's t of 18 degrees of freedom, which
#: exceeds 6 · √3 once in 10⁸ tokens; √3 because noise is half a step, and a rounding error uniform up to it.
FACTOR = 6.0

#: A query whose keys may gain this much weight by noise of FACTOR times its RMS chooses keys by chance.
LARGEST_GROWTH = 1.0

#: INT8 and 16-bit rounding move the operands of the worst-case bounds by less than this.
ROUNDED = 1.02

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WIDTHS = (0, 1, 5, 31, 64, 65, 100, 200)
LENGTHS = (1, 2, 3, 7, 16, 31, 33, 63, 64, 65, 100, 127, 128, 129, 150)
#: What Triton's interpreter runs in about a second.
LARGEST_INTERPRETED = 100 * 100 * 2
KERNELS = ("reference", "triton", "hopper", "ampere")


@dataclass(frozen=True)
class Case:
    """One attention. ``inputs`` are views on the CPU; the other fields are as sage_attention takes them."""

    index: int
    inputs: dict[str, Tensor]
    is_causal: bool
    scale: float | None
    config: SageConfig
    boundaries: dict[str, Tensor]
    window_size: tuple[int, int] = (-1, -1)
    poison: tuple[str, tuple[int, ...]] | None = None
    shared: dict[str, bool] = field(default_factory=dict)
    description: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs["q"].dtype

    @property
    def window(self) -> Window:
        """The causal mask included."""
        return Window.of(self.is_causal, self.window_size)

    @property
    def logits(self) -> int:
        """Elements of S."""
        q, k = self.inputs["q"], self.inputs["k"]
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


# --- Drawing a case ----------------------------------------------------------------------------------------


def draw_case(seed: int, index: int) -> Case:
    """Case ``index`` of ``seed``: the same on every machine."""
    choose = random.Random(f"{seed}-{index}")
    generator = torch.Generator().manual_seed(choose.getrandbits(60))
    config = _draw_config(choose)
    dtype = choose.choice(["float16", "float16", "bfloat16", "bfloat16", "float32"])
    group, kv_heads, batch = choose.choice([1, 1, 2, 3]), choose.choice([1, 2]), choose.choice([1, 1, 2])
    d = choose.choice([8, 16, 24, 40, 64, 64, 72, 128])
    n_q = choose.choice(LENGTHS)
    n_kv = n_q if choose.random() < 0.5 else choose.choice(LENGTHS)
    boundaries = {}
    if choose.random() < 0.25:
        batch, boundaries = 1, _draw_boundaries(choose, n_q, n_kv)
    shapes = {
        name: (batch, kv_heads, n_kv, d) if name in "kv" else (batch, kv_heads * group, n_q, d)
        for name in INPUTS
    }
    values, magnitudes = _draw_values(choose, generator, shapes, DTYPES[dtype])
    expanded = {name: _draw_axis(choose) for name in INPUTS}
    layouts = {name: choose.choice([*VIEWS, "contiguous"]) for name in INPUTS}
    poison = None
    if choose.random() < 0.15:
        name = choose.choice(INPUTS)
        poison = name, tuple(choose.randrange(size) for size in shapes[name])
        expanded[name] = None
        values[name][poison[1]] = choose.choice([torch.nan, torch.inf])
    inputs = {name: _view(values[name], expanded[name], layouts[name]) for name in INPUTS}
    shared = {
        "q_shared": 2 in (expanded["q"], expanded["grad_out"]),
        "kv_shared": 2 in (expanded["k"], expanded["v"]),
    }
    is_causal, scale = (
        choose.random() < 0.5,
        choose.choice([None, None, None, 0.0, choose.uniform(0.01, 0.5)]),
    )
    window_size = _draw_window(choose)
    description = (
        f"{dtype} q {shapes['q']} k {shapes['k']} causal={is_causal} window={window_size} "
        f"scale={scale} {magnitudes} "
        f"expanded={expanded} layouts={layouts} poison={poison} "
        f"boundaries={ {name: x.tolist() for name, x in boundaries.items()} } {config}"
    )
    masks = (boundaries, window_size)
    return Case(index, inputs, is_causal, scale, config, *masks, poison, shared, description)


def _draw_config(choose: random.Random) -> SageConfig:
    """A preset, or any switches that go together. S is taken alike in both passes, as in all presets."""
    if choose.random() < 0.6:
        return PRESETS[choose.choice(list(PRESETS))]
    while True:
        with_s = choose.random() < 0.8
        others = [x for x in MATMULS if not x.startswith("s_") and choose.random() < 0.7]
        switches = {
            name: choose.random() < 0.4 for name in ("smooth_q", "smooth_v", "unsigned_p", "compensate_o")
        }
        try:
            return SageConfig(
                smooth_k=choose.random() < 0.7,
                int8_matmuls=(*others, *(("s_fwd", "s_bwd") if with_s else ())),
                operand_scales=choose.choice(["block", "token"]),
                granularity=choose.choice(["block", "row"]),
                block_q=choose.choice([None, 32, 64, 128]),
                block_kv=choose.choice([None, 32, 64, 128]),
                **switches,
            )
        except ValueError:  # two of them exclude each other
            continue


def _draw_boundaries(choose: random.Random, n_q: int, n_kv: int) -> dict[str, Tensor]:
    """One to four documents, some of them empty, with tokens left over at both ends."""
    documents = choose.randint(1, 4)

    def cut(n: int) -> Tensor:
        return torch.tensor(sorted(choose.randint(0, n) for _ in range(documents + 1)), dtype=torch.int32)

    boundaries = {"cu_seqlens": cut(n_q)}
    if n_q != n_kv or choose.random() < 0.3:
        boundaries["cu_seqlens_kv"] = cut(n_kv)
    return boundaries


def _draw_window(choose: random.Random) -> tuple[int, int]:
    """Usually none; else a limit on one side or on both, some wider than the sequence."""
    if choose.random() < 0.7:
        return -1, -1
    return choose.choice([-1, *WIDTHS]), choose.choice([-1, *WIDTHS])


def _draw_values(
    choose: random.Random, generator: torch.Generator, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[dict[str, Tensor], str]:
    """Gaussians of any magnitude, some with an outlier channel, outlier tokens or a common mean."""
    largest = 5e3 if dtype == torch.float16 else 1e6
    size = {name: 10 ** choose.uniform(-3, 2) for name in INPUTS}
    if choose.random() < 0.7:  # logits that a softmax is made for
        size["q"], size["k"] = (10 ** choose.uniform(-1, 0.4) for _ in range(2))
    if choose.random() < 0.05:
        size[choose.choice(INPUTS)] = largest
    values, kinds = {}, {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        kinds[name] = choose.choice(["plain"] * 6 + ["outlier channel", "outlier tokens", "mean"])
        if kinds[name] == "outlier channel":
            x[..., choose.randrange(shape[-1])] *= 10
        elif kinds[name] == "outlier tokens":
            x[..., :: choose.choice([3, 20, 50]), :] *= 10
        elif kinds[name] == "mean":
            x += 3 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
        limit = 0.9 * torch.finfo(dtype).max
        values[name] = (size[name] * x).clamp(-limit, limit).to(dtype)
    return values, " ".join(f"{name}: {size[name]:.2g} {kinds[name]}" for name in INPUTS)


def _draw_axis(choose: random.Random) -> int | None:
    """The axis along which a tensor is one slice, expanded: batch, heads, tokens, or usually none."""
    return choose.choice([0, 1, 2]) if choose.random() < 0.1 else None


def _view(x: Tensor, expanded: int | None, layout: str) -> Tensor:
    if expanded is not None:
        return x.narrow(expanded, 0, 1).expand_as(x)
    return x if layout == "contiguous" else VIEWS[layout](x)


# --- Running and comparing ---------------------------------------------------------------------------------


def kernel_sets(case: Case, device: str) -> list[str]:
    """The kernel sets that can run a case on a device; on a CPU "triton", too, where its interpreter can."""
    q = case.inputs["q"]
    call = dispatch._call(torch.device(device), q.dtype, q.shape[-1], case.config)
    names = ["reference"]
    if device == "cpu":
        if not dispatch._is_interpreted() or case.logits > LARGEST_INTERPRETED:
            return names
        call = call._replace(is_interpreted=True)
    return names + [name for name in KERNELS[1:] if not dispatch.obstacles(name, call)]


def attend(case: Case, kernels: str, device: str) -> dict[str, Tensor]:
    """out, dq, dk and dv of a case, on the CPU in float64."""
    q, k, v, grad_out = (_to(x, device) for x in case.inputs.values())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with warnings.catch_warnings():  # of Triton's interpreter, which is made of numpy
        warnings.simplefilter("ignore", RuntimeWarning)
        out = sage_attention(
            *leaves,
            is_causal=case.is_causal,
            window_size=case.window_size,
            scale=case.scale,
            enable_gqa=True,
            config=case.config,
            kernels=kernels,
            **{name: x.to(device) for name, x in case.boundaries.items()},
        )
        gradients = torch.autograd.grad(out, leaves, grad_out)
    return dict(zip(NAMES, (x.detach().double().cpu() for x in (out, *gradients)), strict=True))


def _to(x: Tensor, device: str) -> Tensor:
    """A tensor on a device with its strides, those of an expanded view too."""
    if device == "cpu":
        return x
    whole = x.new_empty(0).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def problems(case: Case, found: dict[str, Tensor]) -> Iterator[str]:
    """What is wrong with the results of a case."""
    q, k = case.inputs["q"], case.inputs["k"]
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    outside = {name: torch.ones(found[name].shape[2], dtype=torch.bool) for name in NAMES}
    boundaries = case.boundaries.get("cu_seqlens"), case.boundaries.get("cu_seqlens_kv")
    for rows, columns in locate(q, k, *boundaries):
        slices = {"q": rows, "grad_out": rows, "out": rows, "dq": rows}
        part = {name: found[name][:, :, slices.get(name, columns)] for name in NAMES}
        inputs = {name: x[:, :, slices.get(name, columns)].double() for name, x in case.inputs.items()}
        clean, must_be_nan = _poisoned(case, rows, columns, part)
        for name in NAMES:
            outside[name][slices.get(name, columns)] = False
            if not part[name][must_be_nan[name]].isnan().all():
                yield f"{name}: a NaN or Inf of {case.poison} is hidden"
        attention = Attention(
            *(inputs[name].nan_to_num(0.0, 0.0, 0.0) for name in INPUTS),
            scale=scale,
            rounding=Rounding(case.config, case.dtype),
            window=case.window,
        )
        yield from _out_of_bound(case, attention, part, clean)
    for name in NAMES:
        if found[name][:, :, outside[name]].any():
            yield f"{name}: tokens of no document are not zero"


def _out_of_bound(
    case: Case, attention: Attention, found: dict[str, Tensor], clean: dict[str, Tensor]
) -> Iterator[str]:
    exact, bounds = attention.run(EXACT), bound(case, attention)
    limit = torch.finfo(case.dtype).max
    for name in NAMES:
        # An Inf is right where the bound reaches it, as everywhere in 16 bit.
        wanted = getattr(exact, name).clamp(-limit, limit)
        error = (found[name].clamp(-limit, limit) - wanted).norm(dim=-1)
        has_bound = clean[name] & bounds[name].isfinite()
        excess = (error / bounds[name].clamp_min(1e-300))[has_bound]
        if not (excess <= 1).all():
            yield f"{name}: error is {excess.nan_to_num(torch.inf).max():.3g} of the bound"


def bound(case: Case, attention: Attention) -> dict[str, Tensor]:
    """The largest error of each token (B, heads, N) of out, dq, dk and dv.

    Not finite where an operand in 16 bit, such as dS, overflows: there it is NaN in any attention.
    """
    exact = attention.run(EXACT)
    generator = torch.Generator().manual_seed(case.index)
    squares = dict.fromkeys(NAMES, 0.0)
    for draw in range(DRAWS):
        drawn = attention.run(Noise(generator, coherent=-(draw % 3), **case.shared))
        for name in NAMES:
            difference = getattr(drawn, name) - getattr(exact, name)
            squares[name] = squares[name] + difference.square().sum(-1) / DRAWS
    last_place = {name: attention.rounding.to_dtype(getattr(exact, name)).norm(dim=-1) for name in NAMES}
    worst = _worst_case(attention)
    return {name: FACTOR * squares[name].sqrt() + last_place[name] + worst[name] for name in NAMES}


def _worst_case(attention: Attention) -> dict[str, Tensor]:
    """What tokens may be off by because of queries that choose keys by chance; zero without any.

    Rows of P sum to 1 whatever is chosen, so out lies within the values, |δ| and |dP| are at most
    Z = Σ|dO|·max|V|, and |dS| at most 2 Z in each row, and in its sum.
    """
    config, repeat = attention.rounding.config, attention.repeat
    hidden = ~attention.visible()
    s = (attention.q @ repeat(attention.k).mT * attention.scale).masked_fill(hidden, -torch.inf)
    growth = FACTOR * attention.logit_steps()
    chance = (s.softmax(-1) * growth.clamp_max(700).expm1().masked_fill(hidden, 0.0)).sum(-1)
    chance = (chance > LARGEST_GROWTH).double()  # (B, H, N_q)
    any_chance = chance.amax(-1, keepdim=True)
    if config.granularity == "block":  # its large dS sets the scale of other rows
        chance = any_chance.expand_as(chance)
    n_kv = attention.k.shape[-2]
    k = attention.smoothed()[2]
    values = repeat(attention.v.abs().amax(-2, keepdim=True))
    z = (attention.grad_out.abs() * values).sum(-1)
    largest_z = (z * chance).amax(-1, keepdim=True)
    log_error = (2.0**-20 * s.masked_fill(hidden, 0.0).abs().amax((-1, -2))[..., None]).clamp_max(20)
    ds = 2 * ROUNDED * log_error.exp() * z
    rounded_ds = 2 * ROUNDED * log_error.exp() * largest_z / 254
    keys = repeat(k.abs().amax(-2, keepdim=True)).norm(dim=-1)
    queries = attention.q.norm(dim=-1)
    grads = attention.grad_out.norm(dim=-1)
    to_keys = 2 * ROUNDED * abs(attention.scale)
    per_head = {
        "dk": to_keys
        * ((chance * ds * queries).sum(-1) + any_chance[..., 0] * (rounded_ds * queries).sum(-1)),
        "dv": 2
        * ROUNDED
        * ((chance * log_error.exp() * grads).sum(-1) + any_chance[..., 0] * grads.sum(-1) / 254),
    }
    grouped = {
        name: x.unflatten(1, (-1, attention.group)).sum(2)[..., None].expand(*x.shape[:1], -1, n_kv)
        for name, x in per_head.items()
    }
    return {
        "out": chance * 2 * ROUNDED * values.norm(dim=-1),
        "dq": chance * 2 * ROUNDED * abs(attention.scale) * keys * (ds + n_kv * rounded_ds),
        **grouped,
    }


def _poisoned(
    case: Case, rows: slice, columns: slice, found: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masks by result: tokens (B, heads, N) that no poison can reach, and elements that it must reach."""
    clean = {name: torch.ones(found[name].shape[:-1], dtype=torch.bool) for name in NAMES}
    reached = {name: torch.zeros(found[name].shape, dtype=torch.bool) for name in NAMES}
    if case.poison is None:
        return clean, reached
    name, (batch, head, token, channel) = case.poison
    tokens = columns if name in "kv" else rows
    if not tokens.start <= token < tokens.stop:
        return clean, reached
    token -= tokens.start
    group = case.inputs["q"].shape[1] // case.inputs["k"].shape[1]
    kv_head = head if name in "kv" else head // group
    heads = range(kv_head * group, (kv_head + 1) * group) if name in "kv" else [head]
    for result in NAMES:
        owners = [kv_head] if result in ("dk", "dv") else range(kv_head * group, (kv_head + 1) * group)
        clean[result][batch, owners] = False
    for h in heads:
        visible = _visible(case, found["out"].shape[2], found["dk"].shape[2])
        queries = visible[:, token] if name in "kv" else torch.arange(len(visible)) == token
        for i in (queries & visible.any(1)).nonzero().flatten():
            seen = visible[i]
            if name != "grad_out":
                reached["out"][batch, h, i, channel if name == "v" else slice(None)] = True
            reached["dq"][batch, h, i] = reached["dk"][batch, kv_head, seen] = True
            if name in ("q", "k"):
                reached["dv"][batch, kv_head, seen] = True
            elif name == "grad_out":
                reached["dv"][batch, kv_head, seen, channel] = True
    return clean, reached


def _visible(case: Case, n_q: int, n_kv: int) -> Tensor:
    """(n_q, n_kv) bool: which keys each query of a document sees."""
    distance = torch.arange(n_kv) - torch.arange(n_q)[:, None]
    left, right = case.window
    return (distance >= (-n_q if left < 0 else -left)) & (distance <= (n_kv if right < 0 else right))


# --- The command -------------------------------------------------------------------------------------------


def run_case(
    seed: int, index: int, device: str = "cpu", kernels: Sequence[str] = KERNELS
) -> tuple[list[str], int]:
    """Problems of one case, each with what reproduces it, and the number of kernel sets that ran."""
    case, found = draw_case(seed, index), []
    names = [name for name in kernel_sets(case, device) if name in kernels]
    for name in names:
        about = f"--seed {seed} --case {index}, {name}"
        try:
            results = attend(case, name, device)
        except Exception as error:
            error.add_note(f"{about}\n    {case.description}")
            raise
        wrong = list(problems(case, results))
        if wrong:
            found.append(f"{about}: {'; '.join(wrong)}\n    {case.description}")
    return found, len(names)


def main(argv: list[str] | None = None) -> int:
    """Run cases and print what is out of bound; the number of those cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS, help="by default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    indices = range(options.first, options.first + options.cases) if options.case is None else [options.case]
    failed = runs = 0
    start = time.perf_counter()
    for index in tqdm(indices, unit="case", disable=None):
        found, sets = run_case(options.seed, index, options.device, options.kernels)
        runs += sets
        failed += bool(found)
        for line in found:
            tqdm.write(line)
    seconds = time.perf_counter() - start
    print(f"{len(indices)} cases, {runs} runs, {failed} cases out of bound, {seconds:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
