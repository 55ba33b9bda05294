"""``attn_implementation="sagebwd"`` for the models of Hugging Face transformers.

>>> from sagebwd.integrations.transformers import register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sagebwd")

transformers prepares the mask once per forward pass (:func:`transformers_masks.make_mask`) and calls the
attention in each layer (:func:`_attention`). A layer is computed as the model asks for, or refused with the
fix, or, with ``fallback="sdpa"``, computed by transformers in full precision.
"""

from __future__ import annotations

import functools
import re
import sys
from inspect import signature
from typing import Any

from torch import Tensor, nn

from sagebwd import usage
from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.integrations.varlen import (
    Layout,
    Seen,
    attend,
    dense_mask,
    find_layout,
    once_while_traced,
    read_mask,
    remember_recent,
)
from sagebwd.usage import Obstacle, find_obstacle
from sagebwd.validation import check_config, check_name
from sagebwd.window import CAUSAL, FULL, Window

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
except ImportError as error:
    raise ImportError(
        f"sagebwd.integrations.transformers needs Hugging Face transformers 5 or newer ({error}); "
        "pip install 'transformers>=5'"
    ) from error

from sagebwd.integrations.transformers_masks import (
    OWN_ATTENTION,
    USE_ANOTHER,
    additive,
    decode,
    describe_masks,
    make_mask,
)

#: Arguments with which a model asks for more than softmax(QKᵀ)V, and what they stand for.
FEATURES = {
    "softcap": "soft-capping of the logits",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "layer_head_mask": "a head mask",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "the paged cache of continuous batching",
    "block_table": "the paged cache of continuous batching",
}

#: Arguments of every model that :func:`_attention` reads itself.
KNOWN = {
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "dropout",
    "scaling",
    "sliding_window",
    "is_causal",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "output_attentions",
}

#: What models call their attention sinks (H,).
SINKS = "s_aux"

#: transformers gives names that contain these a special meaning.
RESERVED = ("eager", "sdpa", "flash", "flex", "paged")


def register(name: str = "sagebwd", config: SageConfig = DEFAULT_CONFIG, fallback: str = "error") -> None:
    """Make ``attn_implementation=name`` run SageBwd with ``config``, in all models of this process.

    Several names with different settings work side by side. Registered again, a name takes the new settings,
    also in models that use it already. A model that computes attention itself, with any name, is refused when
    it is built.

    Args:
        name: for ``from_pretrained(…, attn_implementation=name)`` or ``model.set_attn_implementation(name)``.
        config: what is quantized, and how.
        fallback: what becomes of a layer that SageBwd does not compute, such as one with soft-capping, a
            position bias or dropout. "error" refuses it. "sdpa" computes it in full precision by
            transformers' own "sdpa", or "eager" where only that can, and warns once;
            :func:`sagebwd.report` lists such layers.

    Raises:
        ValueError: the name means something else to transformers, ``config`` is not a SageConfig, or
            ``fallback`` is none of the two.
    """
    check_name(name)
    check_config(config)
    usage.check_fallback(fallback)
    if not re.fullmatch(r"[\w.-]+", name) or any(word in name for word in RESERVED):
        raise ValueError(
            f"name is {name!r}; take one of letters, digits, '.', '_' and '-' without {', '.join(RESERVED)}"
        )
    attentions = AttentionInterface()
    if name in attentions and getattr(attentions[name], "func", None) is not _attention:
        raise ValueError(f"name {name!r} is already registered by other code; choose another")
    describe_masks()
    AttentionInterface.register(name, functools.partial(_attention, config, fallback))
    AttentionMaskInterface.register(name, functools.partial(make_mask, fallback))
    _watch_models()


def _watch_models() -> None:
    """Notice a model that computes attention itself when it is built: it need not call anything of ours.

    transformers asks this method of each model, with the name that was requested, which attention to take.
    """
    ask = PreTrainedModel.get_correct_attn_implementation
    watchers = getattr(ask, "sagebwd_watchers", ())  # one of each copy of this package, see build_hub_kernel
    if _attention in watchers:
        return

    @functools.wraps(ask)
    def watching(model: PreTrainedModel, requested: str | None, *others: Any, **settings: Any) -> str:
        attention = AttentionInterface().get(requested, None) if requested else None
        is_ours = getattr(attention, "func", None) is _attention
        if is_ours and not type(model)._can_set_attn_implementation():
            _, fallback = attention.args
            usage.fall_back(type(model).__name__, OWN_ATTENTION, fallback, fix=USE_ANOTHER)
            requested = None  # transformers' choice, and its own mask
        return ask(model, requested, *others, **settings)

    watching.sagebwd_watchers = (*watchers, _attention)
    PreTrainedModel.get_correct_attn_implementation = watching


