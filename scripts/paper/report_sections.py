"""The report's sections on the attention itself, and on what else lies among the results.

Words around numbers that are computed from the results, one function a section. A section of the paper
returns verdicts with its text; each states its rule. To fill in the section of a new item, write a function
here or in report_speed.py, report_training.py, report_layers.py or report_gradients.py, and name it in
scripts/paper/experiments.py.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from scripts.paper import published as paper
from scripts.paper.report_parts import (
    AGREES,
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
from scripts.paper.results import Results, final_loss, held_out_loss, speed
from scripts.paper.table1 import PAPER, TENSORS, TITLES
from trainer.plot import series

#: Relative L2 errors within this of the paper's count as the same: its shapes and seeds are not published.
TABLE_1_TOLERANCE = 0.10
#: The share of the entries of Table 1 that must be the same.
TABLE_1_SHARE = 0.9


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
        "`python -m scripts.bench.prepare 'corpus/train-*.parquet' --processes "
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
