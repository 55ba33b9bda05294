"""SageBwd in torchtitan's own training loop, by one argument:

    --override.imports sagebwd.integrations.torchtitan.sagebwd

For another preset write ``'sagebwd.integrations.torchtitan.sagebwd={"preset": "low_bias"}'``. It takes the
place of the attention of configs with ``attn_backend="varlen"``. Nothing else changes: sharding, activation
checkpointing and compilation see torch's ``varlen_attn``, whose operators run SageBwd.

By itself torchtitan's ``VarlenAttention`` activates FlashAttention-3 or -4 when it is built on Hopper or
Blackwell, for the whole process and whatever is active.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from sagebwd.config import PRESETS
from sagebwd.integrations import torch_flash

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        f"sagebwd.integrations.torchtitan needs torchtitan 0.3 or newer ({error}); "
        "pip install 'torchtitan>=0.3'"
    ) from error


class SageAttention(VarlenAttention):
    """torchtitan's ``VarlenAttention``; for the whole process SageBwd replaces torch's FlashAttention."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """preset: a name of :data:`sagebwd.config.PRESETS` without ``compensate_o``."""

        preset: str = "default"

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # that of VarlenAttention would activate another implementation
        self.window_size = config.window_size
        name = f"sagebwd-{config.preset}"
        if current_flash_attention_impl() != name:
            torch_flash.register(name, PRESETS[config.preset])
            activate_flash_attention_impl(name)


@override(target=VarlenAttention.Config, description="INT8 attention by SageBwd")
def sagebwd(config: VarlenAttention.Config, preset: str = "default") -> Any:
    """What ``--override.imports`` names. Raises ValueError for a preset that is not known."""
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; use one of {', '.join(PRESETS)}")
    return derive(config, SageAttention.Config, preset=preset)
