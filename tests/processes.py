"""The processes of a run as the kernel sees them: descendants, listening sockets. Linux only."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

LISTENING = "0A"  # the state in /proc/net/tcp
LOOPBACK = {
    "0100007F",  # 127.0.0.1, in the byte order of the machine
    "00000000000000000000000001000000",  # ::1
    "0000000000000000FFFF00000100007F",  # ::ffff:127.0.0.1
}


def descendants(pid: int) -> list[int]:
    """The process and all that it started, and those started, without zombies."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return [one for one in found if is_running(one)]


def _parent(folder: Path) -> int | None:
    try:
        return int(_stat(folder)[1])
    except OSError:
        return None


def _stat(folder: Path) -> list[str]:
    """State, parent and more; what stands before is the name in parentheses, which may hold anything."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """Whether a thread of the process is left: while one is, its files are open."""
    try:
        return any(_stat(thread)[0] not in "ZX" for thread in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False


def listening_addresses(pids: list[int]) -> list[str]:
    """The addresses, in the kernel's hexadecimal, of the TCP sockets on which these processes listen."""
    inodes = set().union(*map(_socket_inodes, pids))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and inode in inodes:
                found.append(local.split(":")[0])
    return found


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(descriptor)))
        except OSError:
            continue  # closed meanwhile
    return inodes


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether the condition came true within these seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
