"""Model families of transformers at tiny size with random weights: one training step and its gradients.

Which families there are is in results/accuracy/integrations.json, the table of docs/models.md.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.files import read_json

RESULTS = read_json(Path(__file__).parents[3] / "results/accuracy/integrations.json")

VOCABULARY, TOKENS = 97, 40

#: What every config gets where it has such a field.
SIZES = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.1, "init_std": 0.1, "sliding_window": 16,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "moe_intermediate_size": 32,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"), 2),
    "num_decoder_layers": 2,
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    # All experts: rounding would else send a token to another one, whose gradient is another.
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 4),
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "kv_lora_rank": 16, "q_lora_rank": 16, "head_dim": 8,
}  # fmt: skip
PART = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TWO_PARTS = {
    "text_config": PART | {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2},
    "vision_config": PART | {"image_size": 32, "patch_size": 8},
}
WAV2VEC = {
    "conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}  # fmt: skip

#: By family: what its config gets beside SIZES.
FURTHER_SIZES: dict[str, dict[str, Any]] = {
    "Llama 4": {"attention_chunk_size": 16, "intermediate_size_mlp": 96},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen2-MoE": {"shared_expert_intermediate_size": 32},
    "Qwen3-Next": {"num_hidden_layers": 4},
    "Gemma 3": {"num_hidden_layers": 6},
    "Gemma 3n": {
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": None, "laurel_rank": 8,
    },
    "EmbeddingGemma": {"num_hidden_layers": 6, "use_bidirectional_attention": True},
    **dict.fromkeys(("DeepSeek-V2", "DeepSeek-V3", "DeepSeek-V3.2"), MLA | {"first_k_dense_replace": 2}),
    **dict.fromkeys(("MiniCPM3", "LongCat-Flash"), MLA),
    "GLM-4.5 (MoE)": {"first_k_dense_replace": 2},
    "Falcon": {"multi_query": False},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "GPT-Neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "GPT-J": {"rotary_dim": 8},
    "ModernBERT": {"local_attention": 16},
    "ModernBERT decoder": {"local_attention": 16},
    "Longformer": {"attention_window": 16},
    "Swin": {"num_heads": (2, 4), "depths": (1, 1), "embed_dim": 16, "window_size": 2, "patch_size": 4},
    "SegFormer": {
        "num_attention_heads": (2, 2), "num_encoder_blocks": 2, "depths": (1, 1), "hidden_sizes": (16, 32),
        "sr_ratios": (2, 1), "patch_sizes": (4, 3), "strides": (4, 2), "mlp_ratios": (2, 2),
    },
    **dict.fromkeys(("CLIP", "SigLIP"), TWO_PARTS),
    "Whisper": {"max_source_positions": 60},
    **dict.fromkeys(("wav2vec 2.0", "HuBERT"), WAV2VEC),
}  # fmt: skip


# --- Inputs -------------------------------------------------------------------------------------------------


def _text(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Two rows, of which the second has padding on the right."""
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, -9:] = 0
    return {"input_ids": _draw_tokens(TOKENS), "attention_mask": mask}


def _pair(config: PreTrainedConfig) -> dict[str, Tensor]:
    """A padded source and a target."""
    return _text(config) | {"decoder_input_ids": _draw_tokens(TOKENS - 15)}


def _image(config: PreTrainedConfig) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _text_and_image(config: PreTrainedConfig) -> dict[str, Tensor]:
    return _text(config) | _image(config)


def _spectrogram(config: PreTrainedConfig) -> dict[str, Tensor]:
    features = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "decoder_input_ids": _draw_tokens(TOKENS - 15)}


def _sound(config: PreTrainedConfig) -> dict[str, Tensor]:
    mask = torch.ones(2, 4000, dtype=torch.int64)
    mask[1, -1500:] = 0
    return {"input_values": torch.randn(2, 4000), "attention_mask": mask}


def _draw_tokens(n: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, n))


#: By family; all others take a text.
INPUTS: dict[str, Callable[[PreTrainedConfig], dict[str, Tensor]]] = {
    **dict.fromkeys(("BART", "Marian", "Pegasus", "M2M-100", "T5", "mT5", "LED"), _pair),
    **dict.fromkeys(("ViT", "DeiT", "DINOv2", "DINOv3", "BEiT", "SigLIP (vision)"), _image),
    **dict.fromkeys(("Swin", "SegFormer"), _image),
    **dict.fromkeys(("CLIP", "SigLIP"), _text_and_image),
    "Whisper": _spectrogram,
    **dict.fromkeys(("wav2vec 2.0", "HuBERT"), _sound),
}


# --- A training step ----------------------------------------------------------------------------------------


def train_step(
    family: str, model: str, attention: str, prepare: Callable[[nn.Module], Callable[..., Any]] = lambda x: x
) -> tuple[dict[str, Tensor], set[str]]:
    """The gradients of a loss over the outputs of real tokens, and the parameters of attention layers.

    ``prepare`` gives what is called in the place of the model.
    """
    built = _build(family, model, attention)
    torch.manual_seed(1)
    inputs = INPUTS.get(family, _text)(built.config)
    out = prepare(built)(**inputs)
    out = next(out[name] for name in ("logits", "last_hidden_state", "image_embeds") if name in out)
    mask = inputs.get("attention_mask")
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    if mask is not None and out.shape[:2] == mask.shape:
        weights = weights * mask[..., None]
    (out * weights).mean().backward()
    return gradients_of(built)


def full_precision_of(model: str) -> str:
    """ "sdpa" where the model has it, else "eager"."""
    return "sdpa" if getattr(transformers, model)._supports_sdpa else "eager"


def _build(family: str, model: str, attention: str) -> PreTrainedModel:
    """The tiny model without dropout, with the same weights for each attention."""
    torch.manual_seed(0)
    further, model_class = FURTHER_SIZES.get(family, {}), getattr(transformers, model)
    default = model_class.config_class()
    other_names = {name for name, meant in default.attribute_map.items() if meant not in further}
    fields = vars(default).keys() | other_names
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    dropout = {name: 0.0 for name, x in vars(default).items() if "drop" in name and isinstance(x, float)}
    config = model_class.config_class(**(sizes | dropout | further))
    return model_class._from_config(config, attn_implementation=attention)


def gradients_of(model: nn.Module, pattern: str = "Attention|MLA") -> tuple[dict[str, Tensor], set[str]]:
    """By parameter, and the names of those in layers whose class matches the pattern."""
    attention = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if re.search(pattern, type(module).__name__)
        for name, _ in module.named_parameters()
    }
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, attention


def cosine(found: dict[str, Tensor], truth: dict[str, Tensor], among: set[str] | None = None) -> float:
    """Of all gradients, or those of some parameters. The truth's that are not zero must be there."""
    names = [name for name in truth if name in found and (among is None or name in among)]
    lost = [name for name, x in truth.items() if x.any() and (name not in found or not found[name].any())]
    assert not lost
    x, y = (torch.cat([side[name].flatten().double() for name in names]) for side in (found, truth))
    return float(x @ y / (x.norm() * y.norm()))
