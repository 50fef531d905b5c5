"""What lies where in a store, read without owning or changing it.

The journal tells it at the cost of one file. Where that is missing or damaged every slot's header
is read instead, as an engine does when it starts.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stepwell.core.keys import fingerprint
from stepwell.core.memory import aligned_memory
from stepwell.core.record import PAGE_BYTES, Header
from stepwell.errors import DataError
from stepwell.tiers import blockio
from stepwell.tiers.directory import FoundExtent, StoreDirectory
from stepwell.tiers.files import open_in_folder
from stepwell.tiers.frames import ASIDE_REASONS, ENTRY, Image, JournalError, replay
from stepwell.tiers.ledger import Ledger
from stepwell.tiers.slots import place_of

__all__ = [
    "ASIDE_REASONS",
    "Contents",
    "JournalState",
    "found_extents",
    "open_extent",
    "open_to_read",
    "read_contents",
    "read_journal",
    "tag_at",
    "usable_extents",
]

_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_SCAN_THREADS = 8
_SCAN_SLOTS = 4096  # per piece of work
_SLOT_MASK = np.uint64(0xFFFFFFFF)
_SLOT_BITS = np.uint64(32)

Rows = npt.NDArray[np.void]


class JournalState(StrEnum):
    """What became of the journal."""

    USED = "used"
    MISSING = "missing"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    """This process may not read it, or the drive could not."""


@dataclass(frozen=True, slots=True)
class FoundJournal:
    """The journal as it was found.

    Attributes:
        state: what became of it.
        image: what it says; None unless it was used.
        size_bytes: of the file.
        error: why it was not used, in words; "" if it was, or if there is none.
    """

    state: JournalState
    image: Image | None = None
    size_bytes: int = 0
    error: str = ""

    @property
    def cut_bytes(self) -> int:
        """What follows the last whole frame: of a write that was not finished."""
        return 0 if self.image is None else self.size_bytes - self.image.valid_bytes


@dataclass(frozen=True, eq=False, slots=True)
class Contents:
    """What lies where, by the journal, or by the headers where there is no journal to go by.

    Attributes:
        journal: as it was found.
        extents: that an engine would use, by number.
        rows: `stepwell.tiers.frames.ENTRY` rows that an engine would serve, the first to leave
            first; places and tags are unique.
        lost: rows of slots that are not there: the extent is gone, or ends before them.
        num_unnamed: rows of a root that is not named; passed over.
        image: where all of this is from.
        aside: place -> number of the reason, of slots that are there.
    """

    journal: FoundJournal
    extents: tuple[FoundExtent, ...]
    rows: Rows
    lost: Rows
    num_unnamed: int
    image: Image
    aside: dict[int, int]

    def slot_bytes(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Slot sizes at places whose extents are there."""
        sizes = np.array([extent.slot_bytes for extent in self.extents], np.int64)
        found: npt.NDArray[np.int64] = sizes[_extent_at(places, self.extents)]
        return found

    @property
    def size_bytes(self) -> int:
        """Of the slots that hold served records."""
        return int(self.slot_bytes(self.rows["place"]).sum())


def open_to_read(path: Path) -> StoreDirectory:
    """The store at ``path``, not owned.

    Raises:
        ConfigError: there is none, it has another format, or no engine would start with it.
    """
    directory = StoreDirectory(path)
    directory.open_to_read()
    return directory


def read_contents(directory: StoreDirectory, *, now_s: float) -> Contents:
    """What lies where. Blocks for reading the journal, or every header.

    Args:
        directory: of the store; owned by anybody or nobody.
        now_s: what headers say to have expired by then is left out, seconds since the epoch;
            0 to have it all.

    Raises:
        OSError: the extents cannot be listed.
    """
    # The journal first: whatever it names was there when it was written, and what an engine
    # made since then is not named. The other way round a new extent would seem to be missing.
    journal = read_journal(directory)
    extents = usable_extents(directory)
    image = journal.image
    if image is None:
        image = Ledger.image_of(_headers(extents), now_s)
    rows = image.rows
    there = _is_there(rows["place"], extents)
    named = np.isin(rows["root"], np.fromiter(image.roots, np.int64, len(image.roots)))
    aside_places = np.fromiter(image.aside, np.uint64, len(image.aside))
    aside_there = aside_places[_is_there(aside_places, extents)].tolist()
    return Contents(
        journal=journal,
        extents=tuple(extents),
        rows=_last_of_each_tag(rows[there & named]),
        lost=rows[~there & named],
        num_unnamed=int((~named).sum()),
        image=image,
        aside={place: image.aside[place] for place in aside_there},
    )


