import math

import torch

from trainer.distributed import Ranks
from trainer.divergence import names_not_finite


def test_tensors_that_are_not_finite_are_named():
    tensors = {name: torch.ones(2, 3) for name in ("nan", "inf", "fine", "none")}
    tensors["nan"][1, 2], tensors["inf"][0, 0], tensors["fine"][0, 1] = math.nan, -math.inf, 3e38
    tensors["none"] = torch.ones(0)
    assert names_not_finite(tensors, Ranks(0, 1, torch.device("cpu"))) == ["nan", "inf"]
