"""Bias or noise: what INT8 attention does to the gradients of a training step.

    python -m scripts.paper.gradient_bias runs/NAME [runs/NAME …] --milestones --out runs/paper/gradient_bias

At each checkpoint of a run, the gradient of every weight is computed on n batches of the run's training text:
with FlashAttention-2 (g_i), with cuDNN as the control, and with each setting of SageBwd (g'_i). With
d_i = g'_i − g_i, means over pairs of different batches estimate without bias

    |b|²  = mean ⟨d_i, d_j⟩    bias: what no number of batches averages out
    |G|²  = mean ⟨g_i, g_j⟩    the gradient itself
    ⟨b, G⟩ = mean ⟨d_i, g_j⟩   bias along the gradient

and what remains is noise: mean |d_i|² − |b|² of quantization, mean |g_i|² − |G|² of the minibatch. The noise
of the minibatch falls as 1/T with the tokens T of a step, the bias does not. They are equal at

    T* = tokens per batch · noise of the minibatch / |b|²

the critical tokens per step: with more, bias is the larger error of a step. All of it is measured for each
group of weights, for each layer and for all weights; raw, and as Adam sees it: every element divided by
√v̂ + eps, where v̂ is Adam's second moment in the checkpoint. Intervals are 95%, by the jackknife over batches;
where there is no bias they are wider than that.

The batches follow the end of the run in its own data order. They are the same for all checkpoints and
settings, disjoint, and unseen by the run as long as it has not gone through its text once. The model is not
compiled; all else is as in training.
"""

from __future__ import annotations

import functools
import operator
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from common.errors import ends_with_message
from common.terminal import positive_int
from model.backends import AttentionFn
from model.backends.fpa import TITLES, pinned
from sagebwd import SageConfig, sage_attention
from sagebwd.config import MATMULS
from scripts.bench.measuring import describe_run
from scripts.paper.gradient_bias_estimates import (
    Grams,
    Moments,
    estimate_gradient,
    estimate_setting,
    mean_and_interval,
    moments,
    rounded,
)
from scripts.paper.gradient_bias_gradients import (
    VIEWS,
    Batch,
    adam_scales,
    attending,
    draw_batches,
    empty_gradients,
    fit_twice,
    gradients,
    own_grams,
    tensor_grams,
)
from scripts.paper.gradient_bias_tables import CONTROL, Row, to_markdown
from scripts.paper.trained_runs import (
    TrainedRun,
    describe_trained,
    load_model,
    measure_all,
    milestones_of,
    open_runs,
    parser_of,
)

PROGRAM = "python -m scripts.paper.gradient_bias"


def alone(*matmuls: str) -> SageConfig:
    """The default with only these products in INT8."""
    return replace(SageConfig(), int8_matmuls=matmuls)


SETTINGS = {
    "paper": SageConfig.paper(),
    "paper_no_smooth_k": replace(SageConfig.paper(), smooth_k=False),
    "default": SageConfig(),
    "consistent": SageConfig.consistent(),
    "strictly_causal": SageConfig.strictly_causal(),
    "smooth_v": replace(SageConfig(), smooth_v=True),
    "unsigned_p": replace(SageConfig(), unsigned_p=True),
    "smooth_v_unsigned_p": replace(SageConfig(), smooth_v=True, unsigned_p=True),
    "only_s": alone("s_fwd", "s_bwd"),
    "only_o": alone("o"),
    "only_dv": alone("dv"),
    "only_dq": alone("dq"),
    "only_dk": alone("dk"),
    "only_dq_dk": alone("dq", "dk"),
    "all_int8": replace(SageConfig(), int8_matmuls=MATMULS),  # dP, too
}

#: What every setting is compared with, and the control on a GPU and on a CPU: names of model.backends.fpa.
TRUTH_KERNEL = "flash"
CONTROL_KERNEL = {"cuda": "cudnn", "cpu": "math"}

TOKENS_PER_PASS = 32_768  # unless --micro-batch says otherwise

EXAMPLES = """
example:
  325M parameters: gradients of 32 batches take 41 GB, and as much in host memory where the GPU has less than
  110 GB, so fewer sequences in a pass
      python -m scripts.paper.gradient_bias runs/NAME --micro-batch 4

with --out runs/paper/gradient_bias:
  runs/paper/gradient_bias.json.gz  every number, by setting, group of weights, layer; after every setting
  runs/paper/gradient_bias.md       tables; after every checkpoint
"""


# --- Weights ------------------------------------------------------------------------------------------------


GROUPS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "q_norm": "gains",
    "k_norm": "gains",
    "mlp": "mlp",
    "embed_tokens": "embeddings",
    "lm_head": "embeddings",
    "norm": "norms",
}
#: Those that are measured layer by layer, too; "qk" is both, "all" every weight.
BY_LAYER = ("all", "qk", "q", "k", "v", "o", "mlp")


def parts(names: Sequence[str]) -> dict[tuple[str, int | None], list[str]]:
    """The weights of every group, and of some groups in every layer, by (group, layer); layer None: all."""
    found: dict[tuple[str, int | None], list[str]] = {}
    for name in names:
        group = next(group for part, group in GROUPS.items() if part in name)
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        for each in ("all", group, *(["qk"] if group in ("q", "k") else [])):
            found.setdefault((each, None), []).append(name)
            if layer is not None and each in BY_LAYER:
                found.setdefault((each, layer), []).append(name)
    return found


# --- Measurements -------------------------------------------------------------------------------------------


