"""Setting right what a check found, with the store owned.

A record that is wrong stays where it is and is noted in the journal as set aside, as an engine
does with one that it met: it is served no more, and its slot is the first to be used again. The
journal is written anew for that, without what leads nowhere. Files that are not the store's are
moved together into one folder inside the store: they may be somebody's, so that nothing is
deleted, and where they lie an engine does not count them. Of a link the link is moved, and what
it leads to is not touched.
"""

import os
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepwell.ops.contents import ASIDE_REASONS, Contents
from stepwell.ops.findings import Bad, Remedy
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.files import open_in_folder
from stepwell.tiers.frames import (
    Kind,
    encode_aside,
    encode_root,
    encode_rows,
    encode_wear,
)
from stepwell.tiers.journal import Journal

__all__ = ["clear_the_way", "repair"]


def clear_the_way(directory: StoreDirectory, bad: Sequence[Bad]) -> list[Bad]:
    """Do what is needed before a store can be owned.

    Nobody can begin to own it while that is needed. An engine that began before, and whose LOCK was
    taken away since, may still use it.

    Args:
        directory: owned by nobody.
        bad: what no engine would start with.

    Returns:
        The same, saying which of them were fixed.
    """
    # The folder for strays first: the others go there.
    order = sorted(bad, key=lambda each: each.path != directory.strays)
    fixed = {
        each.path
        for each in order
        if (each.remedy is Remedy.MOVE and _move(directory, each.path))
        or (each.remedy is Remedy.WRITE and _write_marker(directory))
    }
    return [replace(each, fixed=each.path in fixed) for each in bad]


def _write_marker(directory: StoreDirectory) -> bool:
    try:
        if os.path.lexists(directory.marker):
            directory.set_aside(directory.marker)
        directory.write_marker()
    except OSError:
        return False
    return True


def repair(
    directory: StoreDirectory, contents: Contents, bad: Sequence[Bad], wiped: Sequence[int]
) -> list[Bad]:
    """Do what each remedy says; what the journal names and is no more is left out of it.

    Args:
        directory: owned by this process.
        contents: as they were found.
        bad: what is wrong with them.
        wiped: places of rows whose records were invalidated.

    Returns:
        The same, saying which of them were fixed.
    """
    sizes = {extent.path: extent.slot_bytes for extent in contents.extents}
    by_journal = [each for each in bad if each.remedy in (Remedy.SET_ASIDE, Remedy.RENEW)]
    needed = bool(by_journal or wiped or len(contents.lost))
    renewed = needed and _all_seen(contents, bad) and _renew(directory, contents, by_journal, wiped)
    results = []
    for each in bad:
        match each.remedy:
            case Remedy.SET_ASIDE | Remedy.RENEW:
                fixed = renewed
            case Remedy.MOVE:
                fixed = _move(directory, each.path)
            case Remedy.CUT:
                fixed = _cut(each.path, each.size_bytes - each.size_bytes % sizes[each.path])
            case Remedy.WRITE | Remedy.LEAVE:
                fixed = False
        results.append(replace(each, fixed=fixed))
    return results


def _all_seen(contents: Contents, bad: Sequence[Bad]) -> bool:
    """Whether a new journal would name everything that lies there.

    What this user may not read only the old journal can name; made from the headers that can be
    read a new one would lose it.
    """
    unseen = any(each.remedy is Remedy.LEAVE for each in bad)
    return contents.journal.image is not None or not unseen


def _renew(
    directory: StoreDirectory, contents: Contents, bad: Sequence[Bad], wiped: Sequence[int]
) -> bool:
    """Put a journal of what is good, and of what is set aside, in the old one's place."""
    wrong = {
        each.place: ASIDE_REASONS.index(each.reason) if each.reason in ASIDE_REASONS else 0
        for each in bad
        if each.place is not None
    }
    if _in_the_way(directory.journal) and not _move(directory, directory.journal):
        return False
    frames = _frames(contents, {**contents.aside, **wrong}, wiped)
    journal = Journal(directory.journal, directory.partial_path())
    try:
        if contents.journal.image is not None:
            journal.resume(contents.journal.image)  # so that the old one stays if that fails
        return journal.renew(threading.Lock(), lambda: frames)
    finally:
        journal.close()


def _frames(contents: Contents, aside: Mapping[int, int], wiped: Sequence[int]) -> bytes:
    """A journal's frames; what is aside or wiped is not among the rows."""
    image = contents.image
    left = np.array([*aside, *wiped], np.uint64)
    rows = contents.rows[~np.isin(contents.rows["place"], left)]
    parts = [
        encode_root(number, image.roots[number]) for number in np.unique(rows["root"]).tolist()
    ]
    if image.wear is not None:
        parts.append(encode_wear(image.wear))
    parts.append(encode_rows(Kind.SNAPSHOT, rows))
    parts += [encode_aside(place, number) for place, number in aside.items()]
    return b"".join(parts)


def _in_the_way(path: str) -> bool:
    """Whether something else than a file lies there."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _move(directory: StoreDirectory, path: str) -> bool:
    try:
        directory.set_aside(path)
    except OSError:
        return False
    return True


def _cut(path: str, size_bytes: int) -> bool:
    try:
        fd = open_in_folder(path, os.O_WRONLY)
        try:
            os.ftruncate(fd, size_bytes)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True
