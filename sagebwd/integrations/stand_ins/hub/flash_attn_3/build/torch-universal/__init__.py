"""In the place of the Hub's kernels for FlashAttention-3."""

import flash_attn_interface
from flash_attn_interface import *
