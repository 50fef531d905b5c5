"""What makes a directory a pool, and says which: a small file at its top.

A pool that is made where a file system is not mounted fills whatever lies below instead, so what
can be seen of that is refused; and what is not known is not taken for an answer.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.tiers.errnos import NO_LINKS, NO_ROOM_LEFT
from stepwell.tiers.files import is_there, read_small_text

__all__ = ["MARKER", "check_user", "make_pool", "read_pool_id"]

MARKER = "stepwell-pool.json"
"""The name of the file that makes a directory a pool."""

_FORMAT = 1
_POOL_ID = re.compile(r"[0-9a-f]{32}")
_WAIT_FOR_TEXT_S = 5.0
# What a file system puts into its topmost directory by itself.
_NOBODYS = frozenset({"lost+found", ".snapshot", ".snapshots"})


def make_pool(path: Path, capacity_bytes: int) -> None:
    """Make a pool where there is none.

    Args:
        path: absolute.
        capacity_bytes: that it is to have.

    Raises:
        ConfigError: something else lies there, or it looks like the place of a mount.
        OSError: from the system.
    """
    marker = f"{path}/{MARKER}"
    # In this order: one that somebody else makes meanwhile has its marker from the start.
    is_new = not is_there(path)
    if is_there(marker):
        _wait_for_text(marker)
        return
    parent = path.parent
    if not _is_directory(parent):
        raise ConfigError(f"there is no such directory: path={parent}")
    status = os.statvfs(parent if is_new else path)
    if status.f_blocks and capacity_bytes > status.f_blocks * status.f_frsize:
        raise ConfigError(
            f"a new pool cannot have more than its file system has; is it mounted? "
            f"path={path} capacity={capacity_bytes}B "
            f"file_system={status.f_blocks * status.f_frsize}B"
        )
    text = json.dumps({"format": _FORMAT, "pool": secrets.token_hex(16)})
    part = f".{path.name}.{secrets.token_hex(8)}"
    if is_new:
        _make_whole(parent / part, path, text)
        return
    others = [name for name in os.listdir(path) if not _is_nobodys(name)]
    if others and not is_there(marker):
        raise ConfigError(f"the directory holds something else; give an empty one: path={path}")
    if os.stat(path).st_dev == os.stat("/").st_dev:
        raise ConfigError(
            "an empty directory on the system's own drive: is the file system mounted? "
            f"If it is meant, remove it, and it is made again: path={path}"
        )
    _put_marker(f"{marker}.{part}", marker, text)


def read_pool_id(path: Path) -> str:
    """Which pool this is.

    Raises:
        ConfigError: the marker is of another version, or damaged; what to do is said.
        OSError: there is none, or it cannot be read.
    """
    marker = f"{path}/{MARKER}"
    try:
        says = json.loads(read_small_text(marker))
    except (ValueError, RecursionError):
        says = None
    found = says if isinstance(says, dict) else {}
    if found.get("format", _FORMAT) != _FORMAT:
        raise ConfigError(
            "made by another version of Stepwell; use that one, or another directory: "
            f"path={marker} format={found['format']!r:.20} ours={_FORMAT}"
        )
    pool_id = found.get("pool")
    if "format" not in found or not isinstance(pool_id, str) or not _POOL_ID.fullmatch(pool_id):
        text = json.dumps({"format": _FORMAT, "pool": "<any 32 hexadecimal digits>"})
        raise ConfigError(
            "the marker of this pool is damaged. End the engines that use it; then remove the "
            "whole directory, and it is made anew, or write this into the marker to keep what was "
            f"stored: {text}: path={marker}"
        )
    return pool_id


def _make_whole(part: Path, path: Path, text: str) -> None:
    """A pool's directory appears with its marker in it, whoever else makes one."""
    part.mkdir()
    try:
        _write_new(f"{part}/{MARKER}", text)
        os.rename(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part / MARKER)
        with contextlib.suppress(OSError):
            os.rmdir(part)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # somebody was faster
            raise


def _put_marker(part: str, marker: str, text: str) -> None:
    """The marker appears in a directory that is there; one alone makes it."""
    try:
        _write_new(part, text)
        try:
            os.link(part, marker)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # A rename would replace one that was made meanwhile, and that others have read.
            _write_new(marker, text)
    except FileExistsError:
        _wait_for_text(marker)  # somebody was faster
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def _wait_for_text(marker: str) -> None:
    """Without hard links a marker is there a moment before its text is."""
    ends_s = time.monotonic() + _WAIT_FOR_TEXT_S
    while os.lstat(marker).st_size == 0 and time.monotonic() < ends_s:
        time.sleep(_WAIT_FOR_TEXT_S / 100)


def _write_new(path: str, text: str) -> None:
    """Write a file where nothing is, down to the drive: a pool whose marker is lost is of no use.

    Raises:
        FileExistsError: something is there. OSError: from the system; then nothing is.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_nobodys(name: str) -> bool:
    return name in _NOBODYS or name.startswith(MARKER)


def check_user(path: Path, folder: str) -> None:
    """Check that what this process makes belongs to whom the pool belongs.

    Else one visit leaves a sweeper's folder that nobody else can remove, and nobody may write any
    more. Who a file belongs to is up to the file system, which may know users by other numbers.

    Args:
        path: of the pool.
        folder: in it, where a file may be made for a moment; the pool's own where there is none.

    Raises:
        ConfigError: it belongs to another user. OSError: from the system.
    """
    name = f"check-user-{secrets.token_hex(8)}"
    owner = os.lstat(f"{path}/{MARKER}").st_uid
    probe = f"{folder if is_there(folder) else path}/{name}"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in NO_ROOM_LEFT:
            return  # what is there can be read
        raise
    try:
        us = os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(probe)
    if us != owner:
        raise ConfigError(
            f"the pool belongs to another user; all engines that share it run as one: path={path} "
            f"owner={owner} ours={us}"
        )
