"""The remedy table: each emulation against a closed form, how errors are split, from a run to its numbers."""

import json
from dataclasses import replace

import pytest
import torch

from sagebwd import sage_attention
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from scripts.paper import remedies, roundings
from scripts.paper.attention_emulation import EXACT, Head, emulate, scheme_of
from scripts.paper.products import product_of, scores_of
from scripts.paper.remedies_tables import combined
from scripts.paper.remedy_schemes import (
    DRAWS,
    attend_with,
    finer_where_zero,
    hadamard,
    loses_too_much,
    own_sum,
    stochastic,
)
from scripts.paper.report import Results
from scripts.paper.roundings import exact, int8, rotated, rotation
from tests.scripts.paper.test_attention_emulation import draw, head_of


@pytest.fixture(scope="module")
def head():
    return head_of(draw(tokens=70))


def test_a_hadamard_rotation_is_orthogonal_and_leaves_the_scores_as_they_are():
    """In float64, for a head size that is a power of 2, and for blocks where it is not."""
    for channels in (64, 24):
        turn = rotation(channels).double()
        torch.testing.assert_close(turn @ turn.mT, torch.eye(channels).double(), atol=1e-6, rtol=0)
        entries = turn.abs()[turn != 0]
        torch.testing.assert_close(entries, entries[:1].expand_as(entries))
    turn = rotation(64).double() * 8  # whole numbers, so that nothing is rounded
    q, k = torch.randint(-9, 9, (2, 50, 64), generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal((q @ turn) @ (k @ turn).mT, 64 * (q @ k.mT))


def test_rotated_scores_without_rounding_are_the_scores(head):
    turn = rotation(24)
    whole = replace(
        EXACT,
        scores=scores_of(rotated(exact, turn), rotated(exact, turn)),
        dq=product_of(exact, rotated(exact, turn)),
        dk=product_of(exact, rotated(exact, turn)),
    )
    for found, wanted in zip(emulate(head, whole), emulate(head, EXACT), strict=True):
        assert relative_l2(found, wanted) < 3e-6


def test_a_rotation_helps_where_a_channel_stands_out():
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = torch.randn(4, 64, 64, generator=generator)
    q[:, 7] *= 12
    k[:, 7] *= 12
    outlier = Head(q / 4, k / 4, v, grad_out)
    truth = emulate(outlier, EXACT)
    default = scheme_of(remedies.SageConfig(), 64, torch.bfloat16)
    errors = [relative_l2(emulate(outlier, s).dq, truth.dq) for s in (default, hadamard(default, 64))]
    assert errors[1] < 0.7 * errors[0]


def test_o_over_its_own_sum_is_exact_where_all_values_are_equal(head):
    """Each O is then that value, however P was rounded; the default's is off by as much as P's sum."""
    same = head._replace(v=torch.ones_like(head.v) * 0.5)
    default = scheme_of(remedies.SageConfig(), 24, torch.bfloat16)
    assert relative_l2(emulate(same, own_sum(default, 24)).out, same.v) < 1e-6
    assert relative_l2(emulate(same, default).out, same.v) > 1e-3


def test_stochastic_weights_are_unbiased_and_within_a_step(head):
    """Of O, which is linear in the rounded P: the mean of draws comes near O with exact P as 1/√draws."""
    torch.manual_seed(0)
    default = scheme_of(remedies.SageConfig(), 24, torch.float32)
    tokens = int8(128, None)
    without = replace(default, output=product_of(exact, tokens))
    truth, draws = emulate(head, without).out, 100
    outs = torch.stack([emulate(head, stochastic(default, 24)).out for _ in range(draws)])
    one = (outs - truth).square().mean().sqrt()
    mean = (outs.mean(0) - truth).square().mean().sqrt()
    assert mean < 1.3 * one / draws**0.5  # the bias would add its own
    p = torch.softmax(torch.randn(40, 128), -1)
    step = p.amax(-1, keepdim=True) / 127
    assert ((roundings.stochastic_int8(1, 128)(p) - p).abs() <= step * 1.001).all()


def test_rows_that_lose_too_much_get_finer_scales_and_others_do_not():
    """64 columns: a row of equal values, one with a value that hides the others, and one of zeros."""
    x = torch.zeros(3, 64)
    x[0] = 0.3
    x[1] = 1e-3
    x[1, 0] = 1.0  # the rest is below half a step of 1/127, and 63e-3 / 1.063 of the sum
    assert loses_too_much(x, 64).any(1).tolist() == [False, True, False]
    assert not loses_too_much(x, 64, lost=0.06).any()
    found = finer_where_zero(64, fine=32)(x)
    assert torch.equal(found[[0, 2]], int8(1, 64)(x)[[0, 2]])
    torch.testing.assert_close(found[1, 32:], x[1, 32:])  # a group without the large value
    assert not found[1, 1:32].any()
    assert found.shape == x.shape
    odd = torch.rand(5, 41)
    assert loses_too_much(odd, 16).shape == finer_where_zero(16, 8)(odd).shape == odd.shape


@pytest.mark.parametrize("name", ["default", "low_bias", "paper"])
def test_in_a_model_it_is_the_librarys_attention(name):
    """Heads and sequences side by side, out and gradients, of candidates that are settings."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad_out = torch.randn(4, 2, 2, 150, 24, generator=generator).bfloat16().float()
    remedy = remedies.remedies(24, torch.bfloat16)[name]

    def run(attend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad_out.to(dtype))

    emulated = run(lambda *x: attend_with(remedy.scheme)(*x, is_causal=True, enable_gqa=False), torch.float32)
    library = run(lambda *x: sage_attention(*x, is_causal=True, config=remedy.config), torch.bfloat16)
    for found, wanted in zip(emulated, library, strict=True):
        assert relative_l2(found.bfloat16(), wanted) < 2e-3  # next to ties, and 16-bit results


def test_every_candidate_runs_in_a_model_and_its_heads_are_independent():
    """Where nothing is drawn at random, two heads give what each gives alone."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(2))
    exact_out = exact_attention(q, k, v, is_causal=True).out
    for name, remedy in remedies.remedies(16, torch.bfloat16).items():
        attend = attend_with(remedy.scheme)
        out = attend(q, k, v, is_causal=True, enable_gqa=False)
        assert relative_l2(out, exact_out) < 0.03, name
        if remedy.draws == 1:
            alone = attend(q[:, 1:], k[:, 1:], v[:, 1:], is_causal=True, enable_gqa=False)
            assert relative_l2(alone, out[:, 1:]) < 1e-5, name
    with pytest.raises(ValueError, match="causal and has a key head for every query head"):
        attend(q, k, v, is_causal=False, enable_gqa=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "finer", "hadamard", "own_sum"])
