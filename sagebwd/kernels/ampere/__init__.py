"""CUDA C++ kernels for GPUs since Ampere: mma.sync, ldmatrix, cp.async."""
