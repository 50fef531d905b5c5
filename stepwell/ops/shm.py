"""Shared memory that a stopped vLLM left behind: noticed, never removed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SHM_DIR", "Abandoned", "find_abandoned"]

SHM_DIR = Path("/dev/shm")
_PROC = "/proc"


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A file of vLLM's host memory that no process uses.

    Attributes:
        path: absolute.
        size_bytes: memory that it takes, which is what removing it gives back.
        changed_s: seconds since the epoch.
    """

    path: str
    size_bytes: int
    changed_s: float


def find_abandoned(directory: Path) -> list[Abandoned]:
    """vLLM's ``vllm_offload_*.mmap`` files that no process has open or mapped, by name.

    A file whose owner's processes this one may not look into is passed over: nothing can be
    said of it.

    Args:
        directory: where vLLM puts them, `SHM_DIR`.
    """
    found = []
    for path in sorted(directory.glob("vllm_offload_*.mmap")):
        try:
            status = path.lstat()
        except OSError:
            continue
        if os.geteuid() in (0, status.st_uid):
            found.append(Abandoned(str(path), status.st_blocks * 512, status.st_mtime))
    used = set(_used_paths()) if found else set()
    return [each for each in found if each.path not in used]


def _used_paths() -> Iterator[str]:
    """Every path that a process which we may look into has mapped or open."""
    for name in os.listdir(_PROC):
        if not name.isdigit():
            continue
        try:
            with open(f"{_PROC}/{name}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                for line in maps:
                    # address, permissions, offset, device, inode, path
                    _, _, path = line.rstrip("\n").partition("/")
                    if path:
                        yield f"/{path}"
            for descriptor in os.listdir(f"{_PROC}/{name}/fd"):
                yield os.readlink(f"{_PROC}/{name}/fd/{descriptor}")
        except OSError:
            continue  # it ended, or is another user's
