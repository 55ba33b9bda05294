"""A Llama whose attention is handed in, so that every experiment runs the same model around another kernel.

config       the shape, its checks and its number of parameters
llama        the network
loss         of the output head, without ever holding all logits
kernels/     Triton kernels of the network, apart from attention
backends/    the attentions that can be handed in, one module each
huggingface  weights to and from the Hugging Face layout
generate     sampling
"""
