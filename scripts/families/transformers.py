"""Families of Hugging Face transformers, with random weights at tiny size. Nothing is downloaded."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import sagebwd
from sagebwd import SageConfig
from sagebwd.integrations.transformers import register
from scripts.families import Row, calls_of, compare_gradients

LIBRARY = f"transformers {transformers.__version__}"
VOCABULARY, TOKENS = 97, 40

#: What every config gets where it has such a field.
SIZES = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # all: rounding would else send a token to another expert
    "top_k_experts": 4,
    "image_size": 32,
    "patch_size": 8,
    "sliding_window": 16,
}


class Family(NamedTuple):
    """name: as people call it. model: its class. inputs: makes them from the config. sizes: beside SIZES."""

    name: str
    model: str
    inputs: Callable[[PreTrainedConfig], dict[str, Tensor]]
    sizes: dict[str, Any]


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


MLA = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "head_dim": 8,
}
TEXT = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 2,
}
VISION = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "image_size", "patch_size")} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WAV2VEC = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 8),
    "conv_stride": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}

FAMILIES = [
    Family(name, model, inputs, sizes)
    for inputs, group in (
        (
            _text,
            {
                "Llama": ("LlamaForCausalLM", {}),
                "Llama 4": ("Llama4ForCausalLM", {"attention_chunk_size": 16, "intermediate_size_mlp": 96}),
                "Mistral": ("MistralForCausalLM", {}),
                "Ministral": ("MinistralForCausalLM", {}),
                "Mixtral": ("MixtralForCausalLM", {}),
                "Qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}),
                "Qwen2-MoE": ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 32}),
                "Qwen3": ("Qwen3ForCausalLM", {}),
                "Qwen3-MoE": ("Qwen3MoeForCausalLM", {}),
                "Qwen3-Next": ("Qwen3NextForCausalLM", {"num_hidden_layers": 4}),
                "Gemma": ("GemmaForCausalLM", {}),
                "Gemma 2": ("Gemma2ForCausalLM", {}),
                "Gemma 3": ("Gemma3ForCausalLM", {"num_hidden_layers": 6}),
                "Gemma 3n": (
                    "Gemma3nForCausalLM",
                    {
                        "num_kv_shared_layers": 0,
                        "layer_types": ["sliding_attention", "full_attention"],
                        "vocab_size_per_layer_input": VOCABULARY,
                        "hidden_size_per_layer_input": 16,
                        "activation_sparsity_pattern": None,
                        "laurel_rank": 8,
                    },
                ),
                "EmbeddingGemma": (
                    "Gemma3TextModel",
                    {"num_hidden_layers": 6, "use_bidirectional_attention": True},
                ),
                "VaultGemma": ("VaultGemmaForCausalLM", {}),
                "GPT-OSS": ("GptOssForCausalLM", {}),
                "DeepSeek-V2": ("DeepseekV2ForCausalLM", MLA | {"first_k_dense_replace": 2}),
                "DeepSeek-V3": ("DeepseekV3ForCausalLM", MLA | {"first_k_dense_replace": 2}),
                "DeepSeek-V3.2": ("DeepseekV32ForCausalLM", MLA | {"first_k_dense_replace": 2}),
                "MiniCPM3": ("MiniCPM3ForCausalLM", MLA),
                "LongCat-Flash": ("LongcatFlashForCausalLM", MLA),
                "GLM": ("GlmForCausalLM", {}),
                "GLM-4": ("Glm4ForCausalLM", {}),
                "GLM-4.5 (MoE)": ("Glm4MoeForCausalLM", {"first_k_dense_replace": 2}),
                "Phi": ("PhiForCausalLM", {}),
                "Phi-3": ("Phi3ForCausalLM", {}),
                "Phi-3.5-MoE": ("PhimoeForCausalLM", {}),
                "OLMo": ("OlmoForCausalLM", {}),
                "OLMo 2": ("Olmo2ForCausalLM", {}),
                "OLMo 3": ("Olmo3ForCausalLM", {}),
                "OLMoE": ("OlmoeForCausalLM", {}),
                "Cohere": ("CohereForCausalLM", {}),
                "Cohere 2": ("Cohere2ForCausalLM", {}),
                "Granite": ("GraniteForCausalLM", {}),
                "Granite-MoE": ("GraniteMoeForCausalLM", {}),
                "Granite-SWA": ("GraniteSWAForCausalLM", {}),
                "MiMo-V2-Flash": ("MiMoV2FlashForCausalLM", {}),
                "Apertus": ("ApertusForCausalLM", {}),
                "HunYuan": ("HunYuanDenseV1ForCausalLM", {}),
                "NanoChat": ("NanoChatForCausalLM", {}),
                "DiffLlama": ("DiffLlamaForCausalLM", {}),
                "Doge": ("DogeForCausalLM", {}),
                "BioGPT": ("BioGptForCausalLM", {}),
                "Falcon": ("FalconForCausalLM", {"multi_query": False}),
                "StarCoder2": ("Starcoder2ForCausalLM", {}),
                "StableLM": ("StableLmForCausalLM", {}),
                "Nemotron": ("NemotronForCausalLM", {}),
                "SmolLM3": ("SmolLM3ForCausalLM", {}),
                "Exaone 4": ("Exaone4ForCausalLM", {}),
                "Seed-OSS": ("SeedOssForCausalLM", {}),
                "MiniMax-M2": ("MiniMaxM2ForCausalLM", {}),
                "LFM2": ("Lfm2ForCausalLM", {}),
                "Jamba": (
                    "JambaForCausalLM",
                    {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
                ),
                "GPT-2": ("GPT2LMHeadModel", {}),
                "GPT-Neo": (
                    "GPTNeoForCausalLM",
                    {"attention_types": [[["global", "local"], 1]], "window_size": 16},
                ),
                "GPT-NeoX": ("GPTNeoXForCausalLM", {}),
                "GPT-J": ("GPTJForCausalLM", {"rotary_dim": 8}),
                "OPT": ("OPTForCausalLM", {}),
                "BLOOM": ("BloomForCausalLM", {}),
                "MPT": ("MptForCausalLM", {}),
                "BERT": ("BertForMaskedLM", {}),
                "RoBERTa": ("RobertaForMaskedLM", {}),
                "DistilBERT": ("DistilBertForMaskedLM", {}),
                "ALBERT": ("AlbertForMaskedLM", {}),
                "ELECTRA": ("ElectraForMaskedLM", {}),
                "ModernBERT": ("ModernBertForMaskedLM", {"local_attention": 16}),
                "ModernBERT decoder": ("ModernBertDecoderForCausalLM", {"local_attention": 16}),
                "XLM-RoBERTa": ("XLMRobertaForMaskedLM", {}),
                "EuroBERT": ("EuroBertForMaskedLM", {}),
                "Longformer": ("LongformerForMaskedLM", {"attention_window": 16}),
                "XLNet": ("XLNetLMHeadModel", {}),
                "DeBERTa-v2": ("DebertaV2ForMaskedLM", {}),
                "MPNet": ("MPNetForMaskedLM", {}),
                "ESM": ("EsmForMaskedLM", {}),
            },
        ),
        (
            _pair,
            {
                "BART": ("BartForConditionalGeneration", {}),
                "Marian": ("MarianMTModel", {}),
                "Pegasus": ("PegasusForConditionalGeneration", {}),
                "M2M-100": ("M2M100ForConditionalGeneration", {}),
                "T5": ("T5ForConditionalGeneration", {}),
                "mT5": ("MT5ForConditionalGeneration", {}),
                "LED": ("LEDForConditionalGeneration", {}),
            },
        ),
        (
            _image,
            {
                "ViT": ("ViTModel", {}),
                "DeiT": ("DeiTModel", {}),
                "DINOv2": ("Dinov2Model", {}),
                "DINOv3": ("DINOv3ViTModel", {}),
                "BEiT": ("BeitModel", {}),
                "SigLIP (vision)": ("SiglipVisionModel", {}),
                "Swin": (
                    "SwinModel",
                    {
                        "num_heads": (2, 4),
                        "depths": (1, 1),
                        "embed_dim": 16,
                        "window_size": 2,
                        "patch_size": 4,
                    },
                ),
                "SegFormer": (
                    "SegformerModel",
                    {
                        "num_attention_heads": (2, 2),
                        "num_encoder_blocks": 2,
                        "depths": (1, 1),
                        "hidden_sizes": (16, 32),
                        "sr_ratios": (2, 1),
                        "patch_sizes": (4, 3),
                        "strides": (4, 2),
                        "mlp_ratios": (2, 2),
                    },
                ),
            },
        ),
        (
            _text_and_image,
            {
                "CLIP": ("CLIPModel", {"text_config": TEXT, "vision_config": VISION}),
                "SigLIP": ("SiglipModel", {"text_config": TEXT, "vision_config": VISION}),
            },
        ),
        (_spectrogram, {"Whisper": ("WhisperForConditionalGeneration", {"max_source_positions": 60})}),
        (_sound, {"wav2vec 2.0": ("Wav2Vec2Model", WAV2VEC), "HuBERT": ("HubertModel", WAV2VEC)}),
    )
    for name, (model, sizes) in group.items()
]
NAMES = [family.name for family in FAMILIES]


def families(names: list[str] | None = None) -> list[Row]:
    """Try the families with these names, or all."""
    register("int8-or-error")
    register("int8-or-full", fallback="sdpa")
    register("unquantized", SageConfig(int8_matmuls=()), fallback="sdpa")
    return [_try(family) for family in FAMILIES if names is None or family.name in names]


def _try(family: Family) -> Row:
    """One training step in full precision, one that must not fall back, and one that may."""
    row = functools.partial(Row, LIBRARY, family.name, family.model)
    truth, attention = _step(family, _full_precision_of(family))
    refusal = ""
    try:
        _step(family, "int8-or-error")
    except NotImplementedError as error:
        refusal = str(error)
    sagebwd.report(clear=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is in the report
            found, _ = _step(family, "int8-or-full")
            calls = calls_of(sagebwd.report())
            exact, _ = _step(family, "unquantized")
    except NotImplementedError as error:
        return row(refusal=str(error))
    exact_cosine = compare_gradients(exact, truth, attention)["cosine"]
    gradients = compare_gradients(found, truth, attention)
    return row(refusal=refusal, exact_cosine=exact_cosine, **calls, **gradients)


def _step(family: Family, attention: str) -> tuple[dict[str, Tensor], set[str]]:
    """The gradients of a loss over the outputs of real tokens, and the parameters of attention layers."""
    model = _build(family, attention)
    torch.manual_seed(1)
    inputs = family.inputs(model.config)
    out = model(**inputs)
    out = next(out[name] for name in ("logits", "last_hidden_state", "image_embeds") if name in out)
    mask = inputs.get("attention_mask")
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    if mask is not None and out.shape[:2] == mask.shape:
        weights = weights * mask[..., None]
    (out * weights).mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, _attention_parameters(model)


def _build(family: Family, attention: str) -> PreTrainedModel:
    """The tiny model, with the same weights for each attention."""
    torch.manual_seed(0)
    model_class = getattr(transformers, family.model)
    default = model_class.config_class()
    other_names = {name for name, meant in default.attribute_map.items() if meant not in family.sizes}
    fields = vars(default).keys() | other_names
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    no_dropout = {name: 0.0 for name, value in vars(default).items() if _is_dropout(name, value)}
    config = model_class.config_class(**(sizes | no_dropout | family.sizes))
    return model_class._from_config(config, attn_implementation=attention)


def _is_dropout(name: str, value: Any) -> bool:
    return isinstance(value, float) and ("drop" in name)


def _full_precision_of(family: Family) -> str:
    """ "sdpa" where the model has it, else "eager"."""
    return "sdpa" if getattr(transformers, family.model)._supports_sdpa else "eager"


def _attention_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of layers that are called attention."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if re.search("Attention|MLA", type(module).__name__)
        for name, _ in module.named_parameters()
    }
