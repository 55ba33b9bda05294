"""Where the error of dQ and dK comes from in INT8 attention, and what reduces it: on trained models.

    python -m scripts.paper.layers --help          # writes traces of a run
    python -m scripts.paper.gradient_error runs/NAME/traces
    python -m scripts.paper.gradient_error --sigmas 1 3 5 10      # Gaussians, as in the paper's Table 1

Every query head of every layer is computed again, alone, with each variant of
`scripts.paper.gradient_variants`, and compared with float64 attention. Of the last step of a run, all
variants are measured; of earlier steps the default and each of its roundings alone. Writes

    OUT.json.gz           every number, by trace, layer, head and variant
    OUT.md                tables: error against cost, the error's parts, the same layer by layer
    OUT.png               error of dQ and dK against cost, with the variants that none beats in both
    OUT_progress_dq.png   the error of dQ and its parts over the tokens seen, for runs with several traces
    OUT_progress_dk.png   the same for dK

The errors are those of the algorithm, emulated in float32 (`scripts.paper.attention_emulation`), not those of
a kernel. A head of 1024 tokens takes 6 seconds on one CPU core, one of 4096 a minute or two. A GPU is faster,
and `--heads 2` looks at two heads per layer only.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import exact_attention
from scripts.bench.measuring import describe_run
from scripts.command_line import choose_device, command_parser, positive_int
from scripts.output import with_ending
from scripts.paper import drawing
from scripts.paper.attention_emulation import Head, Result, Scheme, emulate
from scripts.paper.attention_errors import TITLES, draw_inputs
from scripts.paper.gradient_error_pictures import draw_costs, draw_progress
from scripts.paper.gradient_error_rows import PARTS, HeadSource, Row, runs_with_progress
from scripts.paper.gradient_error_tables import to_markdown
from scripts.paper.gradient_variants import Variant, ladder, variants
from scripts.paper.result_files import OUT, write_result
from scripts.paper.traces import Layer, find_traces, load_trace


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and write everything."""
    arguments = parse_arguments(argv)
    torch.manual_seed(arguments.seed)  # of stochastic rounding
    try:
        sources, heads = find_heads(arguments)
    except ValueError as error:
        raise SystemExit(f"gradient_error: {error}") from error
    rows = []
    for source, layer, head, tensors in tqdm(heads, desc="heads", disable=None):
        rows += measure(source, layer, head, tensors)
    result = {
        "values": "against float64 attention, of single query heads",
        **describe_run("python -m scripts.paper.gradient_error", argv, shown(arguments), ["matplotlib"]),
        "sources": {source.name: vars(source) for source in sources},
    }
    markdown = to_markdown(sources, rows)
    write_result(arguments.out, result, rows, markdown)
    drawing.save(draw_costs(sources, rows), with_ending(arguments.out, ".png"))
    if runs_with_progress(sources):
        for tensor in PARTS:
            drawing.save(
                draw_progress(sources, rows, tensor), with_ending(arguments.out, f"_progress_{tensor}.png")
            )
    print(markdown)
    print(f"written to {with_ending(arguments.out, '.json.gz')}, .md and .png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser("python -m scripts.paper.gradient_error", __doc__)
    parser.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="of python -m scripts.paper.layers, or folders of them",
    )
    parser.add_argument(
        "--sigmas", type=float, nargs="+", default=[], help="also Gaussian heads, with these σ of Q and K"
    )
    parser.add_argument("--layers", type=int, nargs="+", help="only these layers (default: all)")
    parser.add_argument("--heads", type=positive_int, help="only so many heads of each layer (default: all)")
    parser.add_argument("--tokens", type=positive_int, help="only the first tokens (default: all; σ: 1024)")
    parser.add_argument("--head-dim", type=positive_int, default=64, help="of Gaussian heads (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default 0)")
    parser.add_argument("--device", help="where to compute: cpu or cuda (default: cuda if available)")
    parser.add_argument(
        "--out", type=Path, default=OUT / "gradient_error", help="beginning of the files' names"
    )
    arguments = parser.parse_args(argv)
    if not arguments.traces and not arguments.sigmas:
        parser.error(
            "nothing to measure; name traces (python -m scripts.paper.layers writes them), or --sigmas 1 3"
        )
    arguments.device = choose_device(arguments.device, parser)
    return arguments


def shown(arguments: Namespace) -> Namespace:
    """The arguments with paths as text, for JSON."""
    return Namespace(**{**vars(arguments), "traces": [str(path) for path in arguments.traces]})


# --- Heads --------------------------------------------------------------------------------------------------

Heads = list[tuple[HeadSource, int, int, Head]]


