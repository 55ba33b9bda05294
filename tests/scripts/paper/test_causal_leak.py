"""The causal leak: what the script must find whatever the numbers, and its command line."""

import json

import pytest
import torch

from sagebwd import SageConfig
from scripts.paper import causal_leak

SMALL = ["--tokens", "270", "--head-dim", "16", "--heads", "2", "--cuts", "140", "255"]


@pytest.fixture(scope="module")
def rows():
    return causal_leak.measure(causal_leak.parse_arguments(SMALL))


def leaks(rows, config, region, at_border):
    """Of both tensors, at the positions inside a tile or at a border."""
    chosen = [row for row in rows if (row["config"], row["at_border"]) == (config, at_border)]
    return [row["leak"][tensor][region] for row in chosen for tensor in causal_leak.TENSORS]


def test_there_is_a_row_for_every_setting_position_and_redraw(rows):
    found = [(row["config"], row["position"], row["redraw"]) for row in rows]
    assert len(found) == len(set(found)) == 6 * 2 * 4
    assert {row["position"]: row["at_border"] for row in rows} == {140: False, 255: True}


def test_strictly_causal_leaks_nothing(rows):
    for region in causal_leak.REGIONS:
        for at_border in (False, True):
            assert set(leaks(rows, "strictly_causal", region, at_border)) == {0.0}


@pytest.mark.parametrize("config", ["default", "paper", "smooth_q=True", "smooth_v=True"])
def test_a_mean_over_all_tokens_leaks_everywhere(rows, config):
    for region in causal_leak.REGIONS:
        for at_border in (False, True):
            assert min(leaks(rows, config, region, at_border)) > 1e-3


def test_scales_leak_only_within_a_tile(rows):
    assert min(leaks(rows, "smooth_k=False", "same_tile", at_border=False)) > 1e-3
    assert set(leaks(rows, "smooth_k=False", "same_tile", at_border=True)) == {0.0}
    for at_border in (False, True):
        assert set(leaks(rows, "smooth_k=False", "earlier_tiles", at_border)) == {0.0}


def test_errors_are_those_of_the_tokens_up_to_the_position(draw, exact):
    inputs = draw(200, head_dim=16, batch=1)
    wanted = exact(*inputs, is_causal=True)
    found = causal_leak.out_and_dq(inputs, SageConfig(int8_matmuls=()))
    errors = causal_leak.compare(found, (wanted["out"], wanted["dq"]), 140, 128)
    assert all(0 < error < 1e-5 for regions in errors.values() for error in regions.values())
    found[1][..., 130, :] += 1
    found[1][..., 141, :] += 1e6
    errors = causal_leak.compare(found, (wanted["out"], wanted["dq"]), 140, 128)
    assert 0.1 < errors["dq"]["same_tile"] < 100
    assert errors["dq"]["earlier_tiles"] < 1e-5


def test_redraws_leave_the_tokens_up_to_the_position(draw):
    inputs = draw(50)
    for redraw, (std, offset) in causal_leak.REDRAWS.items():
        for x, y in zip(inputs, causal_leak.redrawn(inputs, 20, redraw, seed=0), strict=True):
            assert torch.equal(x[..., :21, :], y[..., :21, :])
            later = y[..., 21:, 1:]
            assert later.std().item() == pytest.approx(std, rel=0.1)
            assert y[..., 21:, 0].mean().item() == pytest.approx(offset, abs=0.5 * std)


def test_command_line(tmp_path, capsys):
    out = tmp_path / "new" / "leak.json"
    causal_leak.main([*SMALL, "--seed", "3", "--sigma", "2", "--dtype", "bfloat16", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["settings"] == {
        "tokens": 270,
        "head_dim": 16,
        "heads": 2,
        "sigma": 2.0,
        "cuts": [140, 255],
        "dtype": "bfloat16",
        "seed": 3,
        "device": "cpu",
    }
    assert report["configs"]["default"]["block_kv"] == 128
    assert report["command"].startswith("python -m scripts.paper.causal_leak --tokens 270")
    assert len(report["rows"]) == 48
    printed = capsys.readouterr().out
    assert printed.count("(error)") == 6
    assert printed.count("border") == 6 * 4


@pytest.mark.parametrize("cut", [127, 511])
def test_refuses_positions_without_an_earlier_tile_or_a_later_token(cut, capsys):
    with pytest.raises(SystemExit):
        causal_leak.parse_arguments(["--cuts", str(cut)])
    assert f"--cuts {cut}: choose positions from 128, so that" in capsys.readouterr().err
