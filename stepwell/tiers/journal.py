"""The journal: a hint of where records lie, so that a start need not look at every slot.

A file of frames. A snapshot of the whole table comes first, then what happened since; when that
has grown long, a new file with a new snapshot takes the old one's place. docs/FORMAT.md has it
byte by byte. The records' headers are the truth: an entry that is wrong leads to a miss, and a
journal that is lost or damaged is made again from the headers.
"""

import contextlib
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import ROOT_BYTES, Root
from stepwell.policy.endurance import EnduranceState

__all__ = [
    "ASIDE_REASONS",
    "ENTRY",
    "SNAPSHOT_BASE_BYTES",
    "SNAPSHOT_SLOT_BYTES",
    "Image",
    "Journal",
    "JournalError",
    "encode",
    "replay",
]

MAGIC = b"SWJOURNL"
VERSION = 1
_HEAD = struct.Struct("<8sHHI")  # magic, version, reserved, CRC-32 of these with zero here
_FRAME = struct.Struct("<HHII")  # kind, check of kind and number, number of entries, CRC-32 of all
_CHECKED = struct.Struct("<HI")
_FRAME_CRC_AT = 8

ENTRY = np.dtype(
    [
        ("tag", "<u8"),
        ("place", "<u8"),
        ("root", "<u2"),
        ("reserved", "<u2"),
        ("used_at_s", "<u4"),
        ("expires_at_s", "<u4"),
        ("reserved2", "<u4"),
    ]
)
_ROOT_ENTRY = struct.Struct(f"<HH{ROOT_BYTES}s")
_ASIDE = np.dtype([("place", "<u8"), ("reason", "<u8")])
_PLACE = np.dtype("<u8")
_WEAR = struct.Struct("<QQqQ")

# Once the entries since the snapshot outnumber these and a quarter of the rows, it is time for a
# new snapshot: replaying them stays a fraction of a start, writing it a fraction of the work.
_TAIL_MIN_ENTRIES = 4096
_TAIL_SHARE = 4

SNAPSHOT_SLOT_BYTES = ENTRY.itemsize + _FRAME.size + _ROOT_ENTRY.size
"""What a slot adds to a snapshot at most: its entry, and a root of its own."""
SNAPSHOT_BASE_BYTES = _HEAD.size + 3 * _FRAME.size + _WEAR.size
"""What a snapshot has besides: file header, WEAR, and the heads of its frames."""

ASIDE_REASONS = ("other", "checksum", "header", "identity", "layout", "truncated", "io_error")
"""What the numbers in ASIDE frames stand for (docs/FORMAT.md); added to, never changed."""


class Kind(IntEnum):
    """What a frame says."""

    ROOT = 1
    """A root's number in this file."""
    SNAPSHOT = 2
    """Rows that are present, the first to leave first."""
    PUT = 3
    """Rows that became present, in prefix order."""
    FREE = 4
    """Places that hold nothing any more."""
    TOUCH = 5
    """Places that were used together, in prefix order; the first number is the time."""
    ASIDE = 6
    """Places whose content is wrong and kept for a look, each with the number of its reason."""
    WEAR = 7
    """Bytes written to the drive so far, since when, and and what is left of the budget when."""


class JournalError(Exception):
    """The journal is damaged in a way that its end being cut off does not explain."""


def encode(kind: Kind, body: bytes, count: int) -> bytes:
    """One frame."""
    check = _head_check(kind, count)
    crc = zlib.crc32(body, zlib.crc32(_FRAME.pack(kind, check, count, 0)))
    return _FRAME.pack(kind, check, count, crc) + body


def _head_check(kind: int, count: int) -> int:
    # Or a wrong number of entries would look like a frame that was cut off.
    return zlib.crc32(_CHECKED.pack(kind, count)) & 0xFFFF


def encode_root(number: int, root: Root) -> bytes:
    """A ROOT frame."""
    return encode(Kind.ROOT, _ROOT_ENTRY.pack(number, 0, root), 1)


def encode_free(places: Sequence[int]) -> bytes:
    """A FREE frame."""
    return encode(Kind.FREE, np.array(places, _PLACE).tobytes(), len(places))


