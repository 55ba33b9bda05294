import json
import math
import random
import shlex

import numpy as np
import pytest

from data.corpus import open_corpus
from tests.cli import metrics
from trainer.divergence import SpikeDetector
from trainer.run_directory import RunDirectory
from trainer.settings import SpikeSettings

NOISE = b"~^|{}[]<>@#$%&*0123456789"


def make(window=20, threshold=6.0, history=()):
    return SpikeDetector(SpikeSettings(window=window, threshold=threshold, skip=False), history)


def course(steps=200, seed=0, spikes=()):
    """A noisy, falling loss and a noisy gradient norm; `spikes`: (step, what to add to loss and norm)."""
    noise = random.Random(seed)
    values = [
        (3 + 5 * math.exp(-i / 20) + noise.gauss(0, 0.02), 1 + noise.gauss(0, 0.05)) for i in range(steps)
    ]
    for step, loss, norm in spikes:
        values[step] = (values[step][0] + loss, values[step][1] + norm)
    return values


def found(detector, values):
    spikes = {step: detector.judge(*pair) for step, pair in enumerate(values)}
    return {step: spike.beyond for step, spike in spikes.items() if spike}


def test_spikes_are_found_where_they_are():
    spikes = [(100, 1.0, 0), (150, 0, 3.0), (151, 0, 3.0), (180, 1.0, 3.0)]
    assert found(make(threshold=8.0), course(spikes=spikes)) == {
        100: ["loss"],
        150: ["grad_norm"],
        151: ["grad_norm"],  # the one before did not hide it
        180: ["loss", "grad_norm"],
    }


def test_limits_are_median_and_mad_of_the_steps_before():
    detector = make(window=8, threshold=2.0)
    for value in (1.0, 2.0, 3.0, 4.0, 100.0):
        detector.judge(value, 1.0)
    spike = detector.judge(8.0, 1.0)
    assert spike.typical == {"loss": 3.0, "grad_norm": 1.0}
    assert spike.limits["loss"] == pytest.approx(3 + 2 * 1.4826 * 1.0)
    assert spike.beyond == ["loss"]


def test_it_waits_for_half_a_window_and_gets_used_to_a_new_level():
    assert found(make(), [(1.0, 1.0)] * 9 + [(9.0, 1.0)]) == {}
    assert found(make(), [(1.0, 1.0)] * 10 + [(9.0, 1.0)]) == {10: ["loss"]}
    lasting = found(make(), [(1.0, 1.0)] * 40 + [(9.0, 1.0)] * 40)
    assert list(lasting) == list(range(40, 50))  # until half of the window is new


def test_values_below_and_the_rounding_of_a_run_that_stands_still_are_none():
    assert found(make(), [(1.0, 1.0)] * 30 + [(0.1, 0.1)] + [(1.0 + 1e-4, 1.0)] * 10) == {}
    assert found(make(threshold=None), course(spikes=[(100, 9.0, 9.0)])) == {}


def test_a_detector_goes_on_from_its_history_as_if_it_had_not_stopped():
    values = course(spikes=[(60, 1.0, 0), (75, 0, 2.0)])
    whole, part = make(), make()
    expected = found(whole, values)
    found(part, values[:70])
    restored = make(history=json.loads(json.dumps(part.history)))
    assert {step + 70: names for step, names in found(restored, values[70:]).items()} == {
        step: names for step, names in expected.items() if step >= 70
    }
    assert 75 in expected


@pytest.fixture
def odd_book(tmp_path):
    """Plain text with three lines' worth of noise in it, as overrides: 25 steps of a debug run."""
    line = "It was a dark and stormy night; the rain fell in torrents.\n"
    noise = "".join(random.Random(3).choices(NOISE.decode(), k=130))
    book = tmp_path / "book.txt"
    book.write_text(line * 60 + noise + "\n" + line * 60)
    return ("data=text", f"data.path={book}", "data.tokenizer=bytes", f"data.root={tmp_path / 'tokens'}")


def test_a_run_names_its_odd_sequences_and_leaves_them_out_if_told(train_here, odd_book, tmp_path, caplog):
    steps = 90
    trainer = train_here(
        tmp_path / "run",
        *odd_book,
        f"steps={steps}",
        "spike.window=16",
        "eval_every=90",
        "checkpoint_every=90",
        "sample_tokens=0",
        "probe.every=0",
        "spike.skip=true",
    )
    spikes = [json.loads(line) for line in (tmp_path / "run" / "spikes.jsonl").read_text().splitlines()]
    tokens = open_corpus(trainer.settings.data).train.window(0, 64 * trainer.loader.sequences).reshape(-1, 64)
    noise = [np.isin(sequence, list(NOISE)).sum() for sequence in tokens]
    batches = {step: trainer.loader.sequence_indices(step - 1).tolist() for step in range(1, steps + 1)}
    noisiest = {step: max(noise[index] for index in indices) for step, indices in batches.items()}
    found_at = {spike["step"] for spike in spikes}
    assert all(noisiest[spike["step"]] > 8 for spike in spikes if "loss" in spike["beyond"])
    learned = 60  # steps; before, the loss falls so fast that few steps are outliers
    assert {step for step in range(learned, steps + 1) if noisiest[step] > 32} <= found_at
    assert max(found_at) > learned
    for spike in spikes:
        assert spike["sequences"] == batches[spike["step"]]
        logged = next(record for record in metrics(tmp_path / "run") if record["step"] == spike["step"])
        assert {key: spike[key] for key in ("loss", "grad_norm", "tokens")} == {
            key: logged[key] for key in ("loss", "grad_norm", "tokens")
        }
        assert spike["skipped"]
        assert f"step {spike['step']} is a spike" in caplog.text
    parameter = next(trainer.llama.parameters())
    assert trainer.optimizer.state[parameter]["step"] == steps - len(spikes)


def test_the_command_that_shows_its_text_can_be_pasted(tmp_path, caplog):
    directory = RunDirectory(tmp_path / "it's a run, $HOME")
    directory.path.mkdir()
    detector = make()
    spike = [detector.judge(*pair) for pair in [*course(40), (50.0, 1.0)]][-1]
    spike.log(directory.spikes, {"step": 41, "tokens": 1, "skipped": False, "sequences": [3]})
    command = shlex.split(caplog.text[caplog.text.index("python -m") :])
    assert command == ["python", "-m", "scripts.show_batch", str(directory.path), "--step", "41"]
