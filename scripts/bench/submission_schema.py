"""What a file of scripts.bench.share must hold to be submitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import datetime
from typing import Any, NamedTuple

from scripts.bench.attention_peers import Shape
from scripts.bench.attention_tables import DEFAULT, FAILED, MODES, PASSED, REFUSED, TENSORS, Row

SCHEMA = 1
STATUSES = (PASSED, FAILED, REFUSED)


class Field(NamedTuple):
    """A value at a path such as ("hardware", "name"), and what it must be, in words and as a function."""

    path: tuple[str, ...]
    wanted: str
    holds: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    """Also in a cell of a table."""
    return isinstance(value, str) and bool(value.strip()) and not {*value} & {*"|<>\n"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _is_date(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_capability(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d+\.\d", value) is not None


def text(*path: str) -> Field:
    return Field(path, "a line of text without | < >", _is_text)


def text_or_null(*path: str) -> Field:
    wanted = "a line of text without | < >, or null if it is not known"
    return Field(path, wanted, lambda value: value is None or _is_text(value))


def number_or_null(*path: str) -> Field:
    wanted = "a positive number, or null if it was not recorded"
    return Field(path, wanted, lambda value: value is None or _is_number(value))


def _only_fields_of(structure: type, *path: str) -> Field:
    names = [one.name for one in fields(structure)]
    wanted = f"an object with no other fields than {', '.join(names)}"
    return Field(path, wanted, lambda value: _is_among(value, names))


def _is_among(value: Any, names: list[str]) -> bool:
    return isinstance(value, dict) and {*value} <= {*names}


FIELDS = (
    Field(("schema",), f"{SCHEMA}", lambda value: value == SCHEMA),
    text("command"),
    Field(("date",), "a date with a time zone, as 2026-11-23T08:00:00+00:00", _is_date),
    text_or_null("commit"),
    text_or_null("version"),
    text("hardware", "name"),
    Field(("hardware", "compute_capability"), 'a text such as "8.9"', lambda x: _is_capability(x)),
    Field(("hardware", "memory_gib"), "a positive number", _is_number),
    text_or_null("hardware", "driver"),
    number_or_null("hardware", "power_limit_watts"),
    number_or_null("hardware", "max_sm_clock_mhz"),
    text("versions", "torch"),
    text("versions", "cuda"),
    text_or_null("versions", "triton"),
    Field(("settings", "dtype"), "bfloat16 or float16", lambda value: value in ("bfloat16", "float16")),
    Field(("settings", "repetitions"), "a positive number", _is_number),
    Field(("rows",), "a list with a row at least", lambda value: isinstance(value, list) and bool(value)),
)
ROW_FIELDS = (
    _only_fields_of(Row),
    _only_fields_of(Shape, "shape"),
    text("implementation"),
    Field(("mode",), f"one of {', '.join(MODES)}", lambda value: value in MODES),
    Field(("status",), f"one of {', '.join(STATUSES)}", lambda value: value in STATUSES),
    *(
        Field(("shape", name), "a positive number", _is_number)
        for name in ("batch", "heads", "tokens", "head_dim")
    ),
    Field(("shape", "causal"), "true or false", lambda value: isinstance(value, bool)),
    number_or_null("median_ms"),
    Field(("errors",), "errors of O, dQ, dK, dV as [cosine, relative L2]", lambda value: _are_errors(value)),
)


def _are_errors(value: Any) -> bool:
    if not isinstance(value, dict) or not {*value} <= {*TENSORS}:
        return False
    return all(isinstance(pair, list) and len(pair) == 2 for pair in value.values())


def check(result: Any) -> list[str]:
    """What is wrong with a file, in words: the field, its value and what it must be. Empty if nothing is."""
    if not isinstance(result, dict):
        return [f"the file is {_short(result)}; it must be an object with the fields of scripts.bench.share"]
    problems = [*_broken(result, FIELDS, "")]
    rows = result.get("rows")
    for i, row in enumerate(rows if isinstance(rows, list) else []):
        broken = [*_broken(row, ROW_FIELDS, f"rows[{i}].")]
        problems += broken or _inconsistent(row, f"rows[{i}].")
    if not problems and not any(row["implementation"] == DEFAULT for row in rows):
        problems.append(f"rows has no implementation {DEFAULT!r}; it must have one")
    return problems


def _broken(value: Any, wanted: tuple[Field, ...], prefix: str) -> Iterator[str]:
    for one in wanted:
        found, is_there = value, True
        for name in one.path:
            is_there = is_there and isinstance(found, dict) and name in found
            found = found[name] if is_there else None
        path = (prefix + ".".join(one.path)).rstrip(".")
        if not is_there:
            yield f"{path} is missing; it must be {one.wanted}"
        elif not one.holds(found):
            yield f"{path} is {_short(found)}; it must be {one.wanted}"


def _inconsistent(row: dict[str, Any], prefix: str) -> list[str]:
    """Whether the speed of a row is its work over its time, and only right results have one."""
    if (row["status"] == PASSED) != (row["median_ms"] is not None):
        found = f"median_ms is {row['median_ms']} where status is {row['status']!r}"
        return [f"{prefix}{found}; a time must be there if, and only if, that is {PASSED!r}"]
    if row["median_ms"] is None:
        return []
    speed = Shape(**row["shape"]).flops * MODES[row["mode"]].flops / (row["median_ms"] * 1e-3) / 1e12
    found = row.get("tflops")
    if not _is_number(found) or abs(found / speed - 1) > 0.01:
        return [f"{prefix}tflops is {_short(found)}; it must be {speed:.4g}, which follows from median_ms"]
    return []


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"
