"""Reading JSON and safetensors files that others wrote. What is wrong with one is a ValueError that names it.

No file here can run code or make the reader wait: only regular files of the folder are opened.
"""

import json
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

AGAIN = "copy or download it again"
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REQUIRED = object()
#: Types of JSON, in words.
KINDS = {
    int: "a whole number",
    float: "a fraction",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object, {…}",
}


class Fields:
    """The fields of the JSON object in a file."""

    def __init__(self, values: dict[str, Any], path: Path):
        self.values, self.path = values, path

    def get(self, name: str, *kinds: type, default: Any = REQUIRED) -> Any:
        """The field, of one of these types; `default` where it is missing or null.

        Raises ValueError that names file, field, value and fix.
        """
        value = self.values.get(name)
        if value is None and default is not REQUIRED:
            return default
        if name not in self.values:
            raise ValueError(f"{self.path} has no field '{name}'; it is incomplete, {AGAIN}")
        if type(value) not in kinds:
            wanted = " or ".join(KINDS[kind] for kind in kinds)
            raise ValueError(f"{self.path}: {name} is {shown(value)}, not {wanted}; correct it, or {AGAIN}")
        return value


def shown(value: object) -> str:
    """A JSON value as a message prints it, cut off where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_fields(path: Path) -> Fields:
    """The JSON object in a file. Raises FileNotFoundError without a file, ValueError for anything else."""
    check_regular(path)
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}); {AGAIN}"
        ) from None
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON that one can read (nested too deeply); {AGAIN}") from None
    except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON ({error}); {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {shown(values)}, not an object, {{…}}; {AGAIN}")
    return Fields(values, path)


def check_regular(path: Path) -> None:
    """Raise ValueError for what is no file: to open a FIFO would wait for ever.

    A symbolic link to a file is one: the Hugging Face cache is made of them.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file; replace it by the file itself")


def read_shards(folder: Path, index: str) -> dict[str, Tensor]:
    """The weights of all files that an index names, as :func:`read_tensors` reads them.

    Raises ValueError for a file outside the folder.
    """
    path = folder / index
    weight_map = read_fields(path).get("weight_map", dict)
    if not weight_map:
        raise ValueError(f"{path}: weight_map is empty; {AGAIN}")
    for weight, name in weight_map.items():
        _check_file_name(path, weight, name)
    shards = {name: read_tensors(folder / name) for name in sorted(set(weight_map.values()))}
    if sum(map(len, shards.values())) != len(weight_map):
        raise ValueError(f"{path}: the files hold other weights than weight_map says; {AGAIN}")
    return {weight: tensor for tensors in shards.values() for weight, tensor in tensors.items()}


def _check_file_name(path: Path, weight: str, name: object) -> None:
    if (
        not isinstance(name, str)
        or Path(name).name != name
        or not name.endswith(".safetensors")
        or "\0" in name
    ):
        raise ValueError(
            f"{path}: weight_map.{weight} is {shown(name)}, not the name of a .safetensors file in that "
            f"folder; correct it, or {AGAIN}"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ValueError unless all are finite floating-point numbers."""
    check_regular(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {AGAIN}") from error
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor)
    return tensors


def _check_tensor(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in WEIGHT_DTYPES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_DTYPES)
        raise ValueError(
            f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}, supported are {supported}; "
            "convert the weights before"
        )
    finite = tensor.float().isfinite()
    if not finite.all():
        bad = tensor.numel() - int(finite.sum())
        raise ValueError(
            f"{path}: {name} has {bad} of {tensor.numel()} values that are NaN or infinite in float32; the "
            "training that wrote it diverged, or the file is damaged: take weights of an earlier checkpoint, "
            f"or {AGAIN}"
        )
