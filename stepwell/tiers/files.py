"""Careful file work: nothing here follows links, waits for pipes or trusts what it finds."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "Entry",
    "empty_folder",
    "entries",
    "is_there",
    "kind_of",
    "list_folder",
    "open_in_folder",
    "opened_folder",
    "read_regular",
    "read_small_text",
    "remove_tree",
    "tree_bytes",
    "write_whole",
]

_SMALL_BYTES = 1 << 20
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_LEVELS = 64
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What lies in a directory, as it was when that was listed.

    Attributes:
        name: in the directory.
        path: of the directory, and the name.
        mode: kind and permissions, of a link its own.
        size_bytes: as the file system says.
    """

    name: str
    path: str
    mode: int
    size_bytes: int

    @property
    def is_regular(self) -> bool:
        """Whether it is a file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory, and no link to one."""
        return stat.S_ISDIR(self.mode)


def kind_of(mode: int) -> str:
    """What a file's mode says that it is, in words: "a link"."""
    return next((words for is_it, words in _KINDS if is_it(mode)), "a device")


@contextlib.contextmanager
def opened_folder(path: str, parent: int | None = None) -> Iterator[int]:
    """A directory's file descriptor; what is done relative to it stays in that directory.

    Args:
        path: of it; its last name may be no link.
        parent: file descriptor that a relative path begins at.

    Raises:
        NotADirectoryError: something else lies there, a link to a directory included.
        OSError: from the system.
    """
    fd = os.open(path, _FOLDER_FLAGS, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether anything has this name, a link that leads nowhere included.

    `os.path.lexists` says of a file system that fails that nothing is there.

    Raises:
        OSError: from the system; it is not known.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def open_in_folder(path: str, flags: int) -> int:
    """Open a file whose directory is no link, and which is none itself.

    Raises:
        OSError: from the system.
    """
    folder, name = os.path.split(path)
    with opened_folder(folder) as parent:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def read_regular(path: str, most_bytes: int = 1 << 62, parent: int | None = None) -> bytes:
    """Up to ``most_bytes`` of a regular file.

    Args:
        path: of it.
        most_bytes: what follows is left out.
        parent: file descriptor of the directory that a relative path begins at.

    Raises:
        OSError: from the system, or what is there is no regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        with open(fd, "rb", closefd=False) as file:
            return file.read(min(most_bytes, os.fstat(fd).st_size))
    finally:
        os.close(fd)


def read_small_text(path: str, parent: int | None = None) -> str:
    """The text of a small regular file; see `read_regular`.

    Raises:
        OSError: from the system, or what is there is no regular file.
        ValueError: larger than 1 MiB, or not UTF-8.
    """
    data = read_regular(path, _SMALL_BYTES + 1, parent)
    if len(data) > _SMALL_BYTES:
        raise ValueError(f"too large to be what it should be: path={path}")
    return data.decode("utf-8")


def write_whole(name: str, folder: int, partial: str, partial_folder: int, text: str) -> None:
    """Write a small file that appears whole, by rename, or not at all.

    Args:
        name: its name in ``folder``, a file descriptor.
        folder: where it is to lie.
        partial: a fresh name in ``partial_folder``.
        partial_folder: where it is made, a file descriptor.
        text: ASCII.

    Raises:
        OSError: from the system; nothing is left under the name ``partial``.
    """

    def make(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=partial_folder)

    try:
        with open(partial, "x", encoding="ascii", opener=make) as file:
            file.write(text)
        os.replace(partial, name, src_dir_fd=partial_folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=partial_folder)
        raise


def list_folder(path: str) -> list[Entry]:
    """What lies in a directory; what vanishes meanwhile is left out.

    Raises:
        NotADirectoryError: something else lies there, a link to a directory included.
        OSError: from the system.
    """
    with opened_folder(path) as folder:
        return list(_listing(folder, path))


def entries(path: str) -> list[Entry]:
    """What lies in a directory; nothing if it cannot be read or is a link."""
    try:
        return list_folder(path)
    except OSError:
        return []


def _listing(folder: int, path: str) -> Iterator[Entry]:
    with os.scandir(folder) as found:
        for each in found:
            with contextlib.suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                yield Entry(
                    each.name, os.path.join(path, each.name), status.st_mode, status.st_size
                )


def tree_bytes(path: str) -> int:
    """Bytes of a file, or of all files below a directory.

    What vanishes meanwhile, cannot be read or lies deeper than 64 levels counts 0.
    """
    try:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size
        with opened_folder(path) as folder:
            return _bytes_below(folder, _MOST_LEVELS)
    except OSError:
        return 0


def _bytes_below(folder: int, levels: int) -> int:
    total = 0
    for each in list(_listing(folder, "")):
        if not each.is_directory:
            total += each.size_bytes
        elif levels > 1:
            with contextlib.suppress(OSError), opened_folder(each.name, folder) as below:
                total += _bytes_below(below, levels - 1)
    return total


def remove_tree(path: str) -> None:
    """Remove a file or a directory, however deep; harmless if it is gone.

    Raises:
        OSError: it is there and cannot be removed.
    """
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        try:
            empty_folder(path)
        except NotADirectoryError:
            raise error from None  # a file that may not be removed
        os.rmdir(path)


def empty_folder(path: str) -> None:
    """Remove all that lies in a directory, however deep; links themselves, never beyond them.

    Raises:
        NotADirectoryError: something else lies there, a link to a directory included.
        OSError: something cannot be removed; it is named.
    """
    with opened_folder(path) as folder:
        while found := list(_listing(folder, path)):
            for each in found:
                try:
                    if each.is_directory:
                        _dissolve(folder, each.name)
                    else:
                        os.unlink(each.name, dir_fd=folder)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise OSError(error.errno, error.strerror, each.path) from error


def _dissolve(folder: int, name: str) -> None:
    """Remove a directory; those in it come to lie beside it, so that no depth is too deep."""
    with opened_folder(name, folder) as inner:
        for each in list(_listing(inner, "")):
            if each.is_directory:
                os.rename(each.name, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=folder)
            else:
                os.unlink(each.name, dir_fd=inner)
    os.rmdir(name, dir_fd=folder)
