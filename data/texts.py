"""The texts that have a name: sources of a mixture and validation sets, each as the settings of one text."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from data.files import Known, matching
from data.settings import FILE_SUFFIXES, MIXTURE, SOURCES, DataSettings, problems_of_text, unused

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
LONGEST_PERIOD = 1_000_000  # sequences after which a mixture repeats; its schedule is a table of this length

_TEXT = {"source": str, "path": str, "column": str, "name": str}
KEYS = {
    "validation": _TEXT,
    "sources": _TEXT
    | {"weight": int | float, "val_path": str, "val_fraction": int | float, "documents": int | None}
    | {"repository": str, "config": str, "revision": str},
}
# Settings of a mixture that its sources do not share.
OWN: dict[str, Any] = {"path": None, "val_path": None, "name": None, "sources": {}, "validation": {}}


def sources_of(settings: DataSettings) -> dict[str, DataSettings]:
    """The sources of a mixture by name, sorted: in which order they were given changes nothing."""
    return {name: _source(settings, entry) for name, entry in sorted(settings.sources.items())}


def validation_sets(settings: DataSettings) -> dict[str, DataSettings]:
    """The sets of data.validation by name: settings that have validation text only."""
    return {name: _validation_set(settings, entry) for name, entry in settings.validation.items()}


def all_texts(settings: DataSettings) -> dict[str, DataSettings]:
    """Every text to prepare, by the setting that names it; "data" is a run's only source."""
    found = {"data": replace(settings, validation={})}
    if settings.source == MIXTURE:
        found = {f"data.sources.{name}": text for name, text in sources_of(settings).items()}
    named = {f"data.validation.{name}": text for name, text in validation_sets(settings).items()}
    return found | named


@contextmanager
def named(where: str) -> Iterator[None]:
    """Errors of a text begin with the setting that names it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def whole_weights(settings: DataSettings) -> dict[str, int]:
    """The weights of a mixture's sources as the smallest whole numbers in the same proportions, sorted.

    Raises ValueError if their sum exceeds LONGEST_PERIOD.
    """
    given = {name: Fraction(str(entry["weight"])) for name, entry in sorted(settings.sources.items())}
    multiple = math.lcm(*(weight.denominator for weight in given.values()))
    whole = {name: int(weight * multiple) for name, weight in given.items()}
    divisor = math.gcd(*whole.values())
    whole = {name: weight // divisor for name, weight in whole.items()}
    if sum(whole.values()) > LONGEST_PERIOD:
        raise ValueError(
            f"the weights of data.sources are in proportions of {':'.join(map(str, whole.values()))}, which "
            f"need a schedule of more than {LONGEST_PERIOD:,} sequences; use weights of fewer digits"
        )
    return whole


def _source(settings: DataSettings, entry: Any) -> DataSettings:
    given = _as_mapping(entry)
    kind = given.get("source") or kind_of(given["path"])
    own = {**OWN, **given, "source": kind}
    del own["weight"]
    if kind != "openwebtext":
        own.setdefault("documents", None)  # the mixture's is OpenWebText's
    return replace(settings, **own)


def _validation_set(settings: DataSettings, entry: Any) -> DataSettings:
    given = _as_mapping(entry)
    path = given.pop("path")
    kind = given.pop("source", None) or kind_of(path)
    return replace(settings, **{**OWN, **given, "source": kind, "val_path": path, "documents": None})


def _as_mapping(entry: Any) -> dict[str, Any]:
    """What an entry sets. null sets nothing, except that documents=null means any number of them."""
    if isinstance(entry, str):
        return {"path": entry}
    return {key: value for key, value in entry.items() if value is not None or key == "documents"}


def kind_of(path: str) -> str:
    """parquet, jsonl or text, by the names of the files. Raises ValueError if they do not say."""
    kinds = [kind for kind, suffixes in FILE_SUFFIXES.items() if path.endswith(suffixes)]
    if not kinds and Path(path).is_dir():
        names = [file.name for file in Path(path).rglob("*")]
        kinds = [kind for kind, suffixes in FILE_SUFFIXES.items() if any(n.endswith(suffixes) for n in names)]
    if len(kinds) != 1:
        raise ValueError(f"the name {path} does not say whether it is {' or '.join(FILE_SUFFIXES)}")
    return kinds[0]


# ---------------------------------------------------------------------- checks: each yields problems


def problems(settings: DataSettings) -> Iterator[str]:
    """Why the named texts cannot work, each with its fix."""
    found = [problem for group in KEYS for problem in _problems_of_entries(settings, group)]
    if settings.source == MIXTURE:
        found += _problems_of_mixture(settings)
    elif settings.sources:
        found.append(f"data.sources has no effect with data.source={settings.source}; use data=mixture")
    for name in settings.sources.keys() & settings.validation.keys():
        found.append(f"data.sources.{name} and data.validation.{name} have the same name; rename one of them")
    yield from found
    if not found:  # the texts can be found
        yield from _problems_of_weights(settings)
        yield from _problems_of_files_in_two(settings)


def _problems_of_entries(settings: DataSettings, group: str) -> Iterator[str]:
    read = {"sources": _source, "validation": _validation_set}[group]
    for name, entry in getattr(settings, group).items():
        where = f"data.{group}.{name}"
        found = list(_problems_of_entry(where, name, entry, KEYS[group]))
        yield from found
        if found:
            continue
        try:
            text = read(settings, entry)
        except ValueError as error:
            yield f"{where}: {error}; use {where}.path=… {where}.source=text"
        else:
            given = _as_mapping(entry)
            idle = [f"data.{key}={given[key]} {why}" for key, why in unused(text).items() if key in given]
            yield from (_as_given(problem, where, group) for problem in [*problems_of_text(text), *idle])


def _problems_of_entry(where: str, name: str, entry: Any, keys: Mapping[str, Any]) -> Iterator[str]:
    if not NAME.fullmatch(name):
        yield f"{where}: a name has at most 40 letters, digits, - and _, and begins with a letter or digit"
    if not isinstance(entry, str | dict):
        yield f"{where}={entry} must be a path, or have {', '.join(keys)}"
        return
    given = _as_mapping(entry)
    for key, value in given.items():
        if key not in keys:
            yield f"{where}.{key} is unknown; choose from {', '.join(keys)}"
        elif isinstance(value, bool) or not isinstance(value, keys[key]):
            kind = "text" if keys[key] is str else "a number"
            yield f"{where}.{key}={value} must be {kind}"
    kinds = SOURCES if "weight" in keys else tuple(FILE_SUFFIXES)
    if given.get("source", kinds[0]) not in kinds:
        yield f"{where}.source={given['source']} is unknown here; choose one of {', '.join(kinds)}"
    if "path" not in given and ("source" not in given or "weight" not in keys):
        yield f"{where} needs {where}.path=FILE (or a folder, or a quoted glob such as 'DIR/*')"
    if "weight" in keys:
        yield from _problems_of_weight(where, given.get("weight"))


def _problems_of_weight(where: str, weight: Any) -> Iterator[str]:
    if weight is None:
        yield f"{where} needs {where}.weight=NUMBER, its part of the mixture"
    elif isinstance(weight, int | float) and not (weight > 0 and math.isfinite(weight)):
        yield f"{where}.weight={weight} must be greater than zero; leave a source out that is not to be read"


def _as_given(problem: str, where: str, group: str) -> str:
    """A problem of a text's settings, by the names that they have here."""
    renamed = re.sub(r"\bdata=(?=\w)", "data.source=", problem)
    keys = "source|path|val_path|column|val_fraction|name|repository|config|revision"
    renamed = re.sub(rf"\bdata\.(?=({keys})\b)", f"{where}.", renamed)
    return renamed.replace(f"{where}.val_path", f"{where}.path") if group == "validation" else renamed


