"""Kernels written for Hopper in CUDA C++, and :mod:`.runtime`, which compiles and launches them."""
