"""A fine-tuning step with LoRA, as eager PyTorch runs it: SageBwd in the place of PyTorch's own attention.

    python -m scripts.bench.finetuning --help

Two models with random weights, nothing is downloaded: `language` has the shape of Qwen3-0.6B, `image` that of
Stable Diffusion 3 (transformers, diffusers and peft must be installed). Attentions take turns in one process.
Their gradients are compared first: a step whose gradients are wrong is not timed.

Columns:
  cosine     of all adapters' gradients with those of PyTorch's own choice of attention
  step, ms   median of forward, backward and AdamW
  speedup    over PyTorch's own choice
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.files import write_json
from common.terminal import available_device, command_parser, positive_int
from sagebwd.config import PRESETS
from sagebwd.integrations.sdpa import patch_sdpa
from scripts.bench.measuring import describe_run
from scripts.output import SCRATCH, align, with_ending

PROGRAM = "python -m scripts.bench.finetuning"
OWN_CHOICE = "PyTorch"
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
SMALLEST_COSINE = 0.98
#: What --tiny makes smaller.
TINY = {"layers": 2, "tokens": 64}
ADAPTED = {
    "language": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "image": ["to_q", "to_k", "to_v", "to_out.0"],
}


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table and write it."""
    arguments = parse_arguments(argv)
    path = with_ending(arguments.out, ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    packages = ("transformers", "diffusers", "peft")
    result = describe_run(PROGRAM, argv, arguments, packages)
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        rows += measure(name, arguments)
        write_json(path, result | {"rows": rows})  # an interrupted run keeps what it measured
    header = ["model", "batch", "tokens", "attention", "cosine", "step, ms", "speedup"]
    cells = [
        [
            row["model"],
            str(row["batch"]),
            str(row["tokens"]),
            row["attention"],
            f"{row['cosine']:.4f}",
            f"{row['ms']:.1f}",
            f"{row['speedup']:.2f}",
        ]
        for row in rows
    ]
    print("\n".join(align(header, cells)))
    print(f"written: {path}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=ADAPTED, default=[*ADAPTED], help="default: both")
    add("--preset", choices=PRESETS, default="default", help="of SageBwd (default: default)")
    add("--batch", type=positive_int, default=2, help="default 2")
    add("--steps", type=positive_int, default=10, help="timed in a row, in each round (default 10)")
    add("--rounds", type=positive_int, default=5, help="of all attentions (default 5)")
    add("--tiny", action="store_true", help="two layers and 64 tokens, to try the command")
    add("--device", type=available_device, help="default: a GPU if there is one")
    add(
        "--out",
        type=Path,
        metavar="PREFIX",
        default=SCRATCH / "finetuning",
        help="write PREFIX.json (%(default)s)",
    )
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return arguments


# --- The models --------------------------------------------------------------------------------------------


def language_model(arguments: Namespace) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    """A model, its loss on one batch, and the tokens of a sequence."""
    import transformers

    tokens = TINY["tokens"] if arguments.tiny else 1024
    config = transformers.Qwen3Config(
        vocab_size=1000 if arguments.tiny else 151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=TINY["layers"] if arguments.tiny else 28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    text = torch.randint(config.vocab_size, (arguments.batch, tokens), device=arguments.device)
    return model, lambda model: model(input_ids=text, labels=text).loss, tokens


def image_model(arguments: Namespace) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    """As :func:`language_model`: images of 512 × 512, with 333 tokens of text."""
    import diffusers

    side, words = (16, 8) if arguments.tiny else (64, 333)
    layers = {"num_layers": TINY["layers"]} if arguments.tiny else {"num_layers": 24}
    model = diffusers.SD3Transformer2DModel(
        sample_size=128, num_attention_heads=24, attention_head_dim=64, caption_projection_dim=1536,
        pos_embed_max_size=192, **layers,
    )  # fmt: skip
    dtype = torch.bfloat16 if arguments.device != "cpu" else torch.float32
    draw = partial(torch.randn, arguments.batch, device=arguments.device, dtype=dtype)
    images, target = draw(16, side, side), draw(16, side, side)
    text, pooled = draw(words, 4096), draw(2048)
    when = torch.full((arguments.batch,), 500.0, device=arguments.device)

    def loss(model: nn.Module) -> Tensor:
        found = model(images, encoder_hidden_states=text, pooled_projections=pooled, timestep=when).sample
        return nn.functional.mse_loss(found.float(), target.float())

    return model, loss, (side // 2) ** 2 + words


MODELS = {"language": language_model, "image": image_model}


# --- The measurement ---------------------------------------------------------------------------------------


def measure(name: str, arguments: Namespace) -> Iterator[dict[str, Any]]:
    """A row for each attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with torch.device(arguments.device):
        model, loss, tokens = MODELS[name](arguments)
    model = model.to(arguments.device, torch.bfloat16 if arguments.device != "cpu" else torch.float32)
    # Adapters whose gradients are not zero at the start.
    adapters = LoraConfig(r=16, target_modules=ADAPTED[name], init_lora_weights="gaussian")
    model = get_peft_model(model, adapters).train()
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=arguments.device != "cpu")

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    ways = attentions(arguments)
    step()  # from now on both factors of an adapter have gradients
    truth = gradients(model, loss, weights, ways[OWN_CHOICE])
    cosines = {way: cosine(truth, gradients(model, loss, weights, context)) for way, context in ways.items()}
    if wrong := {way: value for way, value in cosines.items() if value < SMALLEST_COSINE}:
        sys.exit(f"{name}: gradients differ from those of {OWN_CHOICE}'s attention, cosine {wrong}")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, context in ways.items():
            with context():
                step()
                times[way].append(time_of(step, arguments))
    for way, own in times.items():
        yield {
            "model": name,
            "batch": arguments.batch,
            "tokens": tokens,
            "attention": way,
            "cosine": cosines[way],
            "ms": statistics.median(own),
            "speedup": statistics.median(times[OWN_CHOICE]) / statistics.median(own),
        }


def attentions(arguments: Namespace) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """By name, what a step runs in."""
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {OWN_CHOICE: nullcontext}
    if arguments.device != "cpu":
        ways |= {name: partial(sdpa_kernel, backend) for name, backend in PEERS.items()}
    return ways | {f"SageBwd {arguments.preset}": partial(patch_sdpa, PRESETS[arguments.preset])}


def gradients(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    weights: list[nn.Parameter],
    context: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Of all adapters, in one vector in float64."""
    with context():
        found = torch.autograd.grad(loss(model), weights)
    return torch.cat([x.double().flatten() for x in found])


def cosine(x: Tensor, y: Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()))


def time_of(step: Callable[[], None], arguments: Namespace) -> float:
    """Milliseconds of a step, of several in a row."""
    wait = torch.cuda.synchronize if arguments.device != "cpu" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    wait()
    return 1000 * (time.perf_counter() - begin) / arguments.steps


if __name__ == "__main__":
    main()
