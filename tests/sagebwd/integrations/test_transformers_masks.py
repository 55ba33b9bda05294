"""The registered functions themselves: which query sees which key."""

import importlib
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, BloomConfig, masking_utils

from sagebwd import SageConfig, sage_attention
from sagebwd.integrations.transformers import register
from sagebwd.integrations.transformers_masks import decode
from sagebwd.integrations.varlen import REMEMBERED, remember_recent
from sagebwd.metrics import relative_l2
from sagebwd.window import CAUSAL, FULL, Window
from tests.sagebwd.integrations.tiny_models import EXACT, call, described, prepare_mask


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["sagebwd", "sagebwd-paper", "sagebwd-again"])
def test_each_name_runs_sage_attention_with_its_own_config(draw, name, is_causal):
    config = SageConfig.paper() if "paper" in name else SageConfig()
    if "again" in name:
        register(name, SageConfig(int8_matmuls=()))
        register(name, config)
    q, k, v, _ = draw(40, heads=4, kv_heads=2)
    out, weights = call(q, k, v, name=name, scaling=0.3, is_causal=is_causal)
    settings = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True, "config": config}
    assert weights is None
    assert out.shape == (2, 40, 4, 24)
    assert out.is_contiguous()
    assert torch.equal(out, sage_attention(q, k, v, **settings).transpose(1, 2))


@pytest.mark.parametrize("name", ["sdpa", "my-flash", "a/b", "", "paged|sagebwd", "mine"])
def test_a_name_that_means_something_else_is_refused(name, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", lambda: None)
    with pytest.raises(ValueError, match="name"):
        register(name)
    with pytest.raises(ValueError, match=r"pass a sagebwd\.SageConfig"):
        register("sagebwd-x", {"smooth_k": True})


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "sagebwd.integrations.transformers")

    with pytest.raises(ImportError, match="pip install 'transformers>=5'"):
        importlib.import_module("sagebwd.integrations.transformers")


def test_the_last_query_alone_sees_all_keys(draw):
    q, k, v, _ = draw(1, 4)
    out, _ = call(q, k, v, name="sagebwd-exact")
    assert relative_l2(out, scaled_dot_product_attention(q, k, v).transpose(1, 2)) < EXACT


def test_a_mask_says_better_than_the_layer_whether_attention_is_causal(draw):
    q, k, v, _ = draw(6)
    hidden = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    mask = described(hidden, FULL)
    out, _ = call(q, k, v, mask, name="sagebwd-exact", is_causal=True)
    seen = (hidden[:, None, :, None] * hidden[:, None, None]).bool()  # documents hide queries, too
    truth = scaled_dot_product_attention(q, k, v, seen)
    assert relative_l2(out, truth.transpose(1, 2)) < EXACT


SIGNS = {
    "mask": {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])},
    "restart": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
    "restart at 2": {"position_ids": torch.tensor([[2, 3, 4, 2, 3, 4]])},
    "fall": {"position_ids": torch.tensor([[0, 3, 4, 1, 2, 3]])},
    "boundaries": dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 3, 3, 6])),
}


@pytest.mark.parametrize("documents", SIGNS.values(), ids=SIGNS.keys())
@pytest.mark.parametrize("is_causal", [True, False])
def test_each_sign_of_a_new_document_is_enough(draw, documents, is_causal):
    q, k, v, _ = draw(6, batch=1)
    mask = documents.get("attention_mask")
    others = {name: x for name, x in documents.items() if name != "attention_mask"}
    mask = None if mask is None else described(mask, CAUSAL if is_causal else FULL)
    out, _ = call(q, k, v, mask, is_causal=is_causal, **others)
    for half in (slice(0, 3), slice(3, 6)):
        alone, _ = call(q[:, :, half], k[:, :, half], v[:, :, half], is_causal=is_causal)
        assert relative_l2(out[:, half], alone) < EXACT


