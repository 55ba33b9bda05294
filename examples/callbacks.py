"""Code of your own in a training run: two callbacks (trainer/callbacks.py says what each method gets).

    python train.py experiment=quickstart callbacks.norms._target_=examples.callbacks.WeightNorms
    python train.py 'callbacks.tasks={_target_: examples.callbacks.Tasks, tasks: [hellaswag], limit: 200}'

The second needs `pip install -e '.[train,evaluate]' -c constraints.txt`.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from trainer.callbacks import Callback


class WeightNorms(Callback):
    """A metric: the norm of each layer's weights, logged with every validation as `weights/layer_0`, …"""

    def on_evaluate(self, step, record, model):
        for number, layer in enumerate(model.layers):
            norm = get_total_norm([weight.detach() for weight in layer.parameters()])
            if isinstance(norm, DTensor):  # each rank has a part of the weights
                norm = norm.full_tensor()
            record[f"weights/layer_{number}"] = norm.item()


class Tasks(Callback):
    """Tasks of lm-evaluation-harness on checkpoints at multiples of `every`, to the run's evaluations/.

    Training waits for them; several ranks for no longer than hardware.timeout_s. options: further ones of
    lm_eval, such as [--device, cpu].
    """

    def __init__(self, tasks, every=1, limit=None, options=()):
        if find_spec("lm_eval") is None:  # say so now, not at the first checkpoint
            raise ImportError("lm-eval is missing; pip install -e '.[train,evaluate]' -c constraints.txt")
        self.tasks, self.every = tasks, every
        self.options = [*options] + (["--limit", str(limit)] if limit else [])

    def on_checkpoint(self, step, record, model):
        if step % self.every or os.environ.get("RANK", "0") != "0":
            return
        run, weights = Path(record["path"]).parents[1], f"export/step_{step:08d}"
        export = ["scripts.export", str(run), "--step", str(step)]
        model = f"pretrained={run / weights},dtype=float32"
        evaluate = ["lm_eval", "--model", "hf", "--model_args", model, "--tasks", ",".join(self.tasks)]
        for command in (export, [*evaluate, "--output_path", str(run / "evaluations"), *self.options]):
            subprocess.run([sys.executable, "-m", *command], check=True)
