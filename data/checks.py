"""Whether settings of the data can work, as far as it takes no data to know."""

from collections.abc import Iterator

from data import texts
from data.settings import MIXTURE, DataSettings, problems_of_text, vocabulary_size


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
