"""What a check may find: values, and the reasons that an engine never meets or need not mind."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from stepwell.core.keys import Root
from stepwell.ops.contents import JournalState
from stepwell.tiers.slots import slot_of

__all__ = [
    "BLOCKED",
    "DESCRIPTION",
    "JOURNAL",
    "MISSING",
    "PADDING",
    "STRAY",
    "UNREADABLE",
    "Bad",
    "CheckReport",
    "Remedy",
    "Strays",
]

# Beside `stepwell.core.types.Reason`.
BLOCKED = "blocked"
"""No engine would start with the store: its marker is wrong, or something lies in the place of one
of its files or directories."""
PADDING = "padding"
"""Bytes between the payload and the record's end are not zero."""
STRAY = "stray"
"""Not the store's, yet among its files: takes room that nobody counts."""
DESCRIPTION = "description"
"""A damaged description of a root."""
JOURNAL = "journal"
"""The journal is damaged; it is made again from the records' headers."""
MISSING = "missing"
"""The journal names records in extents that are gone or end before them. An engine notes first that
they have left: so somebody removed files, or a power cut took them."""
UNREADABLE = "unreadable"
"""This process may not read it, so it may well be whole."""


class Remedy(StrEnum):
    """What ``fix`` does about something bad."""

    SET_ASIDE = "set_aside"
    """The record is served no more; its slot stays as it is until room is needed."""
    RENEW = "renew"
    """The journal is written anew, from what it said or from the headers."""
    CUT = "cut"
    """The extent is cut to whole slots."""
    MOVE = "move"
    """It is moved to the folder for strays; nothing in the store is deleted."""
    WRITE = "write"
    """The marker is written again; one that was damaged is moved to the strays."""
    LEAVE = "leave"
    """Nothing: it could not be read, so it may be whole."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Something that is not what it claims to be.

    Attributes:
        path: absolute; of a record its extent's.
        reason: a `stepwell.core.types.Reason`, or one of this module's.
        detail: in words.
        size_bytes: of the slot, or of the file.
        remedy: what can be done about it.
        place: of a record, its slot (`stepwell.tiers.slots.place_of`).
        fixed: whether that was done.
    """

    path: str
    reason: str
    detail: str
    size_bytes: int
    remedy: Remedy
    place: int | None = None
    fixed: bool = False

    @property
    def slot_idx(self) -> int | None:
        """Of a record: which slot of its extent, from 0 on."""
        return None if self.place is None else slot_of(self.place)[1]


@dataclass(frozen=True, slots=True)
class Strays:
    """Files that nobody counts: how many, and their bytes."""

    num_files: int = 0
    size_bytes: int = 0

    @classmethod
    def of_sizes(cls, sizes_bytes: Iterable[int]) -> "Strays":
        """Files of these sizes."""
        sizes = list(sizes_bytes)
        return cls(len(sizes), sum(sizes))


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found.

    Attributes:
        path: of the store.
        fix: whether something was to be done about it.
        owned: whether a process used the store meanwhile.
        owner_pid: that process, None if unknown.
        journal: what became of it; unless it was used the headers told where records lie.
        cut_bytes: at the journal's end, of a write that a killed engine did not finish; harmless.
        num_roots: that hold records.
        num_records, size_bytes: that were read, whole, and the slots that they take.
        num_expired: good records whose time has run out; the engine drops them by itself.
        num_gone: records that left, or were written over, while they were looked at.
        num_stale: records that the journal names and that were invalidated. So it is after an
            engine was killed while it removed them; an engine passes them over.
        num_aside: slots that were set aside earlier; they are not served and were not read.
        bad: in the order in which they were found.
        undescribed: roots with records and without a description; their records are good, only
            nobody can tell in words whose they are.
        leftovers: of an engine that was killed; harmless, removed by ``fix`` and at the engine's
            next start. Not looked at while an engine runs.
        strays: what ``fix`` moved aside earlier.
    """

    path: str
    fix: bool
    owned: bool
    owner_pid: int | None
    journal: JournalState
    cut_bytes: int
    num_roots: int
    num_records: int
    size_bytes: int
    num_expired: int
    num_gone: int
    num_stale: int
    num_aside: int
    bad: tuple[Bad, ...]
    undescribed: tuple[Root, ...]
    leftovers: Strays
    strays: Strays

    @property
    def ok(self) -> bool:
        """Whether nothing was bad."""
        return not self.bad
