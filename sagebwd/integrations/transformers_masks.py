"""The masks of Hugging Face transformers, as :mod:`sagebwd.integrations.varlen` takes them.

transformers describes a mask by a function of (batch, head, query, key) and by each key's padding. Here that
becomes the document of each key and a window (:class:`TokenMask`), with no entry for each pair of tokens.
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
from sagebwd.integrations.varlen import Layout, dense_mask, remember_recent
from sagebwd.masks import HIDES_FROM
from sagebwd.window import CAUSAL, FULL, Window

MaskFunction = Callable[..., Tensor]

#: These compute everything that a model may ask for.
USE_ANOTHER = 'use attn_implementation="sdpa" or "eager" for this model'

OWN_ATTENTION = "attention that the model computes itself"

#: None before transformers had bidirectional masks.
BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)


class TokenMask(Tensor):
    """(B, 1, 1, N_kv) int32: the document of each key, from 1 on, 0 for padding.

    Four dimensions, because transformers hands on a mask of four as it is. Models only pass it to their
    attention: what computes with it, in the belief that it is an ordinary mask, is refused.

    Attributes:
        window: how far a query sees within its document; with a limit, fewer queries than keys are the last
            of them.
    """

    window: Window

    @classmethod
    def make(cls, documents: Tensor, window: Window) -> TokenMask:
        """Of ``documents`` (B, N_kv)."""
        mask = documents[:, None, None].int().as_subclass(cls)
        mask.window = window
        return mask

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_function__(function, types, args, kwargs or {})
        if not isinstance(out, TokenMask):
            return out
        tensors = [x for x in args if isinstance(x, Tensor)]
        is_one_mask = len(tensors) == 1 and isinstance(tensors[0], TokenMask)
        if not is_one_mask or out.dtype != torch.int32 or out.dim() != 4 or out.shape[1:3] != (1, 1):
            name = getattr(function, "__name__", function)
            raise NotImplementedError(
                f"the model computes with its attention mask ({name}) instead of handing it on to attention; "
                + USE_ANOTHER
            )
        out.window = tensors[0].window
        return out

    def documents(self) -> Tensor:
        """(B, N_kv) int32, an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)[:, 0, 0]


class Pattern(NamedTuple):
    """What a mask function lets queries see, padding aside.

    documents: (B or 1, N_kv) labels; neighbours with the same share a document. None: each row is one.
    window: how far a query sees.
    """

    documents: Tensor | None
    window: Window


@torch.compiler.disable(reason="it reads the values of the mask")
def make_mask(
    fallback: str,
    /,
    batch_size: int,
    kv_length: int,
    *,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    cache_position: Tensor | None = None,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    config: Any = None,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> Tensor | None:
    """The mask function of transformers' interface: which keys are real, and in which document they are.

    Args:
        fallback: what to do where SageBwd cannot take the mask: "error" or "sdpa".
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
        dtype: of a model that computes attention itself.

    Returns:
        None if the attention layer's ``is_causal`` and the shapes say it all. Else a :class:`TokenMask` of
        N_kv used keys; with ``fallback`` "sdpa" and a mask that is none, that of "sdpa", (B, 1, N_q, N_kv)
        bool, or of "eager" for a model that computes attention itself.
    """
    is_static = isinstance(q_offset, Tensor)
    queries = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:
        queries = {"cache_position": cache_position}
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    dense = functools.partial(
        masking_utils.sdpa_mask,
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        **queries,
    )
    model = _computes_attention_itself(type(config))
    if model:
        usage.fall_back(model, OWN_ATTENTION, fallback, fix=USE_ANOTHER)
        return additive(dense(attention_mask=attention_mask), dtype)
    n_used = int(q_offset) + q_length - kv_offset  # keys up to the last query
    pattern = None if use_vmap else _read(mask_function)
    if pattern is None or (pattern.window.is_sliding and n_used != kv_length):
        pattern = _recognise(dense(attention_mask=None), n_used)
    if pattern is None:
        if fallback == "error":
            raise _refusal(config, kv_length, local_size)
        return dense(attention_mask=attention_mask)
    is_causal = pattern.window[1] == 0
    n_kv = min(kv_length, n_used) if is_causal or is_static else kv_length
    window = pattern.window.narrowed(n_kv, n_kv)
    is_shown = _shown(attention_mask, kv_offset, n_kv)
    may_skip = allow_is_causal_skip if is_causal else allow_is_bidirectional_skip
    # None must not leave open which keys the queries are, nor which slots of a static cache are filled.
    is_clear = n_kv == kv_length and (q_length in (1, n_kv) or not is_causal)
    is_plain = pattern.documents is None and is_shown is None and not window.is_sliding
    if is_plain and is_clear and may_skip:
        return None
    documents = pattern.documents
    if documents is None:
        documents = torch.ones(1, 1, dtype=torch.int32, device=device).expand(1, kv_length)
    documents = documents.expand(batch_size, -1)[:, :n_kv]
    return TokenMask.make(documents if is_shown is None else documents * is_shown, window)


@remember_recent
def read_mask(mask: Any, batch: int, n_q: int, n_kv: int) -> TokenMask | None:
    """A mask that transformers did not make by :func:`make_mask`, if it has documents and a window.

    Args:
        mask: (B or 1, 1, N_q or 1, N_kv): bool, true where a query sees a key, or float, added to the logits.
        batch, n_q, n_kv: B, N_q and N_kv.
    """
    shape = (batch, 1, n_q, n_kv)
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.requires_grad:  # a bias may start at zero
        return None
    if any(found not in (1, wanted) for found, wanted in zip(mask.shape, shape, strict=True)):
        return None
    seen = mask
    if mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= HIDES_FROM)).all()):
            return None
    if seen.dtype != torch.bool:
        return None
    pattern = _recognise(seen.expand(shape), n_kv)
    if pattern is None:
        return None
    documents = pattern.documents
    if documents is None:
        documents = torch.ones(batch, n_kv, dtype=torch.int32, device=mask.device)
    return TokenMask.make(documents, pattern.window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as "eager" attentions add it to the logits; any other mask as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros((), dtype=dtype, device=mask.device).where(mask, torch.finfo(dtype).min)


def _shown(attention_mask: Tensor | None, first: int, n: int) -> Tensor | None:
    """Which of n keys from position ``first`` on are not padding, (B, n), or None if all are."""
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, first : first + n]
    mask = F.pad(attention_mask.bool(), (0, n - attention_mask.shape[1]))
    return None if mask.all() else mask


