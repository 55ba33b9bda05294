"""Fine-tune a video transformer of diffusers with LoRA, in full precision and with SageBwd.

The model has the shape of Wan 2.1, with random weights unless --weights names some. Both runs start from the
same weights and see the same batches: flow matching towards a few synthetic clips, so nothing is downloaded.
It prints the time of a step and of attention alone, the memory, the losses, and the cosine of the gradients
to those in full precision; --out writes them as JSON, with a picture of the losses.

    python examples/finetune_video_lora.py                                          # tiny, on a CPU
    python examples/finetune_video_lora.py --size wan-1.3b --steps 200 --out video  # 32,760 tokens, on a GPU
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor, nn
from torch.nn import functional as F

import sagebwd
from sagebwd.config import PRESETS
from sagebwd.integrations.diffusers import register

#: Of the model, and of a latent video (frames, height, width); a token is 1 × 2 × 2 of it.
SIZES = {
    "tiny": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "ffn_dim": 96,
            "num_layers": 2,
            "text_dim": 48,
            "freq_dim": 32,
        },
        {"video": (3, 8, 10), "text": 12},
    ),
    "wan-1.3b": (
        {
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "ffn_dim": 8960,
            "num_layers": 30,
            "text_dim": 4096,
            "freq_dim": 256,
        },
        {"video": (21, 60, 104), "text": 512},
    ),
}
CHANNELS, CLIPS = 16, 4
#: PyTorch's attention in full precision, by diffusers' names; the fastest that runs here is the baseline.
FULL_PRECISION = ("_native_cudnn", "_native_flash", "native")
ADAPTED = ("to_q", "to_k", "to_v", "to_out.0")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Time attention, train twice, compare gradients; print, write and return what was measured."""
    arguments = parse_arguments(argv)
    register("sagebwd", PRESETS[arguments.preset])
    diffusers.utils.logging.set_verbosity_error()  # set_attention_backend warns that it is experimental
    attention = time_attention(arguments)
    baseline, *others = sorted(attention, key=lambda name: (name == "sagebwd", attention[name]))
    others.remove("sagebwd")
    model = make_model(arguments)
    runs = {}
    for backend in ("sagebwd", baseline):
        reset_adapters(model)
        runs[backend] = {"attention_ms": attention[backend], **train(model, backend, arguments)}
        print(f"trained {arguments.steps} steps with {backend}", flush=True)
    result = describe(arguments) | {
        "baseline": baseline,
        "attention_ms": attention,
        "runs": runs,
        "gradients": compare_gradients(model, baseline, ["sagebwd", *others], arguments),
    }
    print(table(result))
    if arguments.out:
        write(result, arguments.out)
    return result


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="default %(default)s")
    parser.add_argument("--weights", metavar="FOLDER", help="of a WanTransformer3DModel; default random")
    parser.add_argument("--frames", type=int, help="of the latent video; default that of the size")
    for name, default in {"steps": 20, "rank": 16, "warm-up": 2, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default %(default)s")
    parser.add_argument("--preset", default="default", choices=PRESETS, help="of SageConfig")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", metavar="PREFIX", help="write PREFIX.json and PREFIX.png")
    arguments = parser.parse_args(argv)
    for name in ("frames", "rank", "repeats"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: give a positive number")
    if arguments.warm_up < 0:
        parser.error(f"--warm-up {arguments.warm_up}: give 0 or more")
    if arguments.steps <= arguments.warm_up:
        parser.error(f"--steps {arguments.steps} leaves no step to time after --warm-up {arguments.warm_up}")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU; use --device cpu")
    if arguments.out and not Path(arguments.out).parent.is_dir():
        parser.error(f"--out {arguments.out}: there is no such folder")
    sizes, inputs = SIZES[arguments.size]
    arguments.sizes, arguments.text = sizes, inputs["text"]
    arguments.video = [arguments.frames or inputs["video"][0], *inputs["video"][1:]]
    arguments.dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32
    frames, height, width = arguments.video
    arguments.tokens = frames * (height // 2) * (width // 2)
    return arguments


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was run, and where."""
    is_gpu = arguments.device.startswith("cuda")
    return {
        "command": shlex.join(["python", *sys.argv]),
        "settings": {name: value for name, value in vars(arguments).items() if name != "dtype"},
        "device": torch.cuda.get_device_name() if is_gpu else "CPU",
        "versions": {
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "sagebwd": sagebwd.__version__,
        },
    }


# --- The model ---------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen linear layer with a trained update of low rank, kept in fp32."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(layer.weight.new_empty(rank, layer.in_features, dtype=torch.float32))
        self.up = nn.Parameter(layer.weight.new_empty(layer.out_features, rank, dtype=torch.float32))

    def reset(self, generator: torch.Generator) -> None:
        """Start as the frozen layer."""
        with torch.no_grad():
            down = torch.randn(self.down.shape, generator=generator)
            self.down.copy_(down * self.down.shape[1] ** -0.5)
            self.up.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        return self.layer(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


def make_model(arguments: argparse.Namespace) -> WanTransformer3DModel:
    """Frozen, with adapters at every projection of attention."""
    torch.manual_seed(0)
    if arguments.weights:
        model = WanTransformer3DModel.from_pretrained(arguments.weights, torch_dtype=torch.float32)
    else:
        model = WanTransformer3DModel(in_channels=CHANNELS, out_channels=CHANNELS, **arguments.sizes)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not any(kept in name for kept in model._keep_in_fp32_modules):  # diffusers' own rule
            parameter.data = parameter.data.to(arguments.dtype)
    model.to(arguments.device)
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            for name in ADAPTED:
                attention.set_submodule(name, LoRA(attention.get_submodule(name), arguments.rank))
    model.enable_gradient_checkpointing()
    return model.train()


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def reset_adapters(model: nn.Module) -> None:
    """The same start for every run."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, LoRA):
            module.reset(generator)


# --- Training ----------------------------------------------------------------------------------------------


def make_batch(step: int, arguments: argparse.Namespace) -> tuple[dict[str, Tensor], Tensor]:
    """One noisy clip with its text, and the velocity to predict. The same for the same step."""
    clip = torch.Generator().manual_seed(1000 + step % CLIPS)
    wave = torch.rand(CHANNELS, 4, 1, 1, 1, generator=clip)
    axes = torch.meshgrid(*(torch.linspace(0, 1, n) for n in arguments.video), indexing="ij")
    phase = sum(wave[:, i] * axis for i, axis in enumerate(axes)) + wave[:, 3]
    target = torch.sin(4 * torch.pi * phase)
    text = torch.randn(arguments.text, arguments.sizes["text_dim"], generator=clip)
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(target.shape, generator=generator)
    time_ = torch.rand(1, generator=generator)
    placed = {"device": arguments.device, "dtype": arguments.dtype}
    inputs = {
        "hidden_states": torch.lerp(target, noise, time_)[None].to(**placed),
        "encoder_hidden_states": text[None].to(**placed),
        "timestep": (1000 * time_).to(arguments.device),
    }
    return inputs, (noise - target)[None].to(arguments.device)


def loss_of(model: nn.Module, inputs: dict[str, Tensor], velocity: Tensor) -> Tensor:
    """Of flow matching."""
    return F.mse_loss(model(**inputs, return_dict=False)[0].float(), velocity)


def train(model: WanTransformer3DModel, backend: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The losses of all steps, the median time of one in seconds, and the peak of memory in GiB."""
    model.set_attention_backend(backend)
    optimizer = torch.optim.AdamW(adapters(model), lr=arguments.learning_rate)
    losses, seconds = [], []
    is_gpu = arguments.device.startswith("cuda")
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(arguments.steps):
        batch = make_batch(step, arguments)
        begin = time.perf_counter()
        loss = loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - begin)
    return {
        "losses": losses,
        "step_s": statistics.median(seconds[arguments.warm_up :]),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
    }


# --- Attention alone ---------------------------------------------------------------------------------------


def time_attention(arguments: argparse.Namespace) -> dict[str, float]:
    """Forward and backward of one layer's attention in ms, by backend; those that cannot run are left out."""
    heads, width = (arguments.sizes[name] for name in ("num_attention_heads", "attention_head_dim"))
    shape = (1, arguments.tokens, heads, width)
    placed = {"device": arguments.device, "dtype": arguments.dtype}
    q, k, v, grad = (torch.randn(shape, **placed, requires_grad=True) for _ in range(4))
    grad = grad.detach()
    is_gpu = arguments.device.startswith("cuda")
    times = {}

    def step(backend: AttentionBackendName) -> None:
        torch.autograd.grad(dispatch_attention_fn(q, k, v, backend=backend), (q, k, v), grad)

    for name in ("sagebwd", *(FULL_PRECISION if is_gpu else ("native",))):
        backend = AttentionBackendName(name)
        try:
            times[name] = median_ms(lambda b=backend: step(b), arguments)
        except RuntimeError as error:
            if name == "sagebwd":
                raise
            print(f"{name} does not run here: {error}", file=sys.stderr)
    return times


def median_ms(step: Callable[[], None], arguments: argparse.Namespace) -> float:
    """The median time of a step after one that is not counted."""
    times = []
    for _ in range(1 + arguments.repeats):
        begin = time.perf_counter()
        step()
        if arguments.device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


# --- Gradients ---------------------------------------------------------------------------------------------


def compare_gradients(
    model: WanTransformer3DModel, baseline: str, backends: list[str], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Cosine to the gradients of ``baseline``: of all adapters together, and the least of one tensor.

    The adapters are those that were trained last. Other kernels in full precision show what rounding to 16
    bit alone does.
    """
    truth = gradients_with(model, baseline, arguments)
    result = {}
    for backend in backends:
        found = gradients_with(model, backend, arguments)
        together = cosine(torch.cat(found), torch.cat(truth))
        result[backend] = {"all": together, "least": min(map(cosine, found, truth))}
    return result


def gradients_with(model: WanTransformer3DModel, backend: str, arguments: argparse.Namespace) -> list[Tensor]:
    """Of each adapter, flat, in float64, for the batch after the last step."""
    model.set_attention_backend(backend)
    batch = make_batch(arguments.steps, arguments)
    gradients = torch.autograd.grad(loss_of(model, *batch), adapters(model))
    return [gradient.flatten().double() for gradient in gradients]


def cosine(x: Tensor, y: Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()))


# --- Results -----------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    baseline, gradients = result["baseline"], result["gradients"]
    full, sage = result["runs"][baseline], result["runs"]["sagebwd"]
    other = next((name for name in gradients if name != "sagebwd"), None)
    settings = result["settings"]
    head = f"{settings['size']}, {settings['tokens']:,} tokens, {settings['steps']} steps"
    lines = [
        f"\n{head}, {result['device']}\n",
        f"| | full precision ({baseline}) | SageBwd ({settings['preset']}) | |",
        "| --- | ---: | ---: | ---: |",
        _row("step, s", full["step_s"], sage["step_s"], ".3f"),
        _row("attention of a layer, ms", full["attention_ms"], sage["attention_ms"], ".2f"),
        _row("peak memory, GiB", full["memory_gib"], sage["memory_gib"], ".2f"),
        _row("loss, first tenth of the steps", *(_mean(run["losses"], 0) for run in (full, sage)), ".4f"),
        _row("loss, last tenth", *(_mean(run["losses"], -1) for run in (full, sage)), ".4f"),
        f"| cosine of the adapters' gradients | 1 | {gradients['sagebwd']['all']:.5f} | |",
        f"| the least of one tensor | 1 | {gradients['sagebwd']['least']:.5f} | |",
    ]
    if other:
        both = f"{gradients[other]['all']:.5f} and {gradients[other]['least']:.5f}"
        lines.append(f"\nThe same two cosines for {other}, also full precision: {both}.")
    return "\n".join(lines)


def _row(name: str, full: float | None, sage: float | None, form: str) -> str:
    if full is None or sage is None:
        return f"| {name} | – | – | |"
    return f"| {name} | {full:{form}} | {sage:{form}} | {full / sage:.2f}× |"


def _mean(losses: list[float], part: int) -> float:
    n = max(1, len(losses) // 10)
    return statistics.mean(losses[:n] if part == 0 else losses[-n:])


def write(result: dict[str, Any], prefix: str) -> None:
    """PREFIX.json, and PREFIX.png with the losses."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    Path(f"{prefix}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, style in ((result["baseline"], "-"), ("sagebwd", "--")):
        axes.plot(result["runs"][name]["losses"], style, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss", title=f"{result['settings']['tokens']:,} tokens, LoRA")
    axes.legend()
    figure.savefig(f"{prefix}.png", dpi=130)
    pyplot.close(figure)
    print(f"written: {prefix}.json, {prefix}.png")


if __name__ == "__main__":
    main()
