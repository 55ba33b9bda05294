"""The report's sections about speed: of the attention, of a training step, on several GPUs."""

from __future__ import annotations

from typing import Any

from scripts.bench.attention_tables import DEFAULT, relative_times
from scripts.bench.measuring import number
from scripts.paper import published as paper
from scripts.paper.report_parts import (
    AGREES,
    CANNOT_TELL,
    DIFFERS,
    Body,
    Verdict,
    hardware,
    markdown,
    picture,
)
from scripts.paper.results import Results

#: A speed-up within this of the paper's counts as the same.
SPEED_UP_TOLERANCE = 0.10


# --- Figures 2 and 3 ----------------------------------------------------------------------------------------


def figures2_3(results: Results) -> Body:
    data = results.json("bench_attention.json")
    own = [row for row in data["rows"] if row["implementation"] == "sagebwd" and row["status"] == "passed"]
    lengths = list(dict.fromkeys(row["shape"]["tokens"] for row in own))
    settings = data["settings"]
    text = [
        f"`{data['command']}` on {hardware(data)}, {settings['dtype']}, from 16-bit Q, K, V, dO in memory "
        "to 16-bit O, dQ, dK, dV, quantization and smoothing included. How many times as fast as "
        "FlashAttention-2 and as cuDNN, forward and backward; the paper's numbers are for an RTX 4090:",
        speed_up_table(own, lengths, ("FlashAttention-2", "cuDNN"), "both", with_paper=True),
        "The forward alone:",
        speed_up_table(own, lengths, ("FlashAttention-2", "cuDNN"), "forward"),
        " ".join(filter(None, [graph_gain(own), extra_memory(own)]))
        + " Speeds in TFLOP/s, errors, other implementations: [`bench_attention.md`](bench_attention.md).",
        picture("bench_attention.png", "TFLOP/s of forward and backward"),
    ]
    text.append(presets_speed(data))
    return Body("\n\n".join(filter(None, text)), [fastest_verdict(own), always_faster_verdict(own)])


def speed_up_table(
    rows: list[dict], lengths: list[int], peers: tuple[str, ...], mode: str, with_paper: bool = False
) -> str:
    """A row for each peer, mask and head size; a column for each length."""
    lines = []
    for peer in peers:
        for (head_dim, mask), found in speed_ups(rows, peer, mode).items():
            cells = [f"{found[n]:.2f}" if n in found else "" for n in lengths]
            lines.append([peer, f"{mask}, D {head_dim}", *cells])
            if with_paper and peer == "FlashAttention-2" and (head_dim, mask) in paper.FIGURES_2_3:
                printed = paper_speed_ups(head_dim, mask)
                lines.append(["", "paper", *(f"{printed[n]:.2f}" if n in printed else "" for n in lengths)])
    return markdown(["", "", *(f"N {n}" for n in lengths)], lines, left=2)


def speed_ups(rows: list[dict], peer: str, mode: str) -> dict[tuple[int, str], dict[int, float]]:
    """{(head size, mask): {tokens: how many times as fast as the peer}}."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows:
        shape = row["shape"]
        if row["mode"] == mode and peer in (row["speedup"] or {}):
            key = (shape["head_dim"], "causal" if shape["causal"] else "full")
            found.setdefault(key, {})[shape["tokens"]] = row["speedup"][peer]
    return found


def presets_speed(data: dict[str, Any]) -> str:
    """Settings of SageBwd beside the default, timed as CUDA graphs: without the host's part."""
    lengths, rows = data["settings"]["lengths"], data["rows"]
    panels = dict.fromkeys((row["shape"]["causal"], row["shape"]["head_dim"]) for row in rows)
    lines = []
    for causal, head_dim in panels:
        for name, time in relative_times(rows, "both, graph", head_dim, causal).items():
            if name.startswith(DEFAULT) and name != DEFAULT:
                cells = [f"{1 / time[n]:.2f}" if n in time else "" for n in lengths]
                lines.append([name, f"{'causal' if causal else 'full'}, D {head_dim}", *cells])
    if not lines:
        return ""
    table = markdown(["", "", *(f"N {n}" for n in lengths)], sorted(lines), left=2)
    return (
        "Other settings beside the default: how many times as fast as it, forward and backward, replayed as "
        f"a CUDA graph:\n\n{table}"
    )