def work_on(
    runs: list[TrainedRun], result: dict[str, Any], arguments: Namespace
) -> Iterator[tuple[str, Iterator[list[Row]]]]:
    """The checkpoints of the runs, the end of each first, should there be no time for all.

    Raises ValueError if the text of a run is too short for the batches.
    """
    device = torch.device(arguments.device)
    attentions = {name: partial(sage_attention, config=config) for name, config in SETTINGS.items()}
    attentions[CONTROL] = pinned(CONTROL_KERNEL[device.type])
    attentions = {name: attentions[name] for name in arguments.settings}
    for end in runs:
        batches, unseen = draw_batches(end, arguments.batches, arguments.tokens_per_batch)
        result["runs"][end.name] |= {"batches_unseen": unseen}
        batches = [(x.to(device), y.to(device)) for x, y in batches]
        for run in (end, *reversed(milestones_of(end) if arguments.milestones else [])):
            title = f"{run.name}, step {run.step}"
            yield title, measure_checkpoint(run, batches, attentions, result, arguments)


def measure_checkpoint(
    run: TrainedRun,
    batches: Sequence[Batch],
    attentions: Mapping[str, AttentionFn],
    result: dict[str, Any],
    arguments: Namespace,
) -> Iterator[list[Row]]:
    """Rows of each setting, by view, group and layer. Adds losses and the gradient itself to the result."""
    device, dtype = torch.device(arguments.device), run.settings.dtype
    micro_batch = arguments.micro_batch or max(TOKENS_PER_PASS // run.settings.context, 1)
    tokens_per_batch = arguments.tokens_per_batch
    llama = load_model(run, pinned(TRUTH_KERNEL))
    scales = adam_scales(run, llama, device)
    llama = llama.to(device)
    # As in the trainer: what autocast leaves in float32 may use TF32.
    torch.set_float32_matmul_precision("high" if dtype is torch.bfloat16 else "highest")
    g = empty_gradients(llama, len(batches))
    losses = gradients(llama, batches, micro_batch, dtype, g)
    own = own_grams(g, scales)
    place = {"run": run.name, "step": run.step, "tokens": run.tokens}
    result["gradients"] += [
        place | part | rounded(estimate_gradient(found, tokens_per_batch)) for part, found in by_part(own)
    ]
    result["checkpoints"].append(
        place | {"truth": TITLES[TRUTH_KERNEL], "loss": float(np.mean(losses)), "loss_differences": {}}
    )
    fits = fit_twice(llama, len(batches))
    g_setting = empty_gradients(llama, len(batches), in_host_memory=not fits)
    for setting, attend in attentions.items():
        with attending(llama, attend):
            with_setting = gradients(llama, batches, micro_batch, dtype, g_setting)
        grams = tensor_grams(g_setting, g, own, scales)
        difference = np.array(with_setting) - np.array(losses)
        result["checkpoints"][-1]["loss_differences"][setting] = mean_and_interval(difference)
        yield [
            Row(**place, setting=setting, **part, **rounded(estimate_setting(found, tokens_per_batch)))
            for part, found in by_part(grams)
        ]


def by_part(grams: Mapping[tuple[str, str], Grams]) -> Iterator[tuple[dict[str, Any], Moments]]:
    """The view, group and layer of the weights that belong together, and what their inner products give."""
    for view in VIEWS:
        for (group, layer), names in parts([name for each, name in grams if each == view]).items():
            together = functools.reduce(operator.add, (grams[view, name] for name in names))
            yield {"view": view, "group": group, "layer": layer}, moments(together)


# --- Command ------------------------------------------------------------------------------------------------


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    runs = open_runs(arguments.runs)
    result = describe(argv, arguments, runs)
    measure_all(arguments, result, work_on(runs, result, arguments), to_markdown)


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = parser_of(PROGRAM, __doc__, EXAMPLES, out="runs/paper/gradient_bias")
    add = parser.add_argument
    add("--milestones", action="store_true", help="all checkpoints of milestone_every, too")
    add("--batches", type=positive_int, default=32, help="at least 3 (default 32)")
    add("--tokens-per-batch", type=positive_int, default=65_536, help="default %(default)s")
    text = f"sequences in a pass (default: {TOKENS_PER_PASS:,} tokens); changes results by rounding alone"
    add("--micro-batch", type=positive_int, help=text)
    names = {"nargs": "+", "metavar": "NAME", "choices": (CONTROL, *SETTINGS)}
    text = f"some of {', '.join((CONTROL, *SETTINGS))} (default: all)"
    add("--settings", **names, default=[CONTROL, *SETTINGS], help=text)
    arguments = parser.parse_args(argv)
    if arguments.batches < 3:
        parser.error(f"--batches {arguments.batches}: intervals leave batches out; use --batches 3 or more")
    return arguments


def describe(argv: list[str] | None, arguments: Namespace, runs: list[TrainedRun]) -> dict[str, Any]:
    """What was measured, of which runs, how and where."""
    return {
        **describe_run(PROGRAM, argv, arguments, ("numpy", "cuda-bindings")),
        "values": "estimate, lower and upper end of the 95% interval (jackknife over batches)",
        "bias": "|b| / |G|; negative: the estimate of |b|² is, so it is about zero",
        "along": "⟨b, G⟩ / |G|²",
        "noise": "variance of quantization / variance of the minibatch",
        "critical_tokens": "tokens per step at which |b|² is the minibatch's variance; null: without end",
        "tokens_per_batch": arguments.tokens_per_batch,
        "configs": {name: asdict(SETTINGS[name]) for name in arguments.settings if name != CONTROL},
        "control": TITLES[CONTROL_KERNEL[torch.device(arguments.device).type]],
        "runs": {run.name: describe_trained(run) for run in runs},
        "checkpoints": [],
        "gradients": [],
    }


if __name__ == "__main__":
    main()
