"""Kernels under a mask that hides keys: the same bits as each sequence's visible tokens alone."""

from __future__ import annotations

import torch

from tests.sagebwd.kernels.inputs import NAMES

VISIBLE = ([*range(2, 40), 55], range(60))


def test_hidden_tokens_influence_nothing(sample, kernels):
    """Causal, so that they are hidden as queries, too; holes and padding hold NaN."""
    inputs = sample(70, batch=2)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    for row, tokens in enumerate(VISIBLE):
        mask[row, [*tokens]] = True
    poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    found = kernels(*poisoned, key_padding_mask=mask, is_causal=True)
    for row, tokens in enumerate(VISIBLE):
        alone = kernels(*(x[row : row + 1, :, [*tokens]] for x in inputs), is_causal=True)
        for name in NAMES:
            assert torch.equal(found[name][row : row + 1, :, [*tokens]], alone[name]), name
            assert not found[name][row].mT[..., ~mask[row]].any(), name
