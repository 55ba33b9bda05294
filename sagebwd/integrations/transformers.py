"""``attn_implementation="sagebwd"`` for the models of Hugging Face transformers.

>>> from sagebwd.integrations.transformers import register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sagebwd")

transformers prepares the mask once per forward pass (:func:`_mask`) and calls the attention in each layer
(:func:`_attention`). Both do exactly what the model asks for, or raise an error with the fix.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.integrations.packing import Layout, attend, find_layout, remember_last

try:
    from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface, masking_utils
except ImportError as error:
    raise ImportError(
        f"sagebwd.integrations.transformers needs Hugging Face transformers 5 or newer ({error}); "
        "pip install 'transformers>=5'"
    ) from error

#: These compute everything that a model may ask for.
USE_ANOTHER = 'use attn_implementation="sdpa" or "eager" for this model'

#: Arguments with which a model asks for more than softmax(QKᵀ)V, and what they stand for.
REFUSED = {
    "softcap": "soft-capping of the logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "layer_head_mask": "a head mask",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "the paged cache of continuous batching",
    "block_table": "the paged cache of continuous batching",
}

#: transformers gives names that contain these a special meaning.
RESERVED = ("eager", "sdpa", "flash", "flex", "paged")

#: None before transformers had bidirectional masks.
BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)

#: Entries of a mask that are evaluated at once, to bound the memory.
MASK_ENTRIES_AT_ONCE = 2**24


def register(name: str = "sagebwd", config: SageConfig = DEFAULT_CONFIG) -> None:
    """Make ``attn_implementation=name`` run SageBwd with ``config``, in all models of this process.

    Several names with different settings work side by side. Registered again, a name takes the new settings,
    also in models that use it already. A model of which ``set_attn_implementation`` says that it "does not
    support setting its attention implementation" computes attention itself, with any name.

    Args:
        name: for ``from_pretrained(…, attn_implementation=name)`` or ``model.set_attn_implementation(name)``.
        config: what is quantized, and how.

    Raises:
        ValueError: the name means something else to transformers, or ``config`` is not a SageConfig.
    """
    if not isinstance(config, SageConfig):
        raise ValueError(f"config is a {type(config).__name__}; pass a sagebwd.SageConfig")
    if not re.fullmatch(r"[\w.-]+", name) or any(word in name for word in RESERVED):
        raise ValueError(
            f"name is {name!r}; take one of letters, digits, '.', '_' and '-' without {', '.join(RESERVED)}"
        )
    attentions = AttentionInterface()
    if name in attentions and getattr(attentions[name], "func", None) is not _attention:
        raise ValueError(f"name {name!r} is already registered by other code; choose another")
    AttentionInterface.register(name, functools.partial(_attention, config))
    AttentionMaskInterface.register(name, _mask)


def _attention(
    config: SageConfig,
    /,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface.

    Documents are separated whether the mask, ``cu_seq_lens_q`` or ``position_ids`` separates them. The last
    is needed too: with an attention mask of ones, or a cache, transformers does not look at positions for the
    mask, and "sdpa" then attends across documents.

    Args:
        module: the attention layer.
        query: (B, H, N_q, D).
        key, value: (B, H_kv, N_kv, D), of which a static cache may fill only the first part.
        attention_mask: what :func:`_mask` returned, (B, N_kv used).
        dropout, sliding_window, output_attentions: refused where they ask for anything.
        scaling: factor of the logits; 1/√D by default.
        position_ids: (B or 1, N_q), where the model passes them.
        cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) boundaries of documents packed into the only row.
        others: refused if they would change the result; see :func:`_check_others`.

    Returns:
        The output (B, N_q, H, D), and None for the attention weights, which are never computed.
    """
    if attention_mask is not None:
        _check_mask(attention_mask, key)
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
    n_q, n_kv = query.shape[2], key.shape[2]
    _check_features(module, n_kv, dropout, scaling, sliding_window, output_attentions)
    _check_others(module, others)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    if attention_mask is None and is_causal and n_q not in (1, n_kv):
        raise NotImplementedError(
            f"{type(module).__name__} passes {n_q} queries, {n_kv} keys and no mask, which does not say "
            f"what the queries see; {USE_ANOTHER}"
        )
    _check_cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k, query.shape[0], n_q, n_kv)
    layout = _layout(
        query.shape[0], n_q, n_kv, is_causal, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k
    )
    return attend(query, key, value, layout, scale=scaling, config=config), None


