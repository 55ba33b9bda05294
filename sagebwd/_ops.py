"""Where the operators are registered: ``torch.ops.sagebwd``.

A build for the Hub (``scripts/build_hub_kernel.py``) has a namespace of its own instead, so that it and the
installed package can be loaded in one process.
"""

import torch

NAMESPACE = "sagebwd"

#: The operators, once they are registered.
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    """The full name of an operator, for :mod:`torch.library`; the Hub's tools look for this function."""
    return f"{NAMESPACE}::{name}"
