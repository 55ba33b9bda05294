"""What a run makes at its end: its weights in the Hugging Face layout, their model card, and its pictures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

import data.huggingface_tokenizer
import model.huggingface
from common.errors import TrainingError, explain
from common.files import read_lines, write_text
from common.redaction import redact
from data.mixture import whole_weights
from data.recipe import training_texts
from data.settings import MIXTURE, DataSettings
from data.tokenizers import Tokenizer
from model.config import parameter_count
from model.llama import Llama
from trainer.plot import plot_losses, plot_probe
from trainer.run_directory import RunDirectory
from trainer.settings import Settings


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
            f"could not write the trained weights to {folder}: {reason}. Make room or correct the place; the "
            "same command then writes them"
        ) from error


def draw(directory: RunDirectory, records: list[dict[str, Any]], *, alarm: float | None, title: str) -> None:
    """Draw the curves of the loss and of the error of attention; alarm and title are those of the probe."""
    plot_losses({directory.path.name: [records]}, directory.loss_plot)
    plot_probe(records, directory.probe_plot, alarm=alarm, title=title)


# ---------------------------------------------------------------------- the model card

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [sagebwd]
---

# {architecture}, {parameters:,} parameters

A {architecture} model of {parameters:,} parameters, after step {step:,} of its training.
It continues text; it was not tuned for instructions or for safety.

| | |
| --- | --- |
{rows}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)
```

- Documents end with the tokenizer's end-of-text token, and a text begins after one. The tokenizer adds no
  token itself.
- `generation_config.json` samples as the trainer does, and never a token beyond the tokenizer's vocabulary.
"""


def model_card(settings: Settings, directory: RunDirectory, step: int, records: list[dict[str, Any]]) -> str:
    """The card of the run's weights after `step`, in Markdown. records: those of its metrics.jsonl.

    A card is published: paths of text and tokenizer are left out, and the run's name, which may be made of
    them.
    """
    card = CARD.format(
        architecture="Qwen3" if settings.model.qk_norm else "Llama",
        parameters=parameter_count(settings.model),
        step=step,
        rows="\n".join(f"| {name} | {value} |" for name, value in _rows(settings, directory, step, records)),
    )
    return redact(card)


def _rows(
    settings: Settings, directory: RunDirectory, step: int, records: list[dict[str, Any]]
) -> list[tuple[str, object]]:
    optimizer, attention = settings.optimizer, settings.attention.recorded()
    tokens = step * settings.tokens_per_step
    started = [{}, *read_lines(directory.environment)][-1] if directory.environment.exists() else {}
    has_muon_lr = optimizer.name == "muon" and optimizer.muon_lr is not None
    name = optimizer._target_ or optimizer.name
    rate = f"{optimizer.lr:g} and {optimizer.muon_lr:g}" if has_muon_lr else f"{optimizer.lr:g}"
    return [
        (
            "attention in training",
            ", ".join(f"{name}={value}" for name, value in attention.items() if value is not None),
        ),
        (
            "trained on",
            f"{tokens:,} tokens, {settings.tokens_per_step:,} per step, context {settings.context}",
        ),
        ("text", _text(settings)),
        (
            "optimizer",
            f"{name}, learning rate {rate}, {optimizer.schedule} schedule",
        ),
        ("seed", settings.seed),
        *_losses(records, step),
        *((name, started[name]) for name in ("commit", "device", "devices", "torch") if started.get(name)),
    ]


def _text(settings: Settings) -> str:
    if settings.data.source != MIXTURE:
        return _one_text(settings.data)
    weights = whole_weights(settings.data.sources)
    return ", ".join(
        f"{weights[text.name] / sum(weights.values()):.3g} of {_one_text(text.settings)}"
        for text in training_texts(settings.data)
    )


def _one_text(data: DataSettings) -> str:
    if data.name:
        return f"{data.name} {data.config or ''}".strip() + f", revision {data.revision or 'not recorded'}"
    return {"stdlib": "the sources of Python's standard library"}.get(data.source, f"{data.source} files")


def _losses(records: list[dict[str, Any]], step: int) -> Iterator[tuple[str, str]]:
    """The last training and validation loss up to this step."""
    for key, name, unit in (
        ("loss", "training loss", "nats per token"),
        ("val_loss", "validation loss", "nats per token"),
        ("val_bits_per_byte", "validation loss", "bits per byte"),
    ):
        for record in reversed(records):
            if record.get(key) is not None and record["step"] <= step:
                yield name, f"{record[key]:.4f} {unit}, at step {record['step']:,}"
                break
