"""How far SageBwd's attention is from full precision, measured while a run trains, on the run's own numbers.

INT8 attention fails slowly: the loss is the last to show that dQ and dK have become noise. The probe takes
sequences of the step's batch through the model with the current weights, listens to q, k and v of some layers
and to the gradient dO that reaches them, and computes attention from these three times: with SageBwd, with
full precision as one trains it (16 bit), and exactly. What 16 bit cannot do either is not INT8's fault.
It leaves training as it was, bit for bit: it touches no parameter's .grad, no optimizer and no random state.

Shapes: B sequences, H query heads, G key and value heads, N tokens, D channels per head.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

import model.backends.fpa
import model.backends.sagebwd
from model.backends import AttentionFn, AttentionSettings, Backend
from model.config import LlamaConfig
from model.llama import Llama
from sagebwd.metrics import cosine_similarity, relative_l2
from trainer.plan import tokens_per_step
from trainer.settings import Settings

log = logging.getLogger(__name__)

TENSORS = ("o", "dq", "dk", "dv")
GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}

SCORES_AT_ONCE = 2**22  # entries of P (16 MiB in float32); some six such matrices are alive together


@dataclass(frozen=True)
class Captured:
    """What one layer's attention got and gave: q, out, grad_out (B, H, N, D); k, v (B, G, N, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    gains: dict[str, Tensor]  # the largest magnitudes of the QK-norm's gains, scalars; empty without QK-norm
    grad_out: Tensor | None = None


@dataclass(frozen=True)
class Exact:
    """Full-precision attention, float32. The RMS is over all N · N entries, those behind the mask being 0."""

    o: Tensor  # (B, H, N, D)
    dq: Tensor  # (B, H, N, D)
    dk: Tensor  # (B, G, N, D)
    dv: Tensor  # (B, G, N, D)
    p_rms: float
    dp_rms: float
    ds_rms: float
    largest_logit: float  # of |S|, S = QKᵀ/√D, where the mask lets it through


class Probe:
    """Measures the chosen layers of one model."""

    def __init__(self, settings: Settings, llama: Llama, *, device: torch.device, dtype: torch.dtype):
        """`dtype` is what q, k and v have."""
        self.llama = llama
        self.layers = chosen_layers(settings.probe.layers, len(llama.layers))
        self.attend = sage_attend(settings, device=device, dtype=dtype)
        self.attend_fpa: AttentionFn | None = fpa_attend(settings, device=device, dtype=dtype)

    def measure(
        self,
        inputs: Tensor,
        targets: Tensor,
        autocast: Callable[[], AbstractContextManager],
        *,
        is_main: bool = True,
    ) -> dict[str, float]:
        """The measurements as flat keys, `probe/layer_0/dq_l2` and the like; none unless `is_main`.

        inputs, targets: (B, N) int64. Every rank has to call this, with the same sequences: where parameters
        are sharded, all take part in the pass through the model.

        Per layer: cosine similarity (`_cos`) and relative L2 error (`_l2`) of SageBwd's O, dQ, dK and dV;
        `fpa_…_l2`, the same of full-precision attention, where that runs; the RMS of the exact P, dP and dS;
        `largest_logit`; `q_gain` and `k_gain` with QK-norm. Gradients are those of each sequence's own mean
        loss, in nats per token.
        """
        began = time.perf_counter()
        captured = capture(self.llama, self.layers, inputs, targets, autocast)
        if not is_main:
            return {}
        values = {
            f"probe/layer_{layer}/{name}": value
            for layer in self.layers
            for name, value in measure_layer(captured.pop(layer), self.attend, self.attend_fpa).items()
        }
        return {**values, "probe/seconds": time.perf_counter() - began}


def build_probe(
    settings: Settings, llama: Llama, *, device: torch.device, dtype: torch.dtype
) -> Probe | None:
    """The probe of these settings, tried out on a few tokens; None if it is off.

    None as well where SageBwd does not run, if the run itself is of another attention.
    """
    if not settings.probe.every:
        return None
    try:
        probe = Probe(settings, llama, device=device, dtype=dtype)
        q = torch.zeros(1, settings.model.n_heads, 16, settings.model.d_head, device=device, dtype=dtype)
        k = q[:, : settings.model.kv_heads]
        tried = Captured(q, k, k, q, {}, grad_out=q)
        measure_layer(tried, probe.attend, None)
    except Exception as error:  # no compiler, an unknown GPU, …: nothing that another attention needs
        if settings.attention.backend == "sagebwd":
            raise
        log.warning("training goes on without the probe, because SageBwd does not run here: %s", error)
        return None
    try:
        measure_layer(tried, probe.attend, probe.attend_fpa)
    except Exception as error:
        log.warning("the probe leaves out full-precision attention, which does not run here: %s", error)
        probe.attend_fpa = None
    return probe


