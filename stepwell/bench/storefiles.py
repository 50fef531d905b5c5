"""The files of a store, seen from outside: wait until they rest, drop them from memory."""

import contextlib
import os
import time
from pathlib import Path

_POLL_S = 0.1


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Returns {file: (size in bytes, time of last change in ns)} of all files below `folder`."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
            if path.is_file():
                stat = path.stat()
                found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


def wait_until_stable(folder: Path, *, quiet_s: float = 1.0, timeout_s: float = 120.0) -> bool:
    """Waits until no file below `folder` has come, gone or changed for `quiet_s`.

    Returns:
        False if that did not happen within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    last, since = snapshot(folder), time.monotonic()
    while time.monotonic() - since < quiet_s:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
        now = snapshot(folder)
        if now != last:
            last, since = now, time.monotonic()
    return True


def drop_page_cache(folder: Path) -> int:
    """Writes the files' dirty pages down and drops them from the page cache; returns how many.

    Needs no privileges, unlike /proc/sys/vm/drop_caches, and touches only these files.
    """
    num_files = 0
    for path in snapshot(folder):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                num_files += 1
            finally:
                os.close(descriptor)
    return num_files
