"""Weights to and from the Hugging Face layout: a folder with config.json and model.safetensors.

Without QK-norm a model is a `LlamaForCausalLM`, with it a `Qwen3ForCausalLM` (RMSNorm on each head of Q and K
before the rotary embedding is what Qwen3 does). transformers itself is not needed here.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.backends import AttentionFn
from model.config import LlamaConfig, problems
from model.generate import TEMPERATURE, TOP_K
from model.llama import Llama
from model.untrusted import Fields, read_fields, read_shards, read_tensors, shown

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
SHARDS_FILE = "model.safetensors.index.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Fields of config.json that change the computation, each with the only value that this model supports. A
# missing field has that value, which is transformers' default for both architectures.
FIXED_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}


def save(
    model: Llama,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    end_of_text: int | None = None,
) -> None:
    """Write the model so that transformers' `from_pretrained(folder)` reads it.

    Weights are converted to `dtype` if one is given. weights: a state dict to write instead of the model's
    own, whose tensors may be sharded over several devices. end_of_text: the token between documents, if it is
    known. Each file is replaced atomically, config.json last: a folder with a config.json has the weights,
    too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        _to_hf_name(name): tensor.to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        for name, tensor in (model.state_dict() if weights is None else weights).items()
    }
    fields = _to_hf_config(model.config, next(iter(named.values())).dtype, end_of_text)
    _replace(folder / WEIGHTS_FILE, lambda path: save_file(named, path, metadata={"format": "pt"}))
    _replace(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(fields, indent=2) + "\n"))


def save_generation_config(folder: Path, config: LlamaConfig, *, end_of_text: int, tokens: int) -> None:
    """Write how transformers' `generate` samples: as the trainer does, and no token beyond the tokenizer's.

    tokens: the size of the tokenizer's vocabulary; the model's may be padded.
    """
    fields = {
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
    }
    if tokens < config.vocab_size:
        fields["suppress_tokens"] = list(range(tokens, config.vocab_size))
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / GENERATION_FILE, lambda path: path.write_text(json.dumps(fields) + "\n"))


def load(folder: str | Path, attention: AttentionFn) -> Llama:
    """Build the model a folder describes, in float32 on the CPU, and read its weights (sharded or not).

    Raises FileNotFoundError if a file is missing, and ValueError, naming file, field and fix, if one is
    damaged, if the folder holds a model that `Llama` does not compute, or weights that do not fit its config
    or are not finite floating-point numbers.
    """
    model = Llama(read_config(folder), attention)
    load_into(model, folder)
    return model


def read_config(folder: str | Path) -> LlamaConfig:
    """The shape of the model in a folder. Raises what `load` raises."""
    return _from_hf_config(read_fields(Path(folder) / CONFIG_FILE))


def load_into(model: Llama, folder: str | Path) -> None:
    """Replace the model's weights by those in a folder (sharded or not). Raises what `load` raises."""
    folder = Path(folder)
    weights = {
        name: tensor
        for hf_name, tensor in _read_weights(folder).items()
        if (name := _from_hf_name(hf_name, model.config.tie_embeddings)) is not None
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # load_state_dict names every missing, unexpected or misshapen weight
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG_FILE}: {error}") from error


def _to_hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _from_hf_name(hf_name: str, tied: bool) -> str | None:
    """This model's name of a Hugging Face weight; None for one that the model does not store."""
    if hf_name.endswith("rotary_emb.inv_freq") or (tied and hf_name == "lm_head.weight"):
        return None  # computed from the config; the embedding once more
    return hf_name.removeprefix("model.")


def _to_hf_config(config: LlamaConfig, dtype: torch.dtype, end_of_text: int | None) -> dict[str, Any]:
    model_type = "qwen3" if config.qk_norm else "llama"
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_head,
        "intermediate_size": config.d_ffn,
        "max_position_embeddings": config.max_context,
        # Read by transformers 5 and by older versions respectively.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        # These depend on the tokenizer; Llama's defaults would be wrong. A text begins where another ended.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: value for name, value in FIXED_FIELDS.items() if value is not None},
    }


def _from_hf_config(fields: Fields) -> LlamaConfig:
    if wrong := _unsupported(fields):
        raise ValueError(f"{fields.path}: this model cannot be represented here: {'; '.join(wrong)}")
    width, heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    config = LlamaConfig(
        vocab_size=fields.get("vocab_size", int),
        d_model=width,
        n_layers=fields.get("num_hidden_layers", int),
        n_heads=heads,
        n_kv_heads=fields.get("num_key_value_heads", int, default=None),
        d_head=fields.get("head_dim", int, default=width // max(heads, 1)),
        d_ffn=fields.get("intermediate_size", int),
        max_context=fields.get("max_position_embeddings", int),
        rope_theta=_rope(fields).get("rope_theta", int, float, default=10000.0),
        norm_eps=fields.get("rms_norm_eps", int, float),
        qk_norm=fields.get("model_type", str) == "qwen3",
        tie_embeddings=fields.get("tie_word_embeddings", bool, default=False),
        init_std=fields.get("initializer_range", int, float, default=0.02),
    )
    if wrong := problems(config):
        raise ValueError(f"{fields.path} describes a model that cannot be built: {'; '.join(wrong)}")
    return config


def _unsupported(fields: Fields) -> list[str]:
    """The fields of a config.json that ask for something that `Llama` does not compute."""
    found = []
    model_type = fields.get("model_type", str, default=None)
    if model_type not in ARCHITECTURES:
        found.append(f"model_type={model_type}, supported are {', '.join(ARCHITECTURES)}")
    for name, supported in FIXED_FIELDS.items():
        value = fields.values.get(name, supported)
        if value != supported:
            found.append(f"{name}={shown(value)}, supported is {shown(supported)}")
    layer_types = fields.get("layer_types", list, default=[])
    if any(kind != "full_attention" for kind in layer_types):
        found.append(f"layer_types={shown(layer_types)}, supported is full_attention")
    rope = _rope(fields)
    if (kind := rope.get("rope_type", str)) != "default":
        found.append(f"rope scaling of type {kind}, supported is none")
    if (factor := rope.get("partial_rotary_factor", int, float, default=1.0)) != 1.0:
        found.append(f"partial_rotary_factor={factor}, supported is 1.0")
    return found


def _rope(fields: Fields) -> Fields:
    """Rotary settings as transformers 5 groups them, from either spelling of config.json."""
    scaling = fields.get("rope_scaling", dict, default={})
    rope = {"rope_type": scaling.get("rope_type", scaling.get("type", "default"))}
    if "rope_theta" in fields.values:
        rope["rope_theta"] = fields.values["rope_theta"]
    return Fields(rope | fields.get("rope_parameters", dict, default={}), fields.path)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / SHARDS_FILE).exists():
        return read_shards(folder, SHARDS_FILE)
    return read_tensors(folder / WEIGHTS_FILE)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: readers see the old or the complete new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
