"""Where the operators are registered: ``torch.ops.sagebwd``."""

import torch

NAMESPACE = "sagebwd"

#: The operators, once they are registered.
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    """The full name of an operator, for :mod:`torch.library`."""
    return f"{NAMESPACE}::{name}"
