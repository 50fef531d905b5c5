"""What storage that engines share holds, said without using it as an engine does.

A shared directory is looked through, a folder at a time; nothing is written there, and its
members do not notice. Any other kind is asked what it says of itself.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepwell.core.identity import Identity
from stepwell.core.keys import Root, make_key
from stepwell.core.record import HEADER_BYTES
from stepwell.errors import ConfigError
from stepwell.tiers.files import read_regular
from stepwell.tiers.media.base import Stats
from stepwell.tiers.media.books import Books
from stepwell.tiers.media.census import files as files_in
from stepwell.tiers.media.census import record_folders, records, roots
from stepwell.tiers.media.fs import path_of
from stepwell.tiers.media.kinds import kind_of, open_medium
from stepwell.tiers.media.marker import read_pool_id
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.quota import Member
from stepwell.tiers.media.records import root_name
from stepwell.tiers.media.roots import (
    DESCRIPTION_BYTES,
    DESCRIPTIONS,
    described_roots,
    erase_root,
    identity_in,
)
from stepwell.tiers.media.urls import MediumUrl

__all__ = [
    "MediumReport",
    "PoolReport",
    "PoolRoot",
    "erase_roots",
    "inspect_pool",
    "inspect_url",
]

_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class PoolRoot:
    """One root's records in a pool.

    Attributes:
        root: 64 hexadecimal digits.
        identity: who computed them; None if the description is missing or damaged.
        num_chunks, size_bytes: of its records.
        oldest_used_s, newest_used_s: when the record that was not used for longest, and the one
            used last, were; seconds since the epoch by the file system's clock. None without any.
    """

    root: str
    identity: Identity | None
    num_chunks: int
    size_bytes: int
    oldest_used_s: float | None
    newest_used_s: float | None


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A shared directory as it was found.

    Attributes:
        path: absolute.
        kind: of the URL, by name.
        pool_id: of the marker.
        now_s: when, by this host's clock, seconds since the epoch.
        free_bytes, total_bytes: of its file system, for unprivileged users.
        epoch: the highest; 0 if nobody has ever swept.
        sweeper: the member that sweeps in it; "" if there is none.
        heard_s: when that was heard of last; 0 if it has resigned.
        books: what it has told; None if nothing.
        members: each by its name, with the time that it was heard of last.
        roots: by name.
        num_temp, temp_bytes: files that are being written, or were left behind.
    """

    path: str
    kind: str
    pool_id: str
    now_s: float
    free_bytes: int
    total_bytes: int
    epoch: int
    sweeper: str
    heard_s: float
    books: Books | None
    members: Mapping[str, tuple[Member, float]] = field(default_factory=dict)
    roots: tuple[PoolRoot, ...] = ()
    num_temp: int = 0
    temp_bytes: int = 0

    @property
    def num_chunks(self) -> int:
        """Of all roots."""
        return sum(root.num_chunks for root in self.roots)

    @property
    def size_bytes(self) -> int:
        """Of all roots."""
        return sum(root.size_bytes for root in self.roots)


@dataclass(frozen=True, slots=True)
class MediumReport:
    """Another kind of storage.

    Attributes:
        url: without its password.
        kind: by name.
        stats: what it says of itself.
        roots: with their descriptions, None for one that is damaged; None if it cannot list them.
    """

    url: str
    kind: str
    stats: Stats
    roots: Mapping[Root, Identity | None] | None = None


def inspect_url(url: MediumUrl) -> PoolReport | MediumReport:
    """Look at what a URL names. Blocks; of a shared directory it lists every folder.

    Raises:
        ConfigError: it is no such storage. TierError: it does not answer. OSError: a directory
            cannot be read.
    """
    kind = kind_of(url)
    if kind.is_pool:
        return inspect_pool(path_of(url), kind.name)
    medium = open_medium(url, _WITHIN_S)
    try:
        return MediumReport(url.shown, kind.name, medium.stats(_WITHIN_S), described_roots(medium))
    finally:
        medium.close()