def _attention(
    config: SageConfig,
    fallback: str,
    /,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of transformers' interface.

    Documents are separated whether the mask, ``cu_seq_lens_q`` or ``position_ids`` separates them. The last
    is needed too: with an attention mask of ones, or a cache, transformers does not look at positions for the
    mask, and "sdpa" then attends across documents.

    Args:
        config, fallback: as given to :func:`register`.
        module: the attention layer.
        query: (B, H, N_q, D).
        key: (B, H_kv, N_kv, D), of which a static cache may fill only the first part.
        value: (B, H_kv, N_kv, D_v).
        attention_mask: what :func:`make_mask` returned.
        arguments: what else the model passes, of which :data:`KNOWN`, :data:`SINKS` and :data:`FEATURES`
            change the result, and any other name in the signature of the model's own eager attention.

    Returns:
        The output (B, N_q, H, D_v), and None for the attention weights, unless a layer in full precision
        computed them.
    """
    if decode(attention_mask) is not None:
        _check_described(attention_mask, key)
        key, value = (x[:, :, : attention_mask.shape[3]] for x in (key, value))
    layout, obstacle = _find_layout(module, query, key, attention_mask, arguments)
    obstacle = obstacle or _find_obstacle(module, key.shape[2], layout, arguments)
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    scaling = arguments.get("scaling")
    if obstacle := obstacle or find_obstacle(query, key, value, scaling, config):
        usage.fall_back(name, obstacle.reason, fallback, layer, fix=obstacle.fix or USE_ANOTHER)
        return _full_precision(module, query, key, value, attention_mask, layout, arguments)
    settings = {"layer": layer, "scale": scaling, "sinks": arguments.get(SINKS), "config": config}
    out = attend(name, query, key, value, layout, **settings)
    return out.transpose(1, 2).contiguous(), None


# --- Which query sees which key ----------------------------------------------------------------------------


def _find_layout(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, arguments: dict[str, Any]
) -> tuple[Layout | None, Obstacle | None]:
    """The layout of a layer's batch, or None and why there is none."""
    batch, _, n_q, _ = query.shape
    n_kv = key.shape[2]
    if key.shape[0] != batch:
        return None, Obstacle("queries and keys of different batch sizes")
    is_causal = arguments.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    if mask is None and is_causal and n_q not in (1, n_kv):
        return None, Obstacle("several queries after cached keys without a mask that says what they see")
    boundaries = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    given = [x is not None for x in boundaries]
    if any(given) and not (all(given) and batch == 1 and n_q == n_kv):
        raise ValueError(
            f"cu_seq_lens_q or cu_seq_lens_k comes with {batch} rows, {n_q} queries and {n_kv} keys; pass "
            "both, and all documents end to end in one row, without a cache"
        )
    position_ids = arguments.get("position_ids")
    is_text = isinstance(position_ids, Tensor) and position_ids.shape in ((batch, n_q), (1, n_q))
    if not is_text or n_q == 1 or n_q != n_kv:
        position_ids = None  # those of images have more dimensions; queries after a cache are of one document
    window = CAUSAL if is_causal and n_q > 1 else FULL
    if mask is None and position_ids is None and boundaries[0] is None:
        return Layout(window), None
    layout = _layout(batch, n_q, n_kv, window, mask, position_ids, *boundaries)
    if layout is None:
        is_pairwise = isinstance(mask, Tensor) and mask.dim() == 4
        what = "a mask for each pair of tokens" if is_pairwise else "a mask that is not 4-dimensional"
        return None, Obstacle(what, f"pass the model a mask of padding, (batch, tokens), {USE_ANOTHER}")
    return layout, None


@remember_recent
def _layout(
    batch: int,
    n_q: int,
    n_kv: int,
    window: Window,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
) -> Layout | None:
    """The layout of documents that any of the last four arguments keeps apart; None for any other mask."""
    seen = Seen(window)
    if mask is not None:  # which knows better than ``is_causal`` what the model asks for
        is_pairwise = isinstance(mask, Tensor) and mask.dim() == 4
        seen = (decode(mask) or read_mask(mask, batch, n_q, n_kv)) if is_pairwise else None
        if seen is None:
            return None
        if n_q == 1 and seen.window == CAUSAL and seen.labels is None:
            seen = seen._replace(window=FULL)
    return find_layout(seen, batch, n_q, n_kv, position_ids, cu_seq_lens_q, cu_seq_lens_k)


def _check_described(mask: Tensor, key: Tensor) -> None:
    """Refuse a mask of another batch or more keys."""
    if mask.shape[0] != key.shape[0] or mask.shape[3] > key.shape[2]:
        found, wanted = (mask.shape[0], mask.shape[3]), (key.shape[0], key.shape[2])
        raise ValueError(f"the mask is for (batch, keys) {found}, a layer has {wanted}; {USE_ANOTHER}")


# --- What SageBwd does not compute -------------------------------------------------------------------------


def _find_obstacle(
    module: nn.Module, n_kv: int, layout: Layout, arguments: dict[str, Any]
) -> Obstacle | None:
    """The first thing that a layer asks for and SageBwd does not compute."""
    if dropout := arguments.get("dropout"):
        return Obstacle(
            f"attention dropout ({dropout})",
            "set it to 0 in the model's config (attention_dropout, attn_pdrop or "
            "attention_probs_dropout_prob)",
        )
    if arguments.get("output_attentions"):
        return Obstacle(
            "the attention weights", 'set output_attentions=False, use attn_implementation="eager"'
        )
    for name in _asked_for(module, arguments):
        if name == SINKS:
            continue
        return Obstacle(f"{FEATURES[name]} ({name})" if name in FEATURES else f"the argument {name}")
    if getattr(module, "sinks", None) is not None and arguments.get(SINKS) is None:
        return Obstacle("attention sinks that the layer does not pass")
    # GPT-2 of older releases leaves its scalings to the attention function.
    scales_by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    scales = scales_by_layer or not getattr(module, "scale_attn_weights", True)
    if scales and arguments.get("scaling") is None:
        return Obstacle("a scaling that the layer does not pass", "update transformers")
    return _find_obstacle_of_window(n_kv, layout, arguments.get("sliding_window"))


def _find_obstacle_of_window(n_kv: int, layout: Layout, sliding_window: Any) -> Obstacle | None:
    """Why a window is not computed; that of the mask counts, as it does for "sdpa"."""
    if layout.has_holes:
        return Obstacle("a sliding window over padding inside the text", "pad left or right")
    has_limit = layout.window.left >= 0 or sliding_window is None
    if not has_limit and not (isinstance(sliding_window, int) and sliding_window >= n_kv):
        return Obstacle(
            f"a sliding_window of {sliding_window} that the layer's mask does not have",
            f"set config.sliding_window = None, {USE_ANOTHER}",
        )
    return None


def _asked_for(module: nn.Module, arguments: dict[str, Any]) -> list[str]:
    """Names of the arguments that change the result, beside those of every model.

    Models hand on whatever their forward was called with, most of it not meant for attention, so unknown
    arguments must pass. But the model's own eager attention names the arguments that change the result.
    """
    return [name for name in _changing_arguments(type(module)) if arguments.get(name) is not None]


@once_while_traced
def _changing_arguments(module_type: type[nn.Module]) -> tuple[str, ...]:
    return tuple(sorted(({SINKS, *FEATURES} | _eager_arguments(module_type)) - KNOWN))


# --- Full precision ----------------------------------------------------------------------------------------


def _full_precision(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    layout: Layout | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The layer by transformers' "sdpa", or by the model's own eager attention where only that can.

    Without a layout the mask is the model's own, and is handed on as it is.
    """
    arguments = dict(arguments)
    if layout is not None:
        is_plain = layout.window == FULL or (layout.window == CAUSAL and query.shape[2] == key.shape[2])
        arguments["is_causal"] = layout.window.right == 0
        is_plain = is_plain and layout.starts is None and layout.shown is None
        mask = None if is_plain else dense_mask(layout, query.shape[2], key.shape[2], query.device)
    bias = arguments.get("position_bias")
    if bias is not None:
        arguments["position_bias"] = bias[..., : key.shape[2]]
    asked = set(_asked_for(module, arguments))
    # What "sdpa" would ignore, because no argument asks for it.
    needs_eager = bool(arguments.get("output_attentions")) or getattr(module, "sinks", None) is not None
    if asked <= {"position_bias"} and not needs_eager:
        sdpa = _own(type(module), "ALL_ATTENTION_FUNCTIONS", AttentionInterface())["sdpa"]
        return sdpa(module, query, key, value, mask, **arguments)
    eager = _own(type(module), "eager_attention_forward", None)
    unknown = [
        name for name in asked - _eager_arguments(type(module)) if not _is_own(module, arguments[name])
    ]
    if eager is None or unknown:
        what = ", ".join(unknown) or "this layer"
        raise NotImplementedError(
            f"{type(module).__name__}: neither sagebwd nor transformers' own attention for {what} can run "
            f"here; {USE_ANOTHER}"
        )
    if mask is None and arguments.get("is_causal") and query.shape[2] > 1:
        mask = dense_mask(Layout(CAUSAL), query.shape[2], key.shape[2], query.device)
    if isinstance(mask, Tensor):
        mask = additive(mask, query.dtype)
    return eager(module, query, key, value, mask, **arguments)


def _is_own(module: nn.Module, value: Any) -> bool:
    """Whether this is a tensor of the layer, such as its sinks, which eager attention takes from there."""
    # FSDP may have put an ordinary attribute in place of a parameter.
    return any(value is own for own in (*vars(module).values(), *module._parameters.values()))


def _eager_arguments(module_type: type[nn.Module]) -> frozenset[str]:
    """Names of all arguments of the eager attention in the file of this layer, or of its base classes."""
    eager = (getattr(file, "eager_attention_forward", None) for file in _files(module_type))
    return frozenset(name for function in eager if function for name in signature(function).parameters)


def _own(module_type: type[nn.Module], name: str, default: Any) -> Any:
    """What is called ``name`` in the file of this layer, or in that of a base class."""
    found = (getattr(file, name, None) for file in _files(module_type))
    return next((x for x in found if x is not None), default)


def _files(module_type: type[nn.Module]) -> list[Any]:
    files = (sys.modules.get(base.__module__) for base in module_type.__mro__)
    return [file for file in files if file is not None]