def paper_speed_ups(head_dim: int, mask: str) -> dict[int, float]:
    """Over the faster of the paper's two FlashAttention-2, in CUDA and in Triton."""
    printed = paper.FIGURES_2_3[head_dim, mask]
    fastest = map(max, printed["FlashAttention-2"], printed["FlashAttention-2, Triton"])
    pairs = zip(paper.LENGTHS, printed["sagebwd"], fastest, strict=True)
    return {tokens: ours / theirs for tokens, ours, theirs in pairs}


def fastest_verdict(rows: list[dict]) -> Verdict:
    claim = f"up to {paper.BEST_SPEED_UP:.2f} times FlashAttention-2"
    own = [
        value for panel in speed_ups(rows, "FlashAttention-2", "both").values() for value in panel.values()
    ]
    if not own:
        return Verdict(claim, CANNOT_TELL, "FlashAttention-2 was not measured.")
    enough = max(own) >= (1 - SPEED_UP_TOLERANCE) * paper.BEST_SPEED_UP
    why = f"Up to {max(own):.2f} times, on other hardware; "
    why += f"within {SPEED_UP_TOLERANCE:.0%} of the paper's or above agrees."
    return Verdict(claim, AGREES if enough else DIFFERS, why)


def always_faster_verdict(rows: list[dict]) -> Verdict:
    printed = [value for panel in paper.FIGURES_2_3 for value in paper_speed_ups(*panel).values()]
    faster = sum(value > 1 for value in printed)
    claim = f"ahead of FlashAttention-2 in {faster} of {len(printed)} cases"
    own = [
        value for panel in speed_ups(rows, "FlashAttention-2", "both").values() for value in panel.values()
    ]
    if not own:
        return Verdict(claim, CANNOT_TELL, "FlashAttention-2 was not measured.")
    ahead = sum(value > 1 for value in own)
    agrees = ahead / len(own) >= faster / len(printed)
    why = f"In {ahead} of {len(own)}; at least the paper's share agrees."
    return Verdict(claim, AGREES if agrees else DIFFERS, why)


def graph_gain(rows: list[dict]) -> str | None:
    """How much the host costs: the best gain of a CUDA graph over the plain call."""
    times = {(tuple(row["shape"].values()), row["mode"]): row["median_ms"] for row in rows}
    gains = [
        times[shape, "both"] / time for (shape, mode), time in times.items() if mode == "both, graph" and time
    ]
    if not gains:
        return None
    return f"Replayed as a CUDA graph, no case takes less than 1/{max(gains):.2f} of the time."


def extra_memory(rows: list[dict]) -> str | None:
    peaks: dict[int, float] = {}
    for row in rows:
        if row["mode"] == "both" and row["extra_memory"] is not None:
            head_dim = row["shape"]["head_dim"]
            peaks[head_dim] = max(peaks.get(head_dim, 0.0), row["extra_memory"])
    if not peaks:
        return None
    listed = " and ".join(f"{peak:.2f} (D {head_dim})" for head_dim, peak in peaks.items())
    return f"Memory beyond inputs and results peaks at {listed} times the bytes of Q, K and V."


# --- Speed of a training step -------------------------------------------------------------------------------

