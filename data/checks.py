"""Whether settings of the data can work, as far as it takes no data to know."""

from collections.abc import Iterator, Sequence

from data import texts
from data.settings import MIXTURE, DataSettings, problems_of_text, unused, vocabulary_size


def check(settings: DataSettings) -> None:
    """Raise ValueError with all problems of the settings, each with its fix."""
    if found := list(problems(settings)):
        raise ValueError("; ".join(found))


def problems(settings: DataSettings) -> Iterator[str]:
    """Why settings cannot work, each with its fix. Fast, and never uses the network."""
    yield from _problems_of_all_texts(settings)
    if settings.source != MIXTURE:
        yield from problems_of_text(settings)
    yield from texts.problems(settings)


def without_effect(typed: Sequence[str], settings: DataSettings) -> Iterator[str]:
    """Which of these overrides (`data.NAME=value`) change nothing about any text, each with its fix.

    Takes what was typed, because configs/data/ gives all texts a val_fraction. Yields nothing for settings
    that have `problems`.
    """
    given = [word for word in typed if word.lstrip("+").startswith("data.")]
    if not given or any(problems(settings)):
        return
    reasons = [unused(text) for text in texts.all_texts(settings).values()]
    for word in given:
        name = word.lstrip("+").partition("=")[0].removeprefix("data.")
        if all(name in one for one in reasons) and getattr(settings, name) is not None:
            yield f"{word} {reasons[0][name]}"


def _problems_of_all_texts(settings: DataSettings) -> Iterator[str]:
    """Of the settings that all texts of a run share."""
    try:
        vocabulary_size(settings.tokenizer)
    except ValueError as error:
        yield str(error)
    if settings.processes is not None and settings.processes < 1:
        yield f"data.processes={settings.processes} must be at least 1; null uses every core"
    if settings.prepare_on_first_use_mb < 0:
        yield (
            f"data.prepare_on_first_use_mb={settings.prepare_on_first_use_mb} must not be negative; 0 turns "
            "it off"
        )
