"""Command lines in the pages are ones that their programs take. Nothing is trained."""

import importlib
import re

import pytest
from hydra import compose, initialize_config_dir

from data import prepare
from tests.cli import assert_takes
from tests.docs import pages
from tests.docs.pages import PAGES, ROOT
from tests.warm import composed
from trainer import settings

CONFIGS = ROOT / "configs"
COMMANDS = sorted({tuple(words) for words in pages.commands()})
#: Programs of others.
FOREIGN = (("wandb", "login"), ("wandb", "sync"), (".", ".venv/bin/activate"))
LM_EVAL = ("lm_eval", "--model", "hf")
#: What a reader puts in.
PLACEHOLDERS = {
    "attention=NAME": "attention=sagebwd",
    "data=sqlite": "data=text",
    "optimizer=lion": "optimizer=adamw",
}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command(words):
    words = [PLACEHOLDERS.get(word, word) for word in words]
    if tuple(words) in FOREIGN or tuple(words[:3]) == LM_EVAL:
        return
    if "train.py" in words:  # by python, torchrun or in a sweep
        check_overrides(words[words.index("train.py") + 1 :])
    elif words[:2] == ["sbatch", "scripts/slurm.sh"]:
        check_overrides(words[2:])
    elif words[0] == "make":
        assert all(is_target(target) for target in words[1:])
    elif words[:2] == ["pip", "install"]:
        check_extras(words)
    elif words[:2] == ["python", "-m"]:
        check_module(words[2], words[3:])
    else:
        assert words[0] == "python"
        assert (ROOT / words[1]).exists()


def check_module(name, arguments):
    """The module takes these arguments."""
    if name == "pytest":
        paths = [word for word in arguments if word.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths)
    elif name == "http.server":
        pass
    elif name == "data.prepare":
        prepare.register()
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            compose("prepare", overrides=arguments)
    elif name == "scripts.reproduce":
        items = ["table1" if word == "NAME" else word for word in arguments]
        importlib.import_module(name).main(items if "--list" in items else ["--dry-run", *items])
    else:
        assert_takes(name, arguments)


def check_overrides(words):
    """Hydra composes these settings of train.py, of a sweep each value once."""
    words = [word for word in words if word not in ("-m", "--cfg", "job", "--help")]
    settings.check_or_exit(words, CONFIGS)
    for combination in runs_of(words):
        composed(*combination)


def runs_of(words):
    """The command lines of as many runs of a sweep as have each of its values once."""
    pairs = [(key, value) for key, _, value in (word.partition("=") for word in words)]
    swept = [(key, [value] if value[:1] in ("[", "{") else value.split(",")) for key, value in pairs]
    for i in range(max((len(values) for _, values in swept), default=1)):
        yield [f"{key}={values[i % len(values)]}" for key, values in swept]


def is_target(target):
    """Whether make knows it: a rule of the Makefile, or what the pattern rule installs."""
    installed = re.fullmatch(r"\.venv/(\w+)\.done", target)
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    return (
        extra_exists(installed[1]) if installed else re.search(rf"^{re.escape(target)}:", rules, re.MULTILINE)
    )


def check_extras(words):
    """The extras are those of pyproject.toml, and files exist."""
    for word in words[2:]:
        extras = re.search(r"\[(.*)\]", word)
        assert all(extra_exists(extra) for extra in (extras[1].split(",") if extras else ()))
        assert not word.endswith(".txt") or (ROOT / word).exists()


def extra_exists(name):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return re.search(rf"^{name} = \[", extras, re.MULTILINE)


SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)?=[\w.\-]+)`")
GROUPS = {"data", *(folder.name for folder in CONFIGS.iterdir() if folder.is_dir())}
SETTINGS = sorted(
    {
        text
        for page in PAGES
        for text in SETTING.findall(pages.prose(page))
        if text.split("=")[0].split(".")[0] in GROUPS - {"hydra"} and not text.endswith(("=N", "=NAME"))
    }
)


@pytest.mark.parametrize("text", SETTINGS)
def test_setting(text):
    sage = ["attention=sagebwd"] if text.startswith("attention.") else []
    check_overrides([*sage, text])