CONTESTANTS = {
    "sagebwd": "SageBwd",
    "sagebwd-consistent": "SageBwd, `consistent()`",
    "sagebwd-16-bit-p": "SageBwd, P in 16 bit",
    "sagebwd-deterministic": "SageBwd, `hardware.deterministic=true`",
    "fpa-cudnn": "cuDNN",
    "fpa-flash": "FlashAttention-2",
    "fpa-deterministic": "full precision, `hardware.deterministic=true`",
    "fpa-graphs": "full precision, `hardware.cuda_graphs=true`",
    "sagebwd-graphs": "SageBwd, `hardware.cuda_graphs=true`",
    "hf-causal": "transformers' Llama",
    "nanogpt": "a GPT like nanoGPT's",
}
#: Further tables, each of one GPU: {a file's name: what it compares}.
TRAINING_STEPS = {
    "bench_training_peers": "Beside other models of the same size in the same trainer, compiled alike",
    "bench_training_deterministic": "What it costs to repeat a run to the last bit",
    "bench_training_24gb": "In small passes, as on a GPU of 24 GB",
}


def training_speed(results: Results) -> Body:
    data = results.json("bench_training.json")
    settings = data["settings"]
    text = [
        f"`{data['command']}` on {hardware(data)}: the trainer's own step of `model={settings['model']}`, "
        f"{tokens_of(settings)}, bf16, compiled. Each column comes from one GPU. S3 reports an iteration of "
        "Llama-1B as about 1.15 times as fast as with FlashAttention-2 from 8K tokens on.",
        step_table(data),
    ]
    for name, what in TRAINING_STEPS.items():
        if results.has(f"{name}.json"):
            data = results.json(f"{name}.json")
            text += [f"{what}, {tokens_of(data['settings'])}:", step_table(data)]
    files = [name for name in ("bench_training", *TRAINING_STEPS) if results.has(f"{name}.json")]
    links = ", ".join(f"[`{name}.md`]({name}.md)" for name in files)
    return Body("\n\n".join([*text, f"Memory, kernels, spread: {links}."]))


def tokens_of(settings: dict[str, Any]) -> str:
    return f"{settings['tokens_per_micro_batch']:,} tokens a pass, {settings['accumulation']} passes a step"


def step_table(data: dict[str, Any]) -> str:
    """Contestants by contexts: tokens per second, MFU, and the share of attention in the time of kernels."""
    rows = {(row["contestant"], row["context"]): row for row in data["rows"] if row["tokens_per_second"]}
    contexts = sorted({context for _, context in rows})
    header = [""]
    for context in contexts:
        header += [f"tokens/s, context {context}", "MFU", "attention's share"]
    lines = [
        [CONTESTANTS.get(name, name), *(cell for n in contexts for cell in step_cells(rows.get((name, n))))]
        for name in dict.fromkeys(name for name, _ in rows)
    ]
    return markdown(header, lines)


def step_cells(row: dict | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    share = row["class_ms"]["attention"] / sum(row["class_ms"].values()) if row["class_ms"] else None
    return f"{row['tokens_per_second']:,.0f}", number(row["mfu"], ".1%"), number(share, ".0%")


# --- Training on several GPUs -------------------------------------------------------------------------------


def many_gpus(results: Results) -> Body:
    data = results.json("bench_gpus.json")
    header = ["GPUs", "tokens/s", "of that many single ones", "largest difference of the loss", "peak, GiB"]
    lines = [
        [
            "1" if row["devices"] == 1 else f"{row['devices']}, {row['parallel']}",
            number(row["tokens_per_second"], ",.0f"),
            number(row["efficiency"], ".1%"),
            number(row["loss_difference"], ".4f"),
            number(row["peak_memory_gib"], ".1f"),
        ]
        for row in data["rows"]
    ]
    text = [
        f"`{data['command']}` on {hardware(data)}: the same {data['settings']['steps']} steps on one GPU and "
        "on several, with copies of the model (ddp) and with its weights shared out (fsdp). What a "
        "checkpoint and the probe take: [`bench_gpus.md`](bench_gpus.md).",
        markdown(header, lines),
    ]
    return Body("\n\n".join(text))
