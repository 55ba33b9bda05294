"""Train a Llama of Hugging Face transformers on padded texts, in full precision and with SageBwd.

Both runs start from the same weights and see the same batches. It prints the cosine of the first gradients,
the time of a step, the memory and the losses; --out writes them as JSON. The texts are synthetic: each counts
up by 1 to 4 a token, so that there is something to learn and nothing to download.

    python examples/finetune_transformers.py                                            # tiny, on a CPU
    python examples/finetune_transformers.py --layers 16 --width 2048 --heads 32 --kv-heads 8 \\
        --vocabulary 32000 --tokens 4096 --batch 4 --steps 300 --out finetune.json      # 1B, on a GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import sagebwd
from sagebwd.config import PRESETS
from sagebwd.integrations.transformers import register

PADDING, IGNORED = 0, -100


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train twice, print and return what was measured."""
    arguments = parse_arguments(argv)
    register("sagebwd", PRESETS[arguments.preset])
    texts = Texts(arguments)
    cosine = compare_gradients(arguments, collate([texts[i] for i in range(arguments.batch)]))
    result: dict[str, Any] = {"settings": vars(arguments), "gradient_cosine": cosine}
    for attention in (arguments.baseline, "sagebwd"):
        result[attention] = train(arguments, texts, attention)
        print(f"{attention}: {describe(result[attention])}")
    print(f"cosine of the first gradients: {cosine:.5f}")
    print(sagebwd.report())
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 2, "width": 64, "heads": 4, "kv-heads": 2, "vocabulary": 64, "tokens": 64, "batch": 4}
    for name, default in {**sizes, "steps": 20, "warm-up": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default %(default)s")
    parser.add_argument("--baseline", default="sdpa", help="attention in full precision; default sdpa")
    parser.add_argument("--preset", default="default", choices=PRESETS, help="of SageConfig")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--loop", choices=("trainer", "plain"), help="default: trainer with accelerate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", metavar="FILE.json", help="write what was measured")
    arguments = parser.parse_args(argv)
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    if arguments.loop == "trainer" and not has_accelerate:
        parser.error("--loop trainer: transformers' Trainer needs accelerate; pip install accelerate")
    arguments.loop = arguments.loop or ("trainer" if has_accelerate else "plain")
    check(arguments, [*sizes, "steps"], parser)
    return arguments


def check(arguments: argparse.Namespace, positive: list[str], parser: argparse.ArgumentParser) -> None:
    """End the program with a message, before it trains, if it cannot or could not write its result."""
    for name in positive:
        if (value := getattr(arguments, name.replace("-", "_"))) < 1:
            parser.error(f"--{name} {value}: give a positive number")
    if arguments.tokens < 8:
        parser.error(f"--tokens {arguments.tokens}: give 8 or more; a text may have a quarter of it")
    if arguments.vocabulary < 2:
        parser.error(f"--vocabulary {arguments.vocabulary}: give 2 or more, of which one is padding")
    if not 0 <= arguments.warm_up < arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up}: give a number from 0 to --steps - 1")
    if arguments.baseline == "sagebwd":
        parser.error("--baseline sagebwd: give one in full precision, such as sdpa or eager")
    heads, kv_heads = arguments.heads, arguments.kv_heads
    if arguments.width % (2 * heads):
        parser.error(f"--width {arguments.width}: give a multiple of 2 · --heads = {2 * heads}")
    if heads % kv_heads:
        parser.error(f"--kv-heads {kv_heads}: give a divisor of --heads = {heads}")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU; use --device cpu")
    if arguments.out and not Path(arguments.out).parent.is_dir():
        parser.error(f"--out {arguments.out}: there is no such folder")
    if arguments.out and Path(arguments.out).is_dir():
        parser.error(f"--out {arguments.out}: that is a folder; give a file in it")