def test_on_a_gpu_under_autocast_it_is_what_it_is_on_a_cpu(name):
    """Inputs in bf16, and TF32 allowed, as in training; values next to a rounding tie may differ."""
    q, k, v, grad_out = torch.randn(4, 2, 2, 150, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    attend = attend_with(remedies.remedies(64, torch.bfloat16)[name].scheme)

    def run(device):
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        with torch.autocast(device, torch.bfloat16):
            out = attend(*leaves, is_causal=True, enable_gqa=False)
        return [x.cpu().float() for x in (out, *torch.autograd.grad(out, leaves, grad_out.to(device)))]

    for found, wanted in zip(run("cuda"), run("cpu"), strict=True):
        assert relative_l2(found, wanted) < 5e-3


def test_the_split_finds_bias_and_noise_that_were_put_in():
    """Errors of mean −.1 and standard deviation .3 per element and draw, relative to ones."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.ones(200, 50).double()
    errors = -0.1 + 0.3 * torch.randn(DRAWS, 10_000, generator=generator).double()
    error, bias, along = remedies.split(errors, truth)
    assert error == pytest.approx(0.01 + 0.09, rel=0.02)
    assert bias == pytest.approx(0.01, rel=0.06)
    assert along == pytest.approx(-0.1, rel=0.02)
    one = remedies.split(errors[:1], truth)
    assert one[0] == one[1]
    found = combined([(0.25, 0.16, -0.1), (0.25, 0.16, -0.3)])
    assert found == {"error": 0.5, "bias": 0.4, "noise": 0.3, "along": -0.2}
    assert combined([(0.25, -0.01, 0.0)])["bias"] == pytest.approx(-0.1)


def test_costs():
    found = remedies.remedies(64, torch.bfloat16)
    assert {name: own.units for name, own in found.items() if not own.all_int8} == {
        "16_bit": 18,
        "consistent": 13,
    }
    assert {name for name, own in found.items() if own.draws > 1} == {"stochastic", "low_bias_stochastic"}


def test_kernel_times_are_those_that_were_measured(tmp_path):
    rows = [{"setting": "sagebwd smooth V", "commit": "abc", "time": {"4096": 1.01}}]
    rows += [{"setting": "sagebwd paper", "commit": "abc", "time": {"1024": 1.01}}]
    (tmp_path / "error_against_time.json").write_text(json.dumps({"rows": rows}))
    assert remedies.times_of(Results(tmp_path)) == {"smooth_v": {"time": 1.01, "commit": "abc"}}
    assert remedies.times_of(Results(tmp_path / "empty")) == {}


def test_from_a_run_to_its_numbers(train_here, tmp_path):
    """Of four candidates, to save time."""
    names = {"paper", "low_bias", "stochastic", "hadamard"}
    few = ("steps=3", "eval_every=99", "sample_tokens=0", "probe.every=0", "checkpoint_every=99")
    train_here(tmp_path / "run", *few)
    out = tmp_path / "out" / "remedies"
    of_gaussians = ("--sigmas", "2", "--gaussian-heads", "1", "--tokens", "50")
    of_run = (
        "--candidates",
        *sorted(names),
        "--sequences",
        "1",
        "--batches",
        "3",
        "--tokens-per-batch",
        "64",
        "--device",
        "cpu",
    )
    remedies.main([str(tmp_path / "run"), *of_gaussians, *of_run, "--out", str(out)])
    result = json.loads(out.with_suffix(".json").read_text())
    assert set(result["candidates"]) == names
    assert len(result["tensors"]) == 2 * 3 * len(names)
    for row in result["tensors"]:
        assert (row["noise"] > 0) == (row["candidate"] == "stochastic")
        assert row["heads"] == (1 if row["source"].startswith("Gaussian") else 4)
    assert {row["setting"] for row in result["rows"]} == names | {"control"}
    assert {(row["view"], row["layer"]) for row in result["rows"]} == {("raw", None)}
    assert all(0 <= share <= 1 for own in result["refined"].values() for share in own.values())
    text = out.with_suffix(".md").read_text()
    assert "## Gradients of all weights: run" in text
    assert "## Tensors: Gaussian, σ 2" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to measure; name run directories"),
        (["--sigmas", "1", "--batches", "2"], "use --batches 3"),
    ],
)
def test_bad_command_lines_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        remedies.parse_arguments(argv)
    assert message in capsys.readouterr().err
