"""The report's sections on the attention itself, on speed, and on what else lies among the results.

Words around numbers that are computed from the results, one function a section. A section of the paper
returns verdicts with its text; each states its rule. To fill in the section of a new item, write a function
here or in report_training.py, report_layers.py or report_gradients.py, and name it in scripts/experiments.py.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from scripts import paper
from scripts.attention_tables import DEFAULT, relative_times
from scripts.benchmarking import number
from scripts.report_parts import (
    AGREES,
    CANNOT_TELL,
    DIFFERS,
    Body,
    Section,
    Verdict,
    decimal,
    hardware,
    markdown,
    picture,
    tile,
)
from scripts.results import Results, final_loss, held_out_loss, speed
from scripts.table1 import PAPER, TENSORS, TITLES
from trainer.plot import series

#: Relative L2 errors within this of the paper's count as the same: its shapes and seeds are not published.
TABLE_1_TOLERANCE = 0.10
#: The share of the entries of Table 1 that must be the same.
TABLE_1_SHARE = 0.9
#: A speed-up within this of the paper's counts as the same.
SPEED_UP_TOLERANCE = 0.10


# --- Table 1 ------------------------------------------------------------------------------------------------

TABLE_1_VARIANTS = {
    "paper": "paper",
    "block": "`block`: the paper's pseudo-code",
    "row": "`row`: P and dS scaled per output row",
    "default": "default of `SageConfig`",
}


def table1(results: Results) -> Body:
    data = results.json("table1.json")
    settings, rows = data["settings"], data["rows"]
    lines = [
        [f"{row['sigma']:g}", TABLE_1_VARIANTS[row["variant"]], *(decimal(row[name][1]) for name in TENSORS)]
        for row in rows
    ]
    text = [
        f"Relative L2 against float64 attention on Gaussian inputs, on {hardware(data)}; the cosines are "
        f"in the JSON. The paper gives neither shape nor tile; here N {settings['tokens']}, D "
        f"{settings['head_dim']}, {settings['heads']} heads, {'causal' if settings['causal'] else 'full'}, "
        f"tiles of {tile(data['variants']['block'])} for `block` and `row`, "
        f"{tile(data['variants']['default'])} for the default.",
        markdown(["σ", "", *TITLES.values()], lines),
        picture("table1.png", "Relative L2 over σ"),
        "dV sums over queries, so no INT8 product can scale P per query; per query, dV at σ = 1 would come "
        "close to the paper's.",
    ]
    return Body("\n\n".join(text), [table1_verdict(rows, "row"), table1_verdict(rows, "block")])


def table1_verdict(rows: list[dict], variant: str) -> Verdict:
    """Whether enough relative L2 errors are the paper's."""
    entries, off = 0, []
    for row in (row for row in rows if row["variant"] == variant):
        for name, (_, wanted) in zip(TENSORS, PAPER[int(row["sigma"])], strict=True):
            entries += 1
            if abs(row[name][1] / wanted - 1) > TABLE_1_TOLERANCE:
                off.append(
                    f"{TITLES[name]} at σ = {row['sigma']:g}, {decimal(row[name][1])} against "
                    f"{decimal(wanted)}"
                )
    same = entries - len(off)
    answer = AGREES if same >= TABLE_1_SHARE * entries else DIFFERS
    why = f"{same} of {entries} errors are within {TABLE_1_TOLERANCE:.0%} of the paper's"
    why += f" ({TABLE_1_SHARE:.0%} of them must be)"
    why += f"; not {'; '.join(off)}." if off else "."
    return Verdict(f"the errors of Table 1, {TABLE_1_VARIANTS[variant]}", answer, why)


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
    if results.has("bench_attention_presets.json"):
        text.append(presets_speed(results.json("bench_attention_presets.json")))
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
        f"Other settings beside the default (`{data['command']}`): how many times as fast as it, forward and "
        "backward, replayed as a CUDA graph ([`bench_attention_presets.md`](bench_attention_presets.md)):"
        f"\n\n{table}"
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


# --- Accuracy of the kernels --------------------------------------------------------------------------------


