"""What /proc says about the processes of one process group (Linux only)."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

_PROC = Path("/proc")
_SHM_PREFIX = "/dev/shm/vllm_offload_"


def group_pids(group: int) -> list[int]:
    """Returns the living processes of a process group; zombies do not count."""
    pids = []
    for pid in _all_pids():
        try:
            stat = (_PROC / str(pid) / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        # The command, in parentheses, may itself hold spaces and parentheses.
        state, _, process_group = stat.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state != "Z":
            pids.append(pid)
    return pids


def read_bytes_physical(group: int) -> int:
    """Returns the bytes that the group's processes made storage deliver, page cache excluded.

    This is `read_bytes` of /proc/PID/io; reads from tmpfs or a network file system are not in it.
    """
    total = 0
    for pid in group_pids(group):
        try:
            lines = (_PROC / str(pid) / "io").read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        total += int(fields["read_bytes"])
    return total


def io_counters() -> dict[str, int]:
    """The kernel's account of this process's reads and writes; empty if it keeps none.

    Of /proc/self/io: `syscr` is the number of read system calls, `write_bytes` what drives were
    asked to write, and so on.
    """
    try:
        lines = (_PROC / "self" / "io").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split(": ", 1) for line in lines)}


def huge_page_bytes(view: memoryview) -> int:
    """How much of this process's memory lies in huge pages, about: of its part of each mapping.

    Of AnonHugePages and ShmemPmdMapped in /proc/self/smaps; 0 if the kernel does not say.
    """
    begin = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    try:
        lines = (_PROC / "self" / "smaps").read_text().splitlines()
    except OSError:
        return 0
    share, found = 0.0, 0.0
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):  # a mapping begins: its addresses
            low, high = (int(each, 16) for each in words[0].split("-"))
            overlap_bytes = min(high, begin + len(view)) - max(low, begin)
            share = max(0, overlap_bytes) / (high - low)  # neighbours are one mapping
        elif share and words[0] in ("AnonHugePages:", "ShmemPmdMapped:"):
            found += share * int(words[1]) * 1024
    return min(round(found), len(view))


def offload_files(pids: Iterable[int]) -> set[Path]:
    """Returns vLLM's shared offload files in /dev/shm that any of the processes has mapped."""
    found = set()
    for pid in pids:
        try:
            lines = (_PROC / str(pid) / "maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            start = line.find(_SHM_PREFIX)
            if start >= 0 and line.endswith(".mmap"):  # else "(deleted)": nothing is left behind
                found.add(Path(line[start:]))
    return found


def remove_stale(files: set[Path]) -> list[Path]:
    """Removes those of `files` that no living process has mapped; returns what was removed."""
    removed = []
    for path in sorted(files - offload_files(_all_pids())):
        try:
            path.unlink()
        except OSError:
            continue
        removed.append(path)
    return removed


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdigit())
