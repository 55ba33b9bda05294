"""From settings to recipes: what each text of a run is made of, and which folder holds its tokens.

A run has one text, or the sources of a mixture, and validation sets. `read` turns the settings of each into
a Recipe, once; preparing and opening take the recipe.
"""

import difflib
import filecmp
import hashlib
import importlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common.files import identity, matching
from data.mixture import whole_weights
from data.settings import MIXTURE, DataSettings, sources, values_of
from data.shards import FILE, Manifest
from data.sources import Source, Unit, effective_fraction
from data.tokenizers import VOCABULARY_SIZES, tokenizer_identity, vocabulary_size

SOURCES: dict[str, Source] = {
    name: importlib.import_module(f"data.sources.{name}").SOURCE for name in sources()
}
FORMAT = 2  # raise it whenever the same text would give different shards

# What a text with a name can set, and how a value is read. DATASET it has from `data=SOURCE` if it does not.
DATASET = {**dict.fromkeys(("name", "config", "split", "val_split", "revision"), str), "documents": int}
TEXT_KEYS = {**dict.fromkeys(("path", "source", "column", "folder"), str), "val_fraction": float, **DATASET}
KEYS = {"data.sources": TEXT_KEYS | {"weight": str, "val_path": str}, "data.validation": TEXT_KEYS}
# Settings of a run that all of its texts share.
SHARED = ("column", "tokenizer", "val_fraction", "streaming", "root", "processes")


@dataclass(frozen=True, eq=False)
class Recipe:
    """One text of a run: everything that determines its tokens, and their folder.

    What is on disk is looked up when it is first asked for, and kept.
    """

    settings: DataSettings  # of this text alone
    group: str = "data"  # or data.sources, data.validation
    name: str | None = None  # in the group; None: a run's only training text

    @property
    def where(self) -> str:
        """The setting that names this text, for messages."""
        return f"{self.group}.{self.name}" if self.name else self.group

    @property
    def source(self) -> Source:
        return SOURCES[self.settings.source]

    @property
    def is_dataset(self) -> bool:
        """Whether `datasets` finds the text, which may ask the network."""
        return "name" in self.source.settings

    @property
    def has_val_text(self) -> bool:
        """Whether validation text lies apart from training text."""
        return self.settings.val_path is not None or self.settings.val_split is not None

    @property
    def is_validation_set(self) -> bool:
        """Whether it has no training text."""
        text = self.settings
        return text.split is None or (text.val_path is not None and text.path is None)

    @cached_property
    def files(self) -> tuple[list[Path], list[Path]]:
        """The files of training and of validation text; none if it is elsewhere. Raises ValueError."""
        text = self.settings
        given = {key: path for key in ("path", "val_path") if (path := getattr(text, key)) is not None}
        if self.is_dataset and not text.name:
            raise ValueError(
                f"{self._kind()} needs {self.setting('name')}=NAME: a dataset of the Hub, a folder, or with "
                f"{self.setting('path')}=FILES a format (csv, json, parquet, …)"
            )
        if given and not (self.source.suffixes or "path" in self.source.settings):
            key, path = next(iter(given.items()))
            kinds = ", ".join(self._kind(kind) for kind, source in SOURCES.items() if source.suffixes)
            raise ValueError(f"{self.setting(key)}={path} is not read with source={text.source}; use {kinds}")
        if self.source.suffixes and not given:
            raise ValueError(
                f"{self._kind()} needs {self.setting('path')}=FILE (or a folder, or a quoted glob such as "
                "'DIR/*')"
            )
        if self.source.suffixes:
            return self._matching("path", text.path), self._matching("val_path", text.val_path)
        return self.source.files(text)

    @cached_property
    def is_text_missing(self) -> bool:
        """Whether the tokens are here, in data.folder, and the text is not: on a cluster node, say."""
        if self.settings.folder is None or not (self.folder / FILE).is_file():
            return False
        if self.settings.path is None or not self.source.suffixes:
            return False
        try:
            matching(self.settings.path, self.source.suffixes)
        except ValueError:
            return True
        return False

    @cached_property
    def units(self) -> list[Unit]:
        """The text in pieces of work. Reads metadata. Raises ValueError for text that cannot be read."""
        files, val_files = self.files
        units = self.source.units(files, self.settings, "train" if self.has_val_text else None)
        if files and not any(unit.text_bytes for unit in units):
            raise ValueError(f"{self.setting('path')}={self.settings.path} has no text; choose other files")
        return units + (self.source.units(val_files, self.settings, "val") if self.has_val_text else [])

    @cached_property
    def val_fraction(self) -> float:
        """Validation part of the text; 0 if validation text lies apart."""
        if self.has_val_text:
            return 0.0
        size = _size(self.files[0]) if self.is_dataset else sum(unit.text_bytes for unit in self.units)
        return effective_fraction(self.settings.val_fraction, size)

    @property
    def input_bytes(self) -> float:
        """Size of the files, which may be compressed; infinite if they are elsewhere."""
        return sum(map(_size, self.files)) or math.inf

    @cached_property
    def description(self) -> dict:
        """JSON; recipes with equal descriptions give the same bytes."""
        files, val_files = self.files
        is_here = bool(files or val_files)
        text = {"files": identity(files), "val_files": identity(val_files)} if is_here else {}
        places = ("path", "val_path") if is_here else ()
        text |= {key: getattr(self.settings, key) for key in self.source.settings if key not in places}
        return {
            "format": FORMAT,
            "source": self.settings.source,
            "identity": text,
            "tokenizer": tokenizer_identity(self.settings.tokenizer),
            "held_out": self.val_fraction,
            "units": None if self.is_dataset else len(self.units),
        }

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    @cached_property
    def folder(self) -> Path:
        """The folder of the tokens."""
        text = self.settings
        names = (_plain(Path(name or "").stem) for name in (text.path or text.val_path, text.name))
        stem = next(filter(None, names), text.source)
        return Path(text.root) / (text.folder or f"{stem}-{_label(text.tokenizer)}-{self.fingerprint[:10]}")

    def manifest(self) -> Manifest | None:
        """The table of contents of the tokens, None if they are not prepared. Shards are not looked at.

        Raises ValueError if the tokens that are there without their text are of another tokenizer.
        """
        manifest = Manifest.read(self.folder)
        if self.is_text_missing:
            made_with = manifest.recipe["tokenizer"]
            if made_with != tokenizer_identity(self.settings.tokenizer):
                raise ValueError(
                    f"{self.folder} was prepared with data.tokenizer={made_with}, not "
                    f"{self.settings.tokenizer}; use that, or another data.folder"
                )
            return manifest
        return manifest if manifest is not None and manifest.fingerprint == self.fingerprint else None

    def setting(self, key: str) -> str:
        """The full name of a setting of this text, for messages."""
        if self.group == "data.validation":
            key = key.removeprefix("val_")
        return f"{self.where}.{key}"

    def _kind(self, kind: str | None = None) -> str:
        """How this text's kind, or another, is chosen on the command line."""
        return f"{'data' if self.name is None else f'{self.where}.source'}={kind or self.settings.source}"

    def _matching(self, key: str, pattern: str | None) -> list[Path]:
        if pattern is None:
            return []
        if "://" in pattern:
            format_ = {"jsonl": "json"}.get(self.settings.source, self.settings.source)
            raise ValueError(
                f"{self.setting(key)}={pattern} is an address, not a file here; download it, or use "
                f"{self._kind('huggingface')} {self.where}.name={format_}"
            )
        try:
            files = matching(pattern, self.source.suffixes)
        except ValueError as error:
            raise ValueError(f"{self.setting(key)}={pattern}: {error}") from None
        kinds = _kinds(files[0].name)
        if kinds and self.settings.source not in kinds:
            raise ValueError(
                f"{self.setting(key)}={pattern}: {files[0].name} is not {self.settings.source}; use "
                f"{self._kind(kinds[0])}, or rename it if it is"
            )
        return files


