"""Hydra's command lines: settings as words of one, and unknown words answered with the nearest known ones."""

import difflib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException

#: Options of Hydra that the next argument does not belong to.
WITHOUT_VALUE = ("-m", "--multirun", "-r", "--run", "-h", "--help", "--hydra-help", "--version", "--resolve")
# Hydra reads these as they stand, as text: numbers begin with a digit, sign or dot. Other text needs quotes.
PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_/]([A-Za-z0-9_./*%@?-]*[A-Za-z0-9_/*])?")
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}
KEYWORDS = {"true", "false", "null", "nan", "inf"}


def override(name: str, value: Any) -> str:
    """`name=value` such that Hydra reads this value, and not several, another type or an interpolation.

    To show it as part of a command, quote it for the shell, too: `shlex.join`.
    """
    if value is None:
        return f"{name}=null"
    if isinstance(value, bool | int | float):
        return f"{name}={str(value).lower()}"
    text = str(value)
    plain = PLAIN.fullmatch(text) and text.lower() not in KEYWORDS
    return f"{name}={text if plain else QuotedString(escaped(text), Quote.single).with_quotes()}"


def escaped(value: Any) -> Any:
    """The value, text or dicts and lists of it, such that OmegaConf reads ${…} as it stands."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if not isinstance(value, str):
        return value
    # Its escape is a backslash, and two for each that stands before it.
    return re.sub(r"(\\*)\$\{", lambda found: rf"{found[1] * 2}\${{", value)


def readable(arguments: Sequence[str]) -> list[str]:
    """The arguments, with quotes around text that Hydra's grammar cannot read: ~/x.txt, x(1).txt, k=v.txt.

    A ~ becomes the home folder. What begins with a bracket is left to Hydra, which explains its grammar. An
    -m comes first: argparse takes no option between settings.
    """
    sweep = [word for word in arguments if word in ("-m", "--multirun")]
    settings = [word for word in arguments if word not in sweep]
    return [*sweep, *(_readable(word, "," if sweep else "\0") for word in settings)]


def _readable(word: str, comma: str) -> str:
    name, _, value = word.partition("=")
    if word.startswith(("-", "~")) or value.startswith(("[", "{")) or _is_readable(word):
        return word
    texts = [
        text
        if _is_readable(f"{name}={text}")
        else QuotedString(os.path.expanduser(text), Quote.single).with_quotes()
        for text in value.split(comma)
    ]
    return f"{name}={comma.join(texts)}"


def _is_readable(word: str) -> bool:
    """Whether Hydra can read it, or it is no `name=value`."""
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return "=" not in word
    return True


def check_or_exit(
    arguments: Sequence[str],
    schema: type,
    groups: dict[str, list[str]],
    *,
    program: str,
    further: Set[str] = frozenset(),
    other_words: Mapping[str, str] = {},
) -> list[Override]:
    """The overrides among the arguments; ends the program with a message for what cannot be meant.

    schema: the dataclass of the settings. groups: the options of each group. further: settings that the
    schema lacks. other_words: advice by the name that a setting has elsewhere, or by group. Hydra refuses
    unknown names, too. But its advice is to append an unknown setting with `+`, which the typed settings
    refuse next, and an unknown option prints its search path.
    """
    if {"-sc", "--shell-completion"} & {*arguments}:
        return []  # install=bash is no setting
    hints = setting_hints(schema)
    known = hints.keys() | further | groups.keys()
    named = tuple(f"{name}." for name, hint in hints.items() if get_origin(hint) is dict)  # by the user
    _check_words(arguments, hints.keys() | further)
    try:
        words = [word for word in arguments if "=" in word and not word.startswith("-")]
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException:
        return []  # Hydra explains its grammar
    for override in overrides:
        key = override.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra":
            continue
        if key not in known and not key.startswith(named):
            near = difflib.get_close_matches(key, known, n=3) or _same_ending(key, known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"{program} --help lists all settings"
            hint = other_words.get(key.split(".")[-1], hint)
            sys.exit(f"{override.input_line}: there is no setting {key!r}; {hint}")
        if hints.get(key) in (int, int | None):
            _check_whole(override)
        if key in groups and not has_search_path(overrides):
            check_option_or_exit(override, groups[key], other_words.get(key, ""))
    return overrides


def _check_words(arguments: Sequence[str], settings: Set[str]) -> None:
    """End the program with a message if an argument is neither an option nor `name=value`."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        is_value = before.startswith("-") and before not in WITHOUT_VALUE  # of an option: --cfg job
        if "=" in word or word.startswith(("-", "~")) or is_value:
            continue
        if word in settings:
            sys.exit(f"{word}: give it a value, {word}=…")
        paths = _same_ending("path", settings) if Path(word).exists() else []
        hint = f"did you mean {paths[0]}={word}?" if paths else "settings are name=value"
        sys.exit(f"{word}: there is no such option; {hint}")


def _check_whole(override: Override) -> None:
    """End the program with a message if a whole number has a point, an exponent or a unit."""
    for value in _values(override):
        if isinstance(value, str) and (found := re.fullmatch(r"([\d.]+)([kmb])", value.lower())):
            value = float(found[1]) * UNITS[found[2]]
        if isinstance(value, float):
            number = f": {int(value)}" if value.is_integer() else ""
            sys.exit(f"{override.input_line}: {override.key_or_group} is a whole number{number}")


def has_search_path(overrides: Sequence[Override]) -> bool:
    """Whether the user brings a folder of options, which are not known here."""
    return any(override.key_or_group == "hydra.searchpath" for override in overrides)


def check_option_or_exit(override: Override, options: list[str], advice: str = "") -> None:
    """End the program with a message if the override of a group names an option that is not among these."""
    group, listed = override.key_or_group, ", ".join(options)
    if None in _values(override) and not override.is_delete():
        sys.exit(f"{override.input_line}: leave it out for the default, or choose one of {listed}")
    for option in chosen_options(override):
        if option not in options:
            lowered = {name.lower(): name for name in options}  # of two that differ in case, either
            near = difflib.get_close_matches(option.lower(), lowered, n=1)
            hint = f"did you mean {group}={lowered[near[0]]}? Choose" if near else "choose"
            sys.exit(
                f"{override.input_line}: {group} has no option {option!r}; {hint} one of {listed}{advice}"
            )


def setting_hints(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted names and types of all settings in a dataclass and the dataclasses within it."""
    hints = get_type_hints(cls)
    found: dict[str, Any] = {}
    for field in fields(cls):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        found[name] = hint
        if is_dataclass(hint):
            found |= setting_hints(hint, f"{name}.")
    return found


@contextmanager
def explaining_help(arguments: Sequence[str], schema: type, options: Path) -> Iterator[None]:
    """Within this context Hydra's help has what each setting means beside its value.

    That is the comment in the schema, the dataclass of the settings, or else in a YAML file of `options`,
    which is the folder of a group with settings that the schema lacks.
    """
    if not {"-h", "--help"} & {*arguments}:
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        print(_explained(printed.getvalue(), schema, options))


def _explained(help_text: str, schema: type, options: Path) -> str:
    notes = comments_in(schema)
    for file in sorted(options.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        for name, note in re.findall(r"^(\w+):[^#\n]*# (.*)$", text, re.MULTILINE):
            notes.setdefault(f"{options.name}.{name}", note)
    notes.pop(options.name, None)
    lines, path = [], []
    for line in help_text.splitlines():
        if found := re.match(r"((?:  )*)(\w+):", line):
            path = [*path[: len(found[1]) // 2], found[2]]
            note = notes.get(".".join(path))
            line = f"{line:<34} # {note}" if note else line
        lines.append(line)
    return "\n".join(lines)


def comments_in(cls: type, prefix: str = "") -> dict[str, str]:
    """{dotted name: comment} of the settings in a dataclass and the dataclasses within it."""
    hints, found = get_type_hints(cls), {}
    name, above = "", ""
    for line in inspect.getsource(cls).splitlines():
        code, _, note = line.partition("# ")
        if not code.strip():  # of the setting below
            above = f"{above} {note}"
            continue
        setting = re.match(r" {4}(\w+): ", code)
        if setting and setting[1] in hints:
            name = setting[1]
            if is_dataclass(hints[name]):
                found |= comments_in(hints[name], f"{prefix}{name}.")
        note = f"{above} {note}".strip()
        if note and not is_dataclass(hints.get(name)):
            found[prefix + name] = note
        above = ""
    return found


def options_in(group: Path) -> list[str]:
    """The options of a group: its YAML files."""
    return sorted(file.stem for file in group.glob("*.yaml"))


def chosen_options(override: Override) -> Iterator[str]:
    """The options that an override of a group names: one, or several of a sweep. None for glob(…)."""
    for one in _values(override):
        if isinstance(one, (str, int, float, QuotedString)):
            yield one.text if isinstance(one, QuotedString) else str(one)


def _values(override: Override) -> list[Any]:
    value = override.value()
    return value.list if isinstance(value, ChoiceSweep) else [value]


def _same_ending(key: str, known: Set[str]) -> list[str]:
    """Settings of another group with this last name: `lr` is `optimizer.lr`."""
    last = key.split(".")[-1]
    return sorted(name for name in known if name.split(".")[-1] == last)
