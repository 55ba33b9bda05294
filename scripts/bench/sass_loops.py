"""What a compiled kernel executes for each tile, read from its machine code.

A loop over tiles is an outermost loop with tensor-core instructions; each kind of warps has one. Its body is
followed along one path: the one that multiplies, copies and loads the most and, among those, executes the
fewest instructions. That is a tile without a mask, in the middle of the loop, whose running maximum does not
change. Loops inside the body are counted as often as their counters say. Needs no GPU.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scripts.bench.sass import Instruction, parse

TENSOR = ("HMMA", "IMMA")
#: Instructions that a path does not leave out if there is a path with them: products, copies, additions.
WANTED = (*TENSOR, "LDGSTS", "RED", "REDG")
#: Iterations after which a loop counts as endless.
MOST_ITERATIONS = 4096

# --- Blocks and loops ---------------------------------------------------------------------------------------


@dataclass
class Block:
    """Instructions that are executed one after the other.

    target: the block that the last instruction jumps to, if it is a jump within the kernel.
    successors: the blocks that may follow.
    """

    instructions: list[Instruction]
    target: int | None = None
    successors: list[int] = field(default_factory=list)


class Loop(NamedTuple):
    """A natural loop: its first block, and all of its blocks."""

    header: int
    blocks: frozenset[int]


def blocks_of(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    """The basic blocks, in the order of their addresses, the first being the entry."""
    starts = {0, *labels.values()}
    starts |= {i + 1 for i, found in enumerate(instructions) if found.base in ("BRA", "EXIT", "CALL", "RET")}
    order = sorted(start for start in starts if start < len(instructions))
    index = {start: i for i, start in enumerate(order)}
    blocks = []
    for i, (start, stop) in enumerate(zip(order, [*order[1:], len(instructions)], strict=True)):
        block = Block(instructions[start:stop])
        last = block.instructions[-1]
        # A branch for diverged warps is not taken, and a call to another function returns.
        is_jump = last.base in ("BRA", "CALL") and ".DIV" not in last.opcode
        if is_jump and not (last.target or "$").startswith("$"):
            block.target = index[labels[last.target]]
            block.successors.append(block.target)
        is_end = last.base in ("EXIT", "RET") or block.target is not None
        if (not is_end or last.predicates) and i + 1 < len(order):
            block.successors.append(i + 1)
        blocks.append(block)
    return blocks


def loops_of(blocks: list[Block]) -> list[Loop]:
    """All natural loops that can be reached; back edges to one header make one loop."""
    reached, waiting = {0}, [0]
    while waiting:
        found = {*blocks[waiting.pop()].successors} - reached
        reached |= found
        waiting += found
    before: dict[int, list[int]] = {i: [] for i in reached}
    for i in reached:
        for successor in blocks[i].successors:
            before[successor].append(i)
    bodies: dict[int, set[int]] = {}
    for i in sorted(reached):
        for header in (successor for successor in blocks[i].successors if successor <= i):
            body, waiting = bodies.setdefault(header, {header}), [i]
            while waiting:
                if (found := waiting.pop()) not in body:
                    body.add(found)
                    waiting += before[found]
    return [Loop(header, frozenset(body)) for header, body in bodies.items()]


# --- What is executed ---------------------------------------------------------------------------------------


class Program:
    """A kernel, and what a warp executes of it. Counts are {opcode: how often}."""

    def __init__(self, text: str, kernel: str, warps: Sequence[int] = (1,)) -> None:
        """Parse what :func:`scripts.bench.sass.disassemble` returned.

        Args:
            warps: of each kind in a CTA. Those that multiply the most have the lowest numbers.

        Raises:
            ValueError: there is no such kernel, or it has not one loop over tiles for each kind of warps.
        """
        self.blocks = blocks_of(*parse(text, kernel))
        self.loops = loops_of(self.blocks)
        outermost = (x for x in self.loops if not any(x.blocks < other.blocks for other in self.loops))
        #: Those over tiles, the one with the most tensor-core instructions first.
        self.tile_loops = sorted(filter(self._products, outermost), key=self._products, reverse=True)
        if len(self.tile_loops) != len(warps):
            found = f"{len(self.tile_loops)} outermost loops with tensor-core instructions"
            raise ValueError(f"{kernel} has {found}, but {len(warps)} kinds of warps")
        self.warps = tuple(warps)

    def per_iteration(self, kind: int = 0) -> Counter[str]:
        """One iteration of the loop over tiles. Raises ValueError as :meth:`iterations`.

        Args:
            kind: of warps, an index of ``warps``.
        """
        loop = self.tile_loops[kind]
        return self._path(loop.header, loop.blocks, kind)

    def outside(self, kind: int = 0) -> Counter[str]:
        """All before and after the loop over tiles. Argument and errors as :meth:`per_iteration`."""
        return self._path(0, frozenset(range(len(self.blocks))), kind, through=self.tile_loops[kind])

    def iterations(self, loop: Loop, kind: int) -> int:
        """How often the first thread of a kind of warps runs a loop that counts in integers.

        1 if it waits for a value in global memory, or counts up to a variable outside the loop over tiles.

        Raises:
            ValueError: it lies in the loop over tiles and counts in another way.
        """
        blocks = [self.blocks[i] for i in sorted(loop.blocks)]
        code = [instruction for block in blocks for instruction in block.instructions]
        before = (instruction for block in self.blocks[: loop.header] for instruction in block.instructions)
        counters = Counters(before, code, 32 * sum(self.warps[:kind]))
        for iteration in range(1, MOST_ITERATIONS):
            goes_on = self._goes_on(blocks, loop, counters)
            if goes_on is False:
                return iteration
            if goes_on is None:
                break
        is_for_tiles = any(loop.blocks < other.blocks for other in self.tile_loops)
        if any(instruction.base == "LDG" for instruction in code) or not is_for_tiles:
            return 1
        raise ValueError(f"the loop at {code[0].address:#x} does not count up to a constant")

    def _goes_on(self, blocks: list[Block], loop: Loop, counters: Counters) -> bool | None:
        """Execute an iteration. Whether another one follows; None if that cannot be told."""
        for block in blocks:
            for instruction in block.instructions:
                counters.execute(instruction)
            last = block.instructions[-1]
            if block.target == loop.header:
                return counters.holds(last)
            if block.target is not None and block.target not in loop.blocks and counters.holds(last):
                return False
        return None

    def _products(self, loop: Loop) -> int:
        found = (instruction for i in loop.blocks for instruction in self.blocks[i].instructions)
        return sum(instruction.base in TENSOR for instruction in found)

    def _path(
        self, start: int, within: frozenset[int], kind: int, through: Loop | None = None
    ) -> Counter[str]:
        """Counts of the path that the module describes: from ``start`` back to it, or to the kernel's end.

        Args:
            through: a loop over tiles that the path to the kernel's end goes through, counted as nothing.
        """
        inner = [loop for loop in self.loops if loop.blocks < within]
        outermost = [loop for loop in inner if not any(loop.blocks < other.blocks for other in inner)]
        loop_of = {block: loop for loop in outermost for block in loop.blocks}

        @functools.cache
        def best(block: int, is_done: bool) -> Counter[str] | None:
            """From this block, or the loop that begins with it, on; None: no path ends as wanted.

            is_done: the path has been through the loop that it goes through.
            """
            loop = loop_of.get(block)
            own = loop.blocks if loop else {block}
            is_done |= loop is not None and loop == through
            successors = {s for i in own for s in self.blocks[i].successors if not loop or s not in own}
            ways = [
                Counter() if through is None and s == start else best(s, is_done)
                for s in successors if s in within
            ]  # fmt: skip
            if through is not None and not successors and is_done:
                ways.append(Counter())
            found = [way for way in ways if way is not None]
            if not found:
                return None
            own_counts = Counter() if loop and loop == through else self._counts(block, loop, kind)
            return own_counts + max(found, key=_preference)

        counts = best(start, is_done=False)
        if counts is None:
            raise ValueError("there is no path through the machine code")
        return counts

    def _counts(self, block: int, loop: Loop | None, kind: int) -> Counter[str]:
        """Of a block, or of a whole loop."""
        if loop is None:
            return Counter(instruction.counted_as for instruction in self.blocks[block].instructions)
        once = self._path(loop.header, loop.blocks, kind)
        return Counter({opcode: self.iterations(loop, kind) * count for opcode, count in once.items()})


def _preference(counts: Counter[str]) -> tuple[int, int]:
    wanted = sum(count for opcode, count in counts.items() if opcode.split(".")[0] in WANTED)
    return wanted, -counts.total()


# --- Counters of loops --------------------------------------------------------------------------------------

COMPARISONS = {"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le} | {
    "GT": operator.gt,
    "GE": operator.ge,
}
PREDICATE = re.compile(r"!?U?P[\dT]")
IMAD_MODIFIERS = ([], ["MOV", "U32"], ["SHL", "U32"], ["IADD"])


def signed(value: int) -> int:
    """The 32 lowest bits as a signed integer."""
    return (value + 2**31) % 2**32 - 2**31


class Counters:
    """Integer registers and predicates, as far as they follow from constants and the number of the thread.

    None where they do not. Registers are signed, 32 bits.
    """

    def __init__(self, before: Iterable[Instruction], loop: Iterable[Instruction], thread: int) -> None:
        """At the beginning of a loop. A register that the loop updates is 0 if nothing else is known.

        Args:
            before: the instructions at lower addresses.
            loop: those of the loop.
            thread: its number in the CTA.
        """
        self.values: dict[str, int | None] = {"SR_TID.X": thread}
        for instruction in before:
            self.execute(instruction)
        for name in {instruction.operands[0] for instruction in loop}:
            if re.fullmatch(r"U?R\d+", name) and self.values.get(name) is None:
                self.values[name] = 0

    def execute(self, instruction: Instruction) -> None:
        is_executed = self.holds(instruction)
        if is_executed is not False and instruction.base != "BRA":
            value = self._result(instruction) if is_executed else None
            name = instruction.operands[0].removesuffix(".64")
            self.values[name] = None if value is None else signed(value)

    def holds(self, instruction: Instruction) -> bool | None:
        """Whether it is executed; None if that is unknown."""
        found = [self._read(predicate) for predicate in instruction.predicates]
        if 0 in found:
            return False
        return None if None in found else True

    def _result(self, instruction: Instruction) -> int | None:
        """What it writes; None if it is nothing that counts."""
        base, *modifiers = instruction.opcode.split(".")
        sources = instruction.operands[1:]
        values = [self._read(operand) for operand in sources if not PREDICATE.fullmatch(operand)]
        if base in ("UPLOP3", "PLOP3"):
            return self._looked_up(sources)
        if None in values:
            return None
        if base in ("CS2R", "S2R", "UMOV", "MOV"):
            return values[-1]
        if base in ("IADD3", "UIADD3", "IADD", "VIADD") and "X" not in modifiers:
            return sum(values)
        if base == "IMAD" and len(values) == 3 and modifiers in IMAD_MODIFIERS:
            return values[0] * values[1] + values[2]
        if base == "SHF" and modifiers[:2] == ["L", "U32"]:
            return values[0] << values[1]
        if base in ("ISETP", "UISETP") and "AND" in modifiers and sources[-1] in ("PT", "UPT"):
            compared = [value % 2**32 if "U32" in modifiers else signed(value) for value in values]
            return int(COMPARISONS[modifiers[0]](*compared))
        return None

    def _looked_up(self, sources: Sequence[str]) -> int | None:
        """A function of three predicates: the bits of the first number after them, highest for all true."""
        values = [self._read(operand) for operand in sources[1:5]]
        if None in values:
            return None
        a, b, c, table = values
        return table >> (4 * a + 2 * b + c) & 1

    def _read(self, operand: str) -> int | None:
        name = operand.removesuffix(".reuse").lstrip("-!")
        if name in ("RZ", "URZ", "SRZ", "PT", "UPT"):
            value: int | None = int("P" in name)
        elif re.fullmatch(r"0x[0-9a-f]+", name):
            value = int(name, 16)
        else:
            value = self.values.get(name)
        if value is None or operand[0] not in "-!":
            return value
        return 1 - value if operand[0] == "!" else -value
