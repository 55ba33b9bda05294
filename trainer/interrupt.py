"""When a run ends early: signals that ask it to stop, the death of its parent, a terminal that is closed."""

import errno
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tqdm import tqdm

from common.errors import Interrupted

log = logging.getLogger(__name__)

SWEEP_PID = "SAGEBWD_SWEEP_PID"  # environment variable: the process of the sweep that started this one
POLL_S = 1.0
SECOND = "; a second Ctrl-C stops at once, without saving"

#: What writing raises when nobody reads: a closed pipe, a closed terminal, a closed connection.
UNREAD = (errno.EPIPE, errno.EIO, errno.ECONNRESET)


class StopRequest:
    """Within this context, remembers the first signal that asks to stop: the run ends its step and saves.

    A second SIGINT stops at once, but a checkpoint that is being written is completed. Clusters send SIGUSR1
    or SIGUSR2 some time before they end a job. SIGHUP comes when a terminal or a connection is closed; under
    nohup, which ignores it, it stays ignored.
    """

    SIGNALS = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )

    def __init__(self) -> None:
        self.signal: int | None = None
        self.interrupts = 0  # how many SIGINTs came
        self._at_once = False
        self._wakeup: int | None = None

    def __enter__(self) -> "StopRequest":
        ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
        self._previous = {
            number: signal.signal(number, self._handle) for number in self.SIGNALS if number not in ignored
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup)

    def announce(self) -> None:
        """From now on say, when a signal comes, what it does.

        In a thread that Python's C handler wakes: `_handle` waits until this one is back from C, which may
        take a whole step.
        """
        reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        threading.Thread(target=_say_what_stops, args=(reader,), name="stop", daemon=True).start()

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Within this context a signal raises Interrupted, with this message, wherever the run is.

        For work before the first step that has nothing to save.
        """
        self._at_once = True
        try:
            if self.signal:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            raise Interrupted(message, self.signal or signal.SIGINT) from None
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.interrupts += number == signal.SIGINT
        self._react(number)

    def _react(self, number: int) -> None:
        if self._at_once or (number == signal.SIGINT and self.interrupts >= 2):
            self._at_once = False  # the next signal must not interrupt the cleaning up
            # Not Interrupted: code that handles every Exception would go on with its work.
            raise KeyboardInterrupt


class ForwardedStop(StopRequest):
    """In the process that started the ranks: asks them to stop."""

    def _react(self, number: int) -> None:
        ranks = multiprocessing.active_children()
        if not ranks:
            raise Interrupted("stopped before the run began; the same command starts it", number)
        for process in ranks:
            # A terminal sends SIGINT to the ranks, too, and a second SIGINT would stop them at once.
            os.kill(process.pid, signal.SIGTERM)

    def call_previous_handler(self) -> None:
        """After the ranks have saved: run the handler installed before, in which submitit requeues a job."""
        previous = self._previous[self.signal]
        if callable(previous) and previous not in (signal.default_int_handler, _exit):
            previous(self.signal, None)


class StopSignal(StopRequest):
    """In a process that starts commands of their own: only remembers."""

    def _react(self, number: int) -> None:
        pass


def _say_what_stops(reader: int) -> None:
    """Say once what a signal that asks to stop does; `reader` gives the numbers of all signals."""
    said = False
    with open(reader, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] in StopRequest.SIGNALS and not said:
                tqdm.write(f"stopping when this step is done and saved{SECOND}", file=sys.stderr)
                said = True


def exit_on_signals() -> None:
    """Let signals that ask to stop end this process like sys.exit, so that it can say what it has done."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def end_with_sweep() -> None:
    """`watch_parent`, if a sweep started this process as a command of its own."""
    if parent := os.environ.pop(SWEEP_PID, None):
        watch_parent(int(parent))


def watch_parent(parent: int) -> None:
    """Kill this process, within a second or two, when its parent is no longer the process `parent`.

    Without its parent a rank would train on, hold the run's lock, and at the end wait forever. What it had
    not saved is trained again.
    """
    threading.Thread(target=_kill_without, args=(parent,), name="parent", daemon=True).start()


def _kill_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- printing where nobody reads


@contextmanager
def surviving_closed() -> Iterator[None]:
    """Within this context, printing goes on when stdout or stderr is closed at its other end.

    What is printed from then on is discarded, which is logged once.
    """
    before = sys.stdout, sys.stderr
    replaced = [stream and _Surviving(stream) for stream in before]  # None stays: there is no such stream
    sys.stdout, sys.stderr = replaced
    try:
        yield
    finally:
        for stream in filter(None, replaced):
            with suppress(OSError):
                stream.flush()  # what is left would fail at the end of the process, and change its exit code
        sys.stdout, sys.stderr = before


class _Surviving:
    """A text stream, in whose place `write` and `flush` do not fail when nobody reads any more."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._unless_closed(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, call: Callable[..., Any], *arguments: str) -> None:
        """Print to nowhere from now on if it is closed. Raises other errors, such as that of a full disk."""
        try:
            call(*arguments)
        except OSError as error:
            if error.errno not in UNREAD:
                raise
            discard(self._stream.fileno())
            log.warning(
                "nobody reads %s any more (%s); the run goes on without it", self._stream.name, error.strerror
            )


def say(text: str) -> None:
    """Print a line to stderr, or to nowhere if that cannot be written.

    For last words: neither the line nor what is left in the buffer may change how the process ends.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def discard(descriptor: int) -> None:
    """Discard what is written to this file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
