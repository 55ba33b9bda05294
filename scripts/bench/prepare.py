"""Speed of preparing a dataset, compared with the speed of its tokenizer alone.

    python -m scripts.bench.prepare 'corpus/*.parquet'
    python -m scripts.bench.prepare 'corpus/*.parquet' --processes 8 --repeat 4 --out runs/bench/prepare.json

Tokenizes the same parquet files twice, in as many processes:

  tokenizer   texts that are already in memory; ids are thrown away
  prepare     what data.prepare does, from parquet files to checksummed shards on disk, process start included

The ratio of the two is how much of the tokenizer's speed is left. Needs no GPU. It takes about twice the time
of preparing the files, and their space on disk as tokens. Compare by CPU seconds on a machine that is busy.
"""

import multiprocessing
import os
import platform
import resource
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from data import sources, tokenizers, workers
from data.files import matching, write_json
from data.prepare import tasks
from data.recipe import Recipe
from data.settings import DataSettings


class Cost(NamedTuple):
    """What tokenizing some text took."""

    text_mb: float
    seconds: float
    cpu_seconds: float  # of all processes


def main(argv: list[str] | None = None) -> None:
    """Measure both, print the speeds and write them as JSON."""
    arguments = parse_arguments(argv)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        settings = _settings(arguments, Path(folder))
        units = Recipe(settings).units
        alone = tokenizer_alone(units, arguments.tokenizer, arguments.processes)
        whole = prepare(settings, arguments.processes)
    if alone.text_mb != whole.text_mb:
        raise SystemExit(f"tokenizer and prepare read different text: {alone.text_mb} and {whole.text_mb} MB")
    result = {
        "tokenizer": f"{arguments.tokenizer} ({type(tokenizers.load(arguments.tokenizer)).__name__})",
        "processes": arguments.processes,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("tiktoken", "pyarrow", "numpy")},
        "text_mb": round(alone.text_mb, 1),
        "tokenizer_mb_per_s": round(alone.text_mb / alone.seconds, 1),
        "prepare_mb_per_s": round(whole.text_mb / whole.seconds, 1),
        "prepare_over_tokenizer": round(alone.seconds / whole.seconds, 3),
        "tokenizer_mb_per_cpu_s": round(alone.text_mb / alone.cpu_seconds, 1),
        "prepare_mb_per_cpu_s": round(whole.text_mb / whole.cpu_seconds, 1),
        "prepare_over_tokenizer_cpu": round(alone.cpu_seconds / whole.cpu_seconds, 3),
    }
    for name, value in result.items():
        print(f"{name:28} {value}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, result)
    print(f"written: {arguments.out}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    # Not command_parser: importing scripts.bench.measuring imports torch, in every process that is timed.
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", help="parquet files: a file, a folder or a quoted glob")
    add("--column", default="text", help="the column that holds the text (default %(default)s)")
    add("--tokenizer", default="gpt2", help="gpt2 (gigatoken if installed, else tiktoken) or bytes")
    add("--processes", type=int, default=2, metavar="N", help="default %(default)s")
    add("--repeat", type=int, default=1, metavar="N", help="take the files N times, for longer runs")
    add("--folder", type=Path, help="for the shards while they last (default: the temporary folder)")
    out = Path("runs/bench/prepare.json")
    add("--out", type=Path, default=out, metavar="FILE.json", help="default %(default)s")
    return parser.parse_args(argv)


def tokenizer_alone(units: list[sources.Unit], tokenizer: str, processes: int) -> Cost:
    """Cost of tokenizing alone: seconds from a common start until the last process is done."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes, timeout=600)  # so that a dead process does not block the others
    shares = [units[process::processes] for process in range(processes)]
    with ProcessPoolExecutor(processes, context, initializer=_meet_at, initargs=(barrier,)) as pool:
        running = [pool.submit(_tokenize_share, share, tokenizer) for share in shares]
        text_bytes, begins, ends, cpu_seconds = zip(*(share.result() for share in running), strict=True)
    return Cost(sum(text_bytes) / 1e6, max(ends) - min(begins), sum(cpu_seconds))


def _meet_at(barrier) -> None:
    global _barrier
    _barrier = barrier


def _tokenize_share(units: list[sources.Unit], name: str) -> tuple[int, float, float, float]:
    """Bytes of text, begin and end of this process's work, and its CPU seconds."""
    try:
        tokenizer = tokenizers.load(name)
        batches = [batch.texts for unit in units for batch in unit.batches()]
    except BaseException:
        _barrier.abort()
        raise
    _barrier.wait()
    begin, cpu_begin = time.time(), time.process_time()  # time.time is comparable between processes
    for texts in batches:
        tokenizer.encode_batch(texts)
    return sum(texts.nbytes for texts in batches), begin, time.time(), time.process_time() - cpu_begin


def prepare(settings: DataSettings, processes: int) -> Cost:
    """Cost of everything from the settings to the finished shards."""
    text_bytes = 0

    def report(_documents: int, _tokens: int, new_bytes: int) -> None:
        nonlocal text_bytes
        text_bytes += new_bytes

    begin, cpu_begin = time.time(), _cpu_seconds()
    made = Recipe(settings)
    made.folder.mkdir()
    workers.run(tasks(made), processes, report)
    return Cost(text_bytes / 1e6, time.time() - begin, _cpu_seconds() - cpu_begin)


def _cpu_seconds() -> float:
    """CPU seconds of this process and its ended children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _settings(arguments: Namespace, folder: Path) -> DataSettings:
    """Settings for the files, each linked `repeat` times."""
    links = folder / "input"
    links.mkdir()
    for file in matching(arguments.files, (".parquet",)):
        for copy in range(arguments.repeat):
            (links / f"{file.stem}-{copy}.parquet").symlink_to(file.resolve())
    return DataSettings(
        source="parquet",
        path=str(links),
        column=arguments.column,
        tokenizer=arguments.tokenizer,
        root=str(folder),
        name="shards",
    )


if __name__ == "__main__":
    main()
