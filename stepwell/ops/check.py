"""Is everything in a store what it claims to be? Every record is read and verified whole."""

import errno
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import xxhash

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, Root, root_of
from stepwell.core.record import HEADER_BYTES, Header, pad_to_page, record_bytes
from stepwell.core.types import Reason
from stepwell.errors import ConfigError, DataError
from stepwell.ops.inspect import open_to_read
from stepwell.tiers.directory import Found, StoreDirectory
from stepwell.tiers.files import entries, tree_bytes

__all__ = [
    "DESCRIPTION",
    "PADDING",
    "STRAY",
    "UNREADABLE",
    "Action",
    "Bad",
    "CheckReport",
    "check_store",
]

# Beside `stepwell.core.types.Reason`: what an engine never meets, or need not mind.
PADDING = "padding"
"""Bytes between the payload and the record's end are not zero."""
STRAY = "stray"
"""Not a record, yet among them: takes room that nobody counts."""
DESCRIPTION = "description"
"""A damaged root.json."""
UNREADABLE = "unreadable"
"""This process may not read it, so it may well be whole."""

_NUM_THREADS = 4
_PIECE_BYTES = 4 << 20
_RECORD_NAME = re.compile(r"(?:[0-9a-f]{2}){1,64}\.kv")
_ROOT_NAME = re.compile(r"[0-9a-f]{64}")
_BUCKET_NAME = re.compile(r"[0-9a-f]{2}")

_local = threading.local()


