"""SageBwd as an attention backend of Hugging Face diffusers.

>>> from sagebwd.integrations.diffusers import register
>>> register()
>>> transformer.set_attention_backend("sagebwd")

diffusers lets the attention processors of a model choose a backend. Some do not ask: they call PyTorch, or
compute attention themselves, whatever backend is set. :func:`check` finds them in the code of a model, and
``set_attention_backend`` runs it for the names that are registered here.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sagebwd import usage
from sagebwd.attention import sage_attention
from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.integrations.packing import match_widths
from sagebwd.masks import find_key_mask
from sagebwd.usage import choose_kernels
from sagebwd.validation import check_config, check_name

try:
    from diffusers.models import attention_dispatch
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_dispatch import AttentionBackendName
    from diffusers.models.modeling_utils import ModelMixin

    BACKENDS = attention_dispatch._AttentionBackendRegistry
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"sagebwd.integrations.diffusers needs diffusers 0.36 or newer ({error}); "
        "pip install 'diffusers>=0.36'"
    ) from error

#: The function to which processors hand their attention, so that a backend can compute it.
DISPATCH = "dispatch_attention_fn"

#: A function that names one of these computes attention, as does one with a softmax and a matrix product.
ATTENTION = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "memory_efficient_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_attention",
}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}

USE_NATIVE = "call model.set_attention_backend('native')"
WHAT_HELPS = (
    "Keep diffusers' own backend and use sagebwd.integrations.torch_flash, which reaches all that calls "
    "scaled_dot_product_attention, or replace these processors with model.set_attn_processor"
)

#: ``fallback`` of each name that is registered here.
_fallbacks: dict[str, str] = {}


class Obstacle(NamedTuple):
    """Why SageBwd does not compute a call.

    reason: what it does not compute, as a noun.
    fix: what the user can do, other than to register a fallback.
    """

    reason: str
    fix: str = USE_NATIVE


class Bypass(NamedTuple):
    """Layers of a model whose attention no backend sees.

    name: class of the processor, or of the layer where it has none.
    layers: their names in the model.
    reason: what it does instead.
    """

    name: str
    layers: tuple[str, ...]
    reason: str


# --- The backend -------------------------------------------------------------------------------------------


def register(name: str = "sagebwd", config: SageConfig = DEFAULT_CONFIG, fallback: str = "error") -> None:
    """Make ``model.set_attention_backend(name)`` run SageBwd with ``config``.

    Several names with different settings work side by side. Registered again, a name takes the new settings,
    also in models that use it already. ``set_attention_backend(name)`` then runs :func:`check` first;
    diffusers' context manager ``attention_backend(name)`` does not, as it knows no model.

    Args:
        name: lower-case letters, digits and underscores.
        config: what is quantized, and how.
        fallback: what becomes of attention that SageBwd does not compute, such as a mask that differs between
            queries, and of processors that pass by every backend. "error" refuses it. "sdpa" leaves it in
            full precision and warns once; :func:`sagebwd.report` lists it.

    Raises:
        ValueError: the name is diffusers' own or malformed, ``config`` is not a SageConfig, or ``fallback``
            is none of the two.
    """
    check_name(name)
    check_config(config)
    usage.check_fallback(fallback)
    if not re.fullmatch(r"[a-z]\w*", name) or name != name.lower():
        raise ValueError(f"name is {name!r}; take one of lower-case letters, digits and '_'")
    if name in [*AttentionBackendName] and name not in _fallbacks:
        raise ValueError(f"name {name!r} is a backend of diffusers; choose another")
    _fallbacks[name] = fallback
    BACKENDS.register(_backend_name(name))(functools.partial(_attention, config, fallback))
    for model_class in (ModelMixin, AttentionModuleMixin):
        _watch(model_class)


def _backend_name(name: str) -> AttentionBackendName:
    """The member ``name`` of diffusers' enumeration of backends, which it asks for everywhere.

    diffusers has no function to add one, and an enumeration cannot be subclassed.
    """
    if name not in AttentionBackendName._value2member_map_:
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[name] = member
        AttentionBackendName._member_names_.append(member._name_)
    return AttentionBackendName(name)


def _attention(
    config: SageConfig,
    fallback: str,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The function of diffusers' interface, which drops every argument that is not named here.

    Args:
        config, fallback: as given to :func:`register`.
        query: (B, N_q, H, D).
        key, value: (B, N_kv, H_kv, D) and (B, N_kv, H_kv, D_v).
        attn_mask: as of ``scaled_dot_product_attention``, or (B, N_kv): keys that take part.
        dropout_p, is_causal, scale, enable_gqa: as of ``scaled_dot_product_attention``.
        window_size: as of :func:`sagebwd.sage_attention`.
        softcap, return_attn_probs: refused where they ask for anything.
        deterministic: either way; the same inputs give the same bits.
        return_lse: return the logsumexp, too.
        _parallel_config: of diffusers' context parallelism.

    Returns:
        The output (B, N_q, H, D_v); with ``return_lse`` also (B, H, N_q) fp32, as from FlashAttention.
    """
    q, k, v = match_widths(*(x.transpose(1, 2) for x in (query, key, value)))
    mask = _read_mask(attn_mask, query, key)
    settings = {"scale": query.shape[-1] ** -0.5 if scale is None else scale, "window_size": window_size}
    asked = {
        "soft-capping": softcap,
        "attention weights": return_attn_probs,
        "a window": tuple(window_size) != (-1, -1),
        "the logsumexp": return_lse,
    }
    kernels, reason = choose_kernels(q, k, v, settings["scale"], config)
    obstacle = _find_obstacle(q, k, mask, dropout_p, _parallel_config, asked)
    if reason and not obstacle:
        obstacle = Obstacle(f"this input: {reason}")
    if obstacle:
        _fall_back(obstacle, fallback, asked)
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return attention_dispatch._native_attention(*arguments, _parallel_config=_parallel_config)
    usage.record(_caller(), kernels)
    settings |= {"is_causal": is_causal, "enable_gqa": enable_gqa, "return_lse": return_lse, "config": config}
    result = sage_attention(q, k, v, mask, **settings)
    out, *lse = result if return_lse else (result,)
    out = out[..., : value.shape[-1]].transpose(1, 2)
    return (out, *lse) if return_lse else out


