"""The shape of a Llama: its settings, what makes them invalid, and how many parameters they amount to."""

import math
from dataclasses import dataclass, fields


@dataclass
class LlamaConfig:
    """Settings of a Llama (Hydra group `model`); the defaults are the paper's 325M model.

    Published (SageBwd, arXiv 2603.02170): "325M Llama", "hidden dimension 3072", norm eps 1e-6, context 4096,
    runs with and without QK-norm. Everything else is a choice; width 1024, 20 layers, FFN 3072, 16 heads of
    64 and tied embeddings is the one shape known to fit everything that is published (324.2M parameters).
    """

    vocab_size: int = 50304  # choice: GPT-2's 50257 tokens (published) padded to a multiple of 128 for speed
    d_model: int = 1024  # choice; width
    n_layers: int = 20  # choice; blocks
    n_heads: int = 16  # choice; query heads
    n_kv_heads: int | None = None  # choice; None: n_heads, fewer: grouped-query attention
    d_head: int = 64  # choice; size of a head
    d_ffn: int = 3072  # published ("hidden dimension"); inner width of SwiGLU
    max_context: int = 4096  # published; longest sequence the rotary position table covers
    rope_theta: float = 10000.0  # choice: Llama's; base of the rotary positions
    norm_eps: float = 1e-6  # published; of RMSNorm
    qk_norm: bool = True  # RMSNorm of Q and K; published both ways, recommended
    qk_norm_gain: float = 1.0  # choice; of QK-norm before training: logits grow with its square
    tie_embeddings: bool = True  # choice: without tying, the published size leaves too few layers
    init_std: float = 0.02  # choice: GPT-2's and Llama's; of the weights before training
    linear: str | None = None  # choice; products with the blocks' weights; float8: in FP8 (torchao)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, with the default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def is_gqa(self) -> bool:
        """Whether there are fewer key heads than query heads (grouped-query attention)."""
        return self.kv_heads != self.n_heads


def check(config: LlamaConfig) -> None:
    """Raise ValueError that names every wrong setting and its fix, unless a model can be built."""
    if found := problems(config):
        raise ValueError("; ".join(found))


def problems(config: LlamaConfig) -> list[str]:
    """Every reason why no model can be built, each with its fix."""
    return _nonpositive(config) or _inconsistent(config)


def _nonpositive(config: LlamaConfig) -> list[str]:
    sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "kv_heads", "d_head", "d_ffn", "max_context")
    problems = [
        f"model.{name.replace('kv_heads', 'n_kv_heads')}={getattr(config, name)} must be at least 1"
        for name in sizes
        if getattr(config, name) < 1
    ]
    for name in ("rope_theta", "norm_eps", "qk_norm_gain", "init_std"):
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            problems.append(f"model.{name}={value} must be positive and finite")
    return problems


def _inconsistent(config: LlamaConfig) -> list[str]:
    problems = []
    if config.n_heads % config.kv_heads:
        problems.append(
            f"model.n_kv_heads={config.n_kv_heads} does not divide model.n_heads={config.n_heads}; "
            f"use model.n_kv_heads={_alternatives(_divisors(config.n_heads), config.kv_heads)}"
        )
    if config.d_head % 2:
        problems.append(
            f"model.d_head={config.d_head} is odd, but rotary embedding rotates pairs of channels; "
            f"use model.d_head={_alternatives([config.d_head - 1, config.d_head + 1], config.d_head)}"
        )
    if config.d_model % config.n_heads:
        below = config.d_model // config.n_heads * config.n_heads
        multiples = [below, below + config.n_heads]
        problems.append(
            f"model.d_model={config.d_model} is not a multiple of model.n_heads={config.n_heads}, which the "
            f"Hugging Face layout requires; use model.d_model={_alternatives(multiples, config.d_model)}"
        )
    if config.linear not in (None, "float8"):
        problems.append(f"model.linear={config.linear} is unknown; choose float8 or null")
    heads = (config.n_heads * config.d_head, config.kv_heads * config.d_head)
    sizes = (config.d_model, config.d_ffn, *heads)
    if config.linear == "float8" and any(size % 16 for size in sizes):
        problems.append(
            "model.linear=float8 needs multiples of 16, but d_model, d_ffn and the channels of all query and "
            f"of all key heads are {', '.join(map(str, sizes))}; change them, or use model.linear=null"
        )
    return problems


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _alternatives(valid: list[int], wrong: int) -> str:
    """The nearest positive valid value below and above the wrong one: "4 or 8"."""
    below = [n for n in valid if 0 < n < wrong][-1:]
    above = [n for n in valid if n > wrong][:1]
    return " or ".join(map(str, below + above))


#: Fields that may differ between weights and the model they are read into: the length of the rotary table,
#: which is computed, the initialization, and how products are computed. (n_kv_heads is compared as kv_heads,
#: with its default filled in.)
NOT_IN_WEIGHTS = ("max_context", "qk_norm_gain", "init_std", "linear", "n_kv_heads")


def differences(stored: LlamaConfig, wanted: LlamaConfig) -> list[tuple[str, object, object]]:
    """(name, stored value, wanted value) of the fields by which `stored` weights do not fit the model."""
    names = [field.name for field in fields(LlamaConfig) if field.name not in NOT_IN_WEIGHTS]
    values = [(name, getattr(stored, name), getattr(wanted, name)) for name in names]
    values.append(("n_kv_heads", stored.kv_heads, wanted.kv_heads))
    return [(name, theirs, ours) for name, theirs, ours in values if theirs != ours]


def parameter_count(config: LlamaConfig) -> int:
    """Number of trainable parameters, tied embeddings counted once."""
    head = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    return config.vocab_size * config.d_model + non_embedding_parameter_count(config) + head


def non_embedding_parameter_count(config: LlamaConfig) -> int:
    """Number of trainable parameters without the token embedding and without the output head."""
    attention = 2 * config.d_model * config.d_head * (config.n_heads + config.kv_heads)
    qk_gains = 2 * config.d_head if config.qk_norm else 0
    feed_forward = 3 * config.d_model * config.d_ffn
    norm_gains = 2 * config.d_model
    return config.n_layers * (attention + qk_gains + feed_forward + norm_gains) + config.d_model


def flops_per_token(config: LlamaConfig, context: int) -> float:
    """Floating-point operations of the model per trained token, forward and backward.

    6 · (parameters outside the embedding + the head d_model · vocab_size), as each weight takes part in one
    multiply-add forward and two backward; plus causal attention, where a token attends to context / 2 others
    on average: QKᵀ and PV take 4 · d_head · context / 2 per head forward, and twice that backward. Work that
    an implementation repeats (recomputed scores, activation checkpointing) is not counted.
    """
    embedding = config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    weights = parameter_count(config) - embedding + config.vocab_size * config.d_model
    return 6 * weights + attention_flops_per_token(config, context)


def attention_flops_per_token(config: LlamaConfig, context: int) -> float:
    """The part of :func:`flops_per_token` that attention itself takes."""
    return 3 * 4 * config.n_layers * config.n_heads * config.d_head * context / 2
