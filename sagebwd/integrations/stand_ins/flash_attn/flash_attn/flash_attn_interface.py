"""The module of flash_attn that has its functions, and those of which rings are built."""

from sagebwd.integrations.flash_attn import *
from sagebwd.integrations.flash_attn import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

try:  # imported by unsloth, which asks whether flash_attn loads, and by xformers, which calls it
    import flash_attn_2_cuda as flash_attn_gpu
except ImportError:
    flash_attn_gpu = None

_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