def read_journal(directory: StoreDirectory) -> FoundJournal:
    """The journal as it is now, also while an engine writes to it."""
    # Opened once: an engine that renews it puts a whole new file in its place.
    try:
        fd = os.open(directory.journal, _OPEN_FLAGS)
    except FileNotFoundError:
        return FoundJournal(JournalState.MISSING)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            return FoundJournal(JournalState.DAMAGED, error="it is not a regular file")
        return FoundJournal(JournalState.UNREADABLE, error=str(error.strerror))
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return FoundJournal(JournalState.DAMAGED, error="it is not a regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read()
    except OSError as error:
        return FoundJournal(JournalState.UNREADABLE, error=str(error.strerror))
    finally:
        os.close(fd)
    try:
        return FoundJournal(JournalState.USED, replay(data), len(data))
    except JournalError as error:
        return FoundJournal(JournalState.DAMAGED, size_bytes=len(data), error=str(error))


def found_extents(directory: StoreDirectory) -> list[FoundExtent]:
    """As `StoreDirectory.find_extents`; none where no directory is in their place.

    Raises:
        OSError: they cannot be listed.
    """
    try:
        return directory.find_extents()
    except NotADirectoryError:
        return []  # which is one of `StoreDirectory.faults`


def usable_extents(directory: StoreDirectory) -> list[FoundExtent]:
    """Those with at least one whole slot, by number: the ones that an engine would use.

    Raises:
        OSError: they cannot be listed.
    """
    return [each for each in found_extents(directory) if each.size_bytes >= each.slot_bytes]


@contextlib.contextmanager
def open_extent(path: str) -> Iterator[int]:
    """Open an extent for reading, past the page cache where that works; a file descriptor.

    What counts is what the drive has, not what memory remembers of it; and other files' pages
    should not make way for what is looked at once.

    Raises:
        OSError: from the system.
    """
    try:
        fd = _open_direct(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fd = open_in_folder(path, _OPEN_FLAGS)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield fd
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def tag_at(extent: FoundExtent, slot_idx: int) -> int | None:
    """The fingerprint of the key in a slot's header; None if there is no readable header."""
    try:
        with open_extent(extent.path) as fd:
            page = blockio.read_page(fd, slot_idx * extent.slot_bytes)
            return fingerprint(Header.unpack(page).key)
    except (OSError, DataError):
        return None


def _open_direct(path: str) -> int:
    fd = open_in_folder(path, _OPEN_FLAGS | os.O_DIRECT)
    try:
        # Some file systems open the file and then refuse to read it.
        os.preadv(fd, [aligned_memory(PAGE_BYTES)], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            os.close(fd)
            raise
    return fd


def _headers(extents: Sequence[FoundExtent]) -> Iterator[tuple[int, Header]]:
    """Every readable header as (place, header), at one small read per slot."""
    pieces = [
        (extent, begin)
        for extent in extents
        for begin in range(0, extent.size_bytes // extent.slot_bytes, _SCAN_SLOTS)
    ]
    with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="stepwell-scan") as pool:
        for found in pool.map(_scan_piece, pieces):
            yield from found


def _scan_piece(piece: tuple[FoundExtent, int]) -> list[tuple[int, Header]]:
    extent, begin = piece
    end = min(begin + _SCAN_SLOTS, extent.size_bytes // extent.slot_bytes)
    found = []
    with contextlib.suppress(OSError), open_extent(extent.path) as fd:
        for idx in range(begin, end):
            # Never written, torn, or not readable: nothing that could be served.
            with contextlib.suppress(OSError, DataError):
                header = Header.unpack(blockio.read_page(fd, idx * extent.slot_bytes))
                found.append((place_of(extent.extent_id, idx), header))
    return found


def _extent_at(
    places: npt.NDArray[np.uint64], extents: Sequence[FoundExtent]
) -> npt.NDArray[np.int64]:
    """For each place the index of the extent with its number, or of the next one."""
    numbers = np.array([extent.extent_id for extent in extents], np.uint64)
    return np.searchsorted(numbers, places >> _SLOT_BITS).astype(np.int64)


def _is_there(
    places: npt.NDArray[np.uint64], extents: Sequence[FoundExtent]
) -> npt.NDArray[np.bool_]:
    """Which places are slots of an extent; the others can hold nothing."""
    if not extents:
        return np.zeros(len(places), np.bool_)
    numbers = np.array([extent.extent_id for extent in extents], np.uint64)
    num_slots = np.array([each.size_bytes // each.slot_bytes for each in extents], np.uint64)
    at = np.minimum(_extent_at(places, extents), len(extents) - 1)
    there: npt.NDArray[np.bool_] = (numbers[at] == places >> _SLOT_BITS) & (
        places & _SLOT_MASK < num_slots[at]
    )
    return there


def _last_of_each_tag(rows: Rows) -> Rows:
    """Of two rows of one chunk the more recent one, as an engine takes it; the order stays."""
    _, first = np.unique(rows["tag"][::-1], return_index=True)
    found: Rows = rows[::-1][np.sort(first)][::-1]
    return found if len(found) else np.empty(0, ENTRY)