class Action(StrEnum):
    """What was done about something bad."""

    NONE = "none"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    """It could not be moved, or was left alone because it could not be read."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Something that is not what it claims to be.

    Attributes:
        path: absolute, where it was found.
        reason: a `stepwell.core.types.Reason`, or one of this module's.
        detail: in words.
        size_bytes: as the file system says.
        action: what was done.
    """

    path: str
    reason: str
    detail: str
    size_bytes: int
    action: Action = Action.NONE


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found.

    Attributes:
        path: of the store.
        fix: whether bad things were to be set aside.
        owned: whether a process used the store meanwhile.
        owner_pid: that process, None if unknown.
        num_roots: that hold records.
        num_records, size_bytes: that were read, whole.
        num_expired: good records whose time has run out; the engine drops them by itself.
        bad: in the order in which they were found.
        undescribed: roots with records and without root.json; their records are good, only
            nobody can tell in words whose they are.
        num_leftovers, leftover_bytes: unfinished writes of an engine that was killed; harmless,
            removed by ``fix`` and at the engine's next start. 0 while an engine runs.
    """

    path: str
    fix: bool
    owned: bool
    owner_pid: int | None
    num_roots: int
    num_records: int
    size_bytes: int
    num_expired: int
    bad: tuple[Bad, ...]
    undescribed: tuple[Root, ...]
    num_leftovers: int
    leftover_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing was bad."""
        return not self.bad


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What one record is; ``bad`` is None for a good one."""

    bad: Bad | None = None
    gone: bool = False
    expired: bool = False


def check_store(
    path: Path,
    *,
    now_s: float,
    fix: bool = False,
    on_start: Callable[[int], object] = lambda total_bytes: None,
    on_record: Callable[[int], object] = lambda size_bytes: None,
) -> CheckReport:
    """Read and verify everything. Blocks for as long as reading all of it takes.

    Takes about 4 MiB for each of four threads, however large the records are. Without ``fix``
    nothing is changed and an engine may go on using the store.

    Args:
        path: of the store.
        now_s: seconds since the epoch, to tell what has expired.
        fix: own the store, move what is bad to its quarantine and remove unfinished writes.
        on_start: told how many bytes there are to read.
        on_record: told the size of every record that was looked at.

    Raises:
        ConfigError: there is no store at ``path``; or ``fix``, and a process owns it.
    """
    directory = open_to_read(path)
    owner = directory.owner()
    leftovers = _leftovers(directory) if owner is None else []
    with _owned(directory, owner) if fix else _not_owned():
        records = list(directory.scan())
        on_start(sum(found.size_bytes for found in records))
        identities = directory.identities()
        bad = _check_layout(directory, identities)
        num_records = size_bytes = num_expired = 0
        for found, verdict in _verdicts(directory, records, identities, now_s):
            on_record(found.size_bytes)
            if verdict.gone:
                continue  # evicted meanwhile
            num_records += 1
            size_bytes += found.size_bytes
            num_expired += verdict.expired
            if verdict.bad is not None:
                bad.append(verdict.bad)
        if fix:
            bad = [_set_aside(directory, each) for each in bad]
    roots = {root_of(found.key) for found in records}
    return CheckReport(
        path=str(path),
        fix=fix,
        owned=owner is not None,
        owner_pid=owner or None,
        num_roots=len(roots),
        num_records=num_records,
        size_bytes=size_bytes,
        num_expired=num_expired,
        bad=tuple(bad),
        undescribed=tuple(sorted(root for root in roots if not _has_description(directory, root))),
        num_leftovers=len(leftovers),
        leftover_bytes=sum(leftovers),
    )


# Ownership and surroundings.


@contextmanager
def _owned(directory: StoreDirectory, owner: int | None) -> Iterator[None]:
    if owner is not None:
        raise ConfigError(
            f"an engine uses this store, and --fix would move files from under it; stop the "
            f"engine, or check without --fix: path={directory.path} pid={owner or 'unknown'}"
        )
    directory.open()
    try:
        yield
    finally:
        directory.close()


@contextmanager
def _not_owned() -> Iterator[None]:
    yield


def _leftovers(directory: StoreDirectory) -> list[int]:
    try:
        return [tree_bytes(entry.path) for entry in os.scandir(directory.partial)]
    except OSError:
        return []


def _description_path(directory: StoreDirectory, root: Root) -> str:
    return os.path.join(directory.roots, root.hex(), "root.json")


def _has_description(directory: StoreDirectory, root: Root) -> bool:
    return os.path.lexists(_description_path(directory, root))


def _check_layout(directory: StoreDirectory, identities: dict[Root, Identity | None]) -> list[Bad]:
    """Damaged descriptions, and whatever lies among the records without being one."""
    bad = [
        Bad(path, DESCRIPTION, "root.json is damaged or describes another root", tree_bytes(path))
        for root, identity in identities.items()
        if identity is None and os.path.lexists(path := _description_path(directory, root))
    ]
    bad += [
        Bad(path, STRAY, "not a record, yet it lies among them", tree_bytes(path))
        for path in _strays(directory)
    ]
    return bad


def _strays(directory: StoreDirectory) -> Iterator[str]:
    for root in entries(directory.roots):
        if not (_ROOT_NAME.fullmatch(root.name) and root.is_dir()):
            yield root.path
            continue
        for bucket in entries(root.path):
            if bucket.name == "root.json":
                continue
            if not (_BUCKET_NAME.fullmatch(bucket.name) and bucket.is_dir(follow_symlinks=False)):
                yield bucket.path
                continue
            for entry in entries(bucket.path):
                if not _RECORD_NAME.fullmatch(entry.name):
                    yield entry.path


def _set_aside(directory: StoreDirectory, bad: Bad) -> Bad:
    moved = None if bad.reason == UNREADABLE else directory.set_aside(bad.path, bad.reason)
    action = Action.FAILED if moved is None else Action.QUARANTINED
    return Bad(bad.path, bad.reason, bad.detail, bad.size_bytes, action)


# Records.


def _verdicts(
    directory: StoreDirectory,
    records: Sequence[Found],
    identities: dict[Root, Identity | None],
    now_s: float,
) -> Iterator[tuple[Found, _Verdict]]:
    """Look at records on several threads, a few ahead of the caller."""
    window: deque[tuple[Found, Future[_Verdict]]] = deque()
    stop = threading.Event()
    with (
        ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="stepwell-check") as pool,
        _set_at_the_end(stop),  # an interrupt does not wait until large records are read
    ):
        for found in records:
            identity = identities.get(root_of(found.key))
            chunk_bytes = None if identity is None else identity.fields.get("chunk_bytes")
            in_place = directory.record_path(found.key) == found.path
            job = pool.submit(_examine, found, chunk_bytes, in_place, int(now_s * 1e6), stop)
            window.append((found, job))
            if len(window) >= 2 * _NUM_THREADS:
                first, future = window.popleft()
                yield first, future.result()
        for found, future in window:
            yield found, future.result()


@contextmanager
def _set_at_the_end(event: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        event.set()


def _examine(
    found: Found, chunk_bytes: object, in_place: bool, now_us: int, stop: threading.Event
) -> _Verdict:
    try:
        mode = os.lstat(found.path).st_mode
        if not stat.S_ISREG(mode):
            raise DataError("not a regular file", Reason.NOT_A_FILE)
        header = _verify_file(found.path, found.key, stop)
        if isinstance(chunk_bytes, int) and header.payload_bytes != chunk_bytes:
            raise DataError(
                f"another length than its root's chunks: expected_bytes={chunk_bytes} "
                f"found_bytes={header.payload_bytes}",
                Reason.LAYOUT,
            )
        if not in_place:
            raise DataError("it lies in the wrong folder", Reason.IDENTITY)
    except DataError as error:
        size_bytes = tree_bytes(found.path)
        return _Verdict(Bad(found.path, str(error.reason), str(error), size_bytes))
    except (FileNotFoundError, NotADirectoryError):
        return _Verdict(gone=True)
    except OSError as error:
        reason = Reason.IO_ERROR.value if error.errno == errno.EIO else UNREADABLE
        return _Verdict(Bad(found.path, reason, str(error.strerror), found.size_bytes))
    return _Verdict(expired=0 < header.expires_at_us <= now_us)


def _verify_file(path: str, key: Key, stop: threading.Event) -> Header:
    """Check a record against its name and itself, a piece at a time.

    Raises:
        DataError: with the reason.
        OSError: from the system.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags)
    try:
        # What counts is what the drive has, not what memory remembers of it; and afterwards
        # other files' pages should not have made way for these.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        header = Header.unpack(b"".join(bytes(piece) for piece in _pieces(fd, 0, HEADER_BYTES)))
        _verify_length(header, os.fstat(fd).st_size)
        if header.key != key:
            raise DataError(
                f"the record is another chunk's: found={header.key.hex()}", Reason.IDENTITY
            )
        digest = xxhash.xxh3_128()
        for piece in _pieces(fd, HEADER_BYTES, header.payload_bytes):
            digest.update(piece)
            if stop.is_set():
                raise InterruptedError  # nobody waits for the verdict any more
        if digest.digest() != header.checksum:
            raise DataError("payload checksum is wrong", Reason.CHECKSUM)
        end = HEADER_BYTES + header.payload_bytes
        padding_bytes = pad_to_page(header.payload_bytes) - header.payload_bytes
        if any(bytes(piece).strip(b"\0") for piece in _pieces(fd, end, padding_bytes)):
            raise DataError("the bytes after the payload are not zero", PADDING)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return header
    finally:
        os.close(fd)


def _verify_length(header: Header, size_bytes: int) -> None:
    expected_bytes = record_bytes(header.payload_bytes)
    if size_bytes < expected_bytes:
        raise DataError(
            f"cut short: bytes={size_bytes} expected={expected_bytes}", Reason.TRUNCATED
        )
    if size_bytes > expected_bytes:
        raise DataError(
            f"longer than it says: bytes={size_bytes} expected={expected_bytes}", Reason.LAYOUT
        )


def _pieces(fd: int, offset: int, length: int) -> Iterator[memoryview]:
    """Up to ``length`` bytes from ``offset`` on; a piece is valid until the next one."""
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = memoryview(bytearray(_PIECE_BYTES))
    while length > 0:
        count = os.preadv(fd, [buffer[: min(length, _PIECE_BYTES)]], offset)
        if count == 0:
            return
        yield buffer[:count]
        offset += count
        length -= count