class Texts(torch.utils.data.Dataset):
    """Text i counts up from a random token, by 1 to 4 a token, and has a length of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.n, self.vocabulary = arguments.tokens, arguments.vocabulary
        self.texts = arguments.steps * arguments.batch

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, i: int) -> Tensor:
        if i >= self.texts:
            raise IndexError(i)
        generator = torch.Generator().manual_seed(i)
        start, step, length = torch.randint(0, 2**30, (3,), generator=generator).tolist()
        tokens = start + torch.arange(self.n // 4 + length % (self.n - self.n // 4 + 1)) * (1 + step % 4)
        return 1 + tokens % (self.vocabulary - 1)


def collate(texts: list[Tensor]) -> dict[str, Tensor]:
    """Pad on the right, to the longest of the batch."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)
    is_text = tokens != PADDING
    labels = tokens.masked_fill(~is_text, IGNORED)
    return {"input_ids": tokens, "attention_mask": is_text.long(), "labels": labels}


def make_model(arguments: argparse.Namespace, attention: str) -> transformers.PreTrainedModel:
    """With the same weights for every attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 4,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.tokens,
        pad_token_id=PADDING,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return model.to(arguments.device).train()


def compare_gradients(arguments: argparse.Namespace, batch: dict[str, Tensor]) -> float:
    """Cosine of all gradients with SageBwd and in full precision, at the first weights."""
    attentions = (arguments.baseline, "sagebwd")
    truth, found = (first_gradients(arguments, attention, batch) for attention in attentions)
    return float(dot(truth, found) / (dot(truth, truth) * dot(found, found)).sqrt())


def dot(x: list[Tensor], y: list[Tensor]) -> Tensor:
    """The inner product of all elements, in float64."""
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in zip(x, y, strict=True)]).sum()


def first_gradients(arguments: argparse.Namespace, attention: str, batch: dict[str, Tensor]) -> list[Tensor]:
    """Of every parameter."""
    model = make_model(arguments, attention)
    with autocast(arguments):
        loss = model(**{name: x.to(arguments.device) for name, x in batch.items()}).loss
    loss.backward()
    return [p.grad for p in model.parameters()]


def train(arguments: argparse.Namespace, texts: Texts, attention: str) -> dict[str, Any]:
    """The losses of all steps, the median time of one in ms, and the peak of memory in GiB."""
    model, clock = make_model(arguments, attention), Clock(arguments.device)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if arguments.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    loop = train_with_trainer if arguments.loop == "trainer" else train_plainly
    losses = loop(arguments, model, texts, clock)
    is_gpu = arguments.device.startswith("cuda")
    memory = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None
    return {"losses": losses, "ms_per_step": clock.median(skip=arguments.warm_up), "memory_gib": memory}


def train_with_trainer(
    arguments: argparse.Namespace, model: transformers.PreTrainedModel, texts: Texts, clock: Clock
) -> list[float]:
    """By transformers' Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            bf16=arguments.device.startswith("cuda"),
            use_cpu=arguments.device == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        trainer = transformers.Trainer(
            model, settings, data_collator=collate, train_dataset=texts, callbacks=[clock]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_plainly(
    arguments: argparse.Namespace, model: transformers.PreTrainedModel, texts: Texts, clock: Clock
) -> list[float]:
    """What Trainer does, in a loop; it needs no accelerate."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), arguments.learning_rate, weight_decay=0.0), []
    batches = torch.utils.data.DataLoader(texts, arguments.batch, collate_fn=collate)
    for batch in batches:
        clock.on_step_begin()
        with autocast(arguments):
            loss = model(**{name: x.to(arguments.device) for name, x in batch.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
        losses.append(loss.item())
    return losses


def autocast(arguments: argparse.Namespace) -> torch.autocast:
    """bf16 on a GPU, fp32 on a CPU."""
    device_type = torch.device(arguments.device).type
    return torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda")


class Clock(transformers.TrainerCallback):
    """The time of each step, without loading the batch."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self._now() - self.start)

    def median(self, skip: int) -> float:
        """In ms, without the first steps, in which kernels are compiled."""
        return 1e3 * float(torch.tensor(self.seconds[skip:]).median())

    def _now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()


def describe(run: dict[str, Any]) -> str:
    memory = "" if run["memory_gib"] is None else f", {run['memory_gib']:.1f} GiB"
    first, *_, last = run["losses"]
    return f"{run['ms_per_step']:.1f} ms per step{memory}, loss {first:.3f} to {last:.3f}"


if __name__ == "__main__":
    main()
