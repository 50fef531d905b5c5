"""File systems that tests mount, in a mount namespace of their own: nobody else sees them."""

import ctypes
import os
from functools import cache
from pathlib import Path

import pytest

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


@cache
def _refused() -> str:
    """Why this thread cannot have a namespace of its own; "" once it has one.

    Threads and processes that it starts from now on have the same.
    """
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return os.strerror(ctypes.get_errno())
    return ""


def own_namespace() -> None:
    """Be where what is mounted is seen by this test run alone; skips where that is not allowed."""
    if _refused():
        pytest.skip(f"nothing can be mounted here: {_refused()}")


def mount_memory(path: Path, size_bytes: int, inodes: int = 0) -> None:
    """A file system in memory, of so many bytes; and files, if not 0."""
    own_namespace()
    options = f"size={size_bytes},nr_inodes={inodes}".encode()
    if _libc.mount(b"none", str(path).encode(), b"tmpfs", 0, options):
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")


def unmount(path: Path) -> None:
    """Whatever is mounted there, in whatever state; harmless if nothing is."""
    _libc.umount2(str(path).encode(), _MNT_DETACH)
