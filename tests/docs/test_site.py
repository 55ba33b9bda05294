"""The site can be built: API names exist, links and anchors hold, nothing comes from the network."""

import re
import runpy
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT


def test_make_docs_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="pip install -e '.[docs]'")
    if shutil.which("make") is None:
        pytest.skip("make stages the pages")
    subprocess.run(["make", "docs-source"], cwd=ROOT, check=True, capture_output=True)
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "docs/api.html").read_text(encoding="utf-8")
    for name in ("sage_attention", "SageConfig.strictly_causal", "explain", "relative_l2"):
        assert f'id="sagebwd.{name}"' in api or f'id="sagebwd.metrics.{name}"' in api, name
    assert not re.search(r":(class|meth|func|mod|data|attr):", api)
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'(?:src|<link[^>]* href)="(https?://[^"]+)"', page.read_text(encoding="utf-8"))
        assert not loaded, page


def test_the_table_of_kernels_is_current(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernel_table.py", "--check"])
    runpy.run_path(str(ROOT / "docs/kernel_table.py"), run_name="__main__")
