"""The error of INT8 attention, measured while a run trains, on the run's own q, k, v and dO.

INT8 attention fails slowly: dQ and dK become noise long before the loss shows it. Every `probe.every` steps
the probe runs sequences of the step's batch through the model with the current weights and captures q, k and
v of some layers and the gradient dO that reaches them. It computes attention from these three times: with the
INT8 attention, with 16-bit attention, and exactly. The error of 16-bit attention is the baseline: INT8 cannot
be blamed for it. Training is unchanged, bit for bit: the probe touches no parameter's .grad, no optimizer and
no random state.

Shapes: B sequences, H query heads, G key and value heads, N tokens, D channels per head.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from model import backends
from model.backends import FULL_PRECISION, AttentionFn, Backend
from model.llama import Llama
from sagebwd.metrics import cosine_similarity, relative_l2, small_rows_left
from sagebwd.reference import exact_attention
from sagebwd.reference.exact import ExactRows
from trainer.settings import Settings

log = logging.getLogger(__name__)

TENSORS = ("o", "dq", "dk", "dv")
GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}

ELEMENTS_AT_ONCE = 2**22  # of P (16 MiB in float32); about six such matrices are alive at a time


@dataclass(frozen=True)
class Captured:
    """Input and output of one layer's attention: q, out, grad_out (B, H, N, D); k, v (B, G, N, D).

    Packed documents are one sequence: B is 1, and N counts all of their tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    gains: dict[str, Tensor]  # largest magnitude of each QK-norm gain, scalars; empty without QK-norm
    grad_out: Tensor | None = None
    documents: dict[str, Tensor] = field(default_factory=dict)  # cu_seqlens, if documents are packed


