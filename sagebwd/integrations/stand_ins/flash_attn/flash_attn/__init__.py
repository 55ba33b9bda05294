"""In the place of flash_attn: FlashAttention-2, and in ``cute`` FlashAttention-4.

Other modules are those of an installed flash_attn, also of FlashAttention-4's, which has no ``__init__``.
"""

from pkgutil import extend_path

from sagebwd.integrations.flash_attn import *

__version__ = "2.8.3"  # whose functions these are

__path__ = extend_path(__path__, __name__)
