"""The text of a run, ready to train on."""

import hashlib
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from data import texts, tokenizers
from data.checks import check
from data.files import matching
from data.manifest import Manifest, recipe
from data.mixture import Mixture
from data.overrides import override
from data.prepare import prepare
from data.settings import FILE_SUFFIXES, MIXTURE, DataSettings, named_folder, tokenizer_identity, unused
from data.shards import SPLITS
from data.tokenizers import Tokenizer
from data.tokens import TokenShards

FULL_CHECK_LIMIT = 1 << 30  # bytes of shards; up to this, opening compares checksums and not only sizes


@dataclass(frozen=True)
class ValidationSet:
    """Text that a run is validated on."""

    name: str | None  # None: the held-out part of a run's only source
    tokens: TokenShards
    weight: float  # of its loss in the run's validation loss


@dataclass(frozen=True)
class Corpus:
    """A prepared dataset, or several: the sources of a mixture, and validation sets."""

    train: TokenShards | Mixture
    val: TokenShards  # of a mixture, that of the source with the largest weight
    tokenizer: Tokenizer
    manifest: Manifest  # of a mixture, one that is made from those of its sources
    validation: tuple[ValidationSet, ...] = ()  # all; the weights sum to one


def open_corpus(settings: DataSettings) -> Corpus:
    """Open the datasets of these settings; a small one is prepared first if it is not yet.

    Every process may call this at once: one prepares, the others wait. Raises ValueError, with the command to
    run, for a large dataset that is not prepared and for a damaged shard, and whatever
    `data.prepare.prepare` raises.
    """
    check(settings)
    if settings.source == MIXTURE:
        corpus = _open_mixture(settings)
    else:
        corpus = _open_text(replace(settings, validation={}))
        corpus = replace(corpus, validation=(ValidationSet(None, corpus.val, 1.0),))
    named = [
        ValidationSet(name, _open_named(f"data.validation.{name}", text).val, 0.0)
        for name, text in texts.validation_sets(settings).items()
    ]
    return replace(corpus, validation=(*corpus.validation, *named))


def _open_mixture(settings: DataSettings) -> Corpus:
    opened = {
        name: _open_named(f"data.sources.{name}", text) for name, text in texts.sources_of(settings).items()
    }
    weights = texts.whole_weights(settings)
    total = sum(weights.values())
    first = opened[max(weights, key=weights.__getitem__)]
    return Corpus(
        Mixture(tuple(opened), tuple(weights.values()), tuple(one.train for one in opened.values())),
        first.val,
        first.tokenizer,
        _joined({name: one.manifest for name, one in opened.items()}, weights),
        tuple(ValidationSet(name, one.val, weights[name] / total) for name, one in opened.items()),
    )


def _joined(manifests: dict[str, Manifest], weights: dict[str, int]) -> Manifest:
    """A manifest of a mixture: the fingerprint has those of its sources, and their weights."""
    first = next(iter(manifests.values()))
    made = {
        "source": MIXTURE,
        "tokenizer": first.recipe["tokenizer"],
        "sources": {
            name: {"weight": weights[name], "fingerprint": manifest.fingerprint}
            for name, manifest in manifests.items()
        },
    }
    shards = {split: [shard for one in manifests.values() for shard in one.shards[split]] for split in SPLITS}
    fingerprint = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    return Manifest(fingerprint, made, first.vocab_size, shards, [])


def _open_named(where: str, settings: DataSettings) -> Corpus:
    with texts.named(where):
        return _open_text(settings)


def _open_text(settings: DataSettings) -> Corpus:
    """The dataset of one text. Raises what `open_corpus` raises."""
    folder = _without_its_text(settings) or _prepared(settings)
    manifest = Manifest.read(folder)
    size = sum(map(manifest.tokens, SPLITS)) * manifest.ids.itemsize
    verify = "full" if size <= FULL_CHECK_LIMIT else "size"
    try:
        train, val = (TokenShards.open(folder, split, verify) for split in SPLITS)
    except ValueError as error:
        raise ValueError(f"{error}:\n    {command(settings)}") from None
    return Corpus(train, val, tokenizers.load(settings.tokenizer), manifest)


def _prepared(settings: DataSettings) -> Path:
    made = recipe(settings)
    manifest = Manifest.read(made.folder)
    if manifest is not None and manifest.fingerprint == made.fingerprint:
        return made.folder  # a damaged shard raises when it is opened; it is not replaced in silence
    if made.source.input_bytes > settings.prepare_on_first_use_mb * 1e6:
        raise ValueError(
            f"{made.folder} is not prepared yet, and its input of {made.source.input_bytes / 1e6:,.0f} MB "
            f"takes a while. Prepare it once, on any machine with this folder:\n    {command(settings)}"
        )
    return prepare(settings)


def _without_its_text(settings: DataSettings) -> Path | None:
    """The dataset called data.name, if its source files are not on this machine (a cluster node, say)."""
    folder = named_folder(settings)
    pattern = settings.path or settings.val_path
    if folder is None or pattern is None:
        return None
    try:
        matching(pattern, FILE_SUFFIXES[settings.source])
    except ValueError:
        made_with = Manifest.read(folder).recipe["tokenizer"]
        if made_with != tokenizer_identity(settings.tokenizer):
            raise ValueError(
                f"{folder} was prepared with data.tokenizer={made_with}, not {settings.tokenizer}; use that, "
                "or another data.name"
            ) from None
        return folder
    return None


def command(settings: DataSettings) -> str:
    """The command that prepares the dataset of these settings."""
    group = {"stdlib": "embedded"}.get(settings.source, settings.source)
    usual = DataSettings(tokenizer="")  # always named, as it is not the same in all groups
    keys = ("path", "val_path", "column", "tokenizer", "val_fraction", "repository", "config", "root", "name")
    keys = [key for key in keys if key not in unused(settings)]  # such as a mixture's column of a plain text
    changed = {key: getattr(settings, key) for key in keys if getattr(settings, key) != getattr(usual, key)}
    if settings.source == "openwebtext":  # its group has values of its own for these
        changed |= {"revision": settings.revision, "documents": settings.documents}
    overrides = [override(f"data.{key}", value) for key, value in changed.items()]
    return shlex.join(["python", "-m", "data.prepare", f"data={group}", *overrides])
