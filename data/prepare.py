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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from data import texts, tokenizers, workers
from data.checks import check, without_effect
from data.files import checksums
from data.manifest import Manifest, Recipe, manifest_of, recipe
from data.settings import DataSettings, allow_names, is_validation_only
from data.shards import SPLITS, UnitRecord, remove_unfinished
from data.sources import Source
from data.tokens import TokenShards

BYTES_WORTH_A_PROCESS = 16 << 20  # tokenized in the second that a process takes to start

log = logging.getLogger(__name__)


@dataclass
class PrepareSettings:
    """The command line of `python -m data.prepare`."""

    data: DataSettings = field(default_factory=DataSettings)
    verify: bool = False  # afterwards, read every shard and source file and compare its checksum


def prepare(settings: DataSettings) -> Path:
    """Make sure that the complete dataset of these settings of one text is on disk; return its folder.

    Returns at once if it is. If another process is preparing the same folder, waits for it. Raises ValueError
    for text that cannot be used and OSError for failures of disk, network or memory, each naming the fix.
    Finished units are kept.
    """
    check(settings)
    made = recipe(settings)
    if is_prepared(made):
        return made.folder
    try:
        made.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot create the folder {made.folder}: {error.strerror}; choose another data.root"
        ) from error
    with _locked(made.folder):
        if not is_prepared(made):  # another process may have prepared it meanwhile
            _refuse_other_recipe(made)
            _prepare(made, settings)
    return made.folder


def is_prepared(made: Recipe) -> bool:
    """Whether the folder holds the dataset of the recipe, judged by the sizes of its shards."""
    manifest = Manifest.read(made.folder)
    return (
        manifest is not None and manifest.fingerprint == made.fingerprint and manifest.intact_in(made.folder)
    )


def _prepare(made: Recipe, settings: DataSettings) -> None:
    remove_unfinished(made.folder)
    tokenizers.load(made.tokenizer, warn=True)  # fails here, once and early, without its vocabulary
    tasks = [
        workers.Task(made.folder, index, unit, made.tokenizer, made.source.val_fraction, made.fingerprint)
        for index, unit in enumerate(made.source.units)
        if not _finished(made, index)
    ]
    log.info("preparing %s: %d of %d units to do", made.folder, len(tasks), len(made.source.units))
    start = time.perf_counter()
    with _progress(tasks) as report:
        workers.run(tasks, settings.processes or _useful_processes(tasks), report)
    manifest = _collect(made)
    _check_totals(manifest, settings)
    manifest.write(made.folder)
    log.info(
        "%s: %s training tokens in %s documents, %s validation tokens in %s; %.0f s",
        made.folder,
        *(f"{count(split):,}" for split in SPLITS for count in (manifest.tokens, manifest.documents)),
        time.perf_counter() - start,
    )


