"""The emulated backward against float64, the library's reference, and every FP8 value."""

import pytest
import torch

import sagebwd.reference
import sagebwd.reference.quantization
from sagebwd import SageConfig
from sagebwd.metrics import relative_l1, relative_l2
from sagebwd.reference import exact_attention
from scripts.paper import gradient_formats
from scripts.paper.gradient_formats import (
    FORMATS,
    PER_COLUMN,
    PER_ROW,
    PER_TILE,
    PUBLISHED,
    StorageScheme,
    layer_gradients,
    quantize,
)
from scripts.paper.report import gradients
from scripts.paper.report.rules import OPEN
from scripts.paper.result_files import Results, read_json
from scripts.paper.traces import Layer, Origin, save_trace
from tests.inputs import draw

GRADIENTS = ("dq", "dk", "dv")


@pytest.mark.parametrize("dp_bits", [16, 8])
@pytest.mark.parametrize("granularity", ["block", "row"])
def test_in_int8_it_is_the_reference(dp_bits, granularity):
    """Where the two coincide: O = PV, and dP if need be, outside INT8, and all else in float32."""
    layer = Layer(*draw(heads=4, kv_heads=2, length=150, sigma=1.5))
    int8 = {"s_fwd", "s_bwd", "dv", "dq", "dk"} | ({"dp"} if dp_bits == 8 else set())
    config = SageConfig(granularity=granularity, int8_matmuls=int8, block_q=64, block_kv=32)
    expected = sagebwd.reference.attention(*layer, is_causal=True, enable_gqa=True, config=config)
    found = layer_gradients(layer, StorageScheme("int8", dp_bits, granularity, (64, 32)))
    exact = exact_attention(*layer, is_causal=True)
    for name in GRADIENTS:
        # A value near the middle between two others may be rounded to either.
        assert relative_l2(found[name], getattr(expected, name)) < 2e-3, name
        assert relative_l2(found[name], getattr(exact, name)) > 1e-2, name


@pytest.mark.parametrize(("shared", "axes"), [(PER_TILE, (0, 1)), (PER_ROW, (1,)), (PER_COLUMN, (0,))])
@pytest.mark.parametrize("name", FORMATS)
def test_every_value_goes_to_the_nearest_of_its_format(name, shared, axes):
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)) ** 3
    x[:16, :32] = 0
    form, values = FORMATS[name], all_values(name)
    found = quantize(x, form, (16, 32), shared)
    for tile, stored in zip(tiles(x), tiles(found), strict=True):
        scale = tile.abs().amax(axes, keepdim=True) / values.max()
        nearest = values[((tile / scale).nan_to_num().unsqueeze(-1) - values).abs().argmin(-1)]
        step = (stored - nearest * scale).abs() / (tile.abs() + scale)
        assert (step > 1e-4).float().mean() < 0.01  # but for the middle between two


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-44, 1e-42, 1e-40, 1e-36, 1e30])
def test_no_scale_is_too_small_for_the_format(name, size):
    """dS of a row far below its largest logit is subnormal, and so would its scale be."""
    x = size * torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    found = quantize(x, FORMATS[name], (16, 32), PER_ROW)
    assert ((found - x).abs() <= max(0.2 * x.abs().max(), 1e-35)).all()


def all_values(name):
    """Every finite value of the format."""
    if name == "int8":
        return torch.arange(-127.0, 128.0)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    values = torch.arange(256).to(torch.uint8).view(dtype).float()
    return values[values.isfinite()]


def tiles(x):
    return [tile for rows in x.split(16) for tile in rows.split(32, 1)]


def test_int8_is_the_quantizer_of_the_library():
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    expected = sagebwd.reference.quantization.quantize(x)
    torch.testing.assert_close(
        quantize(x, FORMATS["int8"], (16, 32), PER_TILE), expected.values * expected.scale
    )


