"""Signals that ask a run to stop: it finishes its step, saves, and stops."""

import multiprocessing
import os
import signal
from types import FrameType

from trainer.errors import Interrupted


class StopRequest:
    """Within this context, remembers the first signal that asks to stop.

    A second SIGINT stops at once, but a checkpoint that is being written is completed. Clusters send SIGUSR1
    or SIGUSR2 some time before they end a job.
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


class ForwardedStop(StopRequest):
    """In the process that started the ranks: forwards the signal to them."""

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        ranks = multiprocessing.active_children()
        if not ranks:
            raise Interrupted("stopped before the run began; the same command starts it", number)
        for process in ranks:
            # Ctrl-C also reaches the ranks directly, and a second SIGINT would stop them at once.
            os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)

    def call_previous_handler(self) -> None:
        """After the ranks have saved: run the handler installed before, in which submitit requeues a job."""
        previous = self._previous[self.signal]
        if callable(previous) and previous is not signal.default_int_handler:
            previous(self.signal, None)
