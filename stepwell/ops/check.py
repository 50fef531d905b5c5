"""Is everything in a store what it claims to be? Every record is read and verified whole."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepwell.core.identity import Identity
from stepwell.core.keys import Root
from stepwell.core.types import Reason
from stepwell.errors import ConfigError
from stepwell.ops.contents import (
    Contents,
    JournalState,
    found_extents,
    open_extent,
    read_contents,
    read_journal,
    tag_at,
    usable_extents,
)
from stepwell.ops.findings import (
    BLOCKED,
    DESCRIPTION,
    JOURNAL,
    MISSING,
    STRAY,
    UNREADABLE,
    Bad,
    CheckReport,
    Remedy,
    Strays,
)
from stepwell.ops.records import Examiner, Verdict, verdicts
from stepwell.ops.repair import clear_the_way, repair
from stepwell.tiers.directory import EXTENT_SUFFIX, FoundExtent, StoreDirectory
from stepwell.tiers.files import Entry, entries, list_folder, tree_bytes
from stepwell.tiers.slots import slot_of

__all__ = ["check_store"]

_DESCRIPTION_NAME = re.compile(r"[0-9a-f]{64}\.json")
# What an engine has done is in its journal by then.
_SETTLE_S = 0.1


def check_store(
    path: Path,
    *,
    now_s: float,
    fix: bool = False,
    on_start: Callable[[int], object] = lambda total_bytes: None,
    on_record: Callable[[int], object] = lambda size_bytes: None,
) -> CheckReport:
    """Read and verify everything. Blocks for as long as reading all of it takes.

    Takes some 100 bytes for each record, and about 4 MiB for each of four threads, however large
    the records are. Without ``fix`` nothing is changed and an engine may go on using the store:
    what turns out bad then is looked at once more, and passed over if it left meanwhile.

    Args:
        path: of the store.
        now_s: seconds since the epoch, to tell what has expired.
        fix: own the store and set right what is wrong, see `stepwell.ops.findings.Remedy`.
        on_start: told how many bytes there are to read.
        on_record: told the size of every record that was looked at.

    Raises:
        ConfigError: there is no store at ``path``; or ``fix``, and a process owns it, or what
            keeps an engine from starting cannot be moved away.
        OSError: its extents cannot be listed.
    """
    directory = StoreDirectory(path)
    in_the_way = list(_blocked(directory))
    owner = directory.owner()
    strays = _sizes_below(directory.strays)
    if fix:
        _refuse_owner(directory, owner)
        in_the_way = clear_the_way(directory, in_the_way)
    leftovers = Strays() if owner is not None else _sizes_below(directory.partial)
    with _owned(directory) if fix else nullcontext():
        contents = read_contents(directory, now_s=0.0)
        identities = directory.identities()
        on_start(contents.size_bytes)
        examiner = Examiner(identities, now_s)
        bad = [*_journal_faults(directory, contents), *_surroundings(directory, identities)]
        closed = {each.path for each in bad if each.reason == UNREADABLE}
        tally = _Tally()
        for verdict in verdicts(contents, examiner, closed):
            on_record(verdict.size_bytes)
            tally.add(verdict)
        if owner is None and not fix:
            owner = directory.owner()  # it may have begun meanwhile
        if owner is not None:
            tally.keep(_confirm(directory, tally.suspects, Examiner(identities, now_s)))
        elif not any(each.path == directory.extents for each in in_the_way):
            bad += _missing(directory, contents)
        bad += [verdict.bad for verdict in tally.suspects if verdict.bad is not None]
        if fix:
            bad = repair(directory, contents, bad, tally.wiped)
        bad = [*in_the_way, *bad]
    num_left = len(tally.wiped) + len(contents.lost)
    roots = {contents.image.roots[number] for number in np.unique(contents.rows["root"]).tolist()}
    return CheckReport(
        path=str(path),
        fix=fix,
        owned=owner is not None,
        owner_pid=owner or None,
        journal=contents.journal.state,
        cut_bytes=0 if owner is not None else contents.journal.cut_bytes,
        num_roots=len(roots),
        num_records=tally.num_records,
        size_bytes=tally.size_bytes,
        num_expired=tally.num_expired,
        num_gone=tally.num_gone + (num_left if owner is not None else 0),
        num_stale=0 if owner is not None else len(tally.wiped),
        num_aside=len(contents.aside),
        bad=tuple(bad),
        undescribed=tuple(sorted(root for root in roots if root not in identities)),
        leftovers=leftovers,
        strays=strays,
    )


# Records.


@dataclass(slots=True)
class _Tally:
    """Counts of what was looked at, and what seemed to be wrong."""

    num_records: int = 0
    size_bytes: int = 0
    num_expired: int = 0
    num_gone: int = 0
    suspects: list[Verdict] = field(default_factory=list)
    wiped: list[int] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        if verdict.wiped:
            self.wiped.append(verdict.named.place)
            return
        self.num_records += 1
        self.size_bytes += verdict.size_bytes
        self.num_expired += verdict.expired
        if verdict.bad is not None:
            self.suspects.append(verdict)

    def keep(self, confirmed: Sequence[Verdict]) -> None:
        """Of the suspects these are left, the others are gone."""
        places = {verdict.named.place for verdict in confirmed}
        gone = [verdict for verdict in self.suspects if verdict.named.place not in places]
        self.num_records -= len(gone)
        self.size_bytes -= sum(verdict.size_bytes for verdict in gone)
        self.num_gone += len(gone)
        self.suspects = list(confirmed)


def _confirm(
    directory: StoreDirectory, suspects: Sequence[Verdict], examiner: Examiner
) -> list[Verdict]:
    """Those of the suspects that an engine did not remove or write over meanwhile.

    That a place is free is in the journal before anything else is written there. So what the
    journal names before and after it was read, and what was wrong both times, is wrong.
    """
    again = [
        look
        for verdict, extent in _still_there(directory, suspects)
        for look in examiner.look_at(extent, [verdict.named])
    ]
    wrong = [look for look in again if look.bad is not None]
    return [verdict for verdict, _ in _still_there(directory, wrong)]


def _still_there(
    directory: StoreDirectory, found: Sequence[Verdict]
) -> list[tuple[Verdict, FoundExtent]]:
    """Those whose record still lies where it lay, with their extents as they are now."""
    if not found:
        return []
    time.sleep(_SETTLE_S)
    image = read_journal(directory).image
    tags: dict[int, int] | None = None
    if image is not None:
        places = np.array([verdict.named.place for verdict in found], np.uint64)
        rows = image.rows[np.isin(image.rows["place"], places)]
        tags = dict(zip(rows["place"].tolist(), rows["tag"].tolist(), strict=True))
    extents = {extent.extent_id: extent for extent in usable_extents(directory)}
    there = []
    for verdict in found:
        extent_id, slot_idx = slot_of(verdict.named.place)
        extent = extents.get(extent_id)
        if extent is None or slot_idx >= extent.size_bytes // extent.slot_bytes:
            continue
        tag = tag_at(extent, slot_idx) if tags is None else tags.get(verdict.named.place)
        if tag == verdict.named.tag:
            there.append((verdict, extent))
    return there


# What is around them.


def _blocked(directory: StoreDirectory) -> Iterator[Bad]:
    for fault in directory.faults():
        remedy = Remedy.WRITE if fault.path == directory.marker else Remedy.MOVE
        yield Bad(fault.path, BLOCKED, fault.detail, tree_bytes(fault.path), remedy)


def _journal_faults(directory: StoreDirectory, contents: Contents) -> Iterator[Bad]:
    journal = contents.journal
    where = directory.journal
    if journal.state is JournalState.DAMAGED:
        yield Bad(where, JOURNAL, journal.error, journal.size_bytes, Remedy.RENEW)
    elif journal.state is JournalState.UNREADABLE:
        yield Bad(where, UNREADABLE, journal.error, tree_bytes(where), Remedy.LEAVE)
    if contents.num_unnamed:
        detail = f"entries of a root that it does not name: entries={contents.num_unnamed}"
        yield Bad(where, JOURNAL, detail, journal.size_bytes, Remedy.RENEW)


def _missing(directory: StoreDirectory, contents: Contents) -> Iterator[Bad]:
    """Where nobody owns the store; an owner may have dropped extents meanwhile."""
    if len(contents.lost):
        num_extents = len(np.unique(contents.lost["place"] >> np.uint64(32)))
        detail = (
            f"records are named in extents that are gone or end before them: "
            f"records={len(contents.lost)} extents={num_extents}"
        )
        yield Bad(directory.extents, MISSING, detail, 0, Remedy.RENEW)


def _surroundings(
    directory: StoreDirectory, identities: Mapping[Root, Identity | None]
) -> Iterator[Bad]:
    """Damaged descriptions and extents, and whatever lies among them without being one."""
    try:
        list_folder(directory.roots)
    except (FileNotFoundError, NotADirectoryError):
        pass  # nothing was ever described; or something else lies there, which is said already
    except OSError as error:
        yield Bad(directory.roots, UNREADABLE, str(error.strerror), 0, Remedy.LEAVE)
    for entry in entries(directory.roots):
        if not _DESCRIPTION_NAME.fullmatch(entry.name):
            detail = "not a description of a root, yet it lies among them"
            yield Bad(entry.path, STRAY, detail, tree_bytes(entry.path), Remedy.MOVE)
        elif identities.get(Root(bytes.fromhex(entry.name.removesuffix(".json"))), 0) is None:
            detail = "it is damaged or describes another root"
            yield Bad(entry.path, DESCRIPTION, detail, tree_bytes(entry.path), Remedy.MOVE)
    yield from _extent_faults(directory)


def _extent_faults(directory: StoreDirectory) -> Iterator[Bad]:
    # First whatever lies there, then the extents: one that an engine makes now is none of the
    # former, and the other way round it would be taken for a stray.
    lying = entries(directory.extents)
    found = {extent.path: extent for extent in found_extents(directory)}
    for entry in lying:
        extent = found.get(entry.path)
        if extent is None:
            yield from _no_extent(entry)
            continue
        rest_bytes = extent.size_bytes % extent.slot_bytes
        if extent.size_bytes < extent.slot_bytes:
            detail = f"shorter than a slot: bytes={extent.size_bytes}"
            reason, remedy = Reason.TRUNCATED.value, Remedy.MOVE
        elif rest_bytes:
            detail = f"what follows its last whole slot is no slot: bytes={rest_bytes}"
            reason, remedy = Reason.LAYOUT.value, Remedy.CUT
        else:
            yield from _closed_extent(extent)
            continue
        yield Bad(extent.path, reason, detail, extent.size_bytes, remedy)


def _no_extent(entry: Entry) -> Iterator[Bad]:
    if not os.path.lexists(entry.path):
        return  # it left meanwhile
    if entry.is_regular or not entry.name.endswith(EXTENT_SUFFIX):
        detail, reason = "not an extent, yet it lies among them", STRAY
    else:
        detail, reason = "not a regular file", Reason.NOT_A_FILE.value
    yield Bad(entry.path, reason, detail, tree_bytes(entry.path), Remedy.MOVE)


def _closed_extent(extent: FoundExtent) -> Iterator[Bad]:
    try:
        with open_extent(extent.path):
            return
    except FileNotFoundError:
        return  # it left meanwhile
    except OSError as error:
        detail = str(error.strerror)
        yield Bad(extent.path, UNREADABLE, detail, extent.size_bytes, Remedy.LEAVE)


def _sizes_below(folder: str) -> Strays:
    return Strays.of_sizes(tree_bytes(entry.path) for entry in entries(folder))


# Ownership.


def _refuse_owner(directory: StoreDirectory, owner: int | None) -> None:
    if owner is not None:
        raise ConfigError(
            f"an engine uses this store, and --fix would change files under it; stop the "
            f"engine, or check without --fix: path={directory.path} pid={owner or 'unknown'}"
        )


@contextmanager
def _owned(directory: StoreDirectory) -> Iterator[None]:
    directory.open()
    try:
        yield
    finally:
        directory.close()