def test_from_a_trace_to_the_table(tmp_path, capsys):
    layer, other = (Layer(*(x.bfloat16() for x in draw(seed=seed))) for seed in (0, 1))
    origin = Origin("a run", step=1, tokens=2, tokens_per_step=2, qk_norm=True, attention="fpa")
    save_trace(tmp_path / "trace.safetensors", origin, {3: layer, 7: other})
    out = tmp_path / "made" / "gradient_formats"
    gradient_formats.main(
        [str(tmp_path / "trace.safetensors"), "--granularity", "row", "--tile", "32", "16", "--out", str(out)]
    )
    rows = read_json(tmp_path / "made" / "gradient_formats.json")["rows"]
    expected = [("a run, step 1", n) for n in (3, 7) for _ in range(6)]
    assert [(row["trace"], row["layer"]) for row in rows] == expected
    exact = exact_attention(*layer, is_causal=True)
    for row in rows[:6]:
        scheme = StorageScheme(**row["scheme"] | {"tile": tuple(row["scheme"]["tile"])})
        assert (scheme.granularity, scheme.tile) == ("row", (32, 16))
        found = layer_gradients(layer, scheme)
        for name in GRADIENTS:
            error = relative_l1(found[name], getattr(exact, name))
            assert row["errors"][name]["l1"] == pytest.approx(error, rel=1e-4)
    text = (tmp_path / "made" / "gradient_formats.md").read_text()
    assert text in capsys.readouterr().out
    assert "a run, step 1 (2 layers)" in text
    assert f"FP8 gradients: l1 {PUBLISHED['FP8 gradients']['l1']:g}" in text
    check_section(gradients.gradient_formats(Results(tmp_path / "made")), rows)


def check_section(section, rows):
    """The report's: means over the two layers; a hardly trained model decides nothing."""
    l1 = {scheme: [] for scheme in (("int8", 16), ("e4m3", 16), ("int8", 8))}
    for row in rows:
        scheme = row["scheme"]["format"], row["scheme"]["dp_bits"]
        if scheme in l1:
            l1[scheme].append(row["errors"]["dq"]["l1"])
    formats_table, dp_table = section.tables.values()
    int8, e4m3, int8_dp = (f"{sum(values) / 2:.4f}".lstrip("0") for values in l1.values())
    assert f"| a run, step 1 | row | {int8} | {e4m3} | " in formats_table
    assert f"| a run, step 1 | row | {int8} | " in dp_table
    assert f" | {int8_dp} | " in dp_table
    assert [verdict.answer for verdict in section.verdicts] == [OPEN] * 2


def test_gaussians_without_a_trace(tmp_path, capsys):
    gradient_formats.main(
        ["--sigmas", "1", "--tokens", "256", "--heads", "2", "--head-dim", "32", "--out", str(tmp_path / "g")]
    )
    assert "Gaussian, σ = 1 (1 layer)" in capsys.readouterr().out
    rows = read_json(tmp_path / "g.json")["rows"]
    errors = {tuple(row["scheme"].values())[:3]: row["errors"] for row in rows}
    assert len(errors) == 12
    # FP8 spends bits on range that a Gaussian does not need; fewer bits of mantissa give larger errors.
    for dp_bits in (16, 8):
        int8, e4m3, e5m2 = (errors[name, dp_bits, "row"]["dq"]["l1"] for name in FORMATS)
        assert 2 * int8 < e4m3 < e5m2 / 1.5
    for name in FORMATS:
        assert errors[name, 8, "row"]["dq"]["l1"] > errors[name, 16, "row"]["dq"]["l1"]
        assert errors[name, 8, "row"]["dv"] == errors[name, 16, "row"]["dv"]


def test_what_is_not_a_trace_is_refused(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    for name, message in (("text", "is not a trace, or is damaged"), ("missing", "missing is not there")):
        with pytest.raises(SystemExit, match=message):
            gradient_formats.main([str(tmp_path / name), "--out", str(tmp_path / "out")])
    assert not list(tmp_path.glob("out*"))
