"""Structures lie in memory as in the headers."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from sagebwd.kernels.cuda.arguments import CSegments, CTokenTensor
from sagebwd.kernels.cuda.compile import SHARED
from sagebwd.kernels.layout import Segments


@pytest.mark.parametrize(
    ("structure", "size", "offsets"),
    [(CTokenTensor, 40, [0, 8, 16, 24, 32]), (CSegments, 24, [0, 8, 16])],
)
def test_structures_lie_as_in_c(structure, size, offsets):
    assert ctypes.sizeof(structure) == size
    assert [getattr(structure, field[0]).offset for field in structure._fields_] == offsets


def test_structures_have_the_fields_of_the_header():
    header = (SHARED / "layout.cuh").read_text()
    for structure, name in ((CTokenTensor, "TokenTensor"), (CSegments, "Segments")):
        body = re.search(rf"struct {name} {{(.*?)}}", header, re.DOTALL)[1]
        names = re.findall(r"(\w+)\s*[,;]", body)
        assert names == [field[0] for field in structure._fields_]


def test_structures_of_tensors():
    x = torch.zeros(2, 3, 5, 8).transpose(1, 2)
    packed = CTokenTensor.of(x)
    assert packed.data == x.data_ptr()
    assert (packed.stride_b, packed.stride_h, packed.stride_n, packed.stride_d) == x.stride()
    documents = Segments(*(torch.zeros(3, dtype=torch.int32) for _ in range(3)))
    packed = CSegments.of(documents)
    assert packed.start == documents.start.data_ptr()
    assert packed.document == documents.document.data_ptr()
    assert packed.first_block == documents.first_block.data_ptr()
    assert bytes(CSegments.of(None)) == bytes(24)
