"""How the bytes of records get between files and memory: by system calls, or by a library."""

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stepwell.core.keys import Root, make_key
from stepwell.core.record import HEADER_BYTES, record_bytes
from stepwell.core.types import ChunkResult, Outcome
from stepwell.errors import ConfigError, TierError
from stepwell.tiers.blockio import probe_direct, read_run, write_run
from stepwell.tiers.errnos import GONE
from stepwell.tiers.media.base import Page, Record
from stepwell.tiers.media.records import TRUNCATED, arrived, lay_out, not_read, offsets_of
from stepwell.tiers.media.transfer_engines import TransferEngine, TransferEngines
from stepwell.tiers.outcomes import DONE, write_refusal

__all__ = ["TransferMover", "FileEngine", "Mover", "Piece", "SystemCalls", "in_time"]

T = TypeVar("T")

_CHECK_WITHIN_S = 10.0
_AT_ONCE = 64  # files of one call that are open


class Mover(Protocol):
    """Moves whole records, each of which is a file.

    Threading, Errors: those of `stepwell.tiers.media.base.Medium`.
    """

    def check(self, folder: str) -> None:
        """Find out how it goes, in a folder that files may be made in; before anything else.

        Raises:
            ConfigError: it does not go here. TierError, OSError: it does not go now.
        """
        ...

    def read(
        self, paths: Sequence[str], payloads: Sequence[memoryview], within_s: float
    ) -> list[Page | ChunkResult]:
        """Read a record from each path; returns what `Medium.read` does."""
        ...

    def write(
        self, paths: Sequence[str], records: Sequence[Record], within_s: float
    ) -> list[ChunkResult]:
        """Write each record to a path at which nothing is.

        Returns:
            For each DONE if it is there as a whole; else FULL or FAILED, and anything may be there.

        Raises:
            TierError: then nothing stays there, once what is late is over.
        """
        ...

    def close(self) -> None:
        """Nobody is in a call."""
        ...