def _read_mask(mask: Any, query: Tensor, key: Tensor) -> Any:
    """A mask that hides keys as (B or 1, 1, 1, N_kv), where its shape tells; any other as it is.

    diffusers' own backend reads (B, N_kv) so. ``Attention.prepare_attention_mask`` repeats a mask for each
    head, to (B, H, 1, N_kv). Whether heads differ after all is in the values, which nobody waits for: then
    this mask has NaN there, which is an error on a CPU, and NaN in the output on a GPU.
    """
    if not isinstance(mask, Tensor):
        return mask
    if mask.shape == (key.shape[0], key.shape[1]):
        return mask[:, None, None]
    is_repeated = mask.dim() == 4 and mask.shape[1] > 1 and mask.shape[2] == 1 < query.shape[1]
    if not is_repeated or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return mask
    differs = (mask != mask[:, :1]).any(1, keepdim=True)
    first = mask[:, :1]
    additive = torch.where(first, 0.0, -torch.inf) if mask.dtype == torch.bool else first
    return additive.masked_fill(differs, torch.nan)


def _find_obstacle(
    q: Tensor, k: Tensor, mask: Any, dropout: float, parallel: Any, asked: dict[str, Any]
) -> Obstacle | None:
    """Why SageBwd does not compute a call. q and k are (B, heads, N, D)."""
    for feature in ("soft-capping", "attention weights"):
        if asked[feature]:
            return Obstacle(feature)
    if dropout:
        return Obstacle(f"attention dropout ({dropout})", "set it to 0")
    if parallel is not None:
        return Obstacle("context parallelism")
    if asked["a window"] and q.shape[2] != k.shape[2]:
        return Obstacle("a window with N_q ≠ N_kv, which FlashAttention counts from the last key")
    try:
        find_key_mask(q, k, mask, None)
    except ValueError as error:
        return Obstacle("a mask that does more than hide keys", f"{USE_NATIVE} ({error})")
    return None


def _fall_back(obstacle: Obstacle, fallback: str, asked: dict[str, Any]) -> None:
    """Refuse the call, or let diffusers' own backend compute it, which has nothing of ``asked``."""
    features = " and ".join(feature for feature in asked if asked[feature])
    if features and fallback == "sdpa":
        raise NotImplementedError(
            f"{_caller()}: sagebwd does not compute {obstacle.reason}, and in full precision diffusers' own "
            f"backend does not compute {features}; {obstacle.fix}, or leave {features} out"
        )
    usage.fall_back(_caller(), obstacle.reason, fallback, fix=obstacle.fix)


def _caller() -> str:
    """The class of the attention processor that called, for :func:`sagebwd.report`; a backend is not told."""
    if torch.compiler.is_compiling():  # a tracer has no stack to look at
        return "diffusers"
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != DISPATCH:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return "diffusers"
    code = frame.f_back.f_code
    return getattr(code, "co_qualname", code.co_name).removesuffix(".__call__")


# --- Layers that would pass it by --------------------------------------------------------------------------


def check(model: nn.Module, fallback: str = "error") -> None:
    """Refuse a model with layers whose attention diffusers hands to no backend, whatever backend is set.

    It reads the code of the processors and layers, and runs nothing. ``set_attention_backend`` calls it for
    names that are registered here. Call it again after ``set_attn_processor``, and before
    ``with attention_backend(name)``.

    Args:
        model: any module of diffusers.
        fallback: "sdpa" warns, and lists the layers in :func:`sagebwd.report`, where "error" refuses them.

    Raises:
        NotImplementedError: there are such layers; the message names them and what to do.
        ValueError: ``fallback`` is none of the two.
    """
    usage.check_fallback(fallback)
    found = find_bypasses(model)
    if not found:
        return
    if fallback == "error":
        names = "; ".join(f"{x.name} {x.reason} ({_shorten(x.layers)})" for x in found)
        raise NotImplementedError(
            f"attention of {type(model).__name__} would pass sagebwd by: {names}. {WHAT_HELPS}; or register "
            "sagebwd with fallback='sdpa' to leave these layers in full precision"
        )
    for bypass in found:
        usage.fall_back(bypass.name, bypass.reason, fallback)