def erase_roots(url: MediumUrl, roots: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Remove all that roots have in shared storage. Blocks; joins no pool, so that none is swept
    by whoever erases.

    Args:
        url: of the storage.
        roots: of each 64 hexadecimal digits; nothing is removed if one is wrong.

    Yields:
        Each when it is done, with the number of its chunks.

    Raises:
        ConfigError: it is no such storage, or no root. TierError: it fails; some may be left.
        OSError: a directory cannot be read.
    """
    for root in roots:
        if re.fullmatch(r"[0-9a-f]{64}", root) is None:
            raise ConfigError(f"a root is 64 hexadecimal digits, lower case: root={root!r:.80}")
    if kind_of(url).is_pool:
        _pool_id(path_of(url))
    medium = open_medium(url, _WITHIN_S)
    try:
        for root in roots:
            yield root, erase_root(medium, Root(bytes.fromhex(root)))
    finally:
        medium.close()


def _pool_id(path: Path) -> str:
    try:
        return read_pool_id(path)
    except FileNotFoundError as error:
        raise ConfigError(f"no pool lies there; is it mounted? path={path}") from error


def inspect_pool(path: Path, kind: str = "fs") -> PoolReport:
    """Look at a shared directory; memory is that of one folder of it, and a line per root.

    Args:
        path: absolute.
        kind: by name, for the report.

    Raises:
        ConfigError: it is none. OSError: it cannot be read.
    """
    files = PoolFiles(path)
    pool_id = _pool_id(path)
    epoch = files.highest_epoch()
    descriptions = _descriptions(files.chunks)
    temp = [seen.size_bytes for seen in files_in(files.temp)]
    status = os.statvfs(path)
    return PoolReport(
        path=str(path),
        kind=kind,
        pool_id=pool_id,
        now_s=time.time(),
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
        epoch=epoch,
        sweeper=files.sweeper_of(epoch),
        heard_s=files.lease_ns(epoch) / 1e9,
        books=files.read_books(epoch),
        members={
            name: (member, pulse_ns / 1e9)
            for name, (member, pulse_ns) in sorted(files.read_members().items())
        },
        roots=tuple(
            _root(files.chunks, name, descriptions.get(name))
            for name in roots(files.chunks)
            if name != root_name(DESCRIPTIONS)
        ),
        num_temp=len(temp),
        temp_bytes=sum(temp),
    )


def _descriptions(chunks: str) -> dict[str, Identity | None]:
    """By the names of roots. A pool that is in use is read, so that some may be gone meanwhile."""
    found: dict[str, Identity | None] = {}
    for folder in record_folders(f"{chunks}/{root_name(DESCRIPTIONS)}"):
        for seen in records(folder):
            name = os.path.basename(seen.path)
            with contextlib.suppress(OSError, ValueError):
                content = read_regular(seen.path, DESCRIPTION_BYTES)
                key = make_key(DESCRIPTIONS, bytes.fromhex(name))
                page, payload = content[:HEADER_BYTES], content[HEADER_BYTES:]
                found[name] = identity_in(page, payload, key)
    return found


def _root(chunks: str, name: str, identity: Identity | None) -> PoolRoot:
    num_chunks = size_bytes = 0
    oldest_ns, newest_ns = 1 << 63, 0
    for folder in record_folders(f"{chunks}/{name}"):
        for seen in records(folder):
            num_chunks += 1
            size_bytes += seen.size_bytes
            oldest_ns = min(oldest_ns, seen.used_ns)
            newest_ns = max(newest_ns, seen.used_ns)
    if not num_chunks:
        return PoolRoot(name, identity, 0, 0, None, None)
    return PoolRoot(name, identity, num_chunks, size_bytes, oldest_ns / 1e9, newest_ns / 1e9)