def _open_record(path: str, *, direct: bool) -> int:
    """Nothing is followed and nobody is waited for: what lies there may be anything."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags | (os.O_DIRECT if direct else 0))


def _why_unread(path: str, error: OSError) -> int:
    """An errno; EISDIR where there is no file: a link, a pipe, a directory."""
    with contextlib.suppress(OSError):
        if error.errno not in GONE and not stat.S_ISREG(os.lstat(path).st_mode):
            return errno.EISDIR
    return error.errno or errno.EIO


def _open_new(path: str, *, direct: bool) -> int:
    # To be read as well: 3FS tells the length of a file only to who may read it.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)


class SystemCalls:
    """preadv and pwritev, one record after the other; `within_s` is looked at in between."""

    def __init__(self) -> None:
        self._direct = False
        self._folder = ""

    def check(self, folder: str) -> None:
        """See `Mover.check`."""
        self._folder = folder
        self._direct = probe_direct(folder)

    def read(
        self, paths: Sequence[str], payloads: Sequence[memoryview], within_s: float
    ) -> list[Page | ChunkResult]:
        """See `Mover.read`."""
        each = zip(paths, payloads, strict=True)
        some = in_time(each, self._folder, within_s)
        return [self._read(path, payload) for path, payload in some]

    def _read(self, path: str, payload: memoryview) -> Page | ChunkResult:
        try:
            fd = _open_record(path, direct=self._direct)
            try:
                (page,) = read_run(fd, 0, [payload])
            finally:
                os.close(fd)
        except OSError as error:
            return not_read(_why_unread(path, error))
        # The page is the next read's as well.
        return TRUNCATED if page is None else bytes(page)

    def write(
        self, paths: Sequence[str], records: Sequence[Record], within_s: float
    ) -> list[ChunkResult]:
        """See `Mover.write`."""
        each = zip(paths, records, strict=True)
        try:
            some = in_time(each, self._folder, within_s)
            return [self._write(path, record) for path, record in some]
        except BaseException:  # counted by whoever wanted this
            _remove(paths)
            raise

    def _write(self, path: str, record: Record) -> ChunkResult:
        try:
            fd = _open_new(path, direct=self._direct)
            try:
                write_run(fd, 0, [record.header], [record.payload])
            finally:
                os.close(fd)  # on NFS it is here that a full file system may be told
        except OSError as error:
            return write_refusal(error)
        return DONE

    def close(self) -> None:
        """See `Mover.close`."""


def in_time(each: Iterable[T], path: str | os.PathLike[str], within_s: float) -> Iterator[T]:
    """One after the other, as long as there is time.

    Args:
        each: of them.
        path: that the message names.
        within_s: from the first on.

    Raises:
        TierError: there is none left.
    """
    give_up_s = time.monotonic() + within_s
    for one in each:
        if time.monotonic() > give_up_s:
            raise TierError(f"the directory is slow: path={path} within_s={within_s}")
        yield one


@dataclass(frozen=True, slots=True)
class Piece:
    """A record to be moved between a file's beginning and an engine's memory.

    Attributes:
        fd: of the file.
        offset: in the memory; a multiple of 4096.
        size_bytes: of the record; the same.
    """

    fd: int
    offset: int
    size_bytes: int


class FileEngine(TransferEngine, Protocol):
    """Moves records between its memory and files."""

    def move(self, pieces: Sequence[Piece], *, write: bool) -> list[int]:
        """Move all, however long it takes; what it returns of is over.

        Returns:
            For each the bytes that were moved, or an errno, negative.
        """
        ...


class TransferMover:
    """Records by way of an engine's memory, on its thread.

    Everything that may hang is done on that thread: opening and closing files too. Neither the
    memory nor the files are anybody else's before it is over.

    Args:
        name: of the library, for messages and threads.
        make: see `stepwell.tiers.media.transfer_engines.TransferEngines`.
        direct: whether to use O_DIRECT where that works.
    """

    def __init__(self, name: str, make: Callable[[int], FileEngine], *, direct: bool) -> None:
        self._name = name
        self._may_be_direct = direct
        self._direct = False
        self._engines = TransferEngines(name, make)

    def check(self, folder: str) -> None:
        """See `Mover.check`: a record there and back."""
        self._direct = self._may_be_direct and probe_direct(folder)
        self._engines.try_to_make(_CHECK_WITHIN_S)
        path = f"{folder}/check-{os.getpid()}-{secrets.token_hex(4)}"
        payload = memoryview(secrets.token_bytes(5000))
        record = Record(make_key(Root(bytes(32)), b"check"), bytes(HEADER_BYTES), payload, 0.0)
        back = memoryview(bytearray(len(payload)))
        try:
            (written,) = self.write([path], [record], _CHECK_WITHIN_S)
            if written.outcome is Outcome.FULL:
                return  # what is there can be read
            (found,) = self.read([path], [back], _CHECK_WITHIN_S)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if written != DONE or isinstance(found, ChunkResult):
            raise TierError(f"{self._name} moves nothing here: path={folder}")
        if back != payload or found != record.header:
            raise ConfigError(f"{self._name} gives back what was not written: path={folder}")

    def read(
        self, paths: Sequence[str], payloads: Sequence[memoryview], within_s: float
    ) -> list[Page | ChunkResult]:
        """See `Mover.read`."""
        give_up_s = time.monotonic() + within_s
        results: list[Page | ChunkResult] = []
        for some in _groups(len(paths)):
            results += self._read(paths[some], payloads[some], give_up_s - time.monotonic())
        return results

    def _read(
        self, paths: Sequence[str], payloads: Sequence[memoryview], within_s: float
    ) -> list[Page | ChunkResult]:
        sizes = [record_bytes(len(payload)) for payload in payloads]
        with self._engines.taken(sum(sizes), within_s) as taken:
            engine = taken.engine
            counts = taken.run(lambda: self._from_files(engine, paths, sizes))
            rows = zip(offsets_of(sizes), sizes, counts, payloads, strict=True)
            return [
                arrived(engine.memory[offset : offset + size], count, payload)
                for offset, size, count, payload in rows
            ]

    def write(
        self, paths: Sequence[str], records: Sequence[Record], within_s: float
    ) -> list[ChunkResult]:
        """See `Mover.write`."""
        give_up_s = time.monotonic() + within_s
        results: list[ChunkResult] = []
        for some in _groups(len(paths)):
            try:
                results += self._write(paths[some], records[some], give_up_s - time.monotonic())
            except BaseException:  # counted by whoever wanted this
                # Those of this group are removed there.
                _remove(paths[: some.start])
                raise
        return results

    def _write(
        self, paths: Sequence[str], records: Sequence[Record], within_s: float
    ) -> list[ChunkResult]:
        sizes = [record_bytes(len(record.payload)) for record in records]
        # Taken by the first of two: the thread when it has ended, and whoever gives up. The second
        # removes the files, since nobody uses them and nobody else writes to them any more.
        first = threading.Lock()
        with self._engines.taken(sum(sizes), within_s) as taken:
            engine = taken.engine
            for offset, size, record in zip(offsets_of(sizes), sizes, records, strict=True):
                lay_out(engine.memory[offset : offset + size], record)
            try:
                counts = taken.run(lambda: self._to_files(engine, paths, sizes, first))
            except BaseException:  # counted by whoever wanted this
                if not first.acquire(blocking=False):
                    _remove(paths)
                raise
        return [write_refusal(OSError(-count, "")) if count < 0 else DONE for count in counts]

    def close(self) -> None:
        """See `Mover.close`."""
        self._engines.close()

    # On an engine's thread.

    def _from_files(
        self, engine: FileEngine, paths: Sequence[str], sizes: Sequence[int]
    ) -> list[int]:
        with contextlib.ExitStack() as stack:

            def opened(idx: int) -> int:
                try:
                    fd = _open_record(paths[idx], direct=self._direct)
                except OSError as error:
                    raise OSError(_why_unread(paths[idx], error), "") from error
                stack.callback(os.close, fd)
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, "")
                # What is too short would fail all that is read together with it.
                return fd if status.st_size >= sizes[idx] else -1

            return _move_what_opens(engine, opened, sizes, write=False)

    def _to_files(
        self,
        engine: FileEngine,
        paths: Sequence[str],
        sizes: Sequence[int],
        first: threading.Lock,
    ) -> list[int]:
        fds: dict[int, int] = {}

        def opened(idx: int) -> int:
            fds[idx] = _open_new(paths[idx], direct=self._direct)
            return fds[idx]

        counts = [-errno.EIO] * len(paths)
        try:
            counts = _move_what_opens(engine, opened, sizes, write=True)
        finally:
            for idx, fd in fds.items():
                counts[idx] = _closed(fd, counts[idx], sizes[idx])
            if not first.acquire(blocking=False):
                _remove(paths)
        return counts


def _groups(count: int) -> list[slice]:
    return [slice(begin, begin + _AT_ONCE) for begin in range(0, count, _AT_ONCE)]


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _closed(fd: int, count: int, size_bytes: int) -> int:
    """Close a file; what became of its record, of which not all may have been written."""
    try:
        is_whole = count == size_bytes == os.fstat(fd).st_size
    except OSError:
        is_whole = False
    try:
        os.close(fd)  # on NFS it is here that a full file system may be told
    except OSError as error:
        return -(error.errno or errno.EIO)
    return count if is_whole or count < 0 else -errno.EIO


def _move_what_opens(
    engine: FileEngine, opened: Callable[[int], int], sizes: Sequence[int], *, write: bool
) -> list[int]:
    """Move the records whose files can be opened; what became of each, in their order."""
    counts = [0] * len(sizes)
    pieces: dict[int, Piece] = {}
    for idx, (offset, size) in enumerate(zip(offsets_of(sizes), sizes, strict=True)):
        try:
            fd = opened(idx)
        except OSError as error:
            counts[idx] = -(error.errno or errno.EIO)
            continue
        if fd >= 0:
            pieces[idx] = Piece(fd, offset, size)
    if pieces:
        moved = engine.move(list(pieces.values()), write=write)
        for idx, count in zip(pieces, moved, strict=True):
            counts[idx] = count
    return counts
