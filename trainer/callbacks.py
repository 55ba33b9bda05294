"""Code of the user's own that a run calls: `callbacks: {NAME: {_target_: path.to.Class, …}}`."""

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra.utils

from common.errors import Interrupted, SettingsError, TrainingError
from data.loader import Batch
from model.llama import Llama
from trainer.run_directory import check_readable


class Callback:
    """Override what you need. All ranks make all calls, in the same order, and none is timed as training.

    What a method adds to `record` is logged with it: in metrics.jsonl, W&B and TensorBoard. Numbers, text and
    None can be; what is there stays. Gradients that it leaves are dropped. model: without torch.compile; if
    it is sharded, all ranks must take part in calling it. A callback has no state in checkpoints: a run that
    continues makes a new one.

    Attributes:
        validation_batches: set by the trainer when it has made the callback: the batches of all validation
            sets that are this rank's, on its device, as `model` takes them. on_evaluate is called with
            autocast and without gradients, so `model(*batch)` is the loss that the trainer computes. If the
            model is sharded each rank must call it equally often.
    """

    validation_batches: Callable[[], Iterator[Batch]]

    def on_step(self, step: int, record: dict[str, Any], model: Llama) -> None:
        """After every optimizer step. record: loss, lr, grad_norm; logged every `log_every` steps."""

    def on_evaluate(self, step: int, record: dict[str, Any], model: Llama) -> None:
        """After every validation, before it is logged. record: val_loss, val_bits_per_byte, sample, …"""

    def on_checkpoint(self, step: int, record: dict[str, Any], model: Llama) -> None:
        """When a checkpoint is complete; the model may have trained on. record: its `path`; not logged."""


class Callbacks:
    """Those of a run, called one after the other. Each raises TrainingError that says which one failed."""

    def __init__(self, settings: Mapping[str, Any], validation_batches: Callable[[], Iterator[Batch]]):
        self._all = {name: self._made(name, one) for name, one in settings.items()}
        for one in self._all.values():
            one.validation_batches = validation_batches

    def call(self, hook: str, step: int, record: dict[str, Any], model: Llama) -> None:
        for name, one in self._all.items():
            with _naming(f"callback {name}: {hook} at step {step}"):
                given = dict(record)
                getattr(one, hook)(step, record, model)
                for key in ("step", "tokens", *given):
                    if record.get(key) is not given.get(key):
                        raise ValueError(f"record[{key!r}] is the trainer's; add values by other names")
                for key, value in record.items():
                    if not isinstance(value, int | float | str | None):
                        raise TypeError(f"record[{key!r}] is a {type(value).__name__}; add numbers or text")
                check_readable({"step": step, **record})

    @staticmethod
    def _made(name: str, settings: Any) -> Callback:
        """settings: as Hydra instantiates them, or the path of a class alone."""
        with _naming(f"callbacks.{name}={settings}"):
            settings = settings if isinstance(settings, Mapping) else {"_target_": str(settings)}
            made = hydra.utils.instantiate(settings, _convert_="all")
        if not isinstance(made, Callback):
            raise SettingsError(
                f"callbacks.{name}={settings} is no trainer.callbacks.Callback; give its class as _target_"
            )
        hooks = [hook for hook in vars(Callback) if hook.startswith("on_")]
        if unknown := [hook for hook in dir(made) if hook.startswith("on_") and hook not in hooks]:
            raise SettingsError(
                f"callbacks.{name} has {', '.join(unknown)}, which is never called; use {', '.join(hooks)}"
            )
        return made


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except (TrainingError, Interrupted):
        raise
    except (Exception, SystemExit) as error:
        cause = error.__cause__ or error  # Hydra wraps what a constructor raises
        raise TrainingError(
            f"{what} failed with {type(cause).__name__}: {cause} ({_place(cause)})"
        ) from error


def _place(error: BaseException) -> str:
    """The line of the user's file that an error came from, even if a library that it called raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    library = (__file__, sysconfig.get_path("purelib"))
    called = next((one.filename for one in frames if not one.filename.startswith(library)), __file__)
    place = next((one for one in reversed(frames) if one.filename == called), frames[-1])
    return f"{Path(place.filename).name}, line {place.lineno}"
