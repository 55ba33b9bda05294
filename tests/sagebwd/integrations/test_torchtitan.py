"""torchtitan's attention by torch's varlen_attn, with a stand-in for the package.

With torchtitan 0.3.0 itself, its llama3 under FSDP2 and tensor parallelism was tried by hand: results/log.md.
"""

import importlib
import sys
import types
from dataclasses import dataclass, fields

import pytest
import torch
from torch import nn
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

import sagebwd
from sagebwd import SageConfig, sage_attention
from sagebwd.integrations import torch_flash

N, HEADS, D = 40, 2, 16


class VarlenAttention(nn.Module):
    """As torchtitan's: on Hopper it activates FlashAttention-3."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config):
        super().__init__()
        self.window_size = config.window_size
        attention.activate_flash_attention_impl("FA3")

    def forward(self, q, k, v, boundaries):
        return varlen_attn(q, k, v, boundaries, boundaries, N, N, window_size=self.window_size)


def derive(source, target, **changes):
    return target(**{field.name: getattr(source, field.name) for field in fields(source)} | changes)


@pytest.fixture
def torchtitan(monkeypatch):
    """The adapter, with the stand-in."""
    contents = {
        "torchtitan": {},
        "torchtitan.config": {"derive": derive, "override": lambda **_: lambda factory: factory},
        "torchtitan.models.common.attention": {"VarlenAttention": VarlenAttention},
        "torchtitan.protocols.module": {"Module": nn.Module},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sagebwd.integrations.torchtitan", raising=False)
    yield importlib.import_module("sagebwd.integrations.torchtitan")
    sys.modules.pop("sagebwd.integrations.torchtitan", None)
    attention.restore_flash_attention_impl()


@pytest.fixture
def flash_3():
    """Something else that replaces torch's FlashAttention, and is no SageBwd."""
    registry = sys.modules["torch.nn.attention._registry"]
    known = dict(registry._FLASH_ATTENTION_IMPLS)
    attention.register_flash_attention_impl("FA3", register_fn=lambda: types.SimpleNamespace(remove=int))
    yield
    registry._FLASH_ATTENTION_IMPLS.clear()
    registry._FLASH_ATTENTION_IMPLS.update(known)


def test_the_override_keeps_sagebwd_active_and_trains(torchtitan, flash_3):
    config = torchtitan.sagebwd(VarlenAttention.Config(window_size=(15, 0)), preset="low_bias")
    layers = [torchtitan.SageAttention(config) for _ in range(2)]
    assert attention.current_flash_attention_impl() == "sagebwd-low_bias"
    q, k, v = (torch.randn(N, HEADS, D, requires_grad=True) for _ in range(3))
    boundaries = torch.tensor([0, 13, N], dtype=torch.int32)
    override = torch_flash.Override(SageConfig.low_bias(), "CPU")  # there are no operators for the CPU
    try:
        found = layers[1](q, k, v, boundaries)
        (dq,) = torch.autograd.grad(found.sum(), q)
    finally:
        override.remove()
    settings = {"window_size": (15, 0), "cu_seqlens": boundaries, "config": SageConfig.low_bias()}
    expected = sage_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, **settings)
    torch.testing.assert_close(found, expected[0].transpose(0, 1))
    (wanted,) = torch.autograd.grad(expected.sum(), q)
    torch.testing.assert_close(dq, wanted, atol=2e-3, rtol=0.02)
    with pytest.raises(ValueError, match="preset is 'best'; use one of default, low_bias"):
        torchtitan.sagebwd(VarlenAttention.Config(), preset="best")


def test_it_is_said_when_something_else_takes_over(torchtitan, flash_3):
    torchtitan.SageAttention(torchtitan.sagebwd(VarlenAttention.Config()))
    with pytest.warns(UserWarning, match="in full precision, not in INT8: other code activated 'FA3'"):
        VarlenAttention(VarlenAttention.Config())
    assert attention.current_flash_attention_impl() == "FA3"
    assert [row.reason for row in sagebwd.report(clear=True).rows] == ["other code activated 'FA3'"]
    torchtitan.SageAttention(torchtitan.sagebwd(VarlenAttention.Config()))
    torchtitan.SageAttention(torchtitan.sagebwd(VarlenAttention.Config(), preset="paper"))
    attention.restore_flash_attention_impl()
    assert sagebwd.report().rows == ()  # these were asked for
    attention.activate_flash_attention_impl("FA3")
