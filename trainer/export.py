"""What a run makes at its end: its weights in the Hugging Face layout, and its pictures."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

import data.huggingface_tokenizer
import model.huggingface
from data.files import write_text
from data.tokenizers import Tokenizer
from model.llama import Llama
from trainer.errors import TrainingError, explain
from trainer.plot import plot_losses, plot_probe
from trainer.run_directory import RunDirectory

AGAIN = "Make room or correct the place; the same command then"


def export(
    llama: Llama,
    weights: dict[str, Tensor],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    card: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights, the tokenizer, how to generate and the model card, in the Hugging Face layout.

    dtype: of the written weights, if not their own. Raises TrainingError if that is impossible, for example
    because the disk is full.
    """
    try:
        data.huggingface_tokenizer.write(
            tokenizer.to_huggingface(),
            folder,
            end_of_text=tokenizer.end_of_text_name,
            context=llama.config.max_context,
        )
        model.huggingface.save_generation_config(
            folder, llama.config, end_of_text=tokenizer.end_of_text, tokens=tokenizer.vocab_size
        )
        write_text(folder / "README.md", card)
        model.huggingface.save(llama, folder, dtype, weights=weights, end_of_text=tokenizer.end_of_text)
    except (OSError, SafetensorError) as error:
        reason = explain(error) if isinstance(error, OSError) else str(error)
        if "No space left" in reason:  # safetensors' error has no number
            reason = "the disk is full"
        raise TrainingError(
            f"could not write the trained weights to {folder}: {reason}. {AGAIN} writes them"
        ) from error


def draw(directory: RunDirectory, records: list[dict[str, Any]], *, alarm: float | None, title: str) -> None:
    """Draw the curves of the loss and of the error of attention; alarm and title are those of the probe.

    Raises TrainingError if they cannot be written.
    """
    try:
        plot_losses({directory.path.name: records}, directory.loss_plot)
        plot_probe(records, directory.probe_plot, alarm=alarm, title=title)
    except OSError as error:  # does not say which file
        raise TrainingError(
            f"could not draw the curves in {directory.path}: {explain(error)}. {AGAIN} draws them"
        ) from error
