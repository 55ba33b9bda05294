"""Triton kernels for operations that torch.compile computes in more passes over memory; used on GPUs only.

norm_and_rotate  RMSNorm of every head of Q or K, and the rotary embedding
cross_entropy    the loss of a chunk of logits together with its gradient
"""
