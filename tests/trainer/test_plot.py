import numpy as np
from PIL import Image

from scripts import compare
from trainer.plot import plot_losses, plot_probe, series, smooth

BLUE, ORANGE = (31, 119, 180), (255, 127, 14)  # of the first and second line


def colours(picture):
    """Every colour of a picture, (red, green, blue)."""
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    return {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}


def test_smoothing_a_constant_gives_the_constant():
    np.testing.assert_allclose(smooth(np.full(500, 2.5)), 2.5, rtol=1e-12)


def test_smoothing_is_a_weighted_mean_of_the_past():
    """Against the closed form: weights decay geometrically and sum to one."""
    values = np.random.default_rng(0).normal(size=300)
    decay = 1 - 1 / (0.02 * 300)
    weights = decay ** np.arange(300)[::-1]
    np.testing.assert_allclose(smooth(values)[-1], (weights * values).sum() / weights.sum(), rtol=1e-12)


def test_short_series_are_not_smoothed():
    np.testing.assert_allclose(smooth(np.array([3.0, 1.0, 2.0])), [3, 1, 2])
    assert len(smooth(np.array([]))) == 0


def test_series_picks_the_records_that_have_the_key():
    records = [{"tokens": 10, "loss": 3.0}, {"tokens": 10, "val_loss": 4.0}, {"tokens": 20, "loss": None}]
    np.testing.assert_array_equal(series(records, "loss"), [[10], [3]])
    assert len(series(records, "absent")[0]) == 0


def test_picture_shows_every_run(tmp_path):
    records = [{"step": s, "tokens": 10 * s, "loss": 5 / s} for s in range(1, 30)]
    plot_losses({"one": records}, tmp_path / "one.png")
    plot_losses(
        {"one": records, "two": [{**r, "loss": 6 / r["step"]} for r in records]}, tmp_path / "two.png"
    )

    assert BLUE in colours(tmp_path / "one.png")
    assert ORANGE not in colours(tmp_path / "one.png")
    assert {BLUE, ORANGE} <= colours(tmp_path / "two.png")


def test_probe_picture_has_a_line_for_each_layer_and_none_without_measurements(tmp_path):
    def record(step, layers):
        errors = {
            f"probe/layer_{layer}/{name}_l2": 0.01 * step * (layer + 1)
            for layer in layers
            for name in ("o", "dq", "dk", "dv")
        }
        return {"step": step, "tokens": step, **errors, "probe/seconds": 0.1}

    losses = [{"step": 1, "tokens": 1, "loss": 3.0}]
    plot_probe(losses, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    plot_probe([*losses, record(5, [0]), record(10, [0])], tmp_path / "one.png")
    plot_probe([record(5, [0, 11]), {**record(10, [0]), "probe/layer_0/dq_l2": None}], tmp_path / "two.png")
    assert BLUE in colours(tmp_path / "one.png")
    assert ORANGE not in colours(tmp_path / "one.png")
    assert {BLUE, ORANGE} <= colours(tmp_path / "two.png")


def test_probe_records_leave_the_losses_as_they_are(tmp_path):
    records = [{"step": s, "tokens": 10 * s, "loss": 5 / s} for s in range(1, 30)]
    probed = [*records[:10], {"step": 10, "tokens": 100, "probe/layer_0/dq_l2": 0.2}, *records[10:]]
    assert compare.table({"run": probed}) == compare.table({"run": records})
    plot_losses({"run": records}, tmp_path / "plain.png")
    plot_losses({"run": probed}, tmp_path / "probed.png")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "probed.png").read_bytes()
