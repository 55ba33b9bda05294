"""scripts.bench.tables: the speed of presets over FlashAttention-2, from files of results."""

import gzip
import json
from dataclasses import asdict, replace

import pytest

from scripts.bench.registry import Shape
from scripts.bench.tables import Kind, Row, speed_class, speeds

SHAPE = Shape(1, 32, 4096, 64, True)
HOPPER_64 = Kind("default", "hopper", "9.0", 64)


def row(name, over, shape=SHAPE, mode="both", **settings):
    return Row(name, shape, mode, speedup={"FlashAttention-2": over} if over else {}, **settings)


def write(folder, name, date, *rows, gpu="NVIDIA H100", capability="9.0"):
    hardware = {"name": gpu, "compute_capability": capability}
    result = {"hardware": hardware, "date": date, "rows": [asdict(x) for x in rows]}
    (folder / name).parent.mkdir(exist_ok=True)
    text = json.dumps(result).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)


def test_of_a_shape_the_newest_counts_and_each_gpu(tmp_path):
    longer = replace(SHAPE, tokens=16384)
    write(tmp_path, "speed/bench_b.json.gz", "2026-01-01", row("sagebwd", 1.1), row("sagebwd", 1.2, longer))
    write(tmp_path, "speed/bench_a.json.gz", "2026-01-02", row("sagebwd", 1.3))
    write(tmp_path, "speed/bench_c.json.gz", "2025-01-01", row("sagebwd", 1.9), gpu="NVIDIA H200")
    assert {kind: sorted(over) for kind, over in speeds(tmp_path).items()} == {HOPPER_64: [1.2, 1.3, 1.9]}


def test_what_does_not_count_is_left_out(tmp_path):
    others = (
        row("sagebwd", 2.0, replace(SHAPE, tokens=2048)),
        row("sagebwd", 2.0, replace(SHAPE, left=128, right=0)),
        row("sagebwd", 2.0, mode="forward"),
        row("sagebwd", None),
        row("sagebwd P in 16 bit", 2.0),
        row("sagebwd accurate", 2.0),  # a preset that is gone
        row("cuDNN", 2.0),
    )
    write(tmp_path, "speed/bench_a.json.gz", "2026-01-01", *others, row("sagebwd", 1.5))
    (tmp_path / "speed/bench_training.json").write_text(json.dumps({"rows": [{"shape": "325M"}]}))
    assert speeds(tmp_path) == {HOPPER_64: [1.5]}


def test_a_speed_is_of_the_kernels_that_ran(tmp_path):
    """As recorded, else as the name says, else as is known of the file, else as they are chosen today."""
    rows = (
        row("sagebwd consistent", 1.1, kernels="triton"),
        row("sagebwd paper (ampere)", 1.2),
        row("sagebwd paper", 1.3),
        row("sagebwd S alone in INT8", 1.4),
    )
    write(tmp_path, "speed/bench_ampere_h100.json.gz", "2026-01-01", *rows)
    write(tmp_path, "gpus/mine.json", "2026-01-01", row("sagebwd", 1.5), gpu="RTX 4090", capability="8.9")
    assert speeds(tmp_path) == {
        Kind("consistent", "triton", "9.0", 64): [1.1],
        Kind("paper", "ampere", "9.0", 64): [1.2],
        Kind("paper", "triton", "9.0", 64): [1.3],
        Kind("int8_scores", "hopper", "9.0", 64): [1.4],
        Kind("default", "ampere", "8.9", 64): [1.5],
    }


@pytest.mark.parametrize(
    ("over", "name"),
    [
        ([], "not measured"),
        ([1.1, 2.0], "faster"),
        ([1.09, 0.92], "as fast"),
        ([0.5, 0.9], "slower"),
        ([1.3, 1.0], "as fast to faster"),
        ([1.3, 0.3, 1.0], "slower to faster"),
    ],
)
def test_classes(over, name):
    assert speed_class(over) == name
