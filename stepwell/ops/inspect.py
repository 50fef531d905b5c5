"""What lies in a store, collected without owning or changing it."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stepwell.core.identity import Identity, JsonValue
from stepwell.core.keys import Root, root_of
from stepwell.errors import ConfigError
from stepwell.ops import shm
from stepwell.tiers.directory import FORMAT, StoreDirectory

__all__ = ["Quarantined", "RootReport", "StoreReport", "inspect_store", "open_to_read"]


@dataclass(frozen=True, slots=True)
class RootReport:
    """One root: whose data, and how much.

    Attributes:
        root: 32 bytes.
        identity: its description; None where it is missing or damaged.
        num_chunks, size_bytes: records by the file system's word; their content is not read.
        oldest_used_s, newest_used_s: when the chunk that was not used for longest, and the one
            used last, were read or written, seconds since the epoch (a reading is noted at most
            once a minute); None without chunks.
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
class Quarantined:
    """What was set aside for one reason."""

    reason: str
    num_files: int
    size_bytes: int


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
        roots: the most recently used first.
        quarantine: by reason.
        num_partial, partial_bytes: records that are being written or were never finished.
        abandoned: shared memory of stopped engines on this machine, whatever their store was.
    """

    path: str
    format: int
    now_s: float
    owned: bool
    owner_pid: int | None
    free_bytes: int
    total_bytes: int
    roots: tuple[RootReport, ...]
    quarantine: tuple[Quarantined, ...]
    num_partial: int
    partial_bytes: int
    abandoned: tuple[shm.Abandoned, ...]

    @property
    def num_chunks(self) -> int:
        """Of all roots."""
        return sum(root.num_chunks for root in self.roots)

    @property
    def size_bytes(self) -> int:
        """Of all roots' records."""
        return sum(root.size_bytes for root in self.roots)


def open_to_read(path: Path) -> StoreDirectory:
    """The store at ``path``, not owned.

    Raises:
        ConfigError: there is none, or it has another format.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"path is a file; give the directory of a store: path={path}")
    directory = StoreDirectory(path)
    directory.open_to_read()
    return directory


def inspect_store(path: Path, *, shm_dir: Path | None = None) -> StoreReport:
    """Look at a store, also while an engine uses it. Blocks for a scan by names.

    Args:
        path: of the store.
        shm_dir: where vLLM's host memory lies; None for /dev/shm.

    Raises:
        ConfigError: there is no store at ``path``.
    """
    directory = open_to_read(path)
    owner = directory.owner()
    status = os.statvfs(path)
    partial_bytes = list(_sizes(directory.partial))
    return StoreReport(
        path=str(path),
        format=FORMAT,
        now_s=time.time(),
        owned=owner is not None,
        owner_pid=owner or None,
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
        roots=tuple(_compare(_collect(directory))),
        quarantine=tuple(_quarantined(directory.quarantined())),
        num_partial=len(partial_bytes),
        partial_bytes=sum(partial_bytes),
        abandoned=tuple(shm.find_abandoned(shm_dir or shm.SHM_DIR)),
    )


def _collect(directory: StoreDirectory) -> list[RootReport]:
    counts: Counter[Root] = Counter()
    sizes: Counter[Root] = Counter()
    oldest: dict[Root, float] = {}
    newest: dict[Root, float] = {}
    for found in directory.scan():
        root = root_of(found.key)
        counts[root] += 1
        sizes[root] += found.size_bytes
        oldest[root] = min(found.used_at_s, oldest.get(root, found.used_at_s))
        newest[root] = max(found.used_at_s, newest.get(root, found.used_at_s))
    identities = directory.identities()
    reports = [
        RootReport(
            root, identities.get(root), counts[root], sizes[root], oldest.get(root),
            newest.get(root),
        )
        for root in {**identities, **dict.fromkeys(counts)}
    ]  # fmt: skip
    return sorted(reports, key=lambda report: (-(report.newest_used_s or 0.0), report.root))


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


def _quarantined(entries: Iterable[tuple[str, int, float]]) -> list[Quarantined]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for path, size_bytes, _ in entries:
        # <name>.<reason>.<random>
        parts = os.path.basename(path).rsplit(".", 2)
        reason = parts[1] if len(parts) == 3 else "unknown"
        counts[reason] += 1
        sizes[reason] += size_bytes
    return [Quarantined(reason, counts[reason], sizes[reason]) for reason in sorted(counts)]


def _sizes(directory: str) -> Iterable[int]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        try:
            yield entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
