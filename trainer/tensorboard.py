"""A run in TensorBoard: the same records as in metrics.jsonl, below <run_dir>/tensorboard."""

from pathlib import Path
from typing import Any

from trainer.errors import TrainingError
from trainer.settings import LoggerSettings

MISSING_PACKAGE = (
    "logger.tensorboard=true needs the package tensorboard: pip install -e '.[train,tensorboard]' "
    "-c constraints.txt, or leave the setting out"
)


class TensorBoard:
    """Event files of one start of a run. The x-axis is the step, and `tokens` one of the curves."""

    def __init__(self, folder: Path, *, first_step: int):
        """Raises TrainingError if tensorboard is not installed.

        first_step: steps done before this start. Later ones of an earlier start are hidden: they run again.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional
        except ImportError as error:
            raise TrainingError(MISSING_PACKAGE) from error
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def log(self, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)

    def finish(self) -> None:
        self._writer.close()


def start_tensorboard(settings: LoggerSettings, *, folder: Path, first_step: int) -> TensorBoard | None:
    """The run's TensorBoard, or None if it is off. Raises TrainingError if tensorboard is not installed."""
    return TensorBoard(folder / "tensorboard", first_step=first_step) if settings.tensorboard else None
