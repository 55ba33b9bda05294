"""Continue a prompt with a trained model.

    python -m scripts.sample runs/NAME --prompt "def main("   finished weights, else the newest checkpoint
    python -m scripts.sample runs/NAME --step 1200 --tokens 200 --temperature 0
    python -m scripts.sample FOLDER --prompt "Once upon a"     exported weights, or others in their layout

A text ends where the model ends it, or after --tokens. The model is computed in float32, with full-precision
attention. Every token takes a whole forward pass; for long texts use transformers' `generate` on the weights.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import model.huggingface
from common.errors import ends_with_message
from common.terminal import add_device_option, command_parser, positive_int
from data import tokenizers
from data.tokenizers import Tokenizer
from model.generate import TEMPERATURE, TOP_K, generate
from model.huggingface import CONFIG_FILE
from model.llama import Llama
from scripts.export import load_checkpoint
from scripts.output import printable
from scripts.runs import read_settings
from trainer.run_directory import RunDirectory, newest_step


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    llama, tokenizer = load(arguments.place, arguments.step)
    print(printable(sample(llama.to(arguments.device), tokenizer, arguments), keep="\n\t"))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.sample", __doc__)
    add = parser.add_argument
    add("place", type=Path, metavar="RUN", help="a run's directory, or a folder of weights")
    add("--prompt", default="", help="the beginning of the text (default: none)")
    add("--tokens", type=positive_int, default=128, metavar="N", help="at most so many (default 128)")
    add("--temperature", type=float, default=TEMPERATURE, help="0: the likeliest (default %(default)s)")
    add("--top-k", type=positive_int, default=TOP_K, metavar="K", help="of the K likeliest (%(default)s)")
    add("--seed", type=int, default=0, help="another one gives another text (default 0)")
    add("--step", type=int, help="the step of a checkpoint of the run")
    add_device_option(parser)
    return parser.parse_args(argv)


def load(place: Path, step: int | None) -> tuple[Llama, Tokenizer]:
    """The model, on the CPU, and its tokenizer. Raises ValueError, TrainingError or OSError."""
    run = RunDirectory(place)
    weights = run.weights if run.config.exists() else place
    if step is None and (weights / CONFIG_FILE).exists():
        run.check()  # if it is one
        return model.huggingface.load(weights, scaled_dot_product_attention), tokenizers.load(str(weights))
    if not run.config.exists():
        raise ValueError(f"{place} is neither the directory of a run, nor a folder with weights")
    settings = read_settings(run)
    llama = load_checkpoint(run, settings, newest_step(run.checkpoints) if step is None else step)
    return llama, tokenizers.load(settings.data.tokenizer)


def sample(llama: Llama, tokenizer: Tokenizer, arguments: argparse.Namespace) -> str:
    """The prompt and what the model makes of it. Raises ValueError for options that mean nothing."""
    prompt = tokenizer.encode(arguments.prompt) or [tokenizer.end_of_text]  # a text begins after one
    tokens = generate(
        llama,
        torch.tensor([prompt], device=arguments.device),
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        vocab_size=tokenizer.vocab_size,
        seed=arguments.seed,
    )[0].tolist()
    new = tokens[len(prompt) :]
    if tokenizer.end_of_text in new:
        new = new[: new.index(tokenizer.end_of_text)]
    return tokenizer.decode([token for token in prompt if token != tokenizer.end_of_text] + new)


if __name__ == "__main__":
    main()
