"""Imports point one way."""

import ast

import pytest

from tests.cli import ROOT

#: What each room of the house may import of the others.
FLOORS = {
    "common": set(),
    "sagebwd": set(),
    "model": {"common", "sagebwd"},
    "data": {"common"},
    "trainer": {"common", "sagebwd", "model", "data"},
    "scripts": {"common", "sagebwd", "model", "data", "trainer"},
}


@pytest.mark.parametrize("room", FLOORS)
def test_a_room_imports_only_the_rooms_below_it(room):
    allowed = {room, *FLOORS[room]}
    for file in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            used = {name.partition(".")[0] for name in names} & {*FLOORS, "tests", "train", "examples"}
            assert used <= allowed, f"{file.relative_to(ROOT)}, line {node.lineno}"
