"""Speed: of the attention, of a training step, on several GPUs, of preparing text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.bench.attention_tables import DEFAULT, relative_times
from scripts.bench.looks import TRAINING_LOOKS, look_of
from scripts.output import number
from scripts.paper import published as paper
from scripts.paper.report.markdown import commit_of, hardware, table
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import always_faster_verdict, fastest_verdict
from scripts.paper.result_files import Results

PEERS = ("FlashAttention-2", "cuDNN")


# --- Figures 2 and 3 ----------------------------------------------------------------------------------------


def figures2_3(results: Results) -> Section:
    data = results.json("bench_attention.json")
    own = [row for row in data["rows"] if row["implementation"] == "sagebwd" and row["status"] == "passed"]
    lengths = list(dict.fromkeys(row["shape"]["tokens"] for row in own))
    over_flash = [value for panel in speed_ups(own, PEERS[0], "both").values() for value in panel.values()]
    tables = {
        "Forward and backward, how many times as fast; the paper's numbers are for an RTX 4090": (
            speed_up_table(own, lengths, "both", with_paper=True)
        ),
        "Forward alone, how many times as fast": speed_up_table(own, lengths, "forward"),
        "Other settings over the default, forward and backward, replayed as a CUDA graph": presets_speed(
            data
        ),
    }
    fields = {
        "speed_ups": speed_up_table(own, lengths, "both", with_paper=True, masks=("causal",)),
        "best": number(max(over_flash, default=None), ".2f"),
        "graph_gain": number(graph_gain(own), ".2f"),
        "extra_memory": extra_memory(own),
    }
    setting = f"{hardware(data)}, {data['settings']['dtype']}, {commit_of(data)}; `{data['command']}`"
    verdicts = [fastest_verdict(over_flash), always_faster_verdict(over_flash)]
    return Section(setting, {title: text for title, text in tables.items() if text}, verdicts, fields)


def speed_up_table(
    rows: list[dict],
    lengths: list[int],
    mode: str,
    with_paper: bool = False,
    masks: tuple[str, ...] = ("causal", "full"),
) -> str:
    """A row for each peer, mask and head size; a column for each length."""
    lines = []
    for peer in PEERS:
        for (head_dim, mask), found in speed_ups(rows, peer, mode).items():
            if mask not in masks:
                continue
            cells = [f"{found[n]:.2f}" if n in found else "" for n in lengths]
            lines.append([peer, f"{mask}, D {head_dim}", *cells])
            if with_paper and peer == PEERS[0] and (head_dim, mask) in paper.FIGURES_2_3:
                printed = paper.speed_ups(head_dim, mask)
                lines.append(["", "paper", *(f"{printed[n]:.2f}" if n in printed else "" for n in lengths)])
    return table(["over", "", *(f"N {n}" for n in lengths)], lines, left=2)


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
    """Settings of SageBwd compared with the default, timed as CUDA graphs: without the host's part."""
    lengths, rows = data["settings"]["lengths"], data["rows"]
    panels = dict.fromkeys((row["shape"]["causal"], row["shape"]["head_dim"]) for row in rows)
    lines = []
    for causal, head_dim in panels:
        for name, time in relative_times(rows, "both, graph", head_dim, causal).items():
            if name.startswith(DEFAULT) and name != DEFAULT:
                cells = [f"{1 / time[n]:.2f}" if n in time else "" for n in lengths]
                lines.append([name, f"{'causal' if causal else 'full'}, D {head_dim}", *cells])
    return table(["", "", *(f"N {n}" for n in lengths)], sorted(lines), left=2) if lines else ""


def graph_gain(rows: list[dict]) -> float | None:
    """How much the host costs: the best gain of a CUDA graph over the plain call."""
    times = {(tuple(row["shape"].values()), row["mode"]): row["median_ms"] for row in rows}
    gains = [
        times[shape, "both"] / time for (shape, mode), time in times.items() if mode == "both, graph" and time
    ]
    return max(gains) if gains else None


