"""The part of cuDNN's graph API that scripts.bench.cudnn_fp8 uses, in PyTorch: FP8 with a scale a tensor."""

from __future__ import annotations

from types import SimpleNamespace

import torch

E4M3 = torch.float8_e4m3fn


def rounded(x, dtype=E4M3):
    """To FP8, beyond its range to its largest value, as the hardware does."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(x.dtype)


def hide_later(x):
    return x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


def sdpa_fp8(of, scale, is_causal):
    """The results by name, from what is bound by name."""
    q, k, v = (of[name].double() * of[f"descale_{name}"].double() for name in "qkv")
    s = scale * q @ k.mT
    s = hide_later(s) if is_causal else s
    largest = s.amax(-1, keepdim=True)
    p = (s - largest).exp()
    total = p.sum(-1, keepdim=True)
    o = rounded(p * of["scale_s"]) @ v * of["descale_s"] / total
    return {
        "o": rounded(o * of["scale_o"]),
        "stats": largest + total.log(),
        "amax_s": torch.ones(1),
        "amax_o": o.abs().amax(),
    }


def sdpa_fp8_backward(of, scale, is_causal, grad_dtype=E4M3):
    q, k, v, o, do = (
        of[name].double() * of[f"descale_{name}"].double() for name in ("q", "k", "v", "o", "dO")
    )
    s = scale * q @ k.mT
    p = ((hide_later(s) if is_causal else s) - of["stats"]).exp()
    dv = (rounded(p * of["scale_s"]) * of["descale_s"]).mT @ do
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    ds8 = rounded(ds * of["scale_dP"], grad_dtype) * of["descale_dP"]
    grads = {"dQ": ds8 @ k, "dK": ds8.mT @ q, "dV": dv}
    largest = {f"amax_{name}": x.abs().amax() for name, x in {**grads, "dP": ds}.items()}
    return {name: rounded(x * of[f"scale_{name}"]) for name, x in grads.items()} | largest


class Port:
    """A tensor of a graph."""

    def __getattr__(self, name):
        assert name.startswith("set_")
        return lambda value: self


class Graph:
    def __init__(self, **settings):
        self.executed = 0

    def tensor(self, *, name, dim, stride, data_type):
        return Port()

    def sdpa_fp8(self, *, attn_scale, use_causal_mask, generate_stats, **ports):
        assert generate_stats
        self._node(sdpa_fp8, ports, attn_scale, use_causal_mask)
        return self.found

    def sdpa_fp8_backward(self, *, attn_scale, use_causal_mask, **ports):
        self._node(sdpa_fp8_backward, ports, attn_scale, use_causal_mask)
        return self.found

    def _node(self, compute, ports, *settings):
        self.compute, self.ports, self.settings = compute, ports, settings
        self.found = [Port() for _ in range(4 if compute is sdpa_fp8 else 7)]

    def get_workspace_size(self):
        return 0

    def execute(self, bound, workspace, handle):
        self.executed += 1
        of = {name: bound[port] for name, port in self.ports.items()}
        assert len(bound) == len(of) + len(self.found)
        for port, x in zip(self.found, self.compute(of, *self.settings).values(), strict=True):
            bound[port].copy_(x)

    def __getattr__(self, name):
        assert name in (
            "validate",
            "build_operation_graph",
            "create_execution_plans",
            "check_support",
            "build_plans",
        )
        return lambda *arguments: None


def make_module():
    """To stand in sys.modules as "cudnn"."""
    names = SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32")
    modes = SimpleNamespace(A="a", FALLBACK="fallback")
    return SimpleNamespace(
        data_type=names,
        heur_mode=modes,
        pygraph=Graph,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
    )
