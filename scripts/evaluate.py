"""Evaluate a run on the tasks of EleutherAI's lm-evaluation-harness, with the exported weights.

    pip install -e '.[train,evaluate]' -c constraints.txt
    python -m scripts.evaluate runs/NAME --tasks hellaswag,lambada_openai
    python -m scripts.evaluate runs/NAME --tasks my_task --include FOLDER --step 1200

A task is one of the harness's (`lm-eval ls tasks` lists them), whose data it downloads, or a YAML file in
FOLDER, whose data may lie on this machine. Such a file may name Python functions, which are run. The model is
that of transformers, in float32, with the context of the training. Results are printed, and added to
evaluations.jsonl in the run's directory, with --wandb also to the run in W&B.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from common.errors import ends_with_message
from common.files import append_line
from common.terminal import add_device_option, command_parser
from data.huggingface_tokenizer import TOKENIZER_FILE
from model.huggingface import CONFIG_FILE
from scripts.export import export_checkpoint, sealed_in
from scripts.runs import read_settings
from trainer.record import start_wandb
from trainer.run_directory import RunDirectory, checkpoint_of, newest_step
from trainer.settings import Settings

BOOTSTRAPS = 1000  # for standard errors that have no closed form

Results = dict[str, dict[str, float]]  # value by task and metric


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    record = evaluate(arguments)
    print(f"{arguments.run}, step {record['step']}:")
    for task, values in record["results"].items():
        for metric, value in values.items():
            print(f"  {task:30} {metric:30} {value:.4f}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.evaluate", __doc__)
    parser.add_argument("run", type=Path, help="the run's directory, which has its config.yaml")
    parser.add_argument("--tasks", required=True, help="names, separated by commas")
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="a folder with task files of your own")
    parser.add_argument("--step", type=int, help="the step of a checkpoint (default: the finished weights)")
    parser.add_argument(
        "--few-shot", type=int, metavar="N", help="examples in each prompt (default: the task's)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples of each task")
    parser.add_argument("--batch-size", type=int, default=8, help="examples at a time (default 8)")
    add_device_option(parser)
    parser.add_argument("--wandb", action="store_true", help="add the results to the run's summary in W&B")
    return parser.parse_args(argv)


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate, and record what was found. Returns that record.

    Raises ValueError or TrainingError, naming the fix, if lm-eval is not installed, a task is unknown, or the
    run has no such weights.
    """
    check_installed()
    directory = RunDirectory(arguments.run)
    settings = read_settings(directory)
    step, folder = weights_of(directory, settings, arguments.step)
    results = run_tasks(arguments, folder, settings.context)
    record = {"step": step, "few_shot": arguments.few_shot, "limit": arguments.limit, "results": results}
    append_line(directory.path / "evaluations.jsonl", record)
    if arguments.wandb:
        add_to_wandb(directory, settings, record)
    return record


def check_installed() -> None:
    """Raise ValueError, with the fix, unless lm-eval and transformers can be imported."""
    missing = [name for name in ("lm_eval", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"evaluation on tasks needs {' and '.join(missing)}: "
            "pip install -e '.[train,evaluate]' -c constraints.txt"
        )


def weights_of(directory: RunDirectory, settings: Settings, step: int | None) -> tuple[int, Path]:
    """The step, and the folder of its weights, which is made if it is a checkpoint's."""
    if step is not None:
        folder = directory.exports / f"step_{step:08d}"
        if not (folder / CONFIG_FILE).exists():
            return step, export_checkpoint(directory.path, step, folder, "float32")
        dtype = json.loads((folder / CONFIG_FILE).read_text())["dtype"]
        if dtype != "float32":
            raise ValueError(f"{folder} has weights in {dtype}; move it away: results are those of float32")
        return step, folder
    for file in (CONFIG_FILE, TOKENIZER_FILE):
        if not (directory.weights / file).exists():
            raise ValueError(
                f"{directory.weights} has no {file}: the run is not finished, or was by an older version. "
                "Name a checkpoint with --step N"
            )
    directory.check()
    return settings.total_steps, directory.weights


def run_tasks(arguments: argparse.Namespace, folder: Path, context: int) -> Results:
    """The results of the tasks. Raises ValueError if one is unknown."""
    import lm_eval  # optional, and slow to import
    from lm_eval.models.huggingface import HFLM

    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    tasks = task_manager(names, arguments.include)
    unknown = [name for name in names if name not in tasks.all_tasks]
    if unknown or not names:
        raise ValueError(
            f"--tasks {arguments.tasks}: unknown are {', '.join(unknown) or 'all'}; `lm-eval ls tasks` lists "
            "the known ones, and --include names a folder with your own"
        )
    found = lm_eval.simple_evaluate(
        HFLM(
            pretrained=str(folder),
            device=arguments.device,
            batch_size=arguments.batch_size,
            max_length=context,
        ),
        tasks=names,
        num_fewshot=arguments.few_shot,
        limit=arguments.limit,
        task_manager=tasks,
        bootstrap_iters=BOOTSTRAPS,
        log_samples=False,
    )
    return {task: numbers(values) for task, values in found["results"].items()}


def task_manager(names: list[str], include: Path | None):
    """What knows the tasks: those in `include` alone if they suffice, because reading the others takes long.

    Raises ValueError if there is no such folder.
    """
    from lm_eval.tasks import TaskManager

    if include is None:
        return TaskManager()
    if not include.is_dir():
        raise ValueError(f"--include {include} is no folder; give the one with your task files")
    own = TaskManager(include_path=str(include), include_defaults=False)
    return own if set(names) <= set(own.all_tasks) else TaskManager(include_path=str(include))


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """The metrics, by name, without the harness's names of filters that change nothing ("acc,none")."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name != "sample_len"
    }


def add_to_wandb(directory: RunDirectory, settings: Settings, record: dict[str, Any]) -> None:
    """Add the results to the summary of the run. Raises ValueError if it has none in W&B."""
    sealed = sealed_in(checkpoint_of(directory.checkpoints, newest_step(directory.checkpoints)))
    if not sealed.get("wandb_id"):
        raise ValueError(f"{directory.path} was not logged to W&B; the results are in evaluations.jsonl")
    run = start_wandb(
        settings.logger,
        folder=directory.path,
        config={},
        run_id=sealed["wandb_id"],
    )
    if run is None:
        raise ValueError("W&B is off or not installed (see the run's logger.wandb); leave --wandb out")
    for task, values in record["results"].items():
        run.summary.update({f"eval/{task}/{metric}": value for metric, value in values.items()})
    run.summary.update({"eval/step": record["step"]})
    run.finish()


if __name__ == "__main__":
    main()
