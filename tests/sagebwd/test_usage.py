"""What ran is counted, said once, and refused where no fallback was asked for."""

import pytest
import torch

import sagebwd
from sagebwd import usage


@pytest.fixture(autouse=True)
def nothing_counted():
    sagebwd.report(clear=True)
    yield
    sagebwd.report(clear=True)


def test_layers_that_ran_alike_share_a_row():
    assert str(sagebwd.report()).startswith("SageBwd: no integration has called it; your own calls")
    for layer in (3, 0, 1, 10, 2, 0):
        usage.record("Attention", "triton", layer)
    usage.record("Attention", "hopper", 4)
    usage.record("call", "reference")
    with pytest.warns(UserWarning, match="Attention runs in full precision, not in INT8: a bias"):
        usage.fall_back("Attention", "a bias", "sdpa", 5)
    usage.fall_back("Attention", "a bias", "sdpa", 6)  # said once
    assert str(sagebwd.report()).splitlines() == [
        "attention  layers   calls  ran",
        "Attention  5-6      2      full precision: a bias",
        "Attention  4        1      INT8 (hopper)",
        "Attention  0-3, 10  6      INT8 (triton)",
        "call                1      INT8 (reference)",
    ]
    rows = sagebwd.report(clear=True).rows
    assert rows[2] == usage.ReportRow("Attention", (0, 1, 2, 3, 10), "triton", "", 6)
    assert sagebwd.report().rows == ()
    with pytest.warns(UserWarning, match="a bias"):
        usage.fall_back("Attention", "a bias", "sdpa")


def test_without_a_fallback_the_call_is_refused_and_not_counted():
    with pytest.raises(NotImplementedError, match=r"does not compute a bias; drop it, or .* fallback='sdpa'"):
        usage.fall_back("Attention", "a bias", "error", fix="drop it")
    assert sagebwd.report().rows == ()


def test_an_unknown_fallback_is_refused():
    usage.check_fallback("sdpa")
    with pytest.raises(ValueError, match="fallback is 'eager'; use 'error' or 'sdpa'"):
        usage.check_fallback("eager")


def test_a_tracer_counts_without_breaking_the_graph():
    def layer(x):
        usage.record("Attention", "triton", 0)
        return x + 1

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for _ in range(3):
        compiled(torch.zeros(2))
    [row] = sagebwd.report().rows
    assert row.name == "Attention"