def extra_memory(rows: list[dict]) -> str:
    """Peak memory beyond inputs and results, in multiples of the bytes of Q, K and V."""
    peaks: dict[int, float] = {}
    for row in rows:
        if row["mode"] == "both" and row["extra_memory"] is not None:
            head_dim = row["shape"]["head_dim"]
            peaks[head_dim] = max(peaks.get(head_dim, 0.0), row["extra_memory"])
    return " and ".join(f"{peak:.2f} (D {head_dim})" for head_dim, peak in peaks.items())


# --- Speed of a training step -------------------------------------------------------------------------------

#: {a file's name: what it compares}; each file is of one GPU.
STEP_FILES = {
    "bench_training": "Attentions",
    "bench_training_peers": "Other models of the same size in the same trainer, compiled alike",
    "bench_training_deterministic": "Runs that repeat to the last bit",
    "bench_training_24gb": "Small micro-batches, as on a GPU of 24 GB",
}


def training_speed(results: Results) -> Section:
    data = results.json("bench_training.json")
    settings = data["settings"]
    tables = {}
    for name, what in STEP_FILES.items():
        if results.has(f"{name}.json"):
            own = results.json(f"{name}.json")
            tables[f"{what}, {tokens_of(own['settings'])}"] = step_table(own)
    setting = (
        f"{hardware(data)}, `model={settings['model']}`, bf16, compiled, {commit_of(data)}; "
        f"`{data['command']}`"
    )
    return Section(setting, tables, fields={"steps": step_table(data), "tokens": tokens_of(settings)})


def tokens_of(settings: dict[str, Any]) -> str:
    return (
        f"{settings['tokens_per_micro_batch']:,} tokens per micro-batch, {settings['accumulation']} "
        "micro-batches per step"
    )


def step_table(data: dict[str, Any]) -> str:
    """Contestants by contexts: tokens per second, MFU, and the share of attention in the time of kernels."""
    rows = {(row["contestant"], row["context"]): row for row in data["rows"] if row["tokens_per_second"]}
    contexts = sorted({context for _, context in rows})
    header = [""]
    for context in contexts:
        header += [f"tokens/s, context {context}", "MFU", "attention's share"]
    lines = [
        [
            look_of(name, TRAINING_LOOKS).title,
            *(cell for n in contexts for cell in step_cells(rows.get((name, n)))),
        ]
        for name in dict.fromkeys(name for name, _ in rows)
    ]
    return table(header, lines)


def step_cells(row: dict | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    share = row["class_ms"]["attention"] / sum(row["class_ms"].values()) if row["class_ms"] else None
    return f"{row['tokens_per_second']:,.0f}", number(row["mfu"], ".1%"), number(share, ".0%")


# --- Training on several GPUs, preparing text ---------------------------------------------------------------


def many_gpus(results: Results) -> Section:
    data = results.json("bench_gpus.json")
    header = ["GPUs", "tokens/s", "efficiency", "largest difference of the loss", "peak memory, GiB"]
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
    efficiency = {row[0]: row[2] for row in lines[1:]}
    setting = f"{hardware(data)}, {data['settings']['steps']} steps, {commit_of(data)}; `{data['command']}`"
    fields = {"efficiency": ", ".join(f"{share} ({gpus})" for gpus, share in efficiency.items() if share)}
    return Section(setting, {"One GPU and several": table(header, lines)}, fields=fields)


def preparing(results: Results) -> Section:
    measured = [results.json(f"prepare_{name}.json") for name in ("tiktoken", "gigatoken")]
    rows = [
        [
            data["tokenizer"],
            f"{data['text_mb']:,.0f}",
            f"{data['tokenizer_mb_per_s']:.1f}",
            f"{data['prepare_mb_per_s']:.1f}",
            f"{data['prepare_over_tokenizer']:.2f}",
        ]
        for data in measured
    ]
    header = ["tokenizer", "MB of text", "tokenizer alone, MB/s", "`data.prepare`, MB/s", "ratio"]
    setting = f"{measured[0]['hardware']}, {measured[0]['processes']} processes"
    fields = {"speeds": " and ".join(f"{row[3]} MB/s ({row[0]})" for row in rows)}
    return Section(
        setting, {"zstd-compressed Parquet to checksummed shards": table(header, rows)}, fields=fields
    )


SECTIONS: dict[str, Callable[[Results], Section]] = {
    "figures2-3": figures2_3,
    "training_speed": training_speed,
    "many_gpus": many_gpus,
}
