"""Triton kernels for operations that torch.compile computes in more passes over memory; used on GPUs only.

norm_and_rotate  RMSNorm of every head of Q and K, and the rotary embedding
swiglu           silu(gate) · up of gate and up side by side
cross_entropy    the loss of a chunk of logits together with its gradient
"""
