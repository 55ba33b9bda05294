"""What a skipped step leaves: followed by the weights and moments after each step, not by what is logged."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from common.errors import TrainingError
from model.llama import Llama
from tests.cli import metrics
from trainer import loop, parallel

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
    """By step, from 2 on: whether anything moved."""
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
