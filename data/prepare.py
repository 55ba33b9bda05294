"""Tokenize a source into shards, once: `python -m data.prepare data=openwebtext`.

Several processes take one unit each. Finished units are kept: after an interruption of any kind the same
command does only the remaining ones. The result is the same bytes with and without interruption, for any
number of processes.
"""

import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import hide_tracebacks

if __name__ == "__main__":
    hide_tracebacks()

from tqdm import tqdm

from common.files import checksums, identified_whole
from data import recipe, tokenizers, workers
from data.recipe import Recipe
from data.settings import DataSettings, options, register_options
from data.shards import COUNTS, SPLITS, Manifest, UnitRecord
from data.tokenizers import id_dtype, vocabulary_size
from data.tokens import TokenShards

BYTES_WORTH_A_PROCESS = 16 << 20  # tokenized in the second that a process takes to start

log = logging.getLogger(__name__)


@dataclass
class PrepareSettings:
    """The command line of `python -m data.prepare`."""

    data: DataSettings = field(default_factory=DataSettings)
    verify: bool = False  # afterwards, read every shard and source file and compare its checksum


def prepare(made: Recipe) -> Manifest:
    """Make sure that all tokens of a text are on disk, and return their manifest.

    Returns at once if they are. If another process is preparing the same folder, waits for it. Raises
    ValueError for text that cannot be used and OSError for failures of disk, network or memory, each naming
    the fix. Finished units are kept.
    """
    if (manifest := _prepared(made)) is not None:
        return manifest
    made.units  # raises before there is a folder  # noqa: B018
    made.folder.mkdir(parents=True, exist_ok=True)
    with _locked(made.folder):
        if (manifest := _prepared(made)) is not None:  # another process did it meanwhile
            return manifest
        _refuse_other_recipe(made)
        return _prepare(made)


def _prepared(made: Recipe) -> Manifest | None:
    """The manifest, if all shards are there, judged by their sizes."""
    manifest = made.manifest()
    shards = [shard for split in SPLITS for shard in manifest.shards[split]] if manifest else []
    return manifest if all(shard.is_intact_in(made.folder, manifest.ids) for shard in shards) else None


def tasks(made: Recipe) -> list[workers.Task]:
    """The work on each unit of a text."""
    text = (made.settings.tokenizer, made.val_fraction)
    return [
        workers.Task(made.folder, index, unit, *text, made.fingerprint + unit.version)
        for index, unit in enumerate(made.units)
    ]


def _prepare(made: Recipe) -> Manifest:
    for file in made.folder.glob("*.tmp"):  # of a preparation that was interrupted
        file.unlink(missing_ok=True)
    tokenizers.load(made.settings.tokenizer, warn=True)  # fails here, once and early, without its vocabulary
    left = [task for task in tasks(made) if not _is_finished(task)]
    log.info("preparing %s: %d of %d units to do", made.folder, len(left), len(made.units))
    start = time.perf_counter()
    with _progress(left) as bar:
        workers.run(left, made.settings.processes or _useful_processes(left), bar.update)
    manifest = _collect(made)
    _check_totals(manifest, made)
    manifest.write(made.folder)
    log.info(
        "%s: %s training tokens in %s documents, %s validation tokens in %s; %.0f s",
        made.folder,
        *(f"{count(split):,}" for split in SPLITS for count in (manifest.tokens, manifest.documents)),
        time.perf_counter() - start,
    )
    for loss in manifest.losses():
        log.warning("%s: %s", made.folder, loss)
    return manifest


