"""Bits per byte count the bytes of the tokens that a validation predicts, and of no other."""

import numpy as np
import pytest
import torch

from data.loader import evaluation_batches, evaluation_targets
from data.tokens import TokenShards


@pytest.mark.parametrize("sequences", [3, 50])
def test_targets_are_those_of_all_batches(sequences):
    tokens = TokenShards(np.split(np.arange(100, 185, dtype=np.uint16), [30, 31]))
    batches = evaluation_batches(tokens, context=7, sequences=sequences, micro_batch=4)
    wanted = torch.cat([targets.flatten() for _, targets in batches])
    found = evaluation_targets(tokens, context=7, sequences=sequences)
    assert found.tolist() == wanted.tolist()
    assert found[0] == 101