@remember_last
def _layout(
    batch: int,
    n_q: int,
    n_kv: int,
    is_causal: bool,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
) -> Layout:
    """The layout of a layer's batch; a mask knows better than ``is_causal`` what the model asks for."""
    if position_ids is not None and position_ids.shape not in ((batch, n_q), (1, n_q)):
        position_ids = None  # not positions in a text: those of images have more dimensions
    if cu_seq_lens_q is not None and not torch.equal(cu_seq_lens_q, cu_seq_lens_k):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k differ; with as many queries as keys they are the same"
        )
    is_causal = (is_causal if mask is None else not bool((mask < 0).any())) and n_q > 1
    if mask is None and position_ids is None and cu_seq_lens_q is None:
        return Layout(is_causal)
    if mask is None:
        device = next(x.device for x in (position_ids, cu_seq_lens_q) if x is not None)
        mask = torch.ones(batch, n_kv, dtype=torch.int32, device=device)
    return find_layout(
        mask, n_q=n_q, is_causal=is_causal, position_ids=position_ids, cu_seqlens=cu_seq_lens_q
    )


@torch.compiler.disable(reason="it reads the values of the mask")
def _mask(
    batch_size: int,
    kv_length: int,
    *,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    cache_position: Tensor | None = None,
    mask_function: Callable[..., Tensor] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """The mask function of transformers' interface: which keys are real, and in which document they are.

    Called with each key's padding (``attention_mask``) and a function that says which query sees which key.

    Args:
        batch_size, q_length, kv_length: B, N_q and N_kv.
        q_offset, kv_offset: position of the first query and key; keys past the last query are slots of a
            static cache that are not filled yet.
        cache_position: (N_q,) positions of the queries, which older releases pass for N_q and ``q_offset``.
        mask_function: of broadcast indices (batch, head, query position, key position).
        attention_mask: (B, positions), false for padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: None may stand for a mask without padding.
        local_size: window or chunk that ``mask_function`` implements, for the message.
        use_vmap: the user changed ``mask_function``, and it need not take broadcast indices.
        config: of the model.

    Returns:
        None if the attention layer's ``is_causal`` and the shapes say it all. Else (B, N_kv used) int32: the
        index of each key's document from 1 on, 0 for padding; negative if attention is bidirectional. That
        goes wherever transformers expects a 2-D mask of padding.
    """
    if not _takes_attention_functions(type(config)):
        raise NotImplementedError(
            f"the model of {type(config).__name__} computes attention itself and would ignore sagebwd; "
            + USE_ANOTHER
        )
    if use_vmap:
        raise NotImplementedError(
            "sagebwd does not take a mask changed by or_mask_function or and_mask_function; leave it out, or "
            + USE_ANOTHER
        )
    is_static = isinstance(q_offset, Tensor)
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    q_offset = int(q_offset)
    documents, is_causal = None, mask_function is masking_utils.causal_mask_function
    if not is_causal and mask_function is not BIDIRECTIONAL:
        q, kv = (torch.arange(n, device=device) for n in (q_length, kv_length))
        documents, is_causal = _recognise(mask_function, batch_size, q + q_offset, kv + kv_offset, local_size)
    n_kv = min(kv_length, q_offset + q_length - kv_offset) if is_causal or is_static else kv_length
    is_shown = _shown(attention_mask, kv_offset, n_kv)
    may_skip = allow_is_causal_skip if is_causal else allow_is_bidirectional_skip
    # None must not leave open which keys the queries are, nor which slots of a static cache are filled.
    is_clear = n_kv == kv_length and (q_length in (1, n_kv) or not is_causal)
    if documents is None and is_shown is None and is_clear and may_skip:
        return None
    if documents is None:
        documents = torch.ones(batch_size, kv_length, dtype=torch.int32, device=device)
    documents = documents[:, :n_kv].int() * (1 if is_causal else -1)
    return documents if is_shown is None else documents * is_shown


def _shown(attention_mask: Tensor | None, first: int, n: int) -> Tensor | None:
    """Which of n keys from position ``first`` on are not padding, (B, n), or None if all are."""
    if attention_mask is None:
        return None
    if attention_mask.shape[1] != n:  # else it begins at ``first``: generate() may have prepared it already
        attention_mask = attention_mask[:, first : first + n]
    mask = F.pad(attention_mask.bool(), (0, n - attention_mask.shape[1]))
    return None if mask.all() else mask


@functools.cache
def _takes_attention_functions(config_type: type) -> bool:
    """Whether the model with this config calls a registered attention, as far as transformers knows.

    It lets a model be built with any registered name. One that computes attention itself would then take the
    mask None, which means causal here, for no mask at all, and train on tokens it should predict.
    """
    model_type = MODEL_MAPPING.get(config_type, None)
    return not isinstance(model_type, type) or model_type._can_set_attn_implementation()


def _recognise(
    mask_function: Callable[..., Tensor], batch: int, q: Tensor, kv: Tensor, local_size: int | None
) -> tuple[Tensor | None, bool]:
    """Evaluate which query sees which key, and refuse all but whole documents.

    Args:
        mask_function: of broadcast indices (batch, head, query position, key position).
        q, kv: (N_q,), (N_kv,) positions.
        local_size: window or chunk that ``mask_function`` implements, for the message.

    Returns:
        The index of each key's document, from 1 on, (B, N_kv), or None if each row is one; and whether
        attention within it is causal.
    """
    rows = torch.arange(batch, device=q.device)
    documents, of_q = (torch.ones(batch, len(x), dtype=torch.int64, device=q.device) for x in (kv, q))
    if torch.equal(q, kv):
        sees_previous = mask_function(rows[:, None], rows.new_zeros(1, 1), q[None, 1:], kv[None, :-1])
        documents[:, 1:] += (~sees_previous.expand(batch, len(kv) - 1)).cumsum(1)
        of_q = documents
    for is_causal in (True, False):
        if _sees_documents(mask_function, of_q, documents, q, kv, is_causal):
            return (documents if bool((documents > 1).any()) else None), is_causal
    window = f" (a window or chunk of {local_size})" if local_size else ""
    raise NotImplementedError(
        f"this model lets queries see only some of {len(kv)} keys{window}, and sagebwd knows causal and "
        f"bidirectional attention of whole documents; shorten the input, or {USE_ANOTHER}"
    )


def _sees_documents(
    mask_function: Callable[..., Tensor],
    of_q: Tensor,
    of_kv: Tensor,
    q: Tensor,
    kv: Tensor,
    is_causal: bool,
) -> bool:
    """Whether a query sees its document, up to itself if ``is_causal``, and nothing else.

    ``of_q`` (B, N_q) and ``of_kv`` (B, N_kv) are the documents of the queries and keys at ``q`` and ``kv``.
    """
    batch, at_once = torch.arange(len(of_q), device=q.device), max(1, MASK_ENTRIES_AT_ONCE // of_kv.numel())
    batch, kv = batch[:, None, None, None], kv[None, None, None]
    for start in range(0, len(q), at_once):
        some = slice(start, start + at_once)
        some_q = q[None, None, some, None]
        expected = of_q[:, None, some, None] == of_kv[:, None, None]
        expected = expected & (kv <= some_q) if is_causal else expected
        seen = mask_function(batch, torch.zeros_like(kv[..., :1]), some_q, kv)
        if not torch.equal(seen.expand_as(expected), expected):
            return False
    return True


def _check_mask(mask: Any, key: Tensor) -> None:
    """Refuse a mask that :func:`_mask` did not make."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.dim() != 2:
        found = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"attention_mask is {found}; sagebwd takes no mask for each pair of tokens: pass one of padding, "
            f"(batch, tokens), to the model, or {USE_ANOTHER}"
        )
    if mask.shape[0] != key.shape[0] or mask.shape[1] > key.shape[2]:
        raise ValueError(
            f"the mask is for (batch, keys) {tuple(mask.shape)}, a layer has {(key.shape[0], key.shape[2])}; "
            + USE_ANOTHER
        )


def _check_features(
    module: nn.Module,
    n_kv: int,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    output_attentions: bool | None,
) -> None:
    """Refuse what :func:`sagebwd.sage_attention` does not compute, among what every model may ask for."""
    if dropout:
        raise NotImplementedError(
            f"attention dropout is {dropout}, which sagebwd does not do; set it to 0 in the model's config "
            "(attention_dropout, attn_pdrop or attention_probs_dropout_prob)"
        )
    if sliding_window is not None and (not isinstance(sliding_window, int) or sliding_window < n_kv):
        raise NotImplementedError(
            f"sliding_window is {sliding_window}, there are {n_kv} keys, and sagebwd has no windows; shorten "
            f"the input, set config.sliding_window = None, or {USE_ANOTHER}"
        )
    if output_attentions:
        raise NotImplementedError(
            "sagebwd never computes the attention weights; set output_attentions=False, or "
            'use attn_implementation="eager"'
        )
    if getattr(module, "sinks", None) is not None:
        raise NotImplementedError(f"{type(module).__name__} has attention sinks; {USE_ANOTHER}")
    # GPT-2 of older releases leaves its scalings to the attention function.
    scales_by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    if scaling is None and (scales_by_layer or not getattr(module, "scale_attn_weights", True)):
        raise NotImplementedError(f"{type(module).__name__} does not pass its scaling; update transformers")


def _check_others(module: nn.Module, others: dict[str, Any]) -> None:
    """Refuse arguments that change the result.

    Models hand on whatever their forward was called with, most of it not meant for attention, so unknown
    arguments must pass. But the model's own eager attention names the arguments that change the result.
    """
    for name, value in others.items():
        if value is None:
            continue
        if name in REFUSED:
            raise NotImplementedError(f"the model asks for {REFUSED[name]} ({name}); {USE_ANOTHER}")
        if name in _eager_arguments(type(module)):
            raise NotImplementedError(
                f"the model's attention takes {name}, which sagebwd does not support; {USE_ANOTHER}"
            )


@functools.cache
def _eager_arguments(module_type: type[nn.Module]) -> frozenset[str]:
    """Names of all arguments of the eager attention in the file of this layer, or of its base classes."""
    files = (sys.modules.get(base.__module__) for base in module_type.__mro__)
    eager = (getattr(file, "eager_attention_forward", None) for file in files)
    return frozenset(name for function in eager if function for name in signature(function).parameters)


def _check_cu_seq_lens(
    cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, batch: int, n_q: int, n_kv: int
) -> None:
    """Refuse boundaries of documents that do not cut one row of as many queries as keys."""
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("only one of cu_seq_lens_q and cu_seq_lens_k is given; pass both")
    if cu_seq_lens_q is not None and (batch != 1 or n_q != n_kv):
        raise ValueError(
            f"cu_seq_lens_q comes with {batch} rows, {n_q} queries and {n_kv} keys; lay all documents end to "
            "end in one row, without a cache"
        )
