"""SIGTERM and SIGINT ask a run to stop; it finishes its step, saves, and stops."""

import signal
from types import FrameType


class StopRequest:
    """Remembers the first SIGTERM or SIGINT while it is entered.

    A second SIGINT stops at once, except that a checkpoint that is being written is written to its end.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or number