def encode_touch(places: Sequence[int], now_s: float) -> bytes:
    """A TOUCH frame."""
    return encode(Kind.TOUCH, np.array([int(now_s), *places], _PLACE).tobytes(), len(places) + 1)


def aside_number(reason: str) -> int:
    """The number of a reason in ASIDE frames."""
    return ASIDE_REASONS.index(reason) if reason in ASIDE_REASONS else 0


def encode_aside(place: int, reason_number: int) -> bytes:
    """An ASIDE frame."""
    return encode(Kind.ASIDE, np.array([(place, reason_number)], _ASIDE).tobytes(), 1)


def encode_wear(wear: EnduranceState) -> bytes:
    """A WEAR frame."""
    level_bytes = int(max(-(1 << 62), min(wear.level_bytes, 1 << 62)))
    body = _WEAR.pack(wear.written_bytes, int(wear.first_s), level_bytes, int(wear.as_of_s))
    return encode(Kind.WEAR, body, 1)


def encode_rows(kind: Kind, rows: npt.NDArray[np.void]) -> bytes:
    """A SNAPSHOT or PUT frame of `ENTRY` rows."""
    return encode(kind, rows.tobytes(), len(rows))


@dataclass(slots=True)
class Image:
    """What a journal says lies where.

    Attributes:
        rows: `ENTRY` rows, the first to leave first; places are unique, tags may not be.
        roots: number -> root.
        aside: place -> number of the reason.
        wear: what was written to the drive so far, since when, and what is left of its budget;
            None if unknown.
        num_tail: entries since the snapshot.
        valid_bytes: of the file; what follows was cut off.
    """

    rows: npt.NDArray[np.void]
    roots: dict[int, Root] = field(default_factory=dict)
    aside: dict[int, int] = field(default_factory=dict)
    wear: EnduranceState | None = None
    num_tail: int = 0
    valid_bytes: int = 0


_BODY_BYTES = {
    Kind.ROOT: _ROOT_ENTRY.size,
    Kind.SNAPSHOT: ENTRY.itemsize,
    Kind.PUT: ENTRY.itemsize,
    Kind.FREE: _PLACE.itemsize,
    Kind.TOUCH: _PLACE.itemsize,
    Kind.ASIDE: _ASIDE.itemsize,
    Kind.WEAR: _WEAR.size,
}


def _frames(data: memoryview) -> Iterator[tuple[Kind, memoryview, int]]:
    """Whole frames as (kind, body, end); stops where the file was cut off.

    Raises:
        JournalError: a frame is wrong and is not the last thing in the file.
    """
    offset = _HEAD.size
    while offset + _FRAME.size <= len(data):
        kind, check, count, crc = _FRAME.unpack_from(data, offset)
        if check != _head_check(kind, count):
            raise JournalError(f"a frame's head is wrong: offset={offset}")
        if kind not in _BODY_BYTES:
            raise JournalError(f"unknown frame: kind={kind} offset={offset}")
        if kind in (Kind.ROOT, Kind.WEAR) and count != 1:
            raise JournalError(f"not one entry: kind={kind} offset={offset} count={count}")
        end = offset + _FRAME.size + count * _BODY_BYTES[Kind(kind)]
        if end > len(data):
            return  # its writer was stopped in the middle
        body = data[offset + _FRAME.size : end]
        if zlib.crc32(body, zlib.crc32(_FRAME.pack(kind, check, count, 0))) != crc:
            raise JournalError(f"a frame's checksum is wrong: offset={offset}")
        yield Kind(kind), body, end
        offset = end


