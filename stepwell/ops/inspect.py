"""What lies in a store, collected without owning or changing it."""

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stepwell.core.identity import Identity, JsonValue
from stepwell.core.keys import Root
from stepwell.errors import ConfigError
from stepwell.ops import shm
from stepwell.ops.contents import (
    ASIDE_REASONS,
    Contents,
    JournalState,
    open_to_read,
    read_contents,
)
from stepwell.ops.live import LiveCounters, read_live
from stepwell.policy.endurance import LifeProjection, project_life
from stepwell.tiers.directory import FORMAT
from stepwell.tiers.files import entries
from stepwell.tiers.slots import BOOKKEEPING_BYTES

__all__ = [
    "Quarantined",
    "RootReport",
    "SlotSize",
    "StoreReport",
    "Wear",
    "inspect_store",
]


@dataclass(frozen=True, slots=True)
class RootReport:
    """One root: whose data, and how much.

    Attributes:
        root: 32 bytes.
        identity: its description; None where it is missing or damaged.
        num_chunks, size_bytes: records and the slots that they take; their content is not read.
        oldest_used_s, newest_used_s: when the chunk that was not used for longest, and the one
            used last, were read or written, seconds since the epoch; None without chunks.
        compared_with: the root that ``differences`` are to; None if there is none to compare.
        differences: field -> (here, there).
    """

    root: Root
    identity: Identity | None
    num_chunks: int = 0
    size_bytes: int = 0
    oldest_used_s: float | None = None
    newest_used_s: float | None = None
    compared_with: Root | None = None
    differences: Mapping[str, tuple[JsonValue, JsonValue]] | None = None


@dataclass(frozen=True, slots=True)
class SlotSize:
    """The slots of one size.

    Attributes:
        slot_bytes: of each.
        num_extents: files that they lie in.
        num_slots: all of them.
        num_used: with a record.
        num_aside: with something that was wrong.
    """

    slot_bytes: int
    num_extents: int
    num_slots: int
    num_used: int
    num_aside: int

    @property
    def num_free(self) -> int:
        """With nothing in them, or with what an engine is writing just now."""
        return self.num_slots - self.num_used - self.num_aside

    @property
    def allocated_bytes(self) -> int:
        """What they take of the capacity, with room for their journal entries."""
        return self.num_slots * (self.slot_bytes + BOOKKEEPING_BYTES)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Slots whose content was wrong for one reason; they are the first to be used again."""

    reason: str
    num_slots: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Wear:
    """What this store wrote to its drive.

    Attributes:
        written_bytes: so far.
        as_of_s: when that was so, seconds since the epoch: now where the running engine's counters
            say it, else when it was last noted in the journal.
        since_s: when that count began, seconds since the epoch.
        rated_dwpd: the drive's rating as it was given, drive writes per day.
        life: what that makes of it; None where the file system has no size. It takes the file
            system for the drive.
    """

    written_bytes: int
    as_of_s: float
    since_s: float
    rated_dwpd: float
    life: LifeProjection | None

    def bytes_per_day(self, now_s: float) -> float | None:
        """On average; None before a day is over, since an hour's rate says nothing of a day's."""
        days = (now_s - self.since_s) / 86_400
        return self.written_bytes / days if days >= 1 else None


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A store as it was found.

    Attributes:
        path: absolute.
        format: of the directory.
        now_s: when, seconds since the epoch.
        owned: whether a process uses it at present.
        owner_pid: that process, None if unknown.
        free_bytes, total_bytes: of its file system, for unprivileged users.
        journal, journal_error, journal_bytes: what became of it, why it was not used, its size.
            Unless it was used everything below is by the records' headers: what was evicted and
            not written over counts as a chunk, and used means written.
        roots: the most recently used first.
        slots: by size.
        quarantine: by reason.
        wear: None where only the journal could tell it.
        num_partial, partial_bytes: files that are being made or were never finished.
        abandoned: shared memory of stopped engines on this machine, whatever their store was.
        live: counters of the process that uses it; None if it exports none.
    """

    path: str
    format: int
    now_s: float
    owned: bool
    owner_pid: int | None
    free_bytes: int
    total_bytes: int
    journal: JournalState
    journal_error: str
    journal_bytes: int
    roots: tuple[RootReport, ...]
    slots: tuple[SlotSize, ...]
    quarantine: tuple[Quarantined, ...]
    wear: Wear | None
    num_partial: int
    partial_bytes: int
    abandoned: tuple[shm.Abandoned, ...]
    live: LiveCounters | None = None

    @property
    def num_chunks(self) -> int:
        """Of all roots."""
        return sum(root.num_chunks for root in self.roots)

    @property
    def size_bytes(self) -> int:
        """Of all roots' slots."""
        return sum(root.size_bytes for root in self.roots)

    @property
    def num_extents(self) -> int:
        """Of all slot sizes."""
        return sum(size.num_extents for size in self.slots)

    @property
    def allocated_bytes(self) -> int:
        """What the extents take of the capacity."""
        return sum(size.allocated_bytes for size in self.slots)