def accuracy(results: Results) -> Body:
    data = results.json("accuracy.json")
    settings, rows = data["settings"], data["int8"]
    low, high = min(settings["sigmas"]), sorted(settings["sigmas"])[len(settings["sigmas"]) // 2]
    found = {(row["int8"], row["sigma"]): row for row in rows}
    names = list(dict.fromkeys(row["int8"] for row in rows))
    lines = [
        [name, *(decimal(found[name, sigma][tensor][1]) for sigma in (low, high) for tensor in TENSORS)]
        for name in names
    ]
    header = ["in INT8"]
    header += [f"{TITLES[name]}, σ {sigma:g}" for sigma in (low, high) for name in TENSORS]
    six, seven = (found[name, low]["dq"] for name in ("the paper's six", "all seven"))
    s3_six, s3_seven = paper.S3_DP["fp16"][0], paper.S3_DP["int8"][0]
    text = [
        f"The {data['implementation']} on {hardware(data)}, torch {data['versions']['torch']}, "
        f"{settings['dtype']}, {settings['heads']} heads: Table 1 for head sizes, masks and lengths "
        "([`accuracy.md`](accuracy.md)), and each of the seven products in INT8 alone. Relative L2 for "
        f"D {rows[0]['head_dim']}, {rows[0]['tokens']} tokens, causal, default settings:",
        markdown(header, lines),
        f"At σ = {low:g}, dP in INT8 multiplies the error of dQ by {seven[1] / six[1]:.2f}, which is why "
        "the paper leaves it in 16 bit. SageAttention3's Table 1c gives a cosine of dQ of "
        f"{decimal(s3_seven)} with dP in INT8 and {decimal(s3_six)} without, on real tensors; on these "
        f"Gaussians it is {decimal(seven[0])} and {decimal(six[0])}.",
    ]
    return Body("\n\n".join(text))


# --- Speed of a training step -------------------------------------------------------------------------------

CONTESTANTS = {"sagebwd": "SageBwd", "fpa-cudnn": "cuDNN", "fpa-flash": "FlashAttention-2"}


def training_speed(results: Results) -> Body:
    data = results.json("bench_training.json")
    settings = data["settings"]
    rows = {(row["contestant"], row["context"]): row for row in data["rows"] if row["tokens_per_second"]}
    contexts = sorted({context for _, context in rows})
    header = ["attention"]
    for context in contexts:
        header += [f"tokens/s, context {context}", "attention's share"]
    lines = [
        [CONTESTANTS.get(name, name), *(cell for n in contexts for cell in step_cells(rows.get((name, n))))]
        for name in dict.fromkeys(name for name, _ in rows)
    ]
    text = [
        f"`{data['command']}` on {hardware(data)}: the trainer's own step of `model={settings['model']}`, "
        f"{settings['tokens_per_micro_batch']:,} tokens, bf16, compiled "
        "([`bench_training.md`](bench_training.md)). S3 reports an iteration of Llama-1B as about 1.15 "
        "times as fast as with FlashAttention-2 from 8K tokens on.",
        markdown(header, lines),
    ]
    return Body("\n\n".join(text))


def step_cells(row: dict | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    share = row["class_ms"]["attention"] / sum(row["class_ms"].values()) if row["class_ms"] else None
    return f"{row['tokens_per_second']:,.0f}", "" if share is None else f"{share:.0%}"


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


# --- What a masked token can still change -------------------------------------------------------------------


def causal_leak(results: Results) -> Body:
    data = results.json("causal_leak.json")
    settings, rows = data["settings"], data["rows"]
    lines = []
    for config in dict.fromkeys(row["config"] for row in rows):
        own = [row for row in rows if row["config"] == config]
        lines.append([f"`{config}`", "(error)", *leak_cells(own, "error")])
        for redraw in data["redraws"]:
            inside = [row for row in own if row["redraw"] == redraw and not row["at_border"]]
            lines.append(["", f"{redraw}, inside", *leak_cells(inside, "leak")])
        border = [row for row in own if row["at_border"]]
        if border:
            lines.append(["", "any, at a border", *leak_cells(border, "leak", max)])
    header = [
        "setting",
        "later tokens",
        "O, same tile",
        "O, earlier tiles",
        "dQ, same tile",
        "dQ, earlier tiles",
    ]
    text = [
        f"The reference on {hardware(data)}: relative L2 by which O and dQ of earlier queries change when "
        "all later tokens of Q, K, V and dO are drawn again, beside the error against float64. N "
        f"{settings['tokens']}, D {settings['head_dim']}, {settings['heads']} heads, causal, σ "
        f"{settings['sigma']:g}, mean over the positions {', '.join(map(str, settings['cuts']))}; a "
        "position is inside a tile or at its border (there: the largest of all).",
        markdown(header, lines, left=2),
    ]
    return Body("\n\n".join(text))


def leak_cells(rows: list[dict], key: str, over_rows: Callable[..., float] = mean) -> list[str]:
    regions = ("same_tile", "earlier_tiles")
    values = [over_rows(row[key][name][r] for row in rows) for name in ("out", "dq") for r in regions]
    return ["0" if value == 0 else decimal(value) for value in values]


# --- Runs that lie here as they are -------------------------------------------------------------------------


def llama_325m_fpa(results: Results) -> Body:
    run = "llama_325m_fpa"
    records, environment = results.run(run), results.environment(run)
    tokens, losses = series(records, "loss")
    window = 20
    means = [mean(losses[i - window : i]) for i in range(window, len(losses) + 1)]
    below = next(i for i, value in enumerate(means) if value < 4.5) + window
    shorter = results.metrics(f"{run}/300_steps.jsonl")
    text = [
        f"{records[-1]['step']} steps at `tps=260k` on one {environment['device']} (torch "
        f"{environment['torch']}), full precision (cuDNN), context 4096, bf16, `torch.compile`, QK-norm, "
        f"the learning rate and warm-up of [`config.yaml`]({run}/config.yaml), which are larger and "
        "shorter than the paper's: those are meant for 300,000 steps. The text is English (books, reviews, "
        "web pages), taken about one and a half times; the held-out text is OpenWebText's, which it is "
        "unlike.",
        markdown(
            ["", ""],
            [
                [f"training loss, mean of the last {window} steps", f"{final_loss(records, window):.2f}"],
                [
                    f"first step whose mean over {window} steps is below 4.5",
                    f"{below} ({tokens[below - 1] / 1e6:.1f}M tokens)",
                ],
                ["held-out loss", f"{held_out_loss(records):.2f}"],
                ["speed", f"{speed(records):,.0f} tokens/s, {median_mfu(records):.1%} of the bf16 peak"],
                ["peak memory", f"{max(series(records, 'peak_memory_gib')[1]):.1f} GiB"],
            ],
        ),
        picture(f"{run}/loss.png", "Loss of the 325M model"),
        f"The same over {shorter[-1]['step']} steps, with a cosine of that length, ends at "
        f"{final_loss(shorter, 30):.2f} ([`300_steps.jsonl`]({run}/300_steps.jsonl), mean of the last 30).",
    ]
    return Body("\n\n".join(text))


def median_mfu(records: list[dict[str, Any]]) -> float:
    return sorted(series(records, "mfu")[1])[len(series(records, "mfu")[1]) // 2]


def llama_325m_pair(results: Results) -> Body:
    folder, last = "llama_325m_pair", 30
    runs = {name: results.run(f"{folder}/{name}") for name in ("fpa", "sagebwd")}
    again = results.metrics("llama_325m_fpa/300_steps.jsonl")
    rows = [
        [f"`{name}`", f"{final_loss(run, last):.3f}", f"{held_out_loss(run):.3f}", f"{speed(run):,.0f}"]
        for name, run in runs.items()
    ]
    rows.append(["`fpa`, the same command on another day", f"{final_loss(again, last):.3f}", "", ""])
    ends = {name: final_loss(run, last) for name, run in runs.items()}
    text = [
        f"{runs['fpa'][-1]['step']} steps at `tps=260k`, otherwise as above, with `attention=sagebwd` (the "
        "Triton kernels, default settings) and `attention=fpa` (cuDNN) on two "
        f"{results.environment(f'{folder}/fpa')['device']}s at the same time, the same seed and data.",
        markdown(["attention", f"training loss, last {last} steps", "held-out loss", "tokens/s"], rows),
        picture(f"{folder}/comparison.png", "Loss with both attentions"),
        f"The two attentions end {ends['sagebwd'] - ends['fpa']:+.3f} apart, and two runs in full "
        "precision, which differ only in the rounding of cuDNN's backward and in edits of the trainer's "
        f"loop, {final_loss(again, last) - ends['fpa']:+.3f}. So this pair shows no effect of the "
        "quantization; to measure one takes several seeds. The kernels have changed since then where "
        "logits, strides or scales are extreme, which does not occur in this run, and in the rounding of "
        "P̃ before it becomes INT8.",
    ]
    return Body("\n\n".join(text))


def llama_tiny(results: Results) -> Body:
    folder = "llama_tiny_gpt2"
    runs = {name: results.run(f"{folder}/{name}") for name in ("fpa", "sagebwd")}
    ends = {name: final_loss(run) for name, run in runs.items()}
    text = [
        f"`model=llama_tiny` with GPT-2's vocabulary, context 512, {runs['fpa'][0]['tokens']:,} tokens per "
        f"step, {runs['fpa'][-1]['step']} steps, one {results.environment(f'{folder}/fpa')['device']}, the "
        "same text, seed and order of the data. SageBwd runs as the plain PyTorch reference, so its speed "
        "says nothing about kernels.",
        loss_table({"`fpa`": runs["fpa"], "`sagebwd` (reference)": runs["sagebwd"]}),
        picture(f"{folder}/comparison.png", "Loss with both attentions"),
        f"One seed: how much of the difference of {ends['sagebwd'] - ends['fpa']:.3f} is noise between "
        "seeds is not measured here.",
    ]
    return Body("\n\n".join(text))


def quickstart(results: Results) -> Body:
    runs = {f"`{name}`": results.run(f"quickstart/{name}") for name in ("fpa", "sagebwd")}
    text = [
        f"`make quickstart` on a {results.environment('quickstart/fpa')['device']}; the table is on the "
        "[front page](../README.md#start), too.",
        loss_table(runs),
        picture("quickstart.png", "Loss of the quickstart's two runs"),
    ]
    return Body("\n\n".join(text))


def loss_table(runs: dict[str, list[dict]]) -> str:
    rows = [
        [name, f"{final_loss(run):.3f}", f"{held_out_loss(run):.3f}", f"{speed(run):,.0f}"]
        for name, run in runs.items()
    ]
    return markdown(["attention", "training loss (last tenth)", "held-out loss", "tokens/s"], rows)


# --- Preparing text -----------------------------------------------------------------------------------------


def preparing(results: Results) -> Body:
    rows, measured = [], [results.json(f"prepare_{name}.json") for name in ("tiktoken", "gigatoken")]
    for data in measured:
        speeds = (f"{data['tokenizer_mb_per_s']:.1f}", f"{data['prepare_mb_per_s']:.1f}")
        rows.append(
            [data["tokenizer"], f"{data['text_mb']:,.0f}", *speeds, f"{data['prepare_over_tokenizer']:.2f}"]
        )
    text = [
        "`python -m scripts.bench_prepare 'corpus/train-*.parquet' --processes "
        f"{measured[0]['processes']}` on {measured[0]['hardware']}: English text in zstd-compressed "
        "parquet to checksummed shards on disk, process start included, beside the tokenizer alone on text "
        "in memory.",
        markdown(["tokenizer", "MB of text", "alone, MB/s", "`data.prepare`, MB/s", "ratio"], rows),
        "With gigatoken the tokenizer is no longer what takes the time: reading the compressed files costs "
        "a third to a half of its CPU time, and checksums, synchronised writes and starting processes most "
        "of the rest.",
    ]
    return Body("\n\n".join(text))


FURTHER = (
    Section(
        "The 325M model on real text, full precision",
        ("llama_325m_fpa/metrics.jsonl", "llama_325m_fpa/300_steps.jsonl"),
        llama_325m_fpa,
    ),
    Section(
        "SageBwd beside full precision, the 325M model, one pair",
        ("llama_325m_pair/sagebwd/metrics.jsonl", "llama_325m_fpa/300_steps.jsonl"),
        llama_325m_pair,
    ),
    Section(
        "SageBwd beside full precision, a tiny model, one pair",
        ("llama_tiny_gpt2/sagebwd/metrics.jsonl",),
        llama_tiny,
    ),
    Section("Preparing text", ("prepare_tiktoken.json", "prepare_gigatoken.json"), preparing),
    Section("The quickstart", ("quickstart/sagebwd/metrics.jsonl",), quickstart),
)
