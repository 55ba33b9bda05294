"""The descriptions of kernel sets agree with the rules of the library."""

import pytest

from sagebwd import dispatch
from tests.sagebwd.kernels.sets import KERNEL_SETS


def test_every_kernel_set_is_tested():
    names = {*dispatch.KERNEL_SETS}
    assert {kernel_set.name for kernel_set in KERNEL_SETS} == names


@pytest.mark.parametrize("described", KERNEL_SETS, ids=str)
def test_what_a_description_names_is_run(described):
    for head_dim in (*described.head_dims, *described.all_head_dims):
        for config in (*described.variants.values(), described.another_config, described.config()):
            assert described.runs(config, head_dim), (config, head_dim)
    assert {*described.main_variants} <= {*described.variants}
    assert described.poisoned_tokens[-1] == described.tokens - 1
