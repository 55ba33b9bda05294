"""Trainable INT8 attention: SageBwd (arXiv 2603.02170)."""

from sagebwd.attention import sage_attention
from sagebwd.config import SageConfig

__version__ = "0.1.0"

__all__ = ["SageConfig", "__version__", "sage_attention"]
