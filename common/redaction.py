"""Keeps secrets out of what a run records: config.yaml, environment.jsonl, metrics.jsonl, log.txt and W&B.

Secrets get there by `name=${oc.env:KEY}`, which Hydra resolves before the trainer sees it. Secrets are

- the value of an environment variable whose name has a word of SECRET_WORDS in it, such as HF_TOKEN;
- user and password in a URL.

A secret that is neither is recorded as it is given.
"""

import logging
import os
import re
from typing import Any

# fmt: off
SECRET_WORDS = {"APIKEY", "AUTH", "CREDENTIAL", "CREDENTIALS", "KEY", "PASS", "PASSPHRASE", "PASSWD",
                "PASSWORD", "PW", "SECRET", "TOKEN"}
# fmt: on
PLACES = ("PATH", "DIR", "FILE", "SOCK")  # last words of variables that say where a secret is
SHORTEST = 8  # characters; a shorter value, such as "true", is no secret, and would be found everywhere

USER_IN_URL = re.compile(r"\b([a-zA-Z][\w+.-]*://)[^/?#\s@]+@")


def redact(value: Any) -> Any:
    """The value, a string or dicts and lists of them, with secrets replaced by `<redacted: NAME>`."""
    return _redacted(value, secrets())


def secrets() -> dict[str, str]:
    """Names of environment variables by their secret values, longest first."""
    found = {value: name for name, value in os.environ.items() if len(value) >= SHORTEST and _is_secret(name)}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


class RedactingFormatter(logging.Formatter):
    """Formats log messages without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _redacted(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item, names) for item in value]
    if not isinstance(value, str):
        return value
    for secret, name in names.items():
        value = value.replace(secret, f"<redacted: {name}>")
    return USER_IN_URL.sub(r"\1<redacted>@", value)


def _is_secret(name: str) -> bool:
    words = name.upper().split("_")
    return words[-1] not in PLACES and not SECRET_WORDS.isdisjoint(words)