def test_hidden_tokens_give_zero_and_get_no_gradient(draw):
    q, k, v, grad_out = draw(6)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    out, _ = call(q, k, v, described(mask, CAUSAL))
    assert out[0, :2].abs().max() == out[1].abs().max() == 0
    out.backward(grad_out.transpose(1, 2))
    for x in tensors:
        assert x.grad[0, :, :2].abs().max() == x.grad[1].abs().max() == 0
        assert x.grad[0, :, 3:].abs().amax(-1).min() > 0


def show(mask: torch.Tensor) -> tuple[list[list[int]], Window]:
    """The documents of the keys, from 1 on, 0 for hidden ones, and the window."""
    if mask.dtype == torch.bool:
        assert mask.shape[1:3] == (1, 1)
        return mask[:, 0, 0].int().tolist(), FULL
    seen = decode(mask)
    shown = torch.ones(mask.shape[0], mask.shape[3]) if seen.shown is None else seen.shown
    labels = torch.zeros_like(shown, dtype=torch.int64) if seen.labels is None else seen.labels
    first = labels.masked_fill(shown == 0, 9).amin()
    return ((labels - first + 1) * shown).int().tolist(), seen.window


def test_the_mask_function_returns_none_only_where_nothing_is_left_open():
    bidirectional = {"mask_function": masking_utils.bidirectional_mask_function}
    may_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    ones = torch.ones(2, 6)
    for whole in ({}, {"attention_mask": ones}, {"q_length": 1, "q_offset": 5}, bidirectional | may_skip):
        assert prepare_mask(**whole) is None
    assert show(prepare_mask(allow_is_causal_skip=False)) == ([[1] * 6] * 2, CAUSAL)
    assert show(prepare_mask(q_length=3, q_offset=3)) == ([[1] * 6] * 2, CAUSAL)
    assert show(prepare_mask(**bidirectional)) == ([[1] * 6] * 2, FULL)
    # Cross-attention sees keys past the last query; a static cache says how many of its slots are filled.
    assert show(prepare_mask(q_length=3, **bidirectional)) == ([[1] * 6] * 2, FULL)
    filled = prepare_mask(q_length=3, q_offset=torch.tensor(1), **bidirectional)
    assert show(filled) == ([[1] * 4] * 2, FULL)
    half = torch.tensor([[0, 1], [1, 1]])
    padded = prepare_mask(q_length=2, kv_length=2, attention_mask=half, **bidirectional, **may_skip)
    assert show(padded) == ([[0, 1], [1, 1]], FULL)


def test_the_mask_function_of_older_releases_gets_cache_position():
    old = {"q_length": None, "device": None, "kv_length": 9}
    assert show(prepare_mask(**old, cache_position=torch.arange(3, 5))) == ([[1] * 5] * 2, CAUSAL)
    cross = {"mask_function": masking_utils.bidirectional_mask_function, "attention_mask": torch.ones(2, 9)}
    cross["attention_mask"][0, 7:] = 0
    found = show(prepare_mask(**old, **cross, cache_position=torch.arange(4)))
    assert found == (cross["attention_mask"].int().tolist(), FULL)


def windows_and_documents() -> dict[str, tuple[dict, list[list[int]], Window]]:
    """Mask functions with their sizes, and the documents and window that they stand for."""
    window, both = (
        getattr(masking_utils, f"sliding_window_{kind}_mask_function") for kind in ("causal", "bidirectional")
    )
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    split = masking_utils.packed_sequence_mask_function(documents)
    causal = masking_utils.and_masks(split, masking_utils.causal_mask_function)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    packed_window = masking_utils.and_masks(split, window(2))
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):  # newer releases
        packed_window = masking_utils.packed_sequence_compatibility_function(window(2), positions, documents)
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    last = {"q_length": 2, "q_offset": 4}
    one, several = [[1] * 6] * 2, (documents + 1).tolist()
    return {
        "window": ({"mask_function": window(5)}, one, (4, 0)),
        "window of one": ({"mask_function": window(1)}, one, (0, 0)),
        "window as long as the text": ({"mask_function": window(6)}, one, CAUSAL),
        "window of the last": ({"mask_function": window(5)} | last, one, (4, 0)),
        "window to both sides": ({"mask_function": both(2)}, one, (2, 2)),
        "two windows": ({"mask_function": masking_utils.and_masks(window(3), window(5))}, one, (2, 0)),
        "documents": ({"mask_function": causal}, several, CAUSAL),
        "documents to both sides": ({"mask_function": split}, several, FULL),
        "documents with a window": ({"mask_function": packed_window}, several, (1, 0)),
        "chunks": ({"mask_function": chunks}, [[1, 1, 1, 1, 2, 2]] * 2, CAUSAL),
    }


