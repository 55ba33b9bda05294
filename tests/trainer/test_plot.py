import numpy as np
from PIL import Image

from trainer.plot import plot_losses, series, smooth


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

    def colours(name):
        pixels = np.asarray(Image.open(tmp_path / name).convert("RGB")).reshape(-1, 3)
        return {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}

    blue, orange = (31, 119, 180), (255, 127, 14)
    assert blue in colours("one.png")
    assert orange not in colours("one.png")
    assert {blue, orange} <= colours("two.png")
