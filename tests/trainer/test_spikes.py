import math
import random
import shlex

import pytest

from trainer.divergence import SpikeDetector
from trainer.run_directory import RunDirectory
from trainer.settings import SpikeSettings


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


def test_the_command_that_shows_its_text_can_be_pasted(tmp_path, caplog):
    directory = RunDirectory(tmp_path / "it's a run, $HOME")
    directory.path.mkdir()
    detector = make()
    spike = [detector.judge(*pair) for pair in [*course(40), (50.0, 1.0)]][-1]
    spike.log(directory.spikes, {"step": 41, "tokens": 1, "skipped": False, "sequences": [3]})
    command = shlex.split(caplog.text[caplog.text.index("python -m") :])
    assert command == ["python", "-m", "scripts.show_batch", str(directory.path), "--step", "41"]