def replay(data: bytes) -> Image:
    """What a journal file says.

    Raises:
        JournalError: no journal, another version, or damaged.
    """
    if len(data) < _HEAD.size:
        raise JournalError(f"too short for a journal: bytes={len(data)}")
    magic, version, _, crc = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or crc != _head_crc():
        raise JournalError(f"no journal of this version: magic={magic!r} version={version}")
    image = Image(np.empty(0, ENTRY), valid_bytes=_HEAD.size)
    history = _History()
    for kind, body, end in _frames(memoryview(data)):
        image.valid_bytes = end
        if kind is Kind.ROOT:
            number, _, root = _ROOT_ENTRY.unpack(body)
            image.roots[number] = Root(root)
        elif kind is Kind.WEAR:
            image.wear = EnduranceState(*_WEAR.unpack(body))
        elif kind in (Kind.SNAPSHOT, Kind.PUT):
            rows = np.frombuffer(body, ENTRY)
            history.put(rows if kind is Kind.SNAPSHOT else rows[::-1])
            for place in image.aside and rows["place"].tolist():
                image.aside.pop(place, None)
            image.num_tail += len(rows) if kind is Kind.PUT else 0
        elif kind is Kind.FREE:
            places = np.frombuffer(body, _PLACE)
            history.free(places)
            for place in image.aside and places.tolist():
                image.aside.pop(place, None)
            image.num_tail += len(places)
        elif kind is Kind.TOUCH:
            numbers = np.frombuffer(body, _PLACE)
            now_s = min(int(numbers[0]), 0xFFFFFFFF) if len(numbers) else 0
            history.touch(numbers[:0:-1], now_s)
            image.num_tail += len(numbers)
        else:
            entries = np.frombuffer(body, _ASIDE)
            history.free(entries["place"])
            image.aside.update(
                zip(entries["place"].tolist(), entries["reason"].tolist(), strict=True)
            )
    image.rows = history.rows()
    return image


