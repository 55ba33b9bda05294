"""How the threads of a CPU wait is chosen before torch is loaded, if the user did not choose it."""

import os
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def loaded(monkeypatch, **chosen):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(ROOT / "trainer" / "__init__.py"))
    return os.environ.get("OMP_WAIT_POLICY")


def test_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    assert loaded(monkeypatch, OMP_WAIT_POLICY="active") == "active"
    assert loaded(monkeypatch, GOMP_SPINCOUNT="1000") is None
    assert loaded(monkeypatch) == "passive"


def test_it_comes_before_torch():
    """train.py imports trainer before what loads torch, which neither package's own file does."""

    def imported(file):
        return re.findall(
            r"^ *(?:from|import) (\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE
        )

    ours = {"torch", "data", "model", "sagebwd", "trainer", "scripts", "common"}
    names = [name for name in imported("train.py") if name in ours]
    assert names[:2] == ["trainer", "common"]
    assert not ours & {
        *imported("trainer/__init__.py"),
        *imported("common/__init__.py"),
        *imported("common/errors.py"),
    }
