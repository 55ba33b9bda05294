"""The README.md of exported weights: what was trained, how, and with what result."""

from typing import Any

from data.mixture import whole_weights
from data.recipe import training_texts
from data.settings import MIXTURE, DataSettings
from model import backends
from model.config import parameter_count
from trainer.plan import tokens_per_step
from trainer.run_directory import RunDirectory, read_lines
from trainer.settings import OptimizerSettings, Settings

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
    return CARD.format(
        architecture="Qwen3" if settings.model.qk_norm else "Llama",
        parameters=parameter_count(settings.model),
        step=step,
        rows="\n".join(f"| {name} | {value} |" for name, value in _rows(settings, directory, step, records)),
    )


def _rows(
    settings: Settings, directory: RunDirectory, step: int, records: list[dict[str, Any]]
) -> list[tuple[str, object]]:
    optimizer = settings.optimizer
    tokens = step * tokens_per_step(settings)
    return [
        ("attention in training", _attention(settings)),
        (
            "trained on",
            f"{tokens:,} tokens, {tokens_per_step(settings):,} per step, context {settings.context}",
        ),
        ("text", _text(settings)),
        ("optimizer", f"{_optimizer(optimizer)}, {optimizer.schedule} schedule"),
        ("seed", settings.seed),
        *_losses(records, step),
        *_environment(directory),
    ]


def _optimizer(settings: OptimizerSettings) -> str:
    if settings.name != "muon":
        return f"AdamW, learning rate {settings.lr:g}"
    rate = settings.lr if settings.muon_lr is None else settings.muon_lr
    return f"Muon, learning rate {rate:g} ({settings.muon_lr_scale}), and AdamW, {settings.lr:g}"


def _attention(settings: Settings) -> str:
    backend, *switches = backends.resolve(settings.attention).items()
    listed = ", ".join(f"{name}={value}" for name, value in switches if value is not None)
    return f"{backend[1]} ({listed})" if listed else str(backend[1])


def _text(settings: Settings) -> str:
    if settings.data.source != MIXTURE:
        return _one_text(settings.data)
    weights = whole_weights(settings.data.sources)
    return ", ".join(
        f"{weights[text.name] / sum(weights.values()):.3g} of {_one_text(text.settings)}"
        for text in training_texts(settings.data)
    )


def _one_text(data: DataSettings) -> str:
    if data.source == "openwebtext":
        return f"{data.repository}, revision {data.revision}"
    return {"stdlib": "the sources of Python's standard library"}.get(data.source, f"{data.source} files")


def _losses(records: list[dict[str, Any]], step: int) -> list[tuple[str, str]]:
    """The last training and validation loss up to this step."""
    found = []
    for key, name, unit in (
        ("loss", "training loss", "nats per token"),
        ("val_loss", "validation loss", "nats per token"),
        ("val_bits_per_byte", "validation loss", "bits per byte"),
    ):
        measured = [record for record in records if record.get(key) is not None and record["step"] <= step]
        if measured:
            found.append((name, f"{measured[-1][key]:.4f} {unit}, at step {measured[-1]['step']:,}"))
    return found


def _environment(directory: RunDirectory) -> list[tuple[str, object]]:
    """What the run was last started on, if that is recorded."""
    path = directory.path / "environment.jsonl"
    started = read_lines(path) if path.exists() else []
    last = started[-1] if started else {}
    names = {"commit": "commit", "device": "device", "devices": "devices", "torch": "PyTorch"}
    return [(name, last[key]) for key, name in names.items() if last.get(key)]