def read(settings: DataSettings) -> list[Recipe]:
    """The recipes of all texts of a run: training texts, then validation sets. All their files are there.

    Raises ValueError, naming the setting and the fix, for settings that cannot work, as far as this can be
    known quickly, without the network, and without reading the text.
    """
    recipes = [*training_texts(settings), *_named(settings, "data.validation", settings.validation)]
    for name in settings.sources.keys() & settings.validation.keys():
        raise ValueError(f"data.sources.{name} and data.validation.{name} have the same name; rename one")
    if found := list(_problems(settings, recipes)):
        raise ValueError("\n".join(found))
    _check_apart([recipe for recipe in recipes if not recipe.is_text_missing])
    return recipes


def training_texts(settings: DataSettings) -> list[Recipe]:
    """The text of a run, or the sources of its mixture, sorted by name. Looks for no files."""
    if settings.source != MIXTURE:
        if settings.sources:
            raise ValueError(f"data.sources are not read with data={settings.source}; use data=mixture")
        return [Recipe(replace(settings, validation={}))]
    if not settings.sources or settings.path or settings.val_path:
        raise ValueError(
            "data=mixture needs data.sources.NAME.path=FILE and data.sources.NAME.weight=N of each source, "
            "and no data.path"
        )
    recipes = _named(settings, "data.sources", dict(sorted(settings.sources.items())))
    whole_weights(settings.sources)
    return recipes


