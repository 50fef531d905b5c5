"""Careful file work: nothing here follows links, waits for pipes or trusts what it finds."""

import contextlib
import errno
import os
import shutil
import stat

__all__ = ["entries", "read_regular", "read_small_text", "remove_tree", "tree_bytes", "write_whole"]

_SMALL_BYTES = 1 << 20


def read_regular(path: str, most_bytes: int = 1 << 62) -> bytes:
    """Up to ``most_bytes`` of a regular file.

    Raises:
        OSError: from the system, or what is there is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        with open(fd, "rb", closefd=False) as file:
            return file.read(min(most_bytes, os.fstat(fd).st_size))
    finally:
        os.close(fd)


def read_small_text(path: str) -> str:
    """The text of a small regular file.

    Raises:
        OSError: from the system, or what is there is no regular file.
        ValueError: larger than 1 MiB, or not UTF-8.
    """
    data = read_regular(path, _SMALL_BYTES + 1)
    if len(data) > _SMALL_BYTES:
        raise ValueError(f"too large to be what it should be: path={path}")
    return data.decode("utf-8")


def write_whole(path: str, partial: str, text: str) -> None:
    """Write a small file that appears whole, by rename, or not at all.

    Raises:
        OSError: from the system; nothing is left at ``partial``.
    """
    try:
        with open(partial, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def entries(path: str) -> list[os.DirEntry[str]]:
    """What lies in a directory; nothing if it cannot be read."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


def tree_bytes(path: str) -> int:
    """Bytes of a file, or of all files below a directory; what vanishes meanwhile counts 0."""
    total, waiting = 0, [path]
    while waiting:
        here = waiting.pop()
        try:
            status = os.lstat(here)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            waiting += [entry.path for entry in entries(here)]
        else:
            total += status.st_size
    return total


def remove_tree(path: str) -> None:
    """Remove a file or a directory; harmless if it is gone.

    Raises:
        OSError: it is there and cannot be removed.
    """
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM) or not os.path.isdir(path):
            raise
        try:
            shutil.rmtree(path)
        except RecursionError as deep:
            raise OSError(errno.ELOOP, "too deep to be removed", path) from deep