def _problems_of_mixture(settings: DataSettings) -> Iterator[str]:
    if not settings.sources:
        yield "data=mixture needs sources, each with data.sources.NAME.path=FILE data.sources.NAME.weight=N"
    for key in ("path", "val_path", "name"):
        if getattr(settings, key) is not None:
            yield (
                f"data.{key}={getattr(settings, key)} has no effect with data=mixture; use "
                f"data.sources.NAME.{key}"
            )


def _problems_of_weights(settings: DataSettings) -> Iterator[str]:
    if settings.source == MIXTURE:
        try:
            whole_weights(settings)
        except ValueError as error:
            yield str(error)


def _problems_of_files_in_two(settings: DataSettings) -> Iterator[str]:
    """A file is read by one source only, and never both to train and to validate."""
    if not (settings.sources or settings.validation):
        return  # data.path and data.val_path alone are compared when they are read
    known, trained = Known(), dict[Path, str]()
    for where, text in all_texts(settings).items():
        for file in _files(text.path, text.source):
            twin = known.find(file) or file
            known.add(file)
            first = trained.setdefault(twin, f"{where}.path")
            if first != f"{where}.path":
                yield _in_two(file, twin, first, f"{where}.path")
    for where, text in all_texts(settings).items():
        for file in _files(text.val_path, text.source):
            if (twin := known.find(file)) is not None:
                place = where if where.startswith("data.validation.") else f"{where}.val_path"
                yield _in_two(file, twin, trained[twin], place)


def _in_two(file: Path, twin: Path, first: str, second: str) -> str:
    name = str(file) if file == twin else f"{file}, the same text as {twin},"
    return f"{name} matches both {first} and {second}; keep it out of one of them"


def _files(pattern: str | None, source: str) -> list[Path]:
    """The files of a text that are on this machine."""
    try:
        return matching(pattern, FILE_SUFFIXES[source]) if pattern else []
    except ValueError:  # a prepared dataset that has a name can be used without its text
        return []