def inspect_store(
    path: Path, *, rated_dwpd: float = 1.0, shm_dir: Path | None = None
) -> StoreReport:
    """Look at a store, also while an engine uses it. Blocks for reading the journal.

    Args:
        path: of the store.
        rated_dwpd: what the drive is rated for, drive writes per day over five years, above 0.
        shm_dir: where vLLM's host memory lies; None for /dev/shm.

    Raises:
        ConfigError: there is no store at ``path``, none that an engine would start with, or the
            rating is out of range.
        OSError: its extents cannot be listed.
    """
    if not 0 < rated_dwpd < math.inf:
        raise ConfigError(f"drive writes per day are above 0: rated_dwpd={rated_dwpd}")
    directory = open_to_read(path)
    owner = directory.owner()
    status = os.statvfs(path)
    total_bytes = status.f_blocks * status.f_frsize
    partial_bytes = [entry.size_bytes for entry in entries(directory.partial)]
    now_s = time.time()
    contents = read_contents(directory, now_s=now_s)
    live = read_live(directory)
    return StoreReport(
        path=str(path),
        format=FORMAT,
        now_s=now_s,
        owned=owner is not None,
        owner_pid=owner or None,
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=total_bytes,
        journal=contents.journal.state,
        journal_error=contents.journal.error,
        journal_bytes=contents.journal.size_bytes,
        roots=tuple(_compare(_roots(contents, directory.identities()))),
        slots=tuple(_slot_sizes(contents)),
        quarantine=tuple(_quarantined(contents)),
        wear=_wear(contents, live, now_s, total_bytes, rated_dwpd),
        num_partial=len(partial_bytes),
        partial_bytes=sum(partial_bytes),
        abandoned=tuple(shm.find_abandoned(shm_dir or shm.SHM_DIR)),
        live=live,
    )


def _roots(contents: Contents, identities: Mapping[Root, Identity | None]) -> list[RootReport]:
    rows = contents.rows
    # Sorted by root once and cut, so that the cost does not grow with the number of roots.
    order = np.argsort(rows["root"], kind="stable")
    numbers, begins = np.unique(rows["root"][order], return_index=True)
    found: dict[Root, RootReport] = {
        root: RootReport(root, identity) for root, identity in identities.items()
    }
    if len(rows):
        used_at_s = rows["used_at_s"][order]
        sizes = np.add.reduceat(contents.slot_bytes(rows["place"])[order], begins)
        oldest = np.minimum.reduceat(used_at_s, begins)
        newest = np.maximum.reduceat(used_at_s, begins)
        counts = np.diff(begins, append=len(rows))
        for number, count, size, old, new in zip(
            *(column.tolist() for column in (numbers, counts, sizes, oldest, newest)), strict=True
        ):
            root = contents.image.roots[number]
            report = found.get(root) or RootReport(root, None)
            found[root] = replace(
                report,
                num_chunks=report.num_chunks + count,
                size_bytes=report.size_bytes + size,
                oldest_used_s=_least(old, report.oldest_used_s),
                newest_used_s=max(new, report.newest_used_s or 0),
            )
    return sorted(found.values(), key=lambda each: (-(each.newest_used_s or 0.0), each.root))


def _least(one: float, other: float | None) -> float:
    return one if other is None else min(one, other)


def _compare(reports: list[RootReport]) -> list[RootReport]:
    """Each root beside the most recently used one that has a description."""
    recent = next((each for each in reports if each.identity is not None), None)
    if recent is None or recent.identity is None:
        return reports
    compared = []
    for report in reports:
        if report.identity is not None and report is not recent:
            report = replace(  # noqa: PLW2901 - the same root, with one more thing known
                report,
                compared_with=recent.root,
                differences=report.identity.differences(recent.identity),
            )
        compared.append(report)
    return compared


def _slot_sizes(contents: Contents) -> list[SlotSize]:
    extents: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    for extent in contents.extents:
        extents[extent.slot_bytes] += 1
        slots[extent.slot_bytes] += extent.size_bytes // extent.slot_bytes
    sizes, counts = np.unique(contents.slot_bytes(contents.rows["place"]), return_counts=True)
    used = Counter(dict(zip(sizes.tolist(), counts.tolist(), strict=True)))
    aside = Counter(_aside_bytes(contents).values())
    return [
        SlotSize(size, extents[size], slots[size], used[size], aside[size])
        for size in sorted(extents)
    ]


def _quarantined(contents: Contents) -> list[Quarantined]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for place, slot_bytes in _aside_bytes(contents).items():
        number = contents.aside[place]
        reason = ASIDE_REASONS[number if number < len(ASIDE_REASONS) else 0]
        counts[reason] += 1
        sizes[reason] += slot_bytes
    return [Quarantined(reason, counts[reason], sizes[reason]) for reason in sorted(counts)]


def _aside_bytes(contents: Contents) -> dict[int, int]:
    """Place -> slot size of what was set aside."""
    places = np.fromiter(contents.aside, np.uint64, len(contents.aside))
    return dict(zip(places.tolist(), contents.slot_bytes(places).tolist(), strict=True))


def _wear(
    contents: Contents, live: LiveCounters | None, now_s: float, drive_bytes: int, rated_dwpd: float
) -> Wear | None:
    state = contents.image.wear
    if state is None or not state.first_s:
        return None
    written_bytes, as_of_s = state.written_bytes, state.as_of_s
    # The counters do not say which of several drives this is.
    by_drive = [] if live is None else list(live.by("written_bytes", "tier").values())
    if len(by_drive) == 1 and math.isfinite(by_drive[0]):
        written_bytes, as_of_s = max(written_bytes, int(by_drive[0])), now_s
    life = None
    if drive_bytes:
        life = project_life(written_bytes, now_s - state.first_s, drive_bytes, rated_dwpd)
    return Wear(written_bytes, as_of_s, state.first_s, rated_dwpd, life)
