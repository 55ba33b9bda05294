"""Two checkouts compared, on a CPU: this one, and copies of it."""

import json
import shutil

import pytest

from scripts.bench import changes

SMALL = ["--device", "cpu", "--rounds", "1"]
for option, value in {"head-dims": 32, "lengths": 70, "tokens": 70, "width": 64, "repetitions": 2}.items():
    SMALL += [f"--{option}", str(value)]


@pytest.fixture
def other(tmp_path):
    """A checkout that has nothing but sagebwd."""
    shutil.copytree(
        changes.ROOT / "sagebwd", tmp_path / "sagebwd", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def test_the_same_code_gives_the_same_bits(other, capsys):
    out = other / "found.json"
    pairs = changes.main([str(other), *SMALL, "--configs", "default", "paper", "--out", str(out)])
    assert [pair.row()[-2:] for pair in pairs] == [["same", ""]] * 4
    table = capsys.readouterr().out
    assert "fastest, paper, D 32, causal, N 70" in table
    written = json.loads(out.read_text())
    assert [len(pair["before"]) for pair in written["pairs"]] == [1] * 4
    assert written["pairs"][0]["after"][0]["backward"] > 0


def test_other_code_gives_other_bits_or_its_error(other):
    file = other / "sagebwd" / "attention.py"
    text = file.read_text()
    assert "return_lse=return_lse)" in text
    file.write_text(text.replace("scale = q.shape[-1] ** -0.5 if", "scale = 0.9 * q.shape[-1] ** -0.5 if"))
    pairs = changes.main([str(other), *SMALL, "--masks", "full"])
    assert [pair.row()[-2:] for pair in pairs] == [["differ", ""]]
    pairs = changes.main([str(other), *SMALL, "--masks", "full", "--kernels", "hopper"])
    assert "ValueError" in pairs[0].row()[-1]


def test_a_folder_without_sagebwd_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        changes.main([str(tmp_path)])
    assert "holds no sagebwd/; make a checkout: git worktree add" in capsys.readouterr().err


def test_a_process_that_fails_says_why(other):
    (other / "sagebwd" / "__init__.py").write_text("raise ImportError('half a checkout')")
    with pytest.raises(RuntimeError, match="half a checkout"):
        changes.main([str(other), *SMALL])


def test_what_does_not_compile_is_left_to_the_measurement(other, tmp_path):
    """There its error is shown."""
    ran = tmp_path / "ran"
    (other / "sagebwd" / "__init__.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise ImportError")
    arguments = changes.parse_arguments([str(other), *SMALL])
    changes.compile_all([case for _, case in changes.named_cases(arguments)], (other,))
    assert ran.exists()