def find_heads(arguments: Namespace) -> tuple[list[HeadSource], Heads]:
    """Every source, and every head to compute: (source, layer, head, tensors).

    Raises:
        ValueError: a file is missing or not a trace, lacks a requested layer, or has the same run and step as
            another one.
    """
    sources, heads = [], []
    for path in find_traces(arguments.traces):
        origin, layers = load_trace(path, arguments.device)
        absent = [str(number) for number in arguments.layers or () if number not in layers]
        if absent:
            raise ValueError(f"{path} has no layer {', '.join(absent)}, only {', '.join(map(str, layers))}")
        if origin.name in (source.name for source in sources):
            raise ValueError(f"{path} is another trace of {origin.name}; leave one out")
        sources.append(
            HeadSource(origin.name, origin.run, origin.tokens, origin.qk_norm, origin.tokens_per_step)
        )
        for number in arguments.layers or layers:
            numbers = origin.heads or range(layers[number].q.shape[1])
            cut = heads_of(layers[number], arguments.tokens)
            heads += [
                (sources[-1], number, head, tensors)
                for head, tensors in list(zip(numbers, cut, strict=True))[: arguments.heads]
            ]
    for sigma in arguments.sigmas:
        sources.append(HeadSource(f"Gaussian, σ {sigma:g}", "Gaussian", None, None))
        heads.append((sources[-1], 0, 0, gaussian(sigma, arguments)))
    marked = {source.name: replace(source, is_last=is_last(source, sources)) for source in sources}
    return list(marked.values()), [(marked[source.name], *rest) for source, *rest in heads]


def is_last(source: HeadSource, sources: list[HeadSource]) -> bool:
    """Whether no other trace of the run is of a later step. Each Gaussian head is a run of its own."""
    return source.tokens is None or all(
        source.tokens >= other.tokens for other in sources if other.run == source.run
    )


def heads_of(layer: Layer, tokens: int | None) -> Iterator[Head]:
    """The query heads of the first sequence, each with its key head; the first tokens see no later ones."""
    group = layer.q.shape[1] // layer.k.shape[1]
    for head in range(layer.q.shape[1]):
        places = (head, head // group, head // group, head)
        yield Head(*(x[0, place, :tokens].float() for x, place in zip(layer, places, strict=True)))


def gaussian(sigma: float, arguments: Namespace) -> Head:
    """Q and K of standard deviation `sigma`, V and dO of 1, in values that bf16 has."""
    shape = (arguments.tokens or 1024, arguments.head_dim)
    draws = draw_inputs(sigma, shape, torch.bfloat16, seed=arguments.seed, device=arguments.device)
    return Head(*(x.float() for x in draws))


# --- Measuring ----------------------------------------------------------------------------------------------


def measure(source: HeadSource, layer: int, number: int, head: Head) -> list[Row]:
    """Every step and every variant on one head; before a run's last trace the default and single steps."""
    whole = exact_attention(*(x[None, None] for x in head), is_causal=True)
    exact = Result(*(getattr(whole, name)[0, 0] for name in Result._fields))
    head_dim, dtype = head.q.shape[-1], torch.bfloat16
    schemes: dict[tuple[str, str], Variant | Scheme] = {
        ("variant", name): variant for name, variant in variants(head_dim, dtype).items()
    } | ladder(head_dim, dtype)
    rows = []
    for (kind, name), scheme in schemes.items():
        if not (source.is_last or (kind, name) == ("variant", "default") or kind == "alone"):
            continue
        variant = scheme if isinstance(scheme, Variant) else Variant(scheme, cost=None)
        errors = compare(mean_of_draws(head, variant), exact)
        rows.append(Row(source.name, layer, number, kind, name, variant.cost, **errors))
    return rows


def mean_of_draws(head: Head, variant: Variant) -> Result:
    draws = [emulate(head, variant.scheme) for _ in range(variant.draws)]
    return Result(*(sum(tensors) / len(draws) for tensors in zip(*draws, strict=True)))


def compare(found: Result, exact: Result) -> dict[str, dict[str, float]]:
    measures = {"relative_l2": relative_l2, "cosine": cosine_similarity, "gain": gain}
    return {
        name: {key: six_digits(measure(getattr(found, key), getattr(exact, key))) for key in TITLES}
        for name, measure in measures.items()
    }


def six_digits(value: float) -> float:
    """Rounded to six significant digits: files of many heads would be large otherwise."""
    return float(f"{value:.6g}")


def gain(x: Tensor, exact: Tensor) -> float:
    """⟨x, exact⟩ / ⟨exact, exact⟩: 1 if the error has no part along the exact tensor, NaN if that is zero."""
    x, exact = x.double().flatten(), exact.double().flatten()
    return (x @ exact / (exact @ exact)).item()


if __name__ == "__main__":
    main()
