"""The numbers that the SageBwd paper (arXiv 2603.02170) prints, to compare with what is measured here."""

#: Table 1 of SageBwd: {σ: (cosine similarity, relative L2) of O, dQ, dK, dV}.
TABLE_1 = {
    1: ((0.9999, 0.0160), (0.9998, 0.0184), (0.9998, 0.0220), (0.9999, 0.0159)),
    3: ((0.9992, 0.0389), (0.9971, 0.0758), (0.9970, 0.0777), (0.9992, 0.0387)),
    5: ((0.9982, 0.0603), (0.9798, 0.2014), (0.9799, 0.2007), (0.9982, 0.0605)),
    8: ((0.9953, 0.0972), (0.8900, 0.4666), (0.8886, 0.4699), (0.9953, 0.0973)),
    10: ((0.9933, 0.1161), (0.7823, 0.6648), (0.7820, 0.6684), (0.9933, 0.1157)),
}

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)

#: Figures 2 and 3, causal, forward and backward on an RTX 4090: TOPS at LENGTHS, by head size.
FIGURES_2_3 = {
    128: {
        "FlashAttention-2": (81, 109, 130, 142, 148, 151),
        "FlashAttention-2, Triton": (68, 85, 95, 100, 103, 104),
        "sagebwd": (110, 128, 190, 206, 214, 224),
    },
    64: {
        "FlashAttention-2": (76, 103, 127, 143, 152, 155),
        "FlashAttention-2, Triton": (86, 110, 136, 149, 157, 160),
        "sagebwd": (114, 116, 190, 248, 255, 263),
    },
}


def speed_ups(head_dim: int) -> dict[int, float]:
    """By length: SageBwd over the faster of the paper's two FlashAttention-2, in CUDA and in Triton."""
    printed = FIGURES_2_3[head_dim]
    fastest = map(max, printed["FlashAttention-2"], printed["FlashAttention-2, Triton"])
    pairs = zip(LENGTHS, printed["sagebwd"], fastest, strict=True)
    return {tokens: ours / theirs for tokens, ours, theirs in pairs}


#: Table 2: (cosine similarity, relative L2) in layer 11 of the QK-norm run at 2.1M tokens per step.
TABLE_2 = {
    "delta": (0.9973, 0.0736),
    "p": (0.9917, 0.1293),
    "dp": (1.0, 0.0),
    "ds": (0.9789, 0.2045),
    "o": (0.9969, 0.0793),
    "dq": (0.9664, 0.2579),
    "dk": (0.9537, 0.3074),
    "dv": (0.9985, 0.0540),
}

#: §4.2: RMS in the QK-norm run at 2.1M tokens per step, 4096 tokens.
RMS = {"p": 5e-3, "dp": 5e-5, "ds": 1e-7}
