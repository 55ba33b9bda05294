import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from tests.warm import no_picture
from trainer.plot import LINES, plot_losses, plot_probe, smooth


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, which stay open to be looked at."""
    saved = []
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", saved.append)
        yield saved
    pyplot.close("all")


@pytest.fixture
def undrawn(figures, monkeypatch):
    """The same where no layout matters, which takes most of the time."""
    monkeypatch.setattr(Figure, "savefig", no_picture)
    return figures


def test_smoothing_is_a_weighted_mean_of_the_past():
    """Against the closed form: weights decay geometrically and sum to one."""
    values = np.random.default_rng(0).normal(size=300)
    decay = 1 - 1 / (0.02 * 300)
    weights = decay ** np.arange(300)[::-1]
    np.testing.assert_allclose(smooth(values)[-1], (weights * values).sum() / weights.sum(), rtol=1e-12)


def run_of(factor, steps=30):
    records = [{"step": s, "tokens": 10 * s, "loss": factor / s} for s in range(1, steps)]
    return [*records, {"step": steps, "tokens": 10 * steps, "val_loss": factor / steps}]


@pytest.mark.parametrize(("label", "shown"), [("$x^$", r"\$x^\$"), ("σ² − 1", "σ² − 1")])
def test_any_name_of_a_run_can_be_drawn_and_matplotlibs_settings_stay(tmp_path, figures, label, shown):
    before = dict(pyplot.rcParams)
    plot_losses({label: [run_of(5)]}, tmp_path / "loss.png")
    changed = {name for name, value in pyplot.rcParams.items() if value != before[name]}
    assert changed <= {"backend", "backend_fallback"}  # which the first picture chooses
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [shown]


def test_named_validation_sets_have_a_panel(tmp_path, undrawn):
    sets = [{"step": n, "tokens": 10 * n, "val_loss/wiki": 2.0 / n, "val_loss/code": 3.0} for n in (8, 9)]
    runs = {"one": [[*run_of(5), *sets]], "two": [run_of(6)]}
    plot_losses(runs, tmp_path / "two.png", baselines={"two": "one"})
    plot_losses({"one": runs["one"]}, tmp_path / "one.png")
    plot_losses({"two": runs["two"]}, tmp_path / "plain.png")
    assert [len(figure.axes) for figure in undrawn] == [3, 2, 1]
    for figure in undrawn[:2]:
        axes = figure.axes[1]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["wiki", "code"]
        assert {text.get_text() for text, _ in legend_of(figure)} <= {"one", "two"}
        drawn_lines = [line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xdata())]
        assert drawn_lines == [[[80, 0.25], [90, pytest.approx(2 / 9)]], [[80, 3], [90, 3]]]


def legend_of(figure):
    (legend,) = figure.legends
    return list(zip(legend.get_texts(), legend.get_lines(), strict=True))


def test_seeds_of_a_setting_are_one_line_with_a_band(tmp_path, undrawn):
    runs = {"attention=fpa": [run_of(4 + seed) for seed in (1, 2, 3)], "attention=sagebwd": [run_of(7)]}
    plot_losses(runs, tmp_path / "picture.png", baselines={"attention=sagebwd": "attention=fpa"})
    (figure,) = undrawn
    labels = [text.get_text() for text, _ in legend_of(figure)]
    assert labels == ["attention=fpa (3 seeds)", "attention=sagebwd"]
    losses, differences = figure.axes
    (band,) = losses.collections
    tokens, heights = band.get_paths()[0].vertices.T
    assert {*heights[tokens == 10].tolist()} == {5, 7}
    assert losses.lines[0].get_xydata()[0].tolist() == [10, 6]  # the mean
    np.testing.assert_allclose(differences.lines[0].get_ydata()[0], 7 - 6)


def test_each_group_is_compared_with_its_own_baseline(tmp_path, undrawn):
    runs = {name: [run_of(factor)] for name, factor in (("a", 5), ("b", 6), ("c", 7), ("d", 9), ("e", 1))}
    plot_losses(runs, tmp_path / "own.png", baselines={"b": "a", "d": "c"})
    plot_losses(runs, tmp_path / "none.png")
    _, differences = undrawn[0].axes
    assert [line.get_ydata()[0] for line in differences.lines[:-1]] == [6 - 5, 9 - 7]
    assert len(undrawn[1].axes) == 1


def test_many_runs_take_several_pictures_with_the_baseline_of_each(tmp_path, undrawn):
    many = [f"lr={i}" for i in range(1 + (LINES - 1) + 1)]
    runs = {name: [run_of(5)] for name in (*many, "x", "y", "z", "alone", "own")}
    baselines = dict.fromkeys(many[1:], many[0]) | {"y": "x", "z": "x"}
    paths = plot_losses(runs, tmp_path / "picture.png", baselines=baselines)
    assert [path.name for path in paths] == ["picture.png", "picture_2.png", "picture_3.png"]
    assert all(path.exists() for path in paths)
    shown = [[text.get_text() for text, _ in legend_of(figure)] for figure in undrawn]
    assert shown == [many[:LINES], [many[0], many[-1], "x", "y", "z", "alone"], ["own"]]
    for figure in undrawn:
        looks = [(line.get_color(), line.get_marker()) for _, line in legend_of(figure)]
        assert len(set(looks)) == len(looks)


def test_runs_of_different_lengths_and_without_validation_are_drawn(tmp_path, figures):
    runs = {"long": [run_of(5, 40)], "short": [run_of(6, 7)[:-1]], "empty": [[]]}
    plot_losses(runs, tmp_path / "picture.png", baselines={"short": "long", "empty": "long"})
    assert_inside(figures[0])


@pytest.mark.parametrize("label", ["model.qk_norm=false " * 9, "long_" * 40])
def test_nothing_is_cut_off(tmp_path, figures, label):
    runs = {f"{label}{i}": [run_of(5 + i), run_of(6 + i)] for i in range(5)}
    baselines = {name: f"{label}0" for name in runs if name != f"{label}0"}
    plot_losses(runs, tmp_path / "losses.png", baselines=baselines)
    plot_probe([probed(step, range(8)) for step in (5, 10)], tmp_path / "probe.png", alarm=0.3)
    for figure in figures:
        assert_inside(figure)


def assert_inside(figure):
    """All that is drawn, titles, labels and legends included, lies within the picture (in inches)."""
    box, size = figure.get_tightbbox(), figure.get_size_inches()
    assert (box.min > -0.02).all()
    assert (box.max < size + 0.02).all()


def probed(step, layers, **others):
    errors = {
        f"probe/layer_{layer}/{prefix}{name}_l2": size * step * (layer + 1)
        for layer in layers
        for prefix, size in (("", 0.01), ("fpa_", 0.001))
        for name in ("o", "dq", "dk", "dv")
    }
    return {"step": step, "tokens": 100 * step, **errors, "probe/seconds": 0.1, **others}


def test_probe_picture_has_a_line_for_each_layer_and_none_without_measurements(tmp_path, undrawn):
    losses = [{"step": 1, "tokens": 1, "loss": 3.0}]
    plot_probe(losses, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    records = [probed(5, [0, 11]), probed(10, [0, 11], **{"probe/layer_0/dq_l2": None})]
    plot_probe([*losses, *records], tmp_path / "two.png", alarm=0.3, title="SageBwd")
    (figure,) = undrawn
    assert "SageBwd" in figure._suptitle.get_text()
    names = [text.get_text() for text, _ in legend_of(figure)]
    assert names == ["full-precision attention (median, range)", "layer 0", "layer 11", "probe.alarm=0.3"]
    o, dq, dk, _ = figure.axes
    baseline, first, last, limit = dk.lines
    assert baseline.get_xydata().tolist() == [[500, pytest.approx(0.0325)], [1000, pytest.approx(0.065)]]
    assert first.get_xydata().tolist() == [[500, 0.05], [1000, 0.1]]  # tokens, not steps
    np.testing.assert_allclose(last.get_xydata(), [[500, 0.6], [1000, 1.2]])
    assert limit.get_ydata() == [0.3, 0.3]
    assert len(dq.lines[1].get_xdata()) == 1  # a value that is not finite
    assert len(o.lines) == 3  # the alarm watches gradients
    assert {axes.get_xlabel() for axes in figure.axes[2:]} == {"training tokens"}


def test_probe_picture_without_a_finite_error_is_drawn(tmp_path):
    nothing = dict.fromkeys(probed(5, [0]))
    plot_probe([nothing | {"step": 5, "tokens": 500, "probe/seconds": 0.1}], tmp_path / "probe.png")
    assert (tmp_path / "probe.png").exists()
