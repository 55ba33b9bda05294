"""Write a checkpoint of a run in the Hugging Face layout: weights, tokenizer, generation config, model card.

    python -m scripts.export runs/NAME                    the newest checkpoint, to runs/NAME/export/step_<n>
    python -m scripts.export runs/NAME --step 1200 --out FOLDER --dtype bfloat16

A finished run has its last weights in weights/ already. Neither a GPU nor the run's text is needed.
Checkpoints are read without running code from them, and verified. Weights that are not finite are not
exported.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from common.errors import ends_with_message, first
from common.terminal import command_parser
from data import tokenizers
from data.tokenizers import tokenizer_identity
from model.huggingface import CONFIG_FILE
from model.llama import Llama
from scripts.runs import read_settings
from trainer.checkpoint import load_weights
from trainer.distributed import Ranks
from trainer.divergence import not_finite
from trainer.export import export, model_card
from trainer.run_directory import RunDirectory, checkpoint_of, newest_step, read_metrics, read_seal
from trainer.settings import Settings
from trainer.start import check_checkpoint


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    print(export_checkpoint(arguments.run, arguments.step, arguments.out, arguments.dtype))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.export", __doc__)
    parser.add_argument("run", type=Path, help="the run's directory, which has its config.yaml")
    parser.add_argument("--step", type=int, help="the step of a checkpoint (default: the newest)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: RUN/export/step_<n>")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default float32)"
    )
    return parser.parse_args(argv)


def export_checkpoint(run: Path, step: int | None, out: Path | None, dtype: str) -> Path:
    """Write the folder and return it.

    Raises ValueError or TrainingError, naming the fix, for a run without such a checkpoint, a damaged one or
    one of another run, weights that are not finite, and a folder that already holds a model.
    """
    directory = RunDirectory(run)
    settings = read_settings(directory)
    step = newest_step(directory.checkpoints) if step is None else step
    folder = out or directory.exports / f"step_{step:08d}"
    if (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} holds a model already; choose another --out, or delete that folder")
    if RunDirectory(folder).config.exists():
        raise ValueError(f"{folder} is the directory of a run; choose another --out")
    llama = load_checkpoint(directory, settings, step)
    directory.check(directory.metrics, directory.environment)
    records = read_metrics(directory.metrics) if directory.metrics.exists() else []
    export(
        llama,
        llama.state_dict(),
        folder,
        tokenizer=tokenizers.load(settings.data.tokenizer),
        card=model_card(settings, directory, step, records),
        dtype=getattr(torch, dtype),
    )
    return folder


def load_checkpoint(directory: RunDirectory, settings: Settings, step: int) -> Llama:
    """The model of a checkpoint of a run with these settings, on the CPU. Raises as `export_checkpoint`."""
    path = checkpoint_of(directory.checkpoints, step)
    try:
        sealed = read_seal(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path} is damaged ({error}); use another --step") from error
    check_checkpoint(path, sealed, settings)
    if sealed.get("tokenizer") not in (None, tokenizer_identity(settings.data.tokenizer)):
        raise ValueError(
            f"{directory.path} was trained with another tokenizer than data.tokenizer="
            f"{settings.data.tokenizer} is now; restore that file"
        )
    llama = Llama(settings.model, scaled_dot_product_attention)
    load_weights(directory.checkpoints, step, llama)
    if bad := not_finite(llama, None, Ranks(0, 1, torch.device("cpu"))):
        raise ValueError(f"{path} holds NaN or Inf in {len(bad)} weights ({first(bad)}); use another --step")
    return llama


if __name__ == "__main__":
    main()
