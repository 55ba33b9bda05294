"""CUDA C++ kernels for Hopper: wgmma, bulk copies, setmaxnreg."""
