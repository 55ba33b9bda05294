"""Model families of diffusers at tiny size with random weights: one training step and its gradients.

Importing this registers "sagebwd" and "sagebwd_exact", and each with a fallback.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from sagebwd import SageConfig
from sagebwd.integrations.diffusers import register
from tests.sagebwd.integrations.families import gradients_of

for name, config in (("sagebwd", SageConfig()), ("sagebwd_exact", SageConfig(int8_matmuls=()))):
    register(name, config)
    register(f"{name}_or_full", config, fallback="sdpa")
diffusers.utils.logging.set_verbosity_error()  # set_attention_backend warns that it is experimental

#: What every model gets where it takes such an argument.
SIZES = {
    **dict.fromkeys(("num_layers", "n_layers", "num_attention_heads", "n_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("num_single_layers", "num_refiner_layers", "n_refiner_layers"), 1),
    **dict.fromkeys(("attention_head_dim", "sample_size", "freq_dim", "time_embed_dim"), 16),
    **dict.fromkeys(("in_channels", "out_channels"), 4),
    **dict.fromkeys(("joint_attention_dim", "caption_channels", "pooled_projection_dim"), 24),
    **dict.fromkeys(("text_dim", "text_embed_dim"), 24),
    **dict.fromkeys(("cross_attention_dim", "caption_projection_dim"), 32),
    **dict.fromkeys(("axes_dims_rope", "rope_axes_dim", "axes_dims"), (4, 6, 6)),
    "ffn_dim": 48,
    "guidance_embeds": False,
}
TEXT, PADDING = 11, 4  # tokens of the text, and how many of the second row's are padding


class Family(NamedTuple):
    """name: as people call it. model: its class. inputs: makes them. sizes: beside SIZES."""

    name: str
    model: str
    inputs: Callable[[], dict[str, Any]]
    sizes: dict[str, Any]


def _latent(*size: int, **others: Any) -> dict[str, Any]:
    """Two latent images, or videos, of this size with a text."""
    hidden, text = torch.randn(2, 4, *size), torch.randn(2, TEXT, 24)
    timestep = torch.tensor([3, 500])
    return {"hidden_states": hidden, "encoder_hidden_states": text, "timestep": timestep} | others


_image, _video = functools.partial(_latent, 8, 8), functools.partial(_latent, 3, 8, 8)


def _mask(dtype: torch.dtype = torch.bool) -> Tensor:
    """The tokens of the texts, (2, TEXT), that are not padding."""
    mask = torch.ones(2, TEXT, dtype=dtype)
    mask[1, -PADDING:] = 0
    return mask


def _pooled() -> Tensor:
    return torch.randn(2, 24)


def _flux(axes: int = 3, **others: Any) -> dict[str, Any]:
    """Two packed images of 5 × 7 with a text, and where their tokens are."""
    ids = torch.zeros(5, 7, axes)
    ids[..., 1], ids[..., 2] = torch.arange(5)[:, None], torch.arange(7)
    return {
        "hidden_states": torch.randn(2, 35, 4),
        "encoder_hidden_states": torch.randn(2, TEXT, 24),
        "timestep": torch.tensor([0.003, 0.5]),
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(TEXT, axes),
    } | others


def _qwen_image() -> dict[str, Any]:
    inputs = _flux(encoder_hidden_states_mask=_mask(), img_shapes=[[(1, 5, 7)]] * 2)
    return {name: x for name, x in inputs.items() if not name.endswith("_ids")}


def _chroma() -> dict[str, Any]:
    return _flux(attention_mask=torch.cat([_mask(), torch.ones(2, 35, dtype=torch.bool)], 1))


def _ltx() -> dict[str, Any]:
    sizes, mask = {"num_frames": 3, "height": 5, "width": 7}, _mask(torch.float32)
    return _video(hidden_states=torch.randn(2, 3 * 5 * 7, 4), encoder_attention_mask=mask, **sizes)


def _unet() -> dict[str, Any]:
    inputs = _image()
    return {"sample": inputs.pop("hidden_states")} | inputs


def _cogvideox() -> dict[str, Any]:
    return _video(hidden_states=torch.randn(2, 5, 4, 8, 8))


def _z_image() -> dict[str, Any]:
    images = [torch.randn(4, 1, 8, n) for n in (8, 12)]
    texts = [torch.randn(n, 24) for n in (TEXT, TEXT - PADDING)]
    return {"x": images, "t": torch.tensor([0.003, 0.5]), "cap_feats": texts}


def _kandinsky() -> dict[str, Any]:
    where = {"visual_rope_pos": [torch.arange(n) for n in (3, 4, 4)], "text_rope_pos": torch.arange(TEXT)}
    return _video(hidden_states=torch.randn(2, 3, 8, 8, 4), pooled_projections=_pooled(), **where)


def _cogview() -> dict[str, Any]:
    return _image(**{x: torch.tensor([[8, 8]] * 2) for x in ("original_size", "target_size", "crop_coords")})


def _ace_step() -> dict[str, Any]:
    """Two latent sounds of 60 frames with a text."""
    shapes = {"hidden_states": (60, 4), "context_latents": (60, 8), "encoder_hidden_states": (TEXT, 32)}
    times = dict.fromkeys(("timestep", "timestep_r"), torch.tensor([0.003, 0.5]))
    return {name: torch.randn(2, *shape) for name, shape in shapes.items()} | times


ONE_OF_EACH = {"num_mmdit_layers": 1, "num_single_dit_layers": 1}
UNET = {
    "block_out_channels": (32, 32), "norm_num_groups": 8, "layers_per_block": 1, "sample_size": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 24,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "num_attention_heads": None,
    "attention_head_dim": 2,
}  # fmt: skip
KANDINSKY = {
    "in_visual_dim": 4, "in_text_dim": 24, "in_text_dim2": 24, "time_dim": 16, "model_dim": 32, "ff_dim": 48,
    "num_text_blocks": 1, "num_visual_blocks": 2,
}  # fmt: skip
COGVIDEOX = {"sample_width": 8, "sample_height": 8, "sample_frames": 17, "max_text_seq_length": TEXT}
LUMINA = {
    "hidden_size": 32, "num_kv_heads": 1, "axes_dim_rope": (4, 6, 6), "axes_lens": (32, 16, 16),
    "cap_feat_dim": 24, "multiple_of": 16,
}  # fmt: skip
ACE_STEP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 1,
    "head_dim": 16, "in_channels": 12, "audio_acoustic_hidden_dim": 4, "sliding_window": 5,
}  # fmt: skip
PIXART = {"use_additional_conditions": False, "out_channels": 8, "norm_num_groups": 1}
SANA = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16}

CHROMA = {"approximator_num_channels": 16, "approximator_hidden_dim": 16, "approximator_layers": 1}
BRIA = {"axes_dims_rope": [4, 6, 6], "pooled_projection_dim": None}
FLUX_2 = {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16}
COGVIEW = {"condition_dim": 4, "rope_axes_dim": (8, 8)}


def _masked(make: Callable[..., dict[str, Any]], dtype: torch.dtype = torch.bool, **others: Any):
    return lambda: make(encoder_attention_mask=_mask(dtype), **{name: x() for name, x in others.items()})


_FAMILIES = (
    Family("Flux", "FluxTransformer2DModel", lambda: _flux(pooled_projections=_pooled()), {}),
    Family("Flux 2", "Flux2Transformer2DModel", lambda: _flux(4), FLUX_2),
    Family("Chroma", "ChromaTransformer2DModel", _chroma, CHROMA),
    Family("Bria", "BriaTransformer2DModel", _flux, BRIA),
    Family("Qwen-Image", "QwenImageTransformer2DModel", _qwen_image, {"patch_size": 1}),
    Family("Z-Image", "ZImageTransformer2DModel", _z_image, {"dim": 32, "cap_feat_dim": 24}),
    Family("Wan", "WanTransformer3DModel", _video, {}),
    Family("SkyReels-V2", "SkyReelsV2Transformer3DModel", _video, {}),
    Family("HunyuanVideo", "HunyuanVideoTransformer3DModel", _masked(_video, pooled_projections=_pooled), {}),
    Family("LTX-Video", "LTXVideoTransformer3DModel", _ltx, {}),
    Family("ACE-Step", "AceStepTransformer1DModel", _ace_step, ACE_STEP),
    Family("Kandinsky 5", "Kandinsky5Transformer3DModel", _kandinsky, KANDINSKY),
    Family("Mochi", "MochiTransformer3DModel", _masked(_video), {}),
    Family("CogVideoX", "CogVideoXTransformer3DModel", _cogvideox, COGVIDEOX),
    Family("Allegro", "AllegroTransformer3DModel", _masked(_video, torch.int64), {}),
    Family("CogView 4", "CogView4Transformer2DModel", _cogview, COGVIEW),
    Family("Lumina 2", "Lumina2Transformer2DModel", _masked(_image), LUMINA),
    Family("SD 3", "SD3Transformer2DModel", lambda: _image(pooled_projections=_pooled()), {}),
    Family("AuraFlow", "AuraFlowTransformer2DModel", _image, ONE_OF_EACH),
    Family("PixArt", "PixArtTransformer2DModel", _masked(_image, torch.int64), PIXART),
    Family("Sana", "SanaTransformer2DModel", _masked(_image, torch.int64), SANA),
    Family("Stable Diffusion, SDXL", "UNet2DConditionModel", _unet, UNET),
)
FAMILIES = {family.name: family for family in _FAMILIES}


def train_step(family: Family, backend: str) -> tuple[dict[str, Tensor], set[str]]:
    """The gradients of a loss over the outputs, and the parameters of attention layers."""
    model = build(family)
    torch.manual_seed(1)
    inputs = family.inputs()
    with attention_set(model, backend):
        out = model(**inputs, return_dict=False)[0]
        out = out if isinstance(out, Tensor) else torch.cat([x.flatten() for x in out])
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        (out * weights).mean().backward()
    return gradients_of(model, "Attention")


@contextmanager
def attention_set(model: ModelMixin, backend: str) -> Iterator[None]:
    """``backend`` for this model; then diffusers' own again, for all models."""
    try:
        model.set_attention_backend(backend)
        yield
    finally:
        model.set_attention_backend("native")


def build(family: Family) -> ModelMixin:
    """The tiny model in training mode, with the same weights every time."""
    torch.manual_seed(0)
    model_class = getattr(diffusers, family.model)
    taken = inspect.signature(model_class.__init__).parameters
    model = model_class(**{name: size for name, size in SIZES.items() if name in taken} | family.sizes)
    for parameter in model.parameters():  # some begin at zero, and let no gradient through
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.7 * parameter[0].numel() ** -0.5)
    return model.train()
