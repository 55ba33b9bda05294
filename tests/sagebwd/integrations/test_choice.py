"""Which kernels run what another library calls."""

import torch

from sagebwd import dispatch
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.integrations.choice import choose_kernels


def test_a_reason_offers_no_argument_that_the_caller_does_not_have(monkeypatch):
    q = torch.zeros(1, 1, 8, 64)
    assert choose_kernels(q, q, q, 0.1, DEFAULT_CONFIG) == ("reference", "")
    old = dispatch.GPU("a Turing GPU", (7, 5))
    call = dispatch.Call("cuda", old, torch.float16, 64, DEFAULT_CONFIG)
    _, _, message = dispatch._fastest(call)
    assert 'kernels="reference"' in message

    def refuse(*_):
        raise NotImplementedError(message)

    monkeypatch.setattr(dispatch, "choose", refuse)
    monkeypatch.setattr(dispatch, "explain", lambda q, config: dispatch.explain_call(call))
    kernels, reason = choose_kernels(q, q, q, 0.1, DEFAULT_CONFIG)
    assert kernels == ""
    assert reason.startswith("a Turing GPU has no kernels: they need an NVIDIA GPU")
    assert "kernels=" not in reason