def _useful_processes(tasks: list[workers.Task]) -> int:
    """One per core that this process may use, but none for so little text that starting it takes longer."""
    size = sum(task.unit.text_bytes for task in tasks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 1 + size // BYTES_WORTH_A_PROCESS) if size else cores


def _is_finished(task: workers.Task) -> bool:
    record = UnitRecord.read(task.folder, task.index)
    if record is None or record.fingerprint != task.fingerprint:
        return False
    ids = id_dtype(vocabulary_size(task.tokenizer))
    return all(shard.is_intact_in(task.folder, ids) for shard in record.shards.values() if shard)


def _collect(made: Recipe) -> Manifest:
    """The manifest over all finished units."""
    records = [UnitRecord.read(made.folder, index) for index in range(len(made.units))]
    shards = {split: [record.shards[split] for record in records if record.shards[split]] for split in SPLITS}
    files = [*made.files[0], *made.files[1]]
    read = [] if identified_whole(files) else checksums(files)
    vocab_size = vocabulary_size(made.settings.tokenizer)
    counts = {name: sum(record.counts[name] for record in records) for name in COUNTS}
    return Manifest(made.fingerprint, made.description, vocab_size, shards, read, counts)


def _check_totals(manifest: Manifest, made: Recipe) -> None:
    found, wanted = sum(map(manifest.documents, SPLITS)), made.settings.documents
    rows = found + manifest.counts["skipped"]
    if wanted is not None and rows != wanted:
        raise ValueError(
            f"{made.folder} has {rows:,} documents instead of {made.where}.documents={wanted:,}: part of it "
            "is missing or it has changed. Delete the folder and prepare it again, or set "
            f"{made.where}.documents=null to accept any number"
        )
    for split in ("val",) if made.is_validation_set else SPLITS:
        if manifest.tokens(split) == 0:
            raise ValueError(
                f"{made.folder}: no text is left for the {split} split: the source holds only {found} "
                f"document(s). Give more text, or separate validation text in {made.where}.val_path"
            )


def _refuse_other_recipe(made: Recipe) -> None:
    """Raise ValueError rather than overwrite tokens of another recipe under the same data.folder."""
    manifest = Manifest.read(made.folder)
    if manifest is None or manifest.fingerprint == made.fingerprint:
        return
    differing = [key for key, value in made.description.items() if manifest.recipe.get(key) != value]
    raise ValueError(
        f"{made.folder} holds a dataset made from something else (different {', '.join(differing)}); choose "
        f"another {made.where}.folder, leave it out, or delete the folder"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the operating system releases if the process dies."""
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is preparing %s; waiting for it", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _progress(tasks: list[workers.Task]) -> tqdm:
    """A progress bar over the bytes of text."""
    total = sum(task.unit.text_bytes for task in tasks) or None  # not known
    interval = 0.5 if sys.stderr.isatty() else 30  # seconds; every refresh is a line of its own in a log file
    return tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", mininterval=interval)


def run(settings: PrepareSettings) -> None:
    """What the command line does: prepare all texts of the settings, one after the other."""
    for made in recipe.read(settings.data):
        manifest = prepare(made)
        if settings.verify:
            _check_source(made, manifest)
            for split in SPLITS:
                TokenShards.open(made.folder, manifest, split, full=True)
        state = "verified" if settings.verify else "ready"
        tokens = f"{manifest.tokens('train'):,} + {manifest.tokens('val'):,} tokens"
        print("; ".join([f"{made.folder}: {state}, {tokens}", *manifest.losses()]))


def _check_source(made: Recipe, manifest: Manifest) -> None:
    """Raise ValueError for a source file that is no longer the one that was read."""
    files = [*made.files[0], *made.files[1]] if manifest.source_files else []
    for file, found, recorded in zip(files, checksums(files), manifest.source_files, strict=True):
        if found != recorded:
            raise ValueError(
                f"{file} is not what {made.folder} was made from: its checksum is {found['sha256']} and was "
                f"{recorded['sha256']}; restore the file, or delete the folder and prepare it again"
            )


def register() -> None:
    """Make the types known to Hydra: configs/prepare.yaml starts from `prepare_schema`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(PrepareSettings)
    register_options(schema)
    ConfigStore.instance().store(name="prepare_schema", node=schema)


def main() -> None:
    """Read configs/prepare.yaml and the command line, then run."""
    import hydra  # here: the tokenizing processes import this module and need no Hydra
    from omegaconf import OmegaConf

    from common import overrides

    register()
    configs = Path(__file__).resolve().parent.parent / "configs"
    groups = {"data": [*options(), *overrides.options_in(configs / "data")]}
    sys.argv[1:] = overrides.readable(sys.argv[1:])
    overrides.check_or_exit(sys.argv[1:], PrepareSettings, groups, program="python -m data.prepare")

    @hydra.main(version_base="1.3", config_path=str(configs), config_name="prepare")
    def command(config) -> None:
        try:
            run(OmegaConf.to_object(config))
        except (ValueError, OSError) as error:
            sys.exit(f"data.prepare: {error}")
        except KeyboardInterrupt:
            sys.exit(
                "data.prepare: interrupted; finished units are kept, run the same command again to continue"
            )

    command()


if __name__ == "__main__":
    main()
