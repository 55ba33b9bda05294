"""Signals that ask a run to stop; it finishes its step, saves, and stops."""

import multiprocessing
import os
import signal
from types import FrameType

from trainer.errors import Interrupted


class StopRequest:
    """Remembers the first signal that asks to stop while it is entered.

    A second SIGINT stops at once, except that a checkpoint that is being written is written to its end.

    SIGUSR1 and SIGUSR2 are what clusters send some time before they end a job.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

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


class PassedOn(StopRequest):
    """In the process that started the ranks: they are the ones to be asked."""

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        ranks = multiprocessing.active_children()
        if not ranks:
            raise Interrupted("stopped before the run began; the same command starts it", number)
        for process in ranks:
            # A Ctrl-C reaches the ranks by itself, and twice would tell them to stop at once.
            os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)

    def hand_on(self) -> None:
        """Once the ranks have saved, let who handled the signal before have it: submitit requeues then."""
        previous = self._previous[self.signal]
        if callable(previous) and previous is not signal.default_int_handler:
            previous(self.signal, None)
