"""The text of a run, ready to train on."""

import hashlib
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from common.overrides import override
from data import recipe, tokenizers
from data.mixture import Mixture, whole_weights
from data.prepare import prepare
from data.recipe import Recipe
from data.settings import MIXTURE, DataSettings, values_of
from data.shards import SPLITS, Manifest
from data.tokenizers import Tokenizer
from data.tokens import TokenShards

SMALL = 200e6  # bytes of files; up to this, a text is prepared when it is opened
FULL_CHECK_LIMIT = 1 << 30  # bytes of shards; up to this, opening verifies them, beyond it reading does


@dataclass(frozen=True)
class ValidationSet:
    """Text that a run is validated on."""

    name: str | None  # None: the held-out part of a run's only source
    tokens: TokenShards
    weight: float  # of its loss in the run's validation loss


@dataclass(frozen=True)
class Corpus:
    """A prepared text, or several: the sources of a mixture, and validation sets."""

    train: TokenShards | Mixture
    val: TokenShards  # of a mixture, that of the source with the largest weight
    tokenizer: Tokenizer
    manifest: Manifest  # of a mixture, one that is made from those of its sources
    validation: tuple[ValidationSet, ...]  # all; the weights sum to one
    checksums: dict[str, str]  # of the tokens of each text, by its setting
    separator: int | None = None  # the token after each document, if batches say where documents begin


class Opened(NamedTuple):
    """A prepared text."""

    manifest: Manifest
    train: TokenShards
    val: TokenShards


def open_corpus(
    settings: DataSettings, recipes: Sequence[Recipe] | None = None, *, small: float = SMALL
) -> Corpus:
    """Open the texts of these settings; a small one is prepared first if it is not yet.

    Every process may call this at once: one prepares, the others wait. Raises ValueError, with the command to
    run, for a large text that is not prepared and for a damaged shard, and whatever `data.recipe.read` and
    `data.prepare.prepare` raise. recipes: those of `data.recipe.read`, if it was called already. small: the
    bytes of files up to which a text is.
    """
    recipes = recipes or recipe.read(settings)
    texts = [_open(one, small) for one in recipes]
    tokenizer = tokenizers.load(settings.tokenizer)
    separator = tokenizer.end_of_text if settings.mask_documents else None
    weights = whole_weights(settings.sources) if settings.source == MIXTURE else {None: 1}
    total = sum(weights.values())
    validation = tuple(
        ValidationSet(one.name, text.val, weights.get(one.name, 0) / total)
        for one, text in zip(recipes, texts, strict=True)
    )
    checksums = {one.where: text.manifest.checksum for one, text in zip(recipes, texts, strict=True)}
    sources = dict(zip(weights, texts, strict=False))  # training texts come first
    first = sources[max(weights, key=weights.__getitem__)]
    if settings.source != MIXTURE:
        return Corpus(first.train, first.val, tokenizer, first.manifest, validation, checksums, separator)
    train = Mixture(tuple(weights), tuple(weights.values()), tuple(text.train for text in sources.values()))
    manifest = _joined({name: text.manifest for name, text in sources.items()}, weights)
    return Corpus(train, first.val, tokenizer, manifest, validation, checksums, separator)


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
    return Manifest(fingerprint, made, first.vocab_size, shards, [], {})


def _open(one: Recipe, small: float) -> Opened:
    """The tokens of a text, which are made now if they are not there and its files are small."""
    manifest = one.manifest()
    if manifest is None:
        if one.input_bytes > small:
            is_here = one.input_bytes < math.inf
            what = f"its text has {one.input_bytes / 1e6:,.0f} MB" if is_here else "its text is not here"
            raise ValueError(
                f"{one.folder} is not prepared yet, and {what}. Prepare it once, on any machine with this "
                f"folder:\n    {command(one)}"
            )
        manifest = prepare(one)
    full = sum(map(manifest.tokens, SPLITS)) * manifest.ids.itemsize <= FULL_CHECK_LIMIT
    try:  # a damaged shard is not replaced in silence
        train, val = (TokenShards.open(one.folder, manifest, split, full=full) for split in SPLITS)
    except OSError as error:
        raise ValueError(f"{error}:\n    {command(one)}") from None
    return Opened(manifest, train, val)


def command(one: Recipe) -> str:
    """The command that prepares a text."""
    text = one.settings
    group = "embedded" if text.source == "stdlib" else text.source
    usual = asdict(DataSettings(**values_of(group)))
    for key in ("source", "validation", "sources", "mask_documents"):
        del usual[key]  # the tokens do not depend on it
    words = [override(f"data.{key}", value) for key in usual if (value := getattr(text, key)) != usual[key]]
    return shlex.join(["python", "-m", "data.prepare", f"data={group}", *words])