@pytest.mark.parametrize("name", windows_and_documents())
def test_windows_and_documents_are_read_from_functions_and_from_what_they_return(name):
    arguments, documents, window = windows_and_documents()[name]
    given = {"allow_is_causal_skip": False, **arguments}
    assert show(prepare_mask(**given)) == (documents, window)
    function = given.pop("mask_function")
    foreign = {"mask_function": lambda *indices: function(*indices)}
    found, found_window = show(prepare_mask(**given, **foreign))
    if window != (0, 0):
        assert (found, found_window) == (documents, window)
    else:  # it may as well be six documents
        assert found == [[1, 2, 3, 4, 5, 6]] * 2
    vmapped = {"mask_function": lambda *indices: function(*indices).clone(), "use_vmap": True}
    assert show(prepare_mask(**given, **vmapped))[0] == found


def test_a_mask_that_is_neither_a_window_nor_documents_is_refused_or_made_in_full():
    blocks = masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, 1, 1], [-1, -1, 0, 0, 0, -1]]))
    image = {"mask_function": masking_utils.or_masks(blocks, masking_utils.causal_mask_function)}
    image["attention_mask"] = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with pytest.raises(NotImplementedError, match=r"6 keys \(a window or chunk of 7\).*fallback='sdpa'"):
        prepare_mask(**image, local_size=7)
    seen = prepare_mask("sagebwd-or-full", **image)
    assert torch.equal(seen, prepare_mask("sdpa", **image, allow_is_causal_skip=False))


def test_a_model_that_computes_attention_itself_gets_the_mask_of_eager():
    """If it was not noticed when it was built."""
    given = {"config": BloomConfig(), "attention_mask": torch.arange(6) > torch.tensor([[0], [-1]])}
    with pytest.raises(NotImplementedError, match="attention that the model computes itself"):
        prepare_mask(**given)
    with pytest.warns(UserWarning, match="BloomModel runs in full precision, not in INT8"):
        found = prepare_mask("sagebwd-or-full", **given)
    assert torch.equal(found, prepare_mask("eager", **given))


def test_recent_layouts_are_remembered_until_a_tensor_changes():
    calls = []
    remembering = remember_recent(lambda *arguments: calls.append(arguments) or len(calls))
    assert remembering(None, CAUSAL) == remembering(None, Window(-1, 0)) != remembering(None, Window(-1, 1))
    calls.clear()
    x, same = torch.zeros(3, device="meta"), torch.zeros(3, device="meta")
    assert [remembering(x, 1), remembering(x, 1)] == [1, 1]
    assert [remembering(x, 2), remembering(same, 2), remembering(None, 2), remembering(x, 2)] == [2, 3, 4, 2]
    x.add_(1)
    assert [remembering(x, 2), remembering(x, 2)] == [5, 5]
    for other in range(REMEMBERED):
        remembering(same, -other)
    assert remembering(x, 2) == 6 + REMEMBERED
    with torch.inference_mode():
        assert remembering(x, 2) != remembering(x, 2)
    in_memory_of_numpy = torch.zeros(3)
    assert remembering(in_memory_of_numpy) != remembering(in_memory_of_numpy)
