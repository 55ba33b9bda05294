"""A Llama that takes its attention as an argument: experiments differ in that, not in the model.

config       the shape, its checks and its number of parameters
llama        the network
loss         of the output head, without storing all logits
kernels/     Triton kernels of the network, apart from attention
backends/    the attentions to choose from, one module each
huggingface  weights to and from the Hugging Face layout
untrusted    reading JSON and weights that others wrote
generate     sampling
"""
