"""What the CUDA kernel sets share: NVRTC, launching, packing of operands, and headers for sources."""
