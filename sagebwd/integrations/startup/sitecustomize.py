"""Imported by every Python process of a program that ``python -m sagebwd.run`` starts, before the program.

Python itself imports a module of this name, and finds this one because its folder is on PYTHONPATH. So the
program runs in a plain interpreter, and the processes that it starts are reached, too.

torch is not imported here, because a program may set environment variables before it imports torch. Attention
is replaced right after that import; the folders of ``stand_ins`` are on ``sys.path`` from the start.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


class _AfterTorch:
    """A finder that calls ``sagebwd.run.patch_process`` right after torch is imported.

    It also finds sagebwd, which the program itself may not find, from another folder or interpreter.
    """

    has_patched = False

    def find_spec(self, name, path, target=None):
        if name not in ("torch", "sagebwd"):
            return None
        if name == "sagebwd":
            spec = PathFinder.find_spec(name, [str(Path(__file__).parents[3])])
        else:
            others = [finder for finder in sys.meta_path if finder is not self]
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module):
                execute(module)
                self._patch(name)

            spec.loader.exec_module = execute_and_patch
        return spec

    def _patch(self, name):
        if name == "torch" and "sagebwd" in sys.modules:
            return  # which imports torch, and can be used when it is itself imported
        if not self.has_patched:
            self.has_patched = True
            from sagebwd.run import patch_process

            patch_process()


def _start():
    folder = Path(__file__).parent
    _, *chosen = os.environ["SAGEBWD_RUN"].split(",")
    at = sys.path.index(str(folder))
    sys.path[at : at + 1] = [str(folder.parent / "stand_ins" / name) for name in chosen if name != "sdpa"]
    sys.meta_path.insert(0, _AfterTorch())


def _import_next():
    """The module of this name that Python would have imported, if there is one."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if "SAGEBWD_RUN" in os.environ:  # a program may hand on PYTHONPATH without it
    _start()
_import_next()
