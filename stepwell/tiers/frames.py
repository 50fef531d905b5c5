"""Frames: what the journal says, as bytes, and what a journal's bytes say.

A snapshot of the whole table comes first, then what happened since. docs/FORMAT.md has it byte by
byte. The records' headers are the truth: an entry that is wrong leads to a miss.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import ROOT_BYTES, Root
from stepwell.policy.endurance import EnduranceState

__all__ = [
    "ASIDE_REASONS",
    "ENTRY",
    "FILE_HEADER",
    "SNAPSHOT_BASE_BYTES",
    "SNAPSHOT_SLOT_BYTES",
    "Image",
    "JournalError",
    "Kind",
    "encode",
    "encode_aside",
    "encode_free",
    "encode_root",
    "encode_rows",
    "encode_touch",
    "encode_wear",
    "replay",
]

MAGIC = b"SWJOURNL"
VERSION = 1
_HEAD = struct.Struct("<8sHHI")  # magic, version, reserved, CRC-32 of these with zero here
_FRAME = struct.Struct("<HHII")  # kind, check of kind and number, number of entries, CRC-32 of all
_HEADER_CRC = zlib.crc32(_HEAD.pack(MAGIC, VERSION, 0, 0))
FILE_HEADER = _HEAD.pack(MAGIC, VERSION, 0, _HEADER_CRC)
"""What a journal begins with."""
_CHECKED = struct.Struct("<HI")

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
    """Bytes written to the drive so far, since when, and what is left of the budget when."""


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
    if magic != MAGIC or version != VERSION or crc != _HEADER_CRC:
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