def _named(settings: DataSettings, group: str, entries: dict[str, Any]) -> list[Recipe]:
    """The texts of a group of settings. What an entry leaves out is as in the settings of the run."""
    shared = {key: getattr(settings, key) for key in SHARED}
    recipes = []
    for name, entry in entries.items():
        own = _read_entry(f"{group}.{name}", entry, KEYS[group])
        own.pop("weight", None)
        option = values_of(own.pop("source"))
        if option["source"] not in SOURCES:
            raise ValueError(_unknown(f"{group}.{name}", option["source"]))
        dataset = {key: value for key, value in option.items() if key in DATASET}
        own = {"source": option["source"], **shared, **dataset, **own}
        if group == "data.validation":
            own["val_path"] = own.pop("path", None)
            if "split" in SOURCES[own["source"]].settings:
                own |= {"split": None, "val_split": own.get("split", "train")}
        recipes.append(Recipe(DataSettings(**own), group, name))
    return recipes


def _unknown(where: str, source: str) -> str:
    return f"{where}.source={source} is unknown; choose one of {', '.join(SOURCES)}"


def _read_entry(where: str, entry: Any, keys: dict[str, type]) -> dict[str, Any]:
    """What an entry sets: a path alone, or values by key, null for none. Its source is found if not named."""
    found: dict[str, Any] = {}
    for key, value in (entry if isinstance(entry, dict) else {"path": entry}).items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {where}.{near[0]}?" if near else f"choose from {', '.join(keys)}"
            raise ValueError(f"{where}.{key}: there is no such setting; {hint}")
        if value is None and key != "documents":
            continue
        try:
            found[key] = None if value is None else keys[key](value)
        except (TypeError, ValueError):
            raise ValueError(f"{where}.{key}={value} must be a number") from None
    if "source" not in found:
        found["source"] = "huggingface" if "name" in found else _kind_of(where, found.get("path"))
    return found


def _kind_of(where: str, path: str | None) -> str:
    """The kind of text, by the names of the files. Raises ValueError if they do not say."""
    if path is None:
        return "text"  # which says that it needs a path
    kinds = _kinds(path)
    if not kinds and (folder := Path(path).expanduser()).is_dir():
        kinds = sorted({kind for file in folder.rglob("*") for kind in _kinds(file.name)})
    if len(kinds) != 1:
        names = [kind for kind, source in SOURCES.items() if source.suffixes]
        raise ValueError(
            f"{where}.path={path} does not say whether it is {' or '.join(names)}; add {where}.source=text"
        )
    return kinds[0]


def _kinds(name: str) -> list[str]:
    return [kind for kind, source in SOURCES.items() if name.endswith(source.suffixes)]


def _problems(settings: DataSettings, recipes: list[Recipe]) -> Iterator[str]:
    """Values that cannot work, each with its fix."""
    try:
        vocabulary_size(settings.tokenizer)
    except ValueError as error:
        yield str(error)
    for recipe in recipes:
        text, where = recipe.settings, recipe.where
        if text.source not in SOURCES:
            yield _unknown(where, text.source)
            continue
        if not 0 < text.val_fraction < 1:
            yield f"{where}.val_fraction={text.val_fraction} must lie between 0 and 1; 0.0005 is usual"
        if text.folder is not None and (Path(text.folder).name != text.folder or text.folder == ".."):
            yield f"{where}.folder={text.folder} must be a folder in data.root, not a path"
        for key in ("name", "val_split"):
            if (value := getattr(text, key)) is not None and key not in recipe.source.settings:
                yield f"{where}.{key}={value} is of data=huggingface, not {text.source}; leave it out"


def _check_apart(recipes: list[Recipe]) -> None:
    """Raise ValueError if a file is in two training texts, or in training and validation text.

    Under whatever name, and a copy of it, too: files of one size are compared.
    """
    by_size: dict[int, list[tuple[Path, str]]] = defaultdict(list)
    train = [(file, recipe.setting("path"), True) for recipe in recipes for file in recipe.files[0]]
    val = [(file, recipe.setting("val_path"), False) for recipe in recipes for file in recipe.files[1]]
    for file, setting, is_train in [*train, *val]:
        same_size = by_size[file.stat().st_size]
        for other, owner in same_size:
            if owner != setting and (file.samefile(other) or filecmp.cmp(file, other, shallow=False)):
                name = str(file) if file == other else f"{file}, the same text as {other},"
                raise ValueError(f"{name} matches both {owner} and {setting}; keep it out of one of them")
        if is_train:
            same_size.append((file, setting))


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _label(tokenizer: str) -> str:
    """A tokenizer's name, or that of its file, for a folder's name."""
    if tokenizer in VOCABULARY_SIZES:
        return tokenizer
    path = Path(tokenizer).resolve()
    return _plain(path.parent.name if path.name == "tokenizer.json" else path.stem) or "tokenizer"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40]