def find_bypasses(model: nn.Module) -> list[Bypass]:
    """The layers of a model whose attention diffusers hands to no backend, by class."""
    found: dict[tuple[str, str], list[str]] = {}
    for layer, module in model.named_modules():
        processor = getattr(module, "processor", None)
        named = [(type(module), _reads(type(module).forward, type(module)), False)]
        if processor is not None:
            named.append((type(processor), _reads(_call_of(type(processor)), type(processor)), True))
        for owner, words, is_processor in named:
            if reason := _why_bypassed(words, is_processor):
                found.setdefault((owner.__name__, reason), []).append(layer)
    return [Bypass(name, tuple(layers), reason) for (name, reason), layers in found.items()]


def _why_bypassed(words: frozenset[str], is_processor: bool) -> str:
    """The reason of a :class:`Bypass`, "" for none, from the words in the code of a layer or processor."""
    if DISPATCH in words:
        fixed = sorted(words & {x for member in AttentionBackendName for x in (member.name, member.value)})
        return f"sets its own backend, {fixed[0].lower()}" if fixed else ""
    called = sorted(words & ATTENTION)
    if called:
        return f"calls {called[0]} itself"
    if is_processor or ("softmax" in words and words & PRODUCTS):
        return "computes attention itself"
    return ""


def _call_of(processor: type) -> Callable[..., Any]:
    """The function that runs when a processor is called."""
    is_module = issubclass(processor, nn.Module) and processor.__call__ is nn.Module.__call__
    return processor.forward if is_module else processor.__call__


@functools.cache
def _reads(function: Callable[..., Any], owner: type) -> frozenset[str]:
    """The names and strings in the code of a function and of those it calls: methods of ``owner``, and
    functions of the modules they are in, but none of torch or of the dispatcher itself."""
    words: set[str] = set()
    to_read, seen = [function], set()
    while to_read:
        function = inspect.unwrap(to_read.pop())
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        used = _words(function.__code__)
        words |= used.names | used.attributes | used.strings
        called = [function.__globals__.get(name) for name in used.names]
        called += [getattr(owner, name, None) for name in used.attributes]
        to_read += [x for x in called if not _is_outside(x)]
    return frozenset(words)


def _is_outside(function: Any) -> bool:
    return getattr(function, "__name__", "") == DISPATCH or str(
        getattr(function, "__module__", "")
    ).startswith("torch.")


class _Words(NamedTuple):
    """names: of globals. attributes: of anything, with "matmul" for the operator @. strings: constants."""

    names: set[str]
    attributes: set[str]
    strings: set[str]


def _words(code: CodeType) -> _Words:
    """What a code object and those within it name."""
    words = _Words(set(), set(), {x for x in code.co_consts if isinstance(x, str)})
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM"):
            words.names.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            words.attributes.add(step.argval)
        elif step.argrepr in ("@", "@=") or step.opname.endswith("MATRIX_MULTIPLY"):
            words.attributes.add("matmul")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for mine, its in zip(words, _words(inner), strict=True):
                mine |= its
    return words


def _shorten(layers: tuple[str, ...]) -> str:
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"{layers[0] or 'the model itself'}{more}"


def _watch(model_class: type) -> None:
    """Let ``set_attention_backend`` look at the model first: for a name of ours, it must bypass nothing."""
    set_backend = model_class.set_attention_backend
    watchers = getattr(set_backend, "sagebwd_watchers", ())  # one of each copy of this package
    if _watch in watchers:
        return

    @functools.wraps(set_backend)
    def watching(model: nn.Module, backend: str) -> None:
        name = str(backend).lower()
        if name in _fallbacks:
            check(model, _fallbacks[name])
        set_backend(model, backend)
        if name in _fallbacks:
            _warn_of_followers(model, name)

    watching.sagebwd_watchers = (*watchers, _watch)
    model_class.set_attention_backend = watching


def _warn_of_followers(model: nn.Module, name: str) -> None:
    """Some processors ask for no backend of their own, and get that which was set last, for any model."""
    followers = {
        type(processor).__name__
        for processor in (getattr(module, "processor", None) for module in model.modules())
        if processor is not None and getattr(processor, "_attention_backend", None) != name
        if not _why_bypassed(_reads(_call_of(type(processor)), type(processor)), True)
    }
    if followers:
        warnings.warn(
            f"{', '.join(sorted(followers))} of {type(model).__name__} take the backend that any model was "
            f"given last; set {name!r} for this model last",
            stacklevel=3,
        )
