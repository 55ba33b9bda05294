"""Libraries whose import gives SageBwd, in this process.

The folders of ``stand_ins`` hold modules with the names of other libraries' modules. Such a folder is first
in ``sys.path``, so that ``import`` finds them there.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

from sagebwd.config import DEFAULT_CONFIG, SageConfig
from sagebwd.validation import check_config

FOLDERS = Path(__file__).parent / "stand_ins"

#: By folder: what is imported.
LIBRARIES = {
    "flash_attn": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "sageattention": "sageattention",
}

#: By folder of ``stand_ins/hub``: the kernels of the Hugging Face Hub that it replaces.
HUB_KERNELS = {
    "flash_attn": ("kernels-community/flash-attn2",),
    "flash_attn_3": ("kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"),
}

_configs: dict[str, SageConfig] = {}


def config_of(name: str) -> SageConfig:
    """What calls of a library that pass no ``config`` take."""
    return _configs.get(name, DEFAULT_CONFIG)


def is_imported_from_elsewhere(name: str) -> bool:
    """Whether a library of :data:`LIBRARIES` is imported and is not SageBwd."""
    module = sys.modules.get(LIBRARIES[name])
    return module is not None and not str(getattr(module, "__file__", None)).startswith(str(FOLDERS / name))


def install(name: str, config: SageConfig = DEFAULT_CONFIG) -> None:
    """Make ``import`` of a library give SageBwd in this process, and log so once.

    Call it before anything imports the library. Called again, it sets another ``config``. Programs also find
    the library's metadata (flash_attn 2.8.3, sageattention 2.2.0), ``flash_attn.bert_padding`` and
    ``flash_attn.cute`` (FlashAttention-4). Other modules, such as ``flash_attn.layers``, are those of an
    installed flash_attn.

    Args:
        name: of :data:`LIBRARIES`.
        config: what is quantized, and how, in all calls that do not pass a ``config`` themselves.

    Raises:
        ValueError: ``config`` is not a SageConfig.
        RuntimeError: the library is imported already, and its functions may be in use.
    """
    check_config(config)
    library, folder = LIBRARIES[name], str(FOLDERS / name)
    if is_imported_from_elsewhere(name):
        found = getattr(sys.modules[library], "__file__", None)
        raise RuntimeError(
            f"{library} is already imported from {found or 'elsewhere'}; install SageBwd in its place before "
            "anything imports it"
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)
        logging.getLogger(__name__).warning("`import %s` now gives SageBwd, which trains", library)
    _configs[name] = config


def hub_kernels(name: str) -> str:
    """For ``LOCAL_KERNELS``, which tells the library ``kernels`` where a kernel is that it need not load."""
    folder = FOLDERS / "hub" / name
    return ":".join(f"{kernel}={folder}" for kernel in HUB_KERNELS.get(name, ()))


def uninstall(name: str) -> None:
    """Undo :func:`install`. What a program imported in the meantime keeps running SageBwd."""
    library, folder = LIBRARIES[name], str(FOLDERS / name)
    _configs.pop(name, None)
    if folder in sys.path:
        sys.path.remove(folder)
        for module in [x for x in sys.modules if x == library or x.startswith(f"{library}.")]:
            del sys.modules[module]
        importlib.invalidate_caches()
