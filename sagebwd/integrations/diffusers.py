"""SageBwd as an attention backend of Hugging Face diffusers.

>>> from sagebwd.integrations.diffusers import register
>>> register()
>>> transformer.set_attention_backend("sagebwd")

diffusers lets the attention processors of a model choose a backend. Some do not ask: they call PyTorch, or
compute attention themselves, whatever backend is set. :func:`check` finds them in the source text of a model,
and ``set_attention_backend`` runs it for the names that are registered here.

diffusers 0.42 has no function that adds a backend: its backends are the members of an enumeration. So this
module adds a member to it, and its function to diffusers' private registry.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sagebwd import usage
from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.integrations.alignment import check_refused
from sagebwd.integrations.sdpa import layout_of
from sagebwd.integrations.varlen import Layout, attend
from sagebwd.masks import find_key_mask
from sagebwd.usage import Obstacle, counted_attention, find_obstacle
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

#: A layer that calls one of these computes attention, as does one with a softmax and a matrix product.
ATTENTION = (
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "memory_efficient_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_attention",
)
SOFTMAX_AND_PRODUCT = re.compile(r"softmax.*(matmul|bmm|einsum| @ )", re.DOTALL)
#: A processor that hands its attention on, but to this backend.
FIXED_BACKEND = re.compile(r"backend=(?:AttentionBackendName\.|[\"'])(\w+)")

USE_NATIVE = "call model.set_attention_backend('native')"
WHAT_HELPS = (
    "Keep diffusers' own backend and use sagebwd.integrations.torch_flash, which reaches all that calls "
    "scaled_dot_product_attention, or replace these processors with model.set_attn_processor"
)

#: ``fallback`` of each name that is registered here.
_fallbacks: dict[str, str] = {}


# --- The backend -------------------------------------------------------------------------------------------


def register(name: str = "sagebwd", config: SageConfig = DEFAULT_CONFIG, fallback: str = "error") -> None:
    """Make ``model.set_attention_backend(name)`` run SageBwd with ``config``.

    Several names with different settings work side by side. Registered again, a name takes the new settings,
    also in models that use it already. ``set_attention_backend(name)`` then runs :func:`check` first;
    diffusers' context manager ``attention_backend(name)`` does not, as it knows no model.

    Args:
        name: lower-case letters, digits and underscores.
        config: what is quantized, and how.
        fallback: what becomes of attention that SageBwd does not compute, such as a mask that is a bias, and
            of processors that pass by every backend. "error" refuses it. "sdpa" leaves it in full precision
            and warns once; :func:`sagebwd.report` lists it.

    Raises:
        ValueError: the name is diffusers' own or malformed, ``config`` is not a SageConfig, or ``fallback``
            is none of the two.
    """
    check_name(name)
    check_config(config)
    usage.check_fallback(fallback)
    if not re.fullmatch(r"[a-z]\w*", name) or name != name.lower():
        raise ValueError(f"name is {name!r}; take one of lower-case letters, digits and '_'")
    if name in [*AttentionBackendName, *BACKENDS.list_backends()] and name not in _fallbacks:
        raise ValueError(f"name {name!r} is a backend of diffusers; choose another")
    _fallbacks[name] = fallback
    BACKENDS.register(_member(name))(functools.partial(_attention, config, fallback))
    for model_class in (ModelMixin, AttentionModuleMixin):
        _watch(model_class)


@functools.cache
def _member(name: str) -> AttentionBackendName:
    """A member of diffusers' enumeration that is new there."""
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[name] = member
    return member


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
) -> Tensor:
    """The function of diffusers' interface, which drops every argument that is not named here.

    Args:
        config, fallback: as given to :func:`register`.
        query: (B, N_q, H, D).
        key, value: (B, N_kv, H_kv, D) and (B, N_kv, H_kv, D_v).
        attn_mask: as of ``scaled_dot_product_attention``, or (B, N_kv): keys that take part.
        dropout_p, is_causal, scale, enable_gqa: as of ``scaled_dot_product_attention``.
        window_size, softcap, return_lse, return_attn_probs: refused where they ask for anything.
        deterministic: either way; the same inputs give the same bits.
        _parallel_config: of diffusers' context parallelism.

    Returns:
        The output (B, N_q, H, D_v).
    """
    window = () if tuple(window_size) == (-1, -1) else window_size
    asked = {"return_lse": return_lse, "return_attn_probs": return_attn_probs}
    check_refused(USE_NATIVE, window_size=window, softcap=softcap, **asked)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask, layout, obstacle = _read_mask(attn_mask, q, k)
    if dropout_p:
        obstacle = Obstacle(f"attention dropout ({dropout_p})", "set it to 0")
    elif _parallel_config is not None:
        obstacle = Obstacle("context parallelism")
    elif layout is not None and is_causal:
        obstacle = Obstacle("a mask for each pair of tokens together with is_causal")
    if obstacle := obstacle or find_obstacle(q, k, v, scale, config):
        usage.fall_back(_running.name, obstacle.reason, fallback, fix=obstacle.fix or USE_NATIVE)
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return attention_dispatch._native_attention(*arguments, _parallel_config=_parallel_config)
    settings = {"scale": scale, "config": config}
    if layout is not None:
        return attend(_running.name, q, k, v, layout, **settings).transpose(1, 2)
    settings |= {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": enable_gqa}
    return counted_attention(_running.name, q, k, v, **settings).transpose(1, 2)


def _read_mask(mask: Any, q: Tensor, k: Tensor) -> tuple[Any, Layout | None, Obstacle | None]:
    """A mask that hides keys as :func:`sage_attention` takes it; or the layout that it shows; or why neither.

    diffusers' own backend reads (B, N_kv) so. ``Attention.prepare_attention_mask`` repeats a mask for each
    head, to (B, H, 1, N_kv). Whether heads differ after all is in the values, which nobody waits for: then
    this mask has NaN there, which is an error on a CPU, and NaN in the output on a GPU. The values of a mask
    for each pair of tokens, such as the window of ACE-Step, are read once; a compiled graph reads none.
    """
    if isinstance(mask, Tensor):
        mask = _of_keys(mask, q, k)
    try:
        find_key_mask(q, k, mask, None)
    except ValueError as error:
        is_pairwise = isinstance(mask, Tensor) and mask.shape[-2:] == (q.shape[2], k.shape[2])
        layout, _ = layout_of(mask, q.shape[0], *mask.shape[-2:]) if is_pairwise else (None, "")
        fix = f"{USE_NATIVE} ({error})"
        return None, layout, None if layout else Obstacle("a mask that does more than hide keys", fix)
    return mask, None, None


def _of_keys(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask that hides keys as (B or 1, 1, 1, N_kv), where its shape tells; any other as it is."""
    if mask.shape == (k.shape[0], k.shape[2]):
        return mask[:, None, None]
    is_repeated = mask.dim() == 4 and mask.shape[1] > 1 and mask.shape[2] == 1 < q.shape[2]
    if not is_repeated or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return mask
    differs = (mask != mask[:, :1]).any(1, keepdim=True)
    first = mask[:, :1]
    additive = torch.where(first, 0.0, -torch.inf) if mask.dtype == torch.bool else first
    return additive.masked_fill(differs, torch.nan)


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
        names = "; ".join(f"{name} {reason} ({_shorten(x)})" for (name, reason), x in found.items())
        raise NotImplementedError(
            f"attention of {type(model).__name__} would pass sagebwd by: {names}. {WHAT_HELPS}; or register "
            "sagebwd with fallback='sdpa' to leave these layers in full precision"
        )
    for name, reason in found:
        usage.fall_back(name, reason, fallback)


def find_bypasses(model: nn.Module) -> dict[tuple[str, str], list[str]]:
    """The layers of a model whose attention diffusers hands to no backend: their names in the model.

    By the class of the processor, or of the layer where it has none, and by what that does instead.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for layer, module in model.named_modules():
        owners = {type(module): False}
        if getattr(module, "processor", None) is not None:
            owners[type(module.processor)] = True
        for owner, is_processor in owners.items():
            if reason := _why_bypassed(owner, is_processor):
                found.setdefault((owner.__name__, reason), []).append(layer)
    return found


@functools.cache
def _why_bypassed(owner: type, is_processor: bool) -> str:
    """What a layer or processor does instead, from its source text; "" if a backend sees its attention."""
    text = _source(owner, is_processor)
    if DISPATCH in text:
        fixed = FIXED_BACKEND.search(text)
        return f"sets its own backend, {fixed[1].lower()}" if fixed else ""
    for function in ATTENTION:
        if function in text:
            return f"calls {function} itself"
    return "computes attention itself" if is_processor or SOFTMAX_AND_PRODUCT.search(text) else ""


def _source(owner: type, is_processor: bool) -> str:
    """Of the method that runs in a layer; of a processor and all that it inherits from. "" where unknown."""
    classes = [x for x in owner.__mro__ if x not in (nn.Module, object)]
    try:
        return "".join(map(inspect.getsource, classes if is_processor else [owner.forward]))
    except (OSError, TypeError):
        return ""


def _shorten(layers: list[str]) -> str:
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"{layers[0] or 'the model itself'}{more}"


# --- What set_attention_backend does -----------------------------------------------------------------------


class _Running(threading.local):
    """The attention layer that runs, for :func:`sagebwd.report`: a backend is not told."""

    name = "diffusers"


_running = _Running()


def _enter(module: nn.Module, _: Any) -> None:
    if not torch.compiler.is_compiling():
        _running.name = type(module.processor).__name__


def _leave(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        _running.name = _Running.name


def _watch(model_class: type) -> None:
    """Let ``set_attention_backend`` check models for the names that are registered here."""
    set_backend = model_class.set_attention_backend
    watchers = getattr(set_backend, "sagebwd_watchers", ())  # one of each copy of this package
    if _watch in watchers:
        return

    @functools.wraps(set_backend)
    def watching(model: nn.Module, backend: str) -> None:
        if (name := backend.lower()) in _fallbacks:
            check(model, _fallbacks[name])
            _follow(model, name)
        set_backend(model, backend)

    watching.sagebwd_watchers = (*watchers, _watch)
    model_class.set_attention_backend = watching


def _follow(model: nn.Module, name: str) -> None:
    """Let each layer say when it runs, and warn of processors without a backend of their own."""
    followers = set()
    for module in model.modules():
        if (processor := getattr(module, "processor", None)) is None:
            continue
        if not hasattr(processor, "_attention_backend") and not _why_bypassed(type(processor), True):
            followers.add(type(processor).__name__)
        if _enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)
    if followers:
        warnings.warn(
            f"{', '.join(sorted(followers))} of {type(model).__name__} take the backend that any model was "
            f"given last; set {name!r} for this model last",
            stacklevel=4,
        )
