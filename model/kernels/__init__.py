"""Triton kernels for operations that torch.compile computes in more passes over memory; used on GPUs only.

norm_and_rotate  RMSNorm of every head of Q or K, and the rotary embedding
cross_entropy    the loss of a chunk of logits together with its gradient

None where Triton is not installed: macOS, Windows, PyTorch for CPUs.
"""

try:
    from model.kernels import cross_entropy, norm_and_rotate
except ModuleNotFoundError as missing:
    if missing.name != "triton":
        raise
    cross_entropy = norm_and_rotate = None