@functools.cache
def _computes_attention_itself(config_type: type) -> str:
    """The name of a config's model if, as far as transformers knows, it calls no registered attention.

    transformers lets a model be built with any registered name. One that computes attention itself would then
    take the mask None, which means causal here, for no mask at all, and train on tokens it should predict.
    """
    model_type = MODEL_MAPPING.get(config_type, None)
    if not isinstance(model_type, type) or model_type._can_set_attn_implementation():
        return ""
    return model_type.__name__


def _refusal(config: Any, n_kv: int, local_size: int | None) -> NotImplementedError:
    window = f" (a window or chunk of {local_size})" if local_size else ""
    model = type(config).__name__.removesuffix("Config") if config is not None else "the model"
    what = f"a mask in which queries see some of {n_kv} keys{window}, neither a window nor whole documents"
    return usage.refusal(model, what, f"shorten the input, {USE_ANOTHER}")


# --- Which query sees which key ----------------------------------------------------------------------------


def _read(mask_function: MaskFunction) -> Pattern | None:
    """What one of transformers' own mask functions lets queries see; None for any other function.

    They are closures over a window or documents, and conjunctions of each other.
    """
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(None, CAUSAL)
    if mask_function is BIDIRECTIONAL:
        return Pattern(None, FULL)
    values = _closure(mask_function)
    match _maker(mask_function), *values.values():
        case "sliding_window_overlay", int(window):
            return Pattern(None, Window(window - 1, -1))
        case "sliding_window_bidirectional_overlay", int(window):
            return Pattern(None, Window(window, window))
        case "packed_sequence_mask_function", Tensor() as documents:
            return Pattern(documents + 1, FULL)
        case "remap_positions_for_packed_sequence", *_:
            # Within a document positions rise by one, so distances are what they are without it.
            return _read(values["mask_function"])
        case "and_masks", tuple(functions):
            return _intersection([_read(function) for function in functions])
    return None


def _maker(function: MaskFunction) -> str:
    """The function of transformers that returned this one, "" if it is not one of theirs."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return ""
    return function.__qualname__.partition(".<locals>.")[0]


def _closure(function: MaskFunction) -> dict[str, Any]:
    """The variables that a function got where it was made."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None or cells is None else dict(zip(code.co_freevars, _contents(cells), strict=True))


def _contents(cells: tuple[Any, ...]) -> list[Any]:
    return [cell.cell_contents for cell in cells]


def _intersection(patterns: list[Pattern | None]) -> Pattern | None:
    """What all of ``patterns`` let queries see, of which at most one has documents."""
    if None in patterns:
        return None
    documents = [pattern.documents for pattern in patterns if pattern.documents is not None]
    if len(documents) > 1:
        return None
    limits = zip(*(pattern.window for pattern in patterns), strict=True)
    window = Window(*(min((x for x in limit if x >= 0), default=-1) for limit in limits))
    return Pattern(documents[0] if documents else None, window)


def _recognise(seen: Tensor, n_used: int) -> Pattern | None:
    """The documents and window of a mask.

    Args:
        seen: (B, 1, N_q, N_kv) bool, which query sees which key.
        n_used: number of keys up to the last query.

    Returns:
        None if the mask is anything else. Keys that no query sees have document 0.
    """
    shown = seen[:, 0].any(1)
    if torch.equal(seen, shown[:, None, None].expand_as(seen)):
        return Pattern(None if shown.all() else shown.int(), FULL)
    batch, _, n_q, n_kv = seen.shape
    if not n_q <= n_used <= n_kv or seen[..., n_used:].any():
        return None
    seen = seen[..., :n_used]
    documents = torch.ones(batch, n_used, dtype=torch.int64, device=seen.device)
    if n_q == n_used:
        sees_previous = seen[:, 0].diagonal(-1, 1, 2)
        documents[:, 1:] += (~sees_previous).cumsum(1)
    documents *= shown[:, :n_used]
    for window in (CAUSAL, FULL, _reach(seen)):
        expected = dense_mask(Layout(window, documents), batch, n_q, n_used, seen.device)
        if torch.equal(seen, expected.expand_as(seen)):
            is_one = bool((documents == 1).all())
            return Pattern(None if is_one else F.pad(documents, (0, n_kv - n_used)), window)
    return None


def _reach(seen: Tensor) -> Window:
    """How far queries see at most, to the left and to the right."""
    _, _, n_q, n_kv = seen.shape
    keys = torch.arange(n_kv, device=seen.device)
    distance = (keys[-n_q:, None] - keys) * seen.any(0).any(0)
    return Window(max(int(distance.max()), 0), max(int(-distance.min()), 0))
