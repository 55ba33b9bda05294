"""How well a model's own attention computes in INT8: one step of it, under every preset.

The model runs forward and backward in full precision, and then under each preset. In the first pass each
preset, 16-bit attention and exact attention compute every call once more, from its q, k, v and dO.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.hub import tqdm  # its stand-in, where tqdm is not installed
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from sagebwd import dispatch, usage
from sagebwd.config import PRESETS, SageConfig
from sagebwd.interface import AttentionParams
from sagebwd.kernels import ops
from sagebwd.metrics import relative_l2, small_rows_left
from sagebwd.reference.exact import ExactRows, exact_attention

#: 16-bit attention, which INT8 is compared with: all products in the dtype of the inputs.
FULL_PRECISION = "16 bit"
CONFIGS = {FULL_PRECISION: SageConfig(int8_matmuls=()), **PRESETS}
TENSORS = ("o", "dq", "dk", "dv")
#: The name of calls that no module makes.
OUTSIDE = "outside the model"

#: A preset is good enough if every layer's dQ, dK and dV err by at most this (relative L2), or twice as much
#: as in 16 bit, and if the gradients of all weights have at least this cosine to those in full precision.
LARGEST_ERROR, SMALLEST_COSINE = 0.1, 0.99
#: The first of these that is good enough is recommended: cheapest first, and on Hopper fastest first.
CHEAPEST_FIRST = ("default", "low_bias", "consistent", "int8_scores")
FASTEST_ON_HOPPER = ("int8_scores", "consistent", "default", "low_bias")


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer's attention.

    Attributes:
        name: the path of the module that called the attention.
        calls: how often; errors and logits below are the largest of all calls.
        largest_logit: of |scale · q·k| where the mask shows the key.
        errors: by preset and by tensor ("o", "dq", "dk", "dv"), the relative L2 error to exact attention of
            the same q, k, v and dO. Gradients are missing where none reaches the layer.
        small_rows: by preset, what small rows of dQ and dK keep (:func:`sagebwd.metrics.small_rows_left`,
            the least of all calls); 1 where no gradient reaches the layer.
    """

    name: str
    calls: int
    largest_logit: float
    errors: dict[str, dict[str, float]]
    small_rows: dict[str, float]

    def gradient_error(self, preset: str) -> float:
        """The largest error of dQ, dK and dV; 0 without gradients."""
        return max((error for name, error in self.errors[preset].items() if name != "o"), default=0.0)


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found; ``print`` shows a table.

    Attributes:
        layers: one for each module that called an attention which SageBwd computes.
        cosines: by preset, of the gradients of all weights to those of the same step in full precision.
        full_precision: the calls that SageBwd does not compute, and why.
        unavailable: by preset, why this device does not run it.
        recommended: a name of :data:`sagebwd.config.PRESETS`; None: leave this model in full precision.
    """

    layers: tuple[LayerDiagnosis, ...]
    cosines: dict[str, float]
    full_precision: tuple[usage.ReportRow, ...]
    unavailable: dict[str, str]
    recommended: str | None

    @property
    def int8_share(self) -> float:
        """The share of attention calls that SageBwd computes."""
        in_int8 = sum(layer.calls for layer in self.layers)
        return in_int8 / (in_int8 + sum(row.calls for row in self.full_precision))

    def is_good(self, preset: str) -> bool:
        """Whether a preset is good enough by :data:`LARGEST_ERROR` and :data:`SMALLEST_COSINE`."""
        return self.cosines[preset] >= SMALLEST_COSINE and all(
            layer.gradient_error(preset) <= max(LARGEST_ERROR, 2 * layer.gradient_error(FULL_PRECISION))
            for layer in self.layers
        )

    def __str__(self) -> str:
        presets = [*self.cosines]
        lines = [("layer", "calls", "largest logit", FULL_PRECISION, *presets)]
        for x in self.layers:
            errors = [
                f"{x.errors[p]['o']:.3f}/{x.gradient_error(p):.3f}/{x.small_rows[p]:.3f}"
                for p in (FULL_PRECISION, *presets)
            ]
            lines.append((x.name, str(x.calls), f"{x.largest_logit:.4g}", *errors))
        lines.append(("all weights", "", "", "", *(f"{self.cosines[p]:.5f}" for p in presets)))
        return "\n".join(
            [
                "relative L2 error of out / of gradients (largest of dQ, dK, dV) / what small rows of dQ and "
                "dK keep; of all weights the cosine",
                *usage.aligned(lines),
                f"{self.int8_share:.0%} of attention calls in INT8",
                *(f"in full precision: {x.name}, {x.calls} calls: {x.reason}" for x in self.full_precision),
                *(f"not available here: {preset}: {why}" for preset, why in self.unavailable.items()),
                f"recommended: {self._recommendation()}",
            ]
        )

    def _recommendation(self) -> str:
        if self.recommended is None:
            return "full-precision attention, FlashAttention or cuDNN: no preset is good enough"
        name = "" if self.recommended == "default" else f".{self.recommended}"
        worst = max(layer.gradient_error(self.recommended) for layer in self.layers)
        cosine = self.cosines[self.recommended]
        return f"SageConfig{name}(): gradients of a layer err by {worst:.3f} at most, cosine {cosine:.5f}"


def diagnose(model: nn.Module, *inputs: Any, **kwargs: Any) -> Diagnosis:
    """Tell how well the attention of ``model`` computes in INT8, layer by layer, and which preset it needs.

    >>> print(sagebwd.diagnose(model, **batch))

    Runs ``model(*inputs, **kwargs)`` forward and backward: in full precision, and under each of
    :data:`sagebwd.config.PRESETS`. Pass what a training step passes, labels included, in the dtype and with
    the autocast of training. The first tensor of the output is differentiated: a loss, or any other tensor
    along random numbers. Calls of SageBwd are looked at, directly or through an adapter; in a model that has
    none, those of ``scaled_dot_product_attention``, as with
    :func:`sagebwd.integrations.torch_flash.patch_sdpa`. Weights' ``.grad``, buffers and random states are as
    before, and :func:`sagebwd.report` counts nothing of it.

    Takes the time of some 20 training steps, on a CPU with the reference kernels minutes for a small model;
    a bar on stderr counts its seven steps, of which the first takes longest.

    Raises:
        ValueError: the model computes no attention that SageBwd could, or its output has no gradient.
    """
    from sagebwd.integrations import torch_flash  # which most users of the library do without

    names = {id(module): path or type(module).__name__ for path, module in model.named_modules()}
    observer = _Observer(names)
    step = functools.partial(_train_step, model, inputs, kwargs)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(usage.counted_apart())
        if "torch._dynamo" in sys.modules:  # a compiled model must run as Python here
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observer)
        with _unchanged(model), torch.no_grad():
            model(*inputs, **kwargs)
        if not observer.calls:
            stack.enter_context(torch_flash.patch_sdpa())
        usage.report(clear=True)
        bar = stack.enter_context(tqdm(desc="diagnose", total=1 + len(PRESETS), unit="step"))
        observer.start(FULL_PRECISION, measures=True)
        truth = step()
        bar.update(1)
        full_precision = tuple(row for row in usage.report().rows if row.reason)
        if not observer.calls and not full_precision:
            raise ValueError(
                f"{type(model).__name__} calls neither sagebwd nor torch's scaled_dot_product_attention; "
                'give it an adapter of sagebwd.integrations, or attn_implementation="sdpa"'
            )
        layers = observer.layers()
        cosines = {}
        for preset in PRESETS:
            if layers and preset not in observer.unavailable:
                observer.start(preset)
                cosines[preset] = _cosine(step(), truth)
            bar.update(1)
    found = Diagnosis(layers, cosines, full_precision, observer.unavailable, None)
    order = FASTEST_ON_HOPPER if observer.is_hopper else CHEAPEST_FIRST
    good = (preset for preset in order if preset in cosines and found.is_good(preset))
    return replace(found, recommended=next(good, None))


# --- One step of the model ---------------------------------------------------------------------------------


def _train_step(model: nn.Module, inputs: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """The gradients of all weights."""
    with _unchanged(model), torch.enable_grad():
        for parameter in model.parameters():
            parameter.grad = None
        output = tree_leaves(model(*inputs, **kwargs))
        found = next((x for x in output if isinstance(x, Tensor) and x.requires_grad), None)
        if found is None:
            raise ValueError("no output of the model has a gradient; set requires_grad of what you train")
        along = torch.ones(found.shape)
        if found.numel() > 1:
            along.normal_(generator=torch.Generator().manual_seed(0))
        found.backward(along.to(found))
        return [parameter.grad for parameter in model.parameters()]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back gradients, buffers and random states afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _cosine(found: list[Tensor | None], truth: list[Tensor | None]) -> float:
    """Of all gradients as one vector, in float64."""
    pairs = [(x.double(), y.double()) for x, y in zip(found, truth, strict=True) if x is not None]
    dot, left, right = (
        math.fsum((a * b).sum().item() for a, b in products)
        for products in (pairs, [(x, x) for x, _ in pairs], [(y, y) for _, y in pairs])
    )
    return dot / math.sqrt(left * right) if left and right else float(left == right)


# --- The calls of attention --------------------------------------------------------------------------------


class _Observer:
    """Within it, every attention that SageBwd computes runs with the settings of :meth:`start`."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names, self._running = names, [OUTSIDE]
        self._config, self._measures = CONFIGS[FULL_PRECISION], False
        self.calls = 0
        self.is_hopper = False
        self.unavailable: dict[str, str] = {}
        self._found: dict[str, list[tuple[float, dict[str, dict[str, float]], dict[str, float]]]] = {}

    def start(self, preset: str, *, measures: bool = False) -> None:
        """From now on compute with ``preset``; with ``measures`` also with all others, for their errors."""
        self._config, self._measures, self.calls = CONFIGS[preset], measures, 0

    def layers(self) -> tuple[LayerDiagnosis, ...]:
        """What was measured, in the order of the model."""
        layers = []
        order = [*self._names.values(), OUTSIDE]
        for name, calls in sorted(self._found.items(), key=lambda item: order.index(item[0])):
            logits, errors, left = zip(*calls, strict=True)
            most = {p: {x: max(own[p][x] for own in errors) for x in found} for p, found in errors[0].items()}
            least = {p: min(own[p] for own in left) for p in left[0]}
            layers.append(LayerDiagnosis(name, len(calls), max(logits), most, least))
        return tuple(layers)

    def __enter__(self) -> None:
        self._attend = ops.attend
        ops.attend = self._observed
        self._hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        )

    def __exit__(self, *_: object) -> None:
        ops.attend = self._attend
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._names:
            self._running.append(self._names[id(module)])

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._names:
            self._running.pop()

    def _observed(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, **asked: Any) -> Any:
        self.calls += 1
        out, lse = self._attend(q, k, v, self._with(self._config, q, params), **asked)
        if not self._measures:
            return out, lse
        inputs = [None if x is None else x.detach() for x in (q, k, v, asked.get("sinks"))]
        measure = functools.partial(self._measure, self._running[-1], inputs, params)
        if out.requires_grad:
            out.register_hook(measure)
        else:
            measure(None)
        return out, lse

    def _with(self, config: SageConfig, q: Tensor, params: AttentionParams) -> AttentionParams:
        return params._replace(config=config, kernels=dispatch.explain(q, config=config).kernels)

    def _measure(
        self, name: str, inputs: list[Tensor | None], params: AttentionParams, grad_out: Tensor | None
    ) -> None:
        """Compute one call with all settings, and exactly."""
        q, k, v, sinks = inputs
        largest = torch.zeros((), dtype=torch.float64, device=q.device)

        def look(rows: ExactRows) -> None:
            torch.maximum(largest, rows.s.abs().max().double(), out=largest)

        exact = exact_attention(
            q, k, v, grad_out, scale=params.scale, window_size=tuple(params.window),
            cu_seqlens=params.cu_seqlens, cu_seqlens_kv=params.cu_seqlens_kv, sinks=sinks, on_rows=look,
            dtype=torch.float64 if q.is_cpu else torch.float32,
        )  # fmt: skip
        truth = (exact.out,) if grad_out is None else (exact.out, exact.dq, exact.dk, exact.dv)
        errors: dict[str, dict[str, float]] = {}
        left: dict[str, float] = {}
        for preset, config in CONFIGS.items():
            own = self._with(config, q, params)
            if own.kernels == "none":
                self.unavailable[preset] = dispatch.explain(q, config=config).reasons["triton"]
                continue
            self.is_hopper |= own.kernels == "hopper"
            attend = functools.partial(self._attend, params=own, with_lse=False, sinks=sinks)
            found = _results(attend, [q, k, v], grad_out)
            pairs = [*zip(found, truth, strict=True)]
            # In place of NaN what the largest or the least of several is.
            of_each = (_unless_nan(relative_l2(*pair), math.inf) for pair in pairs)
            errors[preset] = dict(zip(TENSORS, of_each, strict=False))
            left[preset] = min((_unless_nan(small_rows_left(*pair), 0.0) for pair in pairs[1:3]), default=1.0)
        self._found.setdefault(name, []).append((largest.item(), errors, left))


def _results(
    attend: Callable[..., tuple[Tensor, None]], inputs: list[Tensor], grad_out: Tensor | None
) -> list[Tensor]:
    """Out, and with ``grad_out`` dq, dk, dv."""
    if grad_out is None:
        return [attend(*inputs)[0]]
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out, _ = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad_out)]


def _unless_nan(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value
