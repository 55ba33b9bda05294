"""Build the kernel repository that the Hugging Face `kernels` package loads, from this checkout.

    python -m scripts.build_hub_kernel --out hub

Python then loads it with ``kernels.get_local_kernel(Path("hub"))``.

Writes --out/build/torch-cuda and torch-cpu, each a copy of sagebwd/ that needs no installation:

  - its imports are relative, and of others it imports torch alone (an integration also the library it serves)
  - its operators are in a namespace with a hash of the sources in its name, so that several builds and the
    installed package can be loaded in one process
  - metadata.json says what it is, with a hash of each file

The layout is that of kernels 0.17 (docs/source/kernel-requirements.md there). Nothing is compiled: NVRTC and
Triton do that where the kernel runs. The same sources give the same files. --out/build is replaced.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ends_with_message
from common.terminal import command_parser

PACKAGE = Path(__file__).parents[1] / "sagebwd"
SUFFIXES = (".py", ".cu", ".cuh")

#: By backend: the compute capabilities, those of the Triton kernels; CPU tensors run the reference with both.
BACKENDS: dict[str, dict[str, Any]] = {"cuda": {"archs": ["8.0+PTX"]}, "cpu": {}}
#: The version of what the kernel exports. It rises when that changes. transformers asks for version 1.
VERSION = 1

#: What may be in the folder before: a clone of the repository of an earlier build.
WRITTEN = ("build", "README.md", ".git", ".gitattributes")

#: What the kernel has beyond the package: users cannot import its modules by name, and transformers looks for
#: the functions of flash_attn.
EXPORTS = """
from . import integrations
from .integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ += ["flash_attn_func", "flash_attn_varlen_func", "integrations"]
"""

CARD = """\
---
library_name: kernels
license: apache-2.0
---

Trainable INT8 attention, SageBwd (arXiv 2603.02170), for NVIDIA GPUs since Ampere.

```python
from kernels import get_kernel

sagebwd = get_kernel("OWNER/sagebwd", version=1, trust_remote_code=True)
out = sagebwd.sage_attention(q, k, v, is_causal=True)  # as torch's scaled_dot_product_attention
sagebwd.integrations.transformers.register()  # attn_implementation="sagebwd"
```

In transformers, `attn_implementation="OWNER/sagebwd"` with `allow_all_kernels=True` runs it, too, with its
default settings and through transformers' own code for FlashAttention.
"""


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    parser = command_parser("python -m scripts.build_hub_kernel", __doc__)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where to write the repository"
    )
    out = parser.parse_args(argv).out
    print(*build(out), sep="\n")


def build(out: Path, package: Path = PACKAGE) -> list[Path]:
    """Write the kernel repository, and return the folders of its variants.

    Raises:
        ValueError: a source names the installed package, or ``out`` is a folder of something else.
    """
    if others := sorted(path.name for path in out.glob("*") if path.name not in WRITTEN):
        raise ValueError(f"{out} has other files ({', '.join(others)}); give an empty folder, or a new one")
    files = {path: rewrite(path, package) for path in sources(package)}
    name = package.name
    if (out / "build").exists():
        shutil.rmtree(out / "build")
    variants = []
    for backend in BACKENDS:
        variant = out / "build" / f"torch-{backend}"
        write_variant(variant, name, backend, files)
        variants.append(variant)
    (out / "README.md").write_text(CARD, encoding="utf-8")
    return variants


def sources(package: Path) -> list[Path]:
    """The files of the package, relative to it."""
    return sorted(path.relative_to(package) for path in package.rglob("*") if path.suffix in SUFFIXES)


def write_variant(variant: Path, name: str, backend: str, files: dict[Path, str]) -> None:
    """Write the files with a namespace of their own, and metadata.json."""
    content = "".join(f"{path.as_posix()}\n{text}" for path, text in files.items())
    unique_name = f"_{name}_{backend}_{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    digests = {}
    for path, text in files.items():
        if path == Path("_ops.py"):
            text = with_namespace(text, name, unique_name)
        elif path == Path("__init__.py"):
            text += EXPORTS
        (variant / path).parent.mkdir(parents=True, exist_ok=True)
        (variant / path).write_bytes(text.encode())
        digests[path.as_posix()] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    metadata = {
        "name": name,
        "id": unique_name,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend, **BACKENDS[backend]},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def with_namespace(text: str, name: str, namespace: str) -> str:
    """``_ops.py`` with another namespace."""
    line = f'NAMESPACE = "{name}"\n'
    if line not in text:
        raise ValueError(f"_ops.py has no line {line.strip()}; the operators would clash with the package's")
    return text.replace(line, f'NAMESPACE = "{namespace}"\n')


# --- Imports -----------------------------------------------------------------------------------------------


def rewrite(path: Path, package: Path) -> str:
    """The text of a source, in Python with relative imports for those of the package."""
    text = (package / path).read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    if path != Path("_ops.py"):
        check(path, tree, package.name)
    for module, number in imports_from(tree, package.name):
        relative = "." * len(path.parts) + module[len(package.name) + 1 :]
        lines[number - 1] = lines[number - 1].replace(f"from {module} import", f"from {relative} import")
    return "".join(lines)


def imports_from(tree: ast.Module, name: str) -> Iterator[tuple[str, int]]:
    """(module, line) of each ``from name… import``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and root(node.module) == name:
            yield node.module, node.lineno


def check(path: Path, tree: ast.Module, name: str) -> None:
    """Raise ValueError where a source names the installed package, which need not be there."""
    for node in ast.walk(tree):
        if names_package(node, name):
            raise ValueError(
                f"{path}, line {node.lineno} names the installed package; write `from {name}… import …`, and "
                f"take operators from {name}/_ops.py"
            )


def names_package(node: ast.AST, name: str) -> bool:
    """Whether ``import name``, ``torch.ops.name``, or a string that is a module or an operator of it."""
    if isinstance(node, ast.Import):
        return name in {root(alias.name) for alias in node.names}
    if isinstance(node, ast.Attribute):
        return node.attr == name
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and node.value.startswith((f"{name}.", f"{name}::")) and " " not in node.value


def root(module: str | None) -> str:
    return (module or "").partition(".")[0]


if __name__ == "__main__":
    main()
