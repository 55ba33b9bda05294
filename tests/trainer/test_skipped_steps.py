import itertools
import json
import math
import random
import shlex
import shutil

import numpy as np
import pytest
import torch

from common.errors import TrainingError
from model.llama import Llama
from tests.cli import metrics
from trainer import loop, parallel
from trainer.divergence import SpikeDetector
from trainer.run_directory import RunDirectory
from trainer.settings import SpikeSettings

RUN = ("steps=6", "checkpoint_every=3", "eval_every=6", "sample_tokens=0", "probe.every=0")


@pytest.fixture
def states(monkeypatch):
    """[weights and moments, flat] after each step."""
    found, forget = [], parallel.forget_gradients

    def forget_and_note(optimizer, hardware):
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        moments = [x for p in weights for x in optimizer.state.get(p, {}).values()]
        found.append(torch.cat([x.detach().double().flatten() for x in (*weights, *moments)]))
        forget(optimizer, hardware)

    monkeypatch.setattr(parallel, "forget_gradients", forget_and_note)
    return found


@pytest.fixture
def spoil(monkeypatch):
    """spoil(step, factor): the loss of this step, and so its gradient, is multiplied."""

    def spoil(step, factor):
        output, passes = Llama.output, itertools.count(1)

        def spoiled(self, x, targets):
            result = output(self, x, targets)
            trains = targets is not None and torch.is_grad_enabled()
            return result * factor if trains and next(passes) == step else result

        monkeypatch.setattr(Llama, "output", spoiled)

    return spoil


def changed(states):
    return [not torch.equal(x, y) for x, y in itertools.pairwise(states)]


def test_a_step_that_is_not_finite_ends_the_run(train_here, tmp_path, spoil):
    spoil(4, float("inf"))
    with pytest.raises(TrainingError, match=r"(?s)step 4 is not finite.*skip_nonfinite=true skips such"):
        train_here(tmp_path, *RUN)
    assert (tmp_path / "DIVERGED").read_text() == "4\n"


def test_a_step_that_is_not_finite_moves_nothing_if_it_is_skipped(train_here, tmp_path, states, spoil):
    spoil(4, float("inf"))
    train_here(tmp_path, *RUN, "skip_nonfinite=true")
    assert changed(states) == [True, True, False, True, True]
    assert (tmp_path / "DONE").exists()
    assert all(state.isfinite().all() for state in states)


@pytest.mark.parametrize("skip", [True, False])
def test_a_spike_is_listed_and_moves_nothing_if_it_is_skipped(
    train_here, tmp_path, states, spoil, caplog, skip
):
    spoil(5, 50.0)
    run = train_here(tmp_path, *RUN, "spike.window=8", "spike.threshold=20", f"spike.skip={skip}")
    (spike,) = map(json.loads, (tmp_path / "spikes.jsonl").read_text().splitlines())
    assert (spike["step"], spike["skipped"]) == (5, skip)
    assert spike["sequences"] == run.loader.sequence_indices(4).tolist()
    logged = next(record for record in metrics(tmp_path) if record["step"] == 5)
    assert all(spike[key] == logged[key] for key in ("loss", "grad_norm", "tokens"))
    assert "step 5 is a spike" in caplog.text
    assert changed(states) == [True, True, True, not skip, True]


def test_a_resumed_run_judges_by_the_steps_before(train_here, tmp_path):
    whole = train_here(tmp_path / "whole", *RUN)
    assert len(whole.spikes.history) == 6
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    assert train_here(tmp_path / "run", *RUN).spikes.history == whole.spikes.history


def test_the_probe_measures_sequences_of_the_step_just_done(train_here, tmp_path, monkeypatch):
    read, stack = [], loop.stack_sequences

    def stack_and_note(tokens, indices, context, **how):
        read.append(np.array(indices))
        return stack(tokens, indices, context, **how)

    monkeypatch.setattr(loop, "stack_sequences", stack_and_note)
    trainer = train_here(tmp_path, "steps=4", "probe.every=2", "probe.sequences=2", "sample_tokens=0")
    for step, indices in zip((2, 4), read, strict=True):
        assert (indices == trainer.loader.sequence_indices(step - 1)[:2]).all()


def detector(window=20, threshold=6.0, history=()):
    return SpikeDetector(SpikeSettings(window=window, threshold=threshold, skip=False), history)


def course(steps=200, seed=0, spikes=()):
    """A noisy, falling loss and a noisy gradient norm; `spikes`: (step, what to add to loss and norm)."""
    noise = random.Random(seed).gauss
    values = [(3 + 5 * math.exp(-i / 20) + noise(0, 0.02), 1 + noise(0, 0.05)) for i in range(steps)]
    for step, loss, norm in spikes:
        values[step] = (values[step][0] + loss, values[step][1] + norm)
    return values


def found(spikes, values):
    judged = {step: spikes.judge(*pair) for step, pair in enumerate(values)}
    return {step: spike.beyond for step, spike in judged.items() if spike}


def test_spikes_are_found_where_they_are():
    """Also where the one before could hide it."""
    spikes = [(100, 1.0, 0), (150, 0, 3.0), (151, 0, 3.0), (180, 1.0, 3.0)]
    wanted = {100: ["loss"], 150: ["grad_norm"], 151: ["grad_norm"], 180: ["loss", "grad_norm"]}
    assert found(detector(threshold=8.0), course(spikes=spikes)) == wanted


def test_limits_are_median_and_mad_of_the_steps_before():
    judge = detector(window=8, threshold=2.0).judge
    for value in (1.0, 2.0, 3.0, 4.0, 100.0):
        judge(value, 1.0)
    spike = judge(8.0, 1.0)
    assert spike.typical == {"loss": 3.0, "grad_norm": 1.0}
    assert spike.limits["loss"] == pytest.approx(3 + 2 * 1.4826 * 1.0)
    assert spike.beyond == ["loss"]


def test_it_waits_for_half_a_window_and_gets_used_to_a_new_level():
    assert found(detector(), [(1.0, 1.0)] * 9 + [(9.0, 1.0)]) == {}
    assert found(detector(), [(1.0, 1.0)] * 10 + [(9.0, 1.0)]) == {10: ["loss"]}
    lasting = found(detector(), [(1.0, 1.0)] * 40 + [(9.0, 1.0)] * 40)
    assert list(lasting) == list(range(40, 50))  # until half of the window is new


def test_values_below_and_the_rounding_of_a_run_that_stands_still_are_none():
    assert found(detector(), [(1.0, 1.0)] * 30 + [(0.1, 0.1)] + [(1.0 + 1e-4, 1.0)] * 10) == {}
    assert found(detector(threshold=None), course(spikes=[(100, 9.0, 9.0)])) == {}


def test_the_command_that_shows_its_text_can_be_pasted(tmp_path, caplog):
    directory = RunDirectory(tmp_path / "it's a run, $HOME")
    directory.path.mkdir()
    judge = detector().judge
    spike = [judge(*pair) for pair in [*course(40), (50.0, 1.0)]][-1]
    spike.log(directory.spikes, {"step": 41, "tokens": 1, "skipped": False, "sequences": [3]})
    command = shlex.split(caplog.text[caplog.text.index("python -m") :])
    assert command == ["python", "-m", "scripts.show_batch", str(directory.path), "--step", "41"]
