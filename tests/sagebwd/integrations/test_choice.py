"""Which kernels run what another library calls."""

import pytest
import torch

from sagebwd import dispatch
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.usage import find_obstacle


def test_a_reason_offers_no_argument_that_the_caller_does_not_have(monkeypatch):
    q = torch.zeros(1, 1, 8, 64)
    assert find_obstacle(q, q, q, 0.1, DEFAULT_CONFIG) is None
    old = dispatch.GPU("a Turing GPU", (7, 5))
    call = dispatch.Call("cuda", old, torch.float16, 64, DEFAULT_CONFIG)
    with pytest.raises(NotImplementedError, match='kernels="reference"'):
        dispatch._fastest(call)
    monkeypatch.setattr(dispatch, "choose", lambda *_, **__: dispatch._fastest(call))
    monkeypatch.setattr(dispatch, "explain", lambda *_, config: dispatch.explain_call(call))
    obstacle = find_obstacle(q, q, q, None, DEFAULT_CONFIG)
    assert obstacle.reason.startswith("this input: a Turing GPU has no kernels: they need an NVIDIA GPU")
    assert "kernels=" not in obstacle.reason
