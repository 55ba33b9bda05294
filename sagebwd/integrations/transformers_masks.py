"""The masks of Hugging Face transformers, without an entry for each pair of tokens.

transformers describes a mask by a function of (batch, head, query, key), which it composes of its own few,
and by each key's padding. :func:`describe_masks` has those functions say what they are. :func:`make_mask`
then needs no values, and a model is compiled as one graph.

transformers hands its layers one tensor of four dimensions. So a mask is described by a tensor
(:func:`encode`) that no model can mistake for an ordinary mask: adding it to logits is an error of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MODEL_MAPPING, masking_utils

from sagebwd import usage
from sagebwd.integrations.varlen import Seen, once_while_traced, recognise
from sagebwd.masks import has_values
from sagebwd.window import CAUSAL, FULL, Window

MaskFunction = Callable[..., Tensor]

#: These compute everything that a model may ask for.
USE_ANOTHER = 'use attn_implementation="sdpa" or "eager" for this model'

OWN_ATTENTION = "attention that the model computes itself"

CAUSAL_MASK = masking_utils.causal_mask_function

#: What the values of a described mask are: keys that take part; documents, 0 for hidden keys; documents.
SHOWN, SHOWN_DOCUMENTS, DOCUMENTS = torch.int8, torch.int32, torch.int64


class Pattern(NamedTuple):
    """What a mask function lets queries see, padding aside.

    window: how far a query sees.
    documents: of positions (N_kv,) the labels (B, N_kv), of which neighbours with the same share a document;
        None: each row is one.
    """

    window: Window
    documents: Callable[[Tensor], Tensor] | None = None


# --- What transformers' functions say ----------------------------------------------------------------------


def pattern_of(function: MaskFunction) -> Pattern | None:
    """What a mask function that transformers composed of its own lets queries see; None for any other."""
    if function is CAUSAL_MASK:
        return Pattern(CAUSAL)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(FULL)
    return getattr(function, "sagebwd_pattern", None)


def _intersection(*functions: MaskFunction) -> Pattern | None:
    """What all of ``functions`` let queries see, of which at most one has documents."""
    patterns = [pattern_of(function) for function in functions]
    if None in patterns:
        return None
    documents = [pattern.documents for pattern in patterns if pattern.documents is not None]
    if len(documents) > 1:
        return None
    left = [pattern.window.left for pattern in patterns if pattern.window.left >= 0]
    right = [pattern.window.right for pattern in patterns if pattern.window.right >= 0]
    window = Window(min(left, default=-1), min(right, default=-1))
    return Pattern(window, documents[0] if documents else None)


#: By name of a function that makes a mask function: of its arguments, what that lets queries see.
DESCRIPTIONS: dict[str, Callable[..., Pattern | None]] = {
    "and_masks": _intersection,
    "sliding_window_overlay": lambda window: Pattern(Window(window - 1, -1)),
    "sliding_window_bidirectional_overlay": lambda window: Pattern(Window(window, window)),
    "packed_sequence_mask_function": lambda labels: Pattern(FULL, lambda _: labels),
    "chunked_overlay": lambda size, padding: Pattern(FULL, lambda keys: (keys - padding[:, None]) // size),
    # Within a document positions rise by one, so distances are what they are without it.
    "remap_positions_for_packed_sequence": lambda function, _: pattern_of(function),
}


def describe_masks() -> None:
    """Let the mask functions that transformers makes from now on say what they are, to :func:`pattern_of`.

    What they were made of lies in their closures, which torch.compile cannot open.
    """
    for name, describe in DESCRIPTIONS.items():
        make = getattr(masking_utils, name, None)
        if make is not None and not hasattr(make, "sagebwd_describes"):
            setattr(masking_utils, name, _describing(make, describe))
    if not hasattr(masking_utils.find_packed_sequence_indices, "sagebwd_describes"):
        masking_utils.find_packed_sequence_indices = _of_one_row(masking_utils.find_packed_sequence_indices)


def _describing(make: Callable[..., MaskFunction], describe: Callable[..., Pattern | None]) -> Any:
    @functools.wraps(make)
    def making(*args: Any, **kwargs: Any) -> MaskFunction:
        function = make(*args, **kwargs)
        function.sagebwd_pattern = describe(*args, *kwargs.values())
        return function

    making.sagebwd_describes = True
    return making


def _of_one_row(find: Callable[[Tensor], Tensor | None]) -> Any:
    """``find`` of the row that all rows of positions are, so that its labels say so, too, by their stride."""

    @functools.wraps(find)
    def finding(position_ids: Tensor) -> Tensor | None:
        if position_ids.shape[0] == 1 or position_ids.stride(0) != 0:
            return find(position_ids)
        labels = find(position_ids[:1])
        return None if labels is None else labels.expand(position_ids.shape)

    finding.sagebwd_describes = True
    return finding


# --- As one tensor -----------------------------------------------------------------------------------------


def encode(
    window: Window, shown: Tensor | None, labels: Tensor | None, batch: int, n: int, device: Any
) -> Tensor:
    """A window, keys that take part and documents as one tensor (B, left + 3, right + 3, N_kv).

    Models hand it on, slice its keys and move it, and do not read it. What is no tensor here stands in its
    shape and strides: the window in the dimensions of heads and queries, along which it is expanded, as it
    is along keys if nothing is hidden.
    """
    if shown is None:
        one = torch.ones(1, 1, dtype=SHOWN, device=device)
        values = one if labels is None else labels.to(DOCUMENTS)
    else:
        values = shown.to(SHOWN) if labels is None else ((labels + 1) * shown).to(SHOWN_DOCUMENTS)
    return values.expand(batch, n)[:, None, None].expand(-1, window.left + 3, window.right + 3, -1)


def decode(mask: Any) -> Seen | None:
    """What :func:`encode` made a mask of; None for any other."""
    is_described = (
        isinstance(mask, Tensor)
        and mask.dim() == 4
        and mask.dtype in (SHOWN, SHOWN_DOCUMENTS, DOCUMENTS)
        and mask.shape[1] > 1
        and mask.shape[2] > 1
    )
    if not is_described:
        return None
    values, window = mask[:, 0, 0], Window(mask.shape[1] - 3, mask.shape[2] - 3)
    if mask.dtype == SHOWN:
        return Seen(window, None if mask.stride(3) == 0 else values != 0)
    return Seen(window, None if mask.dtype == DOCUMENTS else values != 0, values)


# --- The mask of a model -----------------------------------------------------------------------------------


def make_mask(fallback: str, /, **given: Any) -> Tensor | None:
    """The mask function of transformers' interface.

    Args:
        fallback: what to do where SageBwd cannot take the mask: "error" or "sdpa".
        given: the arguments of transformers' ``sdpa_mask``, with the model's ``config`` and ``dtype``. Where
            ``q_offset`` is a tensor, keys past the last query are slots of a cache that are not filled yet.

    Returns:
        None if the attention layer's ``is_causal`` and the shapes say it all. For one query, or where each
        sees the same keys, these keys as (B, 1, 1, N_kv) bool. Else what :func:`encode` makes of N_kv used
        keys. For a model that may compute with its causal mask, and with ``fallback`` "sdpa" for any mask
        that is none of these, that of "sdpa", (B, 1, N_q, N_kv) bool, or of "eager" for a model that computes
        attention itself.
    """
    dense = functools.partial(masking_utils.sdpa_mask, **given)
    config, attention_mask = given.get("config"), given.get("attention_mask")
    batch, kv_length, kv_offset = given["batch_size"], given["kv_length"], given.get("kv_offset", 0)
    q_length, q_offset, device = (given.get(name) for name in ("q_length", "q_offset", "device"))
    is_static = isinstance(q_offset, Tensor)
    if (positions := given.get("cache_position")) is not None:  # of the queries, in older releases
        q_length, q_offset, device = positions.shape[0], positions[0], positions.device
    model, hands_on_its_mask = _describe_model(type(config))
    if model:
        usage.fall_back(model, OWN_ATTENTION, fallback, fix=USE_ANOTHER)
        return additive(dense(allow_is_causal_skip=False), given.get("dtype", torch.float32))
    if q_length == 1:
        return dense()
    is_read = not isinstance(q_offset, Tensor) or has_values(q_offset)
    n_used = int(q_offset) + q_length - kv_offset if is_read else q_length  # keys up to the last query
    pattern = None if given.get("use_vmap") else pattern_of(given.get("mask_function", CAUSAL_MASK))
    n_kv, seen = kv_length, None
    if pattern is not None and (n_used == kv_length or (is_read and not pattern.window.is_sliding)):
        n_kv = min(kv_length, n_used) if pattern.window.right == 0 or is_static else kv_length
        keys = torch.arange(n_kv, device=device) + kv_offset
        labels = None if pattern.documents is None else pattern.documents(keys)[:, :n_kv]
        seen = Seen(pattern.window.narrowed(n_kv, n_kv), labels=labels)
    elif is_read and has_values(torch.empty(0)):
        pairs = dense(attention_mask=None, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)[
            :, 0
        ]
        if n_used < kv_length and not pairs[..., n_used:].any():
            pairs, n_kv = pairs[..., :n_used], n_used
        seen = recognise(pairs, batch)
    if seen is None or (seen.shown is not None and not seen.hides_queries):
        if fallback == "error":
            raise _refusal(config, kv_length, given.get("local_size"))
        return dense(allow_is_causal_skip=False)
    window, shown, labels, _ = seen
    padding = _shown(attention_mask, kv_offset, n_kv)
    shown = padding if shown is None else shown if padding is None else shown & padding
    is_causal = window.right == 0
    # None must not leave open which keys the queries are, nor which slots of a static cache are filled.
    is_clear = n_kv == kv_length and (q_length == n_kv or not is_causal)
    is_plain = labels is None and shown is None and not window.is_sliding
    skip, default = ("allow_is_causal_skip", True) if is_causal else ("allow_is_bidirectional_skip", False)
    if is_plain and is_clear and given.get(skip, default):
        return None
    is_asked_for = not given.get("allow_is_causal_skip", True)
    if is_causal and not hands_on_its_mask and (is_asked_for or (window == CAUSAL and labels is None)):
        return dense(allow_is_causal_skip=False)
    if window == FULL and labels is None and shown is not None:
        return F.pad(shown, (0, kv_length - n_kv))[:, None, None]
    return encode(window, shown, labels, batch, n_kv, device)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as "eager" attentions add it to the logits; any other mask as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros((), dtype=dtype, device=mask.device).where(mask, torch.finfo(dtype).min)


def _shown(attention_mask: Tensor | None, first: int, n: int) -> Tensor | None:
    """Which of n keys from position ``first`` on are not padding, (B, n), or None if all are known to be."""
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, first : first + n].bool()
    shown = F.pad(attention_mask, (0, n - attention_mask.shape[1]))
    return None if has_values(shown) and shown.all() else shown


@once_while_traced
def _describe_model(config_type: type) -> tuple[str, bool]:
    """Of a config's model: its name if it calls no registered attention, and whether it hands on its mask.

    transformers lets a model be built with any registered name. One that computes attention itself would
    then take the mask None, which means causal here, for no mask at all, and train on tokens it should
    predict. One that computes with its mask, as DeepSeek-V3.2 to choose keys, has no FlashAttention either.
    """
    model_type = MODEL_MAPPING.get(config_type, None)
    if not isinstance(model_type, type):
        return "", True
    is_own = not model_type._can_set_attn_implementation()
    return model_type.__name__ if is_own else "", model_type._supports_flash_attn


def _refusal(config: Any, n_kv: int, local_size: int | None) -> NotImplementedError:
    window = f" (a window or chunk of {local_size})" if local_size else ""
    model = type(config).__name__.removesuffix("Config") if config is not None else "the model"
    what = f"a mask in which queries see some of {n_kv} keys{window}, neither a window nor whole documents"
    return usage.refusal(model, what, f"shorten the input, {USE_ANOTHER}")
