"""An experiment: `paper()` with one part of its backward changed, to find which part raises the loss.

The forward is always that of `paper()`. dV comes from one SageConfig, dQ and dK from another. Neither depends
on how the other is computed: P is quantized for dV alone, dS for dQ and dK alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.backends import Attention, Backend
from sagebwd import SageConfig, sage_attention

PAPER = SageConfig.paper()
PER_ROW = replace(PAPER, granularity="row")  # the same tiles

#: What ABLATION_DS may be.
CHANGES = ("random_sign", "stochastic", "zero_rows", "zero_elements", "other_elements")


def in_16_bit(*products: str) -> SageConfig:
    return replace(PAPER, int8_matmuls=[name for name in PAPER.int8_matmuls if name not in products])


#: By arm, the settings of dV and those of dQ and dK.
ARMS = {
    "paper": (PAPER, PAPER),
    "ds_per_row": (PAPER, PER_ROW),
    "p_per_row": (PER_ROW, PAPER),
    "dv_16_bit": (in_16_bit("dv"), PAPER),
    "dq_dk_16_bit": (PAPER, in_16_bit("dq", "dk")),
    "dq_16_bit": (PAPER, in_16_bit("dq")),
    # These need ABLATION_DS with the same name; see sagebwd/kernels/triton/device.py.
    **dict.fromkeys(CHANGES, (PAPER, in_16_bit("dq", "dk"))),
}


@dataclass
class Settings(Attention):
    """Which of ARMS."""

    arm: str = "paper"

    def build(self, *, device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool) -> Backend:
        for_dv, for_dq_dk = ARMS[self.arm]

        def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
            both = {"is_causal": is_causal, "enable_gqa": enable_gqa}
            out = sage_attention(q.detach(), k.detach(), v, config=for_dv, **both)
            again = sage_attention(q, k, v.detach(), config=for_dq_dk, **both)
            return out + (again - again.detach())  # which adds zeros, and the gradients of q and k

        return Backend(attend, f"ablation of paper(): {self.arm}", title="ablation")
