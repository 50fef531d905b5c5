"""Looking through a pool's records, a folder at a time, following no link.

What has no name as the pool's folders and records have is somebody else's, and not looked at. What
fails is raised: a count that ended early would be taken for all that there is.
"""

import contextlib
import heapq
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from stepwell.tiers.errnos import VANISHED
from stepwell.tiers.files import opened_folder

__all__ = ["Oldest", "Seen", "files", "prune", "record_folders", "records", "roots", "used_ns"]

_ROOT = re.compile(r"[0-9a-f]{64}")
_SPREAD = re.compile(r"[0-9a-f]{2}")
_ENGINE_KEY = re.compile(r"(?:[0-9a-f]{2}){1,64}")


@dataclass(frozen=True, slots=True, order=True)
class Seen:
    """A record as it was found; in order of last use.

    Attributes:
        used_ns: when it was last used, by the file system's clock.
        size_bytes: of the file.
        path: of it.
        written_ns: when it was written.
    """

    used_ns: int
    size_bytes: int
    path: str
    written_ns: int = field(compare=False)


def used_ns(status: os.stat_result) -> int:
    """When a record was used last: to touch it sets the time of access, writing both."""
    return max(status.st_atime_ns, status.st_mtime_ns)


def roots(chunks: str) -> list[str]:
    """The names of the roots in a pool, in order; each is a folder in ``chunks``.

    Raises:
        OSError: it cannot be read; FileNotFoundError as well, since a pool always has it.
    """
    return _directories(chunks, _ROOT)


def record_folders(root: str) -> Iterator[str]:
    """The paths of the folders that a root's records are in, in order; what vanishes is left out.

    Raises:
        OSError: one cannot be read.
    """
    for name in _those_of(root):
        path = f"{root}/{name}"
        yield from (f"{path}/{below}" for below in _those_of(path))


def _those_of(top: str) -> list[str]:
    try:
        return _directories(top, _SPREAD)
    except OSError as error:
        if error.errno in VANISHED:
            return []
        raise


def _directories(top: str, names: re.Pattern[str]) -> list[str]:
    with opened_folder(top) as fd, os.scandir(fd) as found:
        return sorted(
            each.name
            for each in found
            if names.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
        )


def records(folder: str) -> Iterator[Seen]:
    """The records of one folder; none if it vanishes.

    Raises:
        OSError: it cannot be read.
    """
    return files(folder, _ENGINE_KEY)


def files(folder: str, names: re.Pattern[str] | None = None) -> Iterator[Seen]:
    """The files of one folder; none if it vanishes.

    Args:
        folder: its path.
        names: that they must have; any if None.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with opened_folder(folder) as fd, os.scandir(fd) as found:
            for each in found:
                if names is not None and not names.fullmatch(each.name):
                    continue
                status = None
                with contextlib.suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                if status is not None and stat.S_ISREG(status.st_mode):
                    yield Seen(
                        used_ns(status), status.st_size, f"{folder}/{each.name}", status.st_mtime_ns
                    )
    except OSError as error:
        if error.errno not in VANISHED:
            raise


def prune(folder: str, before_ns: int) -> None:
    """Remove a folder in which nothing has been for a while; a writer makes it again.

    Args:
        folder: of records.
        before_ns: by the file system's clock.
    """
    with contextlib.suppress(OSError):
        for _ in range(3):  # the two above it as well; one that is not empty is not removed
            if os.lstat(folder).st_mtime_ns >= before_ns:
                return
            os.rmdir(folder)
            folder = os.path.dirname(folder)


class Oldest:
    """The records that were not used for longest, so many at most.

    Args:
        most: of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[int, int, str]] = []  # the most recent of them first

    def add(self, seen: Seen) -> None:
        """Look at one more."""
        item = (-seen.used_ns, seen.size_bytes, seen.path)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, item)
        elif item > self._heap[0]:
            heapq.heapreplace(self._heap, item)

    def __len__(self) -> int:
        return len(self._heap)

    def take(self) -> list[tuple[int, int, str]]:
        """All of them as (used_ns, size_bytes, path), the oldest last; nothing is kept."""
        items, self._heap = self._heap, []
        items.sort()
        return [(-used, size, path) for used, size, path in items]
