"""How much of the tokenizer's own speed is left when a dataset is prepared?

Both sides of the comparison tokenize the same parquet files in as many processes, in one run:
  tokenizer   texts that lie in memory already, ids thrown away
  prepare     data.prepare's work from the parquet files to checksummed shards on disk, process start included

    python -m scripts.bench.prepare 'DIR/*.parquet' --processes 2 --repeat 4 --out FILE.json
"""

import argparse
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from data import sources, tokenizers, workers
from data.files import matching, write_json
from data.manifest import recipe
from data.settings import DataSettings


class Cost(NamedTuple):
    """What tokenizing some text took."""

    text_mb: float
    seconds: float
    cpu_seconds: float  # all processes together; what to compare by on a machine that is not idle


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", help="parquet files: a file, a folder or a quoted glob")
    parser.add_argument("--column", default="text")
    parser.add_argument(
        "--tokenizer", default="gpt2", help="gpt2 (gigatoken where installed, else tiktoken) or bytes"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1, help="take the files so many times, for longer runs")
    parser.add_argument(
        "--folder", help="where the shards go for the time of the run; default: the temporary folder"
    )
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        settings = _settings(arguments, Path(folder))
        units = sources.load(settings).units
        alone = tokenizer_alone(units, arguments.tokenizer, arguments.processes)
        whole = prepare(settings, arguments.processes)
    if alone.text_mb != whole.text_mb:
        raise SystemExit(f"the two sides saw different text: {alone.text_mb} and {whole.text_mb} MB")
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
    if arguments.out:
        write_json(arguments.out, result)


def tokenizer_alone(units: list[sources.Unit], tokenizer: str, processes: int) -> Cost:
    """Seconds count from the common start until the last process is done."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes, timeout=600)  # a process that died must not keep the others waiting
    shares = [units[process::processes] for process in range(processes)]
    with ProcessPoolExecutor(processes, context, initializer=_meet_at, initargs=(barrier,)) as pool:
        running = [pool.submit(_tokenize_share, share, tokenizer) for share in shares]
        text_bytes, begins, ends, cpu_seconds = zip(*(share.result() for share in running), strict=True)
    return Cost(sum(text_bytes) / 1e6, max(ends) - min(begins), sum(cpu_seconds))


def _meet_at(barrier) -> None:
    global _barrier
    _barrier = barrier


def _tokenize_share(units: list[sources.Unit], name: str) -> tuple[int, float, float, float]:
    """Bytes of text, when this process began and ended, and the CPU seconds between."""
    try:
        tokenizer = tokenizers.load(name)
        batches = [batch.texts for unit in units for batch in unit.batches()]
    except BaseException:
        _barrier.abort()
        raise
    _barrier.wait()
    begin, cpu_begin = time.time(), time.process_time()  # time.time: the one clock that processes share
    for texts in batches:
        tokenizer.encode_batch(texts)
    return sum(texts.nbytes for texts in batches), begin, time.time(), time.process_time() - cpu_begin


def prepare(settings: DataSettings, processes: int) -> Cost:
    """Everything between the settings and the finished shards."""
    text_bytes = 0

    def report(_documents: int, _tokens: int, new_bytes: int) -> None:
        nonlocal text_bytes
        text_bytes += new_bytes

    begin, cpu_begin = time.time(), _cpu_seconds()
    made = recipe(settings)
    made.folder.mkdir()
    tasks = [
        workers.Task(made.folder, index, unit, made.tokenizer, made.source.val_fraction, made.fingerprint)
        for index, unit in enumerate(made.source.units)
    ]
    workers.run(tasks, processes, report)
    return Cost(text_bytes / 1e6, time.time() - begin, _cpu_seconds() - cpu_begin)


def _cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _settings(arguments: argparse.Namespace, folder: Path) -> DataSettings:
    """Settings for the files, each taken `repeat` times by way of links."""
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