def _useful_processes(tasks: list[workers.Task]) -> int:
    """One per core that this process may use, but none for so little text that starting it takes longer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 1 + sum(task.unit.text_bytes for task in tasks) // BYTES_WORTH_A_PROCESS)


def _finished(made: Recipe, index: int) -> bool:
    record = UnitRecord.read(made.folder, index)
    if record is None or record.fingerprint != made.fingerprint:
        return False
    return record.intact_in(made.folder, made.ids)


def _collect(made: Recipe) -> Manifest:
    """The manifest over all finished units."""
    records = [UnitRecord.read(made.folder, index) for index in range(len(made.source.units))]
    shards = {split: [record.shards[split] for record in records if record.shards[split]] for split in SPLITS}
    return manifest_of(made, shards)


def _check_totals(manifest: Manifest, settings: DataSettings) -> None:
    found = sum(map(manifest.documents, SPLITS))
    if settings.documents is not None and found != settings.documents:
        raise ValueError(
            f"{settings.source} has {found:,} documents instead of "
            f"data.documents={settings.documents:,}: part of it is missing or it has changed. Delete the "
            "prepared folder and prepare it again, or set data.documents=null to accept any number"
        )
    for split in ("val",) if is_validation_only(settings) else SPLITS:
        if manifest.tokens(split) == 0:
            raise ValueError(
                f"no text is left for the {split} split: the source holds only {found} document(s). Give "
                "more text, or separate validation text in data.val_path"
            )


def _refuse_other_recipe(made: Recipe) -> None:
    """Raise ValueError rather than overwrite a dataset of another recipe under the same data.name."""
    manifest = Manifest.read(made.folder)
    if manifest is None or manifest.fingerprint == made.fingerprint:
        return
    differing = [key for key, value in made.description.items() if manifest.recipe.get(key) != value]
    raise ValueError(
        f"{made.folder} holds a dataset made from something else (different {', '.join(differing)}); choose "
        "another data.name, leave data.name out, or delete the folder"
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


@contextmanager
def _progress(tasks: list[workers.Task]) -> Iterator[workers.Report]:
    """A progress bar over the bytes of text, with the number of documents and tokens."""
    total = sum(task.unit.text_bytes for task in tasks)
    interval = 0.5 if sys.stderr.isatty() else 30  # seconds; every refresh is a line of its own in a log file
    documents = tokens = 0
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", mininterval=interval) as bar:

        def report(new_documents: int, new_tokens: int, text_bytes: int) -> None:
            nonlocal documents, tokens
            documents += new_documents
            tokens += new_tokens
            bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens", refresh=False)
            bar.update(text_bytes)

        yield report


def run(settings: PrepareSettings) -> None:
    """What the command line does: prepare all texts of the settings, one after the other."""
    check(settings.data)
    for where, text in texts.all_texts(settings.data).items():
        with nullcontext() if where == "data" else texts.named(where):
            _prepare_and_report(text, verify=settings.verify)


def _prepare_and_report(settings: DataSettings, *, verify: bool) -> None:
    folder = prepare(settings)
    manifest = Manifest.read(folder)
    if verify:
        _check_source(recipe(settings).source, manifest, folder)
        for split in SPLITS:
            TokenShards.open(folder, split, verify="full")
    state = "verified" if verify else "ready"
    print(f"{folder}: {state}, {manifest.tokens('train'):,} + {manifest.tokens('val'):,} tokens")


def _check_source(source: Source, manifest: Manifest, folder: Path) -> None:
    """Raise ValueError for a source file that is no longer the one that was read."""
    now = checksums(source.files if manifest.source_files else [])
    for file, found, recorded in zip(source.files, now, manifest.source_files, strict=False):
        if found != recorded:
            raise ValueError(
                f"{file} is not what {folder} was made from: its checksum is {found['sha256']} and was "
                f"{recorded['sha256']}; restore the file, or delete the folder and prepare it again"
            )


def register() -> None:
    """Make the types known to Hydra: configs/prepare.yaml starts from `prepare_schema`."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(PrepareSettings)
    allow_names(schema)
    ConfigStore.instance().store(name="prepare_schema", node=schema)


def main() -> None:
    """Read configs/prepare.yaml and the command line, then run."""
    import hydra  # here: the tokenizing processes import this module and need no Hydra
    from omegaconf import OmegaConf

    from data import command_line

    register()
    configs = Path(__file__).resolve().parent.parent / "configs"
    names = command_line.setting_names(PrepareSettings)
    command_line.check_words_or_exit(sys.argv[1:], names)
    parsed = command_line.parse(sys.argv[1:])
    command_line.check_numbers_or_exit(parsed, PrepareSettings)
    command_line.check_or_exit(
        parsed,
        names,
        {"data": command_line.options_in(configs / "data")},
        program="python -m data.prepare",
    )

    @hydra.main(version_base="1.3", config_path=str(configs), config_name="prepare")
    def command(config) -> None:
        try:
            settings = OmegaConf.to_object(config)
            if idle := list(without_effect([one.input_line for one in parsed], settings.data)):
                raise ValueError("; ".join(idle))
            run(settings)
        except (ValueError, OSError) as error:
            sys.exit(f"data.prepare: {error}")
        except KeyboardInterrupt:
            sys.exit(
                "data.prepare: interrupted; finished units are kept, run the same command again to continue"
            )

    command()


if __name__ == "__main__":
    main()
