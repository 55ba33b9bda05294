"""SageBwd as Triton kernels, for every NVIDIA GPU since Ampere."""
