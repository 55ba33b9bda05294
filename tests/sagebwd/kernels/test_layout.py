"""Axes: blocks of tokens, which belong to one document each."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from sagebwd.kernels.layout import Axis
from tests.sagebwd.kernels.inputs import clamped


@given(
    n=st.integers(1, 300),
    block=st.sampled_from([32, 64, 128]),
    boundaries=st.lists(st.integers(-10, 310) | st.integers(-(2**62), 2**62), min_size=2, max_size=9),
)
def test_an_axis_holds_every_document_whatever_the_boundaries(n, block, boundaries):
    axis = Axis.of(n, block, torch.tensor(boundaries))
    segments = axis.segments
    assert axis.documents == len(boundaries) - 1
    starts = clamped(boundaries, n)
    assert segments.start.tolist() == [*starts, starts[-1]]  # and an empty document at the end
    blocks = [-(-(stop - start) // block) for start, stop in pairwise(starts)]
    assert segments.document.dtype == segments.start.dtype == segments.first_block.dtype == torch.int32
    assert segments.first_block.diff().tolist() == [*blocks, 0]
    documents = [document for document, count in enumerate(blocks) for _ in range(count)]
    left_over = axis.blocks - len(documents)
    assert left_over >= 0
    assert segments.document.tolist() == documents + [axis.documents] * left_over


def test_an_axis_without_documents():
    assert Axis.of(129, 64, None) == (129, 64, 3, 1, None)
