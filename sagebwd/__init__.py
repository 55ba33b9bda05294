"""Trainable INT8 attention: SageBwd (arXiv 2603.02170). Importing it registers ``torch.ops.sagebwd``."""

from sagebwd.attention import sage_attention
from sagebwd.config import SageConfig
from sagebwd.diagnosis import Diagnosis, diagnose
from sagebwd.dispatch import Explanation, explain
from sagebwd.preparation import prepare
from sagebwd.usage import Report, report

__version__ = "0.1.0"

__all__ = [
    "Diagnosis",
    "Explanation",
    "Report",
    "SageConfig",
    "__version__",
    "diagnose",
    "explain",
    "prepare",
    "report",
    "sage_attention",
]
