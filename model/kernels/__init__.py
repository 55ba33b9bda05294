"""Triton kernels for what PyTorch and torch.compile make more passes over memory of; without a GPU they rest.

norm_and_rotate  RMSNorm of every head of Q or K, and the rotary embedding
cross_entropy    the loss of a chunk of logits together with its gradient
"""
