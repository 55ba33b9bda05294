"""Tiny models of transformers, and what one training step of them gives.

The independent truth is transformers' "sdpa": same weights, same output, same gradients. With
``int8_matmuls=()`` nothing is quantized, and fp32 results must agree to its rounding: a wrong mask, scale or
head cannot hide behind the error of INT8. Weights are drawn so that logits have a standard deviation of about
1; with the libraries' own, attention would be nearly a mean, whatever is wrong with it.

Importing this registers "sagebwd", "sagebwd-paper" and "sagebwd-exact", and each with a fallback.
"""

from types import SimpleNamespace

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from sagebwd import SageConfig
from sagebwd.integrations.transformers import register
from sagebwd.integrations.transformers_masks import encode
from sagebwd.metrics import relative_l2
from sagebwd.window import Window

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.12, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GQA = {"num_key_value_heads": 2, "head_dim": 16}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
MODERNBERT = {"cls_token_id": 1, "sep_token_id": 2}

MODELS = {
    "llama": (transformers.LlamaForCausalLM, {}), "llama-gqa": (transformers.LlamaForCausalLM, GQA),
    "qwen3": (transformers.Qwen3ForCausalLM, GQA), "gemma3": (transformers.Gemma3ForCausalLM, GQA),
    "mistral": (transformers.MistralForCausalLM, {"num_key_value_heads": 1}),
    "qwen2": (transformers.Qwen2ForCausalLM, {"num_key_value_heads": 2}),
    "bert": (transformers.BertForMaskedLM, NO_DROPOUT),
    "modernbert": (transformers.ModernBertForMaskedLM, MODERNBERT),
}  # fmt: skip

#: An order above the rounding of fp32 sums, four below what a wrong mask changes.
EXACT = 1e-5
#: An INT8 operand is off by up to 1/254 of the largest of its block, 3 to 4 of its standard deviations: 0.8%
#: of noise. A layer's output passes two quantized products and a gradient up to six, of two operands each, in
#: each of two layers; found are 2.2% and, with the paper's one scale per tile of P and dS, 5.7%.
INT8_LOSS, INT8_OUTPUT, INT8_GRADIENT = 1e-3, 0.03, 0.08

for name, config in (
    ("sagebwd", SageConfig()),
    ("sagebwd-paper", SageConfig.paper()),
    ("sagebwd-exact", SageConfig(int8_matmuls=())),
):
    register(name, config)
    register(f"{name}-or-full", config, fallback="sdpa")


def make(name: str, **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model, sizes = MODELS[name]
    return model(model.config_class(**(SIZES | sizes | changes)))


def draw_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def train_step(model: nn.Module, attention: str, **inputs: Tensor) -> SimpleNamespace:
    """Loss, logits and the gradient of each parameter."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return SimpleNamespace(loss=out.loss.item(), logits=out.logits.detach(), gradients=gradients)


def assert_same_gradients(found: dict[str, Tensor], truth: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        if name.endswith("key.bias"):
            # Softmax ignores a shift of all keys: this gradient is zero but for rounding, in any attention.
            assert found[name].norm() < bound * truth[name.replace("key", "query")].norm(), name
        else:
            assert found[name].abs().max() > 0, name
            assert relative_l2(found[name], gradient) < bound, name


def padded(name: str, side: str) -> dict[str, Tensor]:
    """Three rows of 33 tokens, of which 9, 0 and 20 are padding that the loss does not count."""
    tokens = draw_tokens(3, 33)
    mask = torch.ones_like(tokens)
    mask[0, :9], mask[2, :20] = 0, 0
    mask = mask if side == "left" else mask.flip(1)
    # A token that follows padding is not a target: the padding's query, which sees no key, would predict it,
    # and what attention returns for such a query is up to the implementation.
    is_target = (mask * mask.roll(1, 1)).bool()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(~is_target, -100)}


def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, name: str = "sagebwd", **arguments):
    """The registered attention in a layer that is causal unless ``is_causal`` says otherwise."""
    arguments.setdefault("module", nn.Identity())
    return AttentionInterface()[name](query=q, key=k, value=v, attention_mask=mask, **arguments)


def described(documents: Tensor, window: tuple[int, int]) -> Tensor:
    """A mask of documents (B, N_kv), 0 for hidden keys, as models hand it to their attention."""
    return encode(Window(*window), documents != 0, documents, *documents.shape, documents.device)


def prepare_mask(name: str = "sagebwd", **arguments) -> Tensor | None:
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "q_offset": 0, "device": "cpu"}
    return AttentionMaskInterface()[name](**(sizes | arguments))


LENGTHS = (13, 1, 20, 7)


def packed(how: str) -> dict[str, Tensor]:
    """Four documents in one row, told apart as ``how`` says."""
    tokens = draw_tokens(1, sum(LENGTHS))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    labels = tokens.clone()
    labels[:, starts[:-1].long()] = -100
    inputs = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if how == "collator":
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
        return collator([{"input_ids": document.tolist()} for document in tokens[0].split(LENGTHS)])
    return (
        inputs
        | {
            "positions": {"use_cache": False},
            "positions with a cache": {"use_cache": True},
            "positions with a mask of ones": {"attention_mask": torch.ones_like(tokens)},
            "cu_seq_lens": {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "use_cache": False},
        }[how]
    )