def chosen_layers(layers: Sequence[int] | None, n_layers: int) -> list[int]:
    """The layers to measure, in order: those given, or the first, middle and last."""
    return sorted(set(layers if layers is not None else (0, n_layers // 2, n_layers - 1)))


def sage_attend(settings: Settings, *, device: torch.device, dtype: torch.dtype) -> AttentionFn:
    """SageBwd with the run's own settings, or with its defaults in a run of another attention."""
    attention = settings.attention
    if attention.backend != "sagebwd":
        attention = AttentionSettings(backend="sagebwd")
    return sage_backend(attention, settings.model, device=device, dtype=dtype).attend


def fpa_attend(settings: Settings, *, device: torch.device, dtype: torch.dtype) -> AttentionFn:
    """Full-precision attention with the run's own settings, or with its defaults in a run of another."""
    attention = settings.attention
    if attention.backend != "fpa":
        attention = AttentionSettings(backend="fpa")
    return fpa_backend(attention, settings.model, device=device, dtype=dtype).attend


def fpa_backend(
    attention: AttentionSettings, config: LlamaConfig, *, device: torch.device, dtype: torch.dtype
) -> Backend:
    """Full-precision attention for the heads of a model."""
    is_gqa = config.kv_heads != config.n_heads
    return model.backends.fpa.build(
        attention, device=device, dtype=dtype, d_head=config.d_head, is_gqa=is_gqa
    )


def sage_backend(
    attention: AttentionSettings, config: LlamaConfig, *, device: torch.device, dtype: torch.dtype
) -> Backend:
    """SageBwd for the heads of a model.

    Where no kernel can run (float32 on a GPU, say) it is the plain PyTorch reference, which is slow there.
    """
    shape = {
        "device": device,
        "dtype": dtype,
        "d_head": config.d_head,
        "is_gqa": config.kv_heads != config.n_heads,
    }
    try:
        return model.backends.sagebwd.build(attention, **shape)
    except ValueError as error:
        log.info("the probe uses the plain PyTorch reference of SageBwd: %s", error)
        return model.backends.sagebwd.build(replace(attention, implementation="reference"), **shape)


def capture(
    llama: Llama,
    layers: Sequence[int],
    inputs: Tensor,
    targets: Tensor,
    autocast: Callable[[], AbstractContextManager],
) -> dict[int, Captured]:
    """One pass through the model: what the attention of each layer got, gave, and was told by the loss."""
    with _listening(llama, layers) as heard, torch.enable_grad(), autocast():
        loss = llama(inputs, targets) * len(inputs)  # of each sequence, whatever the number of them
    # Towards the outputs alone: no weight's gradient is computed, none accumulates in a .grad.
    gradients = torch.autograd.grad(loss, [heard[layer].out for layer in layers])
    return {
        layer: replace(heard[layer], out=heard[layer].out.detach(), grad_out=gradient)
        for layer, gradient in zip(layers, gradients, strict=True)
    }


@contextmanager
def _listening(llama: Llama, layers: Sequence[int]) -> Iterator[dict[int, Captured]]:
    """While this is open, the attention of these layers leaves what it gets and gives in the dictionary."""
    attentions = {layer: llama.layers[layer].self_attn for layer in layers}
    originals = {layer: attention.attend for layer, attention in attentions.items()}
    heard: dict[int, Captured] = {}

    def listener(layer: int) -> AttentionFn:
        def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
            out = originals[layer](q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
            # Gains are read here because within the pass even a sharded parameter is whole.
            heard[layer] = Captured(q.detach(), k.detach(), v.detach(), out, _gains(attentions[layer]))
            return out

        return attend

    try:
        for layer, attention in attentions.items():
            attention.attend = listener(layer)
        yield heard
    finally:
        for layer, attention in attentions.items():
            attention.attend = originals[layer]


def _gains(attention: nn.Module) -> dict[str, Tensor]:
    norms = {"q_gain": attention.q_norm, "k_gain": attention.k_norm}
    return {name: norm.weight.detach().abs().max() for name, norm in norms.items() if norm is not None}


def measure_layer(
    captured: Captured, attend: AttentionFn, attend_fpa: AttentionFn | None
) -> dict[str, float]:
    """The errors of `attend` and of full precision on a layer's q, k, v and dO, and what may explain them."""
    exact = exact_layer(captured)
    values = errors(captured, attend, exact)
    if attend_fpa is not None:
        of_fpa = errors(captured, attend_fpa, exact)
        values |= {f"fpa_{name}_l2": of_fpa[f"{name}_l2"] for name in TENSORS}
    return values | explanations(captured, exact)


def exact_layer(captured: Captured) -> Exact:
    """:func:`exact_attention` of what a layer got."""
    with without_tf32():
        return exact_attention(captured.q, captured.k, captured.v, captured.grad_out)


def errors(captured: Captured, attend: AttentionFn, exact: Exact) -> dict[str, float]:
    """Cosine similarity (`_cos`) and relative L2 error (`_l2`) of o, dq, dk and dv of `attend`."""
    q, k, v, grad_out = captured.q, captured.k, captured.v, captured.grad_out
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    found = (out, *torch.autograd.grad(out, leaves, grad_out))
    values = {}
    for name, tensor in zip(TENSORS, found, strict=True):
        values[f"{name}_cos"] = cosine_similarity(tensor, getattr(exact, name))
        values[f"{name}_l2"] = relative_l2(tensor, getattr(exact, name))
    return values


def explanations(captured: Captured, exact: Exact) -> dict[str, float]:
    """RMS of the exact P, dP and dS, the largest logit, and with QK-norm the largest gains."""
    values = {name: getattr(exact, name) for name in ("p_rms", "dp_rms", "ds_rms", "largest_logit")}
    return values | {name: gain.item() for name, gain in captured.gains.items()}


@contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products in float32, though the trainer allows TF32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@torch.no_grad()
def exact_attention(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Exact:
    """Causal attention and its gradients in float32, some queries at a time: memory is linear in N.

    q, grad_out: (B, H, N, D); k, v: (B, G, N, D) with G dividing H.
    """
    batch, heads, length, d_head = q.shape
    group = heads // k.shape[1]
    q, grad_out = q.float(), grad_out.float()
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scale = d_head**-0.5
    out, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    squares = torch.zeros(3, dtype=torch.float64, device=q.device)  # of P, dP and dS, summed
    largest = torch.zeros((), device=q.device)

    rows = max(SCORES_AT_ONCE // (batch * heads * length), 1)
    for first in range(0, length, rows):
        last = min(first + rows, length)
        queries, keys = (..., slice(first, last), slice(None)), (..., slice(0, last), slice(None))
        s, p, dp, ds = exact_scores(q[queries], k[keys], v[keys], grad_out[queries])
        largest = torch.maximum(largest, s.abs().max())
        out[queries] = p @ v[keys]
        dv[keys] += p.mT @ grad_out[queries]
        dq[queries] = ds @ k[keys] * scale
        dk[keys] += ds.mT @ q[queries] * scale
        squares += torch.stack([vector_norm(x, dtype=torch.float64).square() for x in (p, dp, ds)])

    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    p_rms, dp_rms, ds_rms = (squares / (batch * heads * length**2)).sqrt().tolist()
    return Exact(out, dq, dk, dv, p_rms, dp_rms, ds_rms, largest.item())


def exact_scores(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S, P, dP and dS (B, H, n, N) of the last n of N queries; zero behind the causal mask.

    q, grad_out: (B, H, n, D); k, v: (B, H, N, D).
    """
    rows, columns = q.shape[2], k.shape[2]
    later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    s = q @ k.mT * q.shape[3] ** -0.5
    p = s.masked_fill(later, -torch.inf).softmax(-1)
    dp = (grad_out @ v.mT).masked_fill_(later, 0.0)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    return s.masked_fill_(later, 0.0), p, dp, ds


class Alarm:
    """Warns of layers with a gradient beyond `limit`: once, and again only after the layer was within."""

    def __init__(self, settings: Settings):
        self.limit = math.inf if settings.probe.alarm is None else settings.probe.alarm
        self._is_sage = settings.attention.backend == "sagebwd"
        self._mends = mends(settings)
        self._beyond: set[int] = set()

    def warnings(self, step: int, values: dict[str, float], layers: Sequence[int]) -> list[str]:
        """What to say of these measurements (see Probe.measure) of the chosen layers."""
        messages = []
        for layer in layers:
            errors = {name: values[f"probe/layer_{layer}/{name}_l2"] for name in GRADIENTS}
            worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
            if errors[worst] <= self.limit:
                self._beyond.discard(layer)
            elif self.limit < math.inf and layer not in self._beyond:
                self._beyond.add(layer)
                messages.append(self._message(step, layer, worst, values))
        return messages

    def _message(self, step: int, layer: int, worst: str, values: dict[str, float]) -> str:
        error, fpa_error, ds_rms, logit = (
            values.get(f"probe/layer_{layer}/{name}")
            for name in (f"{worst}_l2", f"fpa_{worst}_l2", "ds_rms", "largest_logit")
        )
        of_fpa = "" if fpa_error is None else f"; that of full-precision attention by {fpa_error:.2g}"
        return (
            f"step {step}, layer {layer}: SageBwd's {GRADIENTS[worst]} "
            f"{'is' if self._is_sage else 'would be'} off by a relative L2 of {error:.3g}, more than "
            f"probe.alarm={self.limit:g}{of_fpa} (RMS of dS {ds_rms:.2g}, largest logit {logit:.3g}). "
            f"{self._mends}"
        )


def mends(settings: Settings) -> str:
    """What these settings leave open that keeps the gradients of INT8 attention accurate.

    The first three are what the paper finds (its figures 5, 4 and 1); the others are SageConfig's.
    """
    attention, is_sage = settings.attention, settings.attention.backend == "sagebwd"
    has_fitting_delta = attention.exact_delta or attention.compensate_o
    open_to_it = [
        (not settings.model.qk_norm, "model.qk_norm=true, which bounds the logits"),
        (is_sage and attention.smooth_k is False, "attention.smooth_k=true"),
        (True, f"fewer tokens per step than {tokens_per_step(settings):,}"),
        (is_sage and attention.granularity == "block", "attention.granularity=row, while logits are small"),
        (is_sage and not has_fitting_delta, "attention=sagebwd_consistent, where full precision errs, too"),
    ]
    return "What may help, in a run of its own: " + "; ".join(text for applies, text in open_to_it if applies)
