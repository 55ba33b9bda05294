"""In the place of the Hub's kernels-community/flash-attn2."""

from sagebwd.integrations.flash_attn import *