class _History:
    """What happened to every place, kept as columns and made up at the end in one go.

    A replay entry by entry would cost a start with a million rows seconds.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._puts: list[npt.NDArray[np.void]] = []
        self._frees: list[tuple[npt.NDArray[np.uint64], int]] = []
        self._touches: list[tuple[npt.NDArray[np.uint64], int, int]] = []
        self._put_at: list[int] = []

    def put(self, rows: npt.NDArray[np.void]) -> None:
        """Rows became present; the last is the most recent."""
        self._puts.append(rows)
        self._put_at.append(self._tick(len(rows)))

    def free(self, places: npt.NDArray[np.uint64]) -> None:
        """Places became free."""
        self._frees.append((places, self._tick(len(places))))

    def touch(self, places: npt.NDArray[np.uint64], now_s: int) -> None:
        """Places were used; the last is the most recent."""
        self._touches.append((places, self._tick(len(places)), now_s))

    def _tick(self, count: int) -> int:
        first = self._clock
        self._clock += count
        return first

    def rows(self) -> npt.NDArray[np.void]:
        """The rows that are left, the least recent first."""
        if not any(map(len, self._puts)):
            return np.empty(0, ENTRY)
        rows = np.concatenate(self._puts)
        _, times = self._all(
            [(p["place"], t) for p, t in zip(self._puts, self._put_at, strict=True)]
        )
        known, owner = np.unique(rows["place"], return_inverse=True)
        # Where an index repeats, the last assignment stands; times only rise.
        last = np.zeros(len(known), np.int64)
        last[owner] = np.arange(len(rows))
        used = np.full(len(known), -1, np.int64)
        used[owner] = times
        freed = np.full(len(known), -1, np.int64)
        if self._frees:
            places, when = self._all(self._frees)
            at = self._positions(known, places)
            freed[at[at >= 0]] = when[at >= 0]
        alive = used > freed
        rows = rows[last]
        if self._touches:
            places, when = self._all([(each, time) for each, time, _ in self._touches])
            lengths = [len(each) for each, _, _ in self._touches]
            now_s = np.repeat([each for _, _, each in self._touches], lengths)
            at = self._positions(known, places)
            # A touch of what lay there before does not count for what lies there now.
            counts = (at >= 0) & (when > used[at])
            used[at[counts]] = when[counts]
            rows["used_at_s"][at[counts]] = now_s[counts]
        order = np.argsort(used[alive], kind="stable")
        found: npt.NDArray[np.void] = rows[alive][order]
        return found

    @staticmethod
    def _all(
        events: Sequence[tuple[npt.NDArray[np.uint64], int]],
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The places of all events one behind the other, and when each happened."""
        lengths = np.array([len(places) for places, _ in events])
        begins = np.cumsum(lengths) - lengths
        times = np.array([time for _, time in events])
        when = np.repeat(times - begins, lengths) + np.arange(int(lengths.sum()))
        return np.concatenate([places for places, _ in events]), when

    @staticmethod
    def _positions(
        known: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        at = np.searchsorted(known, places)
        at[at == len(known)] = 0
        return np.where(known[at] == places, at, -1)


def _head_crc() -> int:
    return zlib.crc32(_HEAD.pack(MAGIC, VERSION, 0, 0))


class Journal:
    """Appends frames; makes a new file when the old has grown long.

    Frames are noted while the owner holds its lock, which fixes their order, and written by
    `flush`, which the owner calls without it: a drive that stands still then holds up nobody who
    only asks.

    Args:
        path: of the journal.
        partial: where a new one is made before it takes the old one's place.

    Threading: `note` under the owner's lock, `flush` and `renew` on any thread.
    Errors: none is raised after construction; a journal that cannot be written is removed, so
        that the next start reads the headers instead of a hint that is out of date, and a new
        one is tried at the next `renew`.
    """

    def __init__(self, path: str, partial: str) -> None:
        self._path = path
        self._partial = partial
        self._noted: list[bytes] = []
        self._io_lock = threading.Lock()
        self._fd = -1
        self._size_bytes = 0
        self._num_tail = 0
        self.written_bytes = 0
        """To the drive, for its wear."""

    @property
    def broken(self) -> bool:
        """Whether frames are lost: `renew` is needed."""
        return self._fd < 0

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self._size_bytes

    def resume(self, image: Image) -> bool:
        """Go on with the file that ``image`` was read from; False if it cannot be written."""
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            os.ftruncate(self._fd, image.valid_bytes)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._give_up()
            return False
        self._size_bytes = image.valid_bytes
        self._num_tail = image.num_tail
        return True

    def long(self, num_rows: int) -> bool:
        """Whether so much followed the snapshot that it is time for a new one."""
        return self._num_tail > max(_TAIL_MIN_ENTRIES, num_rows // _TAIL_SHARE)

    def note(self, frame: bytes, num_entries: int) -> None:
        """Remember a frame for `flush`; the owner's lock is held."""
        self._noted.append(frame)
        self._num_tail += num_entries

    def flush(self, most_bytes: int = 1 << 62) -> bool:
        """Write what was noted so far, in its order; afterwards it has been written.

        Args:
            most_bytes: what the file may have.

        Returns:
            False if it would have more, and nothing was written: `renew` it.
        """
        with self._io_lock:  # even for nothing: what somebody else took may not be written yet
            noted, count = self._noted, len(self._noted)
            data = b"".join(noted[:count])
            if self._fd >= 0 and self._size_bytes + len(data) > most_bytes:
                return False
            if count:
                del noted[:count]  # others only append
                self._append(data)
            return True

    def _append(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._give_up()
            return
        self._size_bytes += len(data)
        self.written_bytes += len(data)

    def renew(self, lock: threading.Lock, snapshot: Callable[[], bytes]) -> bool:
        """Put a new file with a new snapshot in the old one's place; False if that failed.

        Args:
            lock: the owner's, which is held while the snapshot is taken.
            snapshot: frames of everything that is so now.
        """
        with self._io_lock:  # whoever flushes waits, and then writes to the new file
            with lock:
                head = _HEAD.pack(MAGIC, VERSION, 0, _head_crc()) + snapshot()
                data = b"".join(self._noted)
                self._noted.clear()
                self._num_tail = 0
            try:
                fd = self._write_new(head)
            except OSError:
                # What was noted before the snapshot is part of it; the old file must not lack it.
                self._append(data)
                return False
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._size_bytes = len(head)
            self.written_bytes += len(head)
            return True

    def _write_new(self, head: bytes) -> int:
        fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(head)
            while view:
                view = view[os.write(fd, view) :]
            os.replace(self._partial, self._path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(self._partial)
            raise
        return fd

    def _give_up(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._size_bytes = 0
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def close(self) -> None:
        """Write what was noted and close the file."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is: it may be somebody else's by now."""
        with self._io_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