class Probe:
    """Measures the first, middle and last layer of one model, and warns of gradient errors above a limit."""

    def __init__(
        self,
        settings: Settings,
        llama: Llama,
        backend: Backend,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ):
        """`backend` is the run's own attention; `dtype` is that of q, k and v. Raises ValueError."""
        heads = settings.attention_shape
        where = {"device": device, "dtype": dtype}
        self.llama = llama
        last = len(llama.layers) - 1
        self.layers = sorted({0, (last + 1) // 2, last})
        self.limit = math.inf if settings.probe.alarm is None else settings.probe.alarm
        self._above: set[int] = set()  # layers that were reported
        self.is_own = not backend.probe_instead  # whether the attention measured is that of the run
        self.backend, self.attend_fpa = backend, backend.attend
        if self.is_own:
            self.attend_fpa = backends.build(FULL_PRECISION, **where, **heads).attend
        else:
            self.backend = backends.build_first(backend.probe_instead, **where, **heads)

    def measure(
        self,
        inputs: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        autocast: Callable[[], AbstractContextManager],
        is_main: bool = True,
    ) -> dict[str, float]:
        """The measurements as flat keys, `probe/layer_0/dq_l2` and so on; none unless `is_main`.

        inputs, targets, cu_seqlens: as the model takes them. Every rank has to call this, with the same
        sequences, because sharded parameters need all ranks for the pass through the model.

        Per layer: cosine similarity (`_cos`) and relative L2 error (`_l2`) of o, dq, dk and dv of the
        attention measured; of dq and dk what small rows keep (`_small_rows`, see sagebwd.metrics);
        `fpa_…_l2`, the error of 16-bit attention; the RMS of the exact P, dP and dS;
        `largest_logit`; with QK-norm `q_gain` and `k_gain`. Gradients are of each sequence's own mean loss,
        in nats per token.
        """
        began = time.perf_counter()
        captured = capture(self.llama, self.layers, inputs, targets, cu_seqlens, autocast=autocast)
        if not is_main:
            return {}
        values = {
            f"probe/layer_{layer}/{name}": value
            for layer in self.layers
            for name, value in measure_layer(
                captured.pop(layer), self.backend.attend, self.attend_fpa
            ).items()
        }
        return {**values, "probe/seconds": time.perf_counter() - began}

    def warnings(self, step: int, values: dict[str, float]) -> list[str]:
        """What to say of these measurements.

        A layer is reported once, and again only after its error was below the limit in between.
        """
        messages = []
        for layer in self.layers:
            errors = {name: values[f"probe/layer_{layer}/{name}_l2"] for name in GRADIENTS}
            worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
            if errors[worst] <= self.limit:
                self._above.discard(layer)
            elif self.limit < math.inf and layer not in self._above:
                self._above.add(layer)
                messages.append(self._warning(step, layer, worst, values))
        return messages

    def _warning(self, step: int, layer: int, worst: str, values: dict[str, float]) -> str:
        has = "has" if self.is_own else "would have"
        return (
            f"step {step}, layer {layer}: {GRADIENTS[worst]} of {self.backend.title} {has} a relative "
            f"L2 error of {values[f'probe/layer_{layer}/{worst}_l2']:.3g}, above probe.alarm={self.limit:g}"
            f"; full-precision attention has {values[f'probe/layer_{layer}/fpa_{worst}_l2']:.2g} "
            f"(largest logit {values[f'probe/layer_{layer}/largest_logit']:.3g}). QK-norm bounds "
            "the logits; attention=sagebwd_consistent and fewer tokens per step may help, too, in a new run"
        )


def build_probe(
    settings: Settings, llama: Llama, backend: Backend, *, device: torch.device, dtype: torch.dtype
) -> Probe | None:
    """The probe of a run with this attention, tried out on a few tokens; None if it is off.

    None as well, with a warning, if the attention it would measure is not the run's own and does not run
    here.
    """
    if not settings.probe.every:
        return None
    q = torch.zeros(1, settings.model.n_heads, 16, settings.model.d_head, device=device, dtype=dtype)
    k = q[:, : settings.model.kv_heads]
    sample = Captured(q, k, k, q, {}, grad_out=q)
    try:
        probe = Probe(settings, llama, backend, device=device, dtype=dtype)
        measure_layer(sample, probe.backend.attend, probe.attend_fpa)
    except Exception as error:  # no compiler, an unknown GPU, …: nothing that the run's own attention needs
        if not backend.probe_instead:
            raise
        log.warning("training without the probe, because the attention it measures does not run: %s", error)
        return None
    return probe


def capture(
    llama: Llama,
    layers: Sequence[int],
    inputs: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    autocast: Callable[[], AbstractContextManager],
) -> dict[int, Captured]:
    """One pass through the model: input, output and output gradient of the attention of each layer."""
    with _capturing(llama, layers) as seen, torch.enable_grad(), autocast():
        loss = llama(inputs, targets, cu_seqlens) * len(inputs)  # the sum of the sequences' own mean losses
    # Only towards the outputs: no weight's gradient is computed, none accumulates in a .grad.
    gradients = torch.autograd.grad(loss, [seen[layer].out for layer in layers])
    return {
        layer: replace(seen[layer], out=seen[layer].out.detach(), grad_out=gradient)
        for layer, gradient in zip(layers, gradients, strict=True)
    }


@contextmanager
def _capturing(llama: Llama, layers: Sequence[int]) -> Iterator[dict[int, Captured]]:
    """Within this context, the attention of these layers stores its input and output in the dictionary."""
    attentions = {layer: llama.layers[layer].self_attn for layer in layers}
    originals = {layer: attention.attend for layer, attention in attentions.items()}
    seen: dict[int, Captured] = {}

    def recorder(layer: int) -> AttentionFn:
        def attend(
            q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool, **documents: Tensor
        ) -> Tensor:
            out = originals[layer](q, k, v, is_causal=is_causal, enable_gqa=enable_gqa, **documents)
            gains = _gains(attentions[layer])  # read here: within the pass even a sharded parameter is whole
            seen[layer] = Captured(*(x.detach() for x in (q, k, v)), out, gains, documents=documents)
            return out

        return attend

    try:
        for layer, attention in attentions.items():
            attention.attend = recorder(layer)
        yield seen
    finally:
        for layer, attention in attentions.items():
            attention.attend = originals[layer]


def _gains(attention: nn.Module) -> dict[str, Tensor]:
    norms = {"q_gain": attention.q_norm, "k_gain": attention.k_norm}
    return {name: norm.weight.detach().abs().max() for name, norm in norms.items() if norm is not None}


def measure_layer(captured: Captured, attend: AttentionFn, attend_fpa: AttentionFn) -> dict[str, float]:
    """Errors of `attend` and of 16-bit attention on a layer's q, k, v and dO, and what may explain them."""
    exact, statistics = exact_layer(captured)
    values = errors(captured, attend, exact)
    of_fpa = errors(captured, attend_fpa, exact)
    values |= {f"fpa_{name}_l2": of_fpa[f"{name}_l2"] for name in TENSORS}
    return values | statistics


def exact_layer(captured: Captured) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Exact attention of a layer's input: TENSORS in float32, and what may explain errors.

    That is `p_rms`, `dp_rms` and `ds_rms`, over all N · N entries, those that the mask hides being 0;
    `largest_logit`, of |S| where the mask admits it, S = QKᵀ/√D; with QK-norm the largest gains. In float32,
    because float64 is slow on most GPUs. Memory is linear in N.
    """
    q, k, v, grad_out = captured.q, captured.k, captured.v, captured.grad_out
    squares = torch.zeros(3, dtype=torch.float64, device=q.device)  # of P, dP and dS, summed
    largest = torch.zeros((), device=q.device)

    def add(rows: ExactRows) -> None:
        norms = [vector_norm(x, dtype=torch.float64) for x in (rows.p, rows.dp, rows.ds)]
        squares.add_(torch.stack(norms).square_())
        torch.maximum(largest, rows.s.abs().max(), out=largest)

    result = exact_attention(
        q,
        k,
        v,
        grad_out,
        is_causal=True,
        **captured.documents,
        dtype=torch.float32,
        elements_at_once=ELEMENTS_AT_ONCE,
        on_rows=add,
    )
    p_rms, dp_rms, ds_rms = (squares / (q[..., 0].numel() * q.shape[2])).sqrt().tolist()
    statistics = {"p_rms": p_rms, "dp_rms": dp_rms, "ds_rms": ds_rms, "largest_logit": largest.item()}
    statistics |= {name: gain.item() for name, gain in captured.gains.items()}
    return dict(zip(TENSORS, (result.out, result.dq, result.dk, result.dv), strict=True)), statistics


def errors(captured: Captured, attend: AttentionFn, exact: dict[str, Tensor]) -> dict[str, float]:
    """Of o, dq, dk and dv of `attend`: `_cos` and `_l2`, and of dq and dk `_small_rows`."""
    q, k, v, grad_out = captured.q, captured.k, captured.v, captured.grad_out
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], **captured.documents)
    found = (out, *torch.autograd.grad(out, leaves, grad_out))
    values = {}
    for name, tensor in zip(TENSORS, found, strict=True):
        values[f"{name}_cos"] = cosine_similarity(tensor, exact[name])
        values[f"{name}_l2"] = relative_l2(tensor, exact[name])
        if name in ("dq", "dk"):
            values[f"{name}_small_rows"] = small_rows_left(tensor, exact[name])
    return values
