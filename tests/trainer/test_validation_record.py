"""What a validation is logged as, worked out by hand."""

import math

import pytest

from data.corpus import ValidationSet
from data.tokens import TokenShards
from trainer.evaluate import validation_record


def one_set(name, weight):
    return ValidationSet(name=name, weight=weight, tokens=TokenShards([]))


def test_bits_per_byte():
    """A loss of ln 8 nats is 3 bits a token; of 4 bytes each, that is 3/4 of a bit a byte."""
    record = validation_record([one_set(None, 1.0)], [math.log(8)], [4.0])
    assert record == {"val_loss": pytest.approx(math.log(8)), "val_bits_per_byte": pytest.approx(0.75)}


def test_several_sets_are_weighed():
    sets = [one_set("a", 0.25), one_set("b", 0.75)]
    record = validation_record(sets, [math.log(4), math.log(16)], [2.0, 6.0])
    assert record["val_loss"] == pytest.approx(3.5 * math.log(2))
    assert record["val_bits_per_byte"] == pytest.approx(3.5 / 5.0)
    assert record["val_bits_per_byte/a"] == pytest.approx(1.0)
    assert record["val_bits_per_byte/b"] == pytest.approx(4 / 6)
    assert record["val_loss/b"] == pytest.approx(4 * math.log(2))
