"""`stepwell bench storage`: the disk tier beside what the drive and the memory can do.

In one run, round by round and in an order that rotates, the same buffers are written and read
by a plain preallocated file (raw), by the disk tier, and as a file per chunk. Round 0 fills what
is empty; the rounds after it overwrite, as a store in use does: the raw file in place, the tier by
evicting the former round's chunks, since its capacity is that of one round.

Nothing is synced within the timing, since the tier does not sync either; after every timed write
its files are written down, so that nobody pays for another's backlog.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from stepwell.bench import machine
from stepwell.bench.payloads import Payloads
from stepwell.bench.procs import huge_page_bytes
from stepwell.bench.progress import Progress
from stepwell.bench.rawio import (
    DEPTHS,
    FILES_AT_ONCE,
    FilePerChunk,
    RawFile,
    copy_memory,
    direct_works,
    hash_memory,
)
from stepwell.bench.storage_options import Shape, StorageOptions, check_memory, shapes_of
from stepwell.bench.storage_results import (
    CHECKSUM,
    FIRST_FILL,
    MEMORY_COPY,
    READ,
    WRITE,
    Row,
    Section,
    StorageResult,
    make_row,
)
from stepwell.bench.storefiles import drop_page_cache
from stepwell.bench.tierload import JobTier, TierLoad
from stepwell.bench.workplace import check_folder, signals_as_exceptions, working_folders
from stepwell.core.keys import Root
from stepwell.core.types import Direction
from stepwell.errors import ConfigError
from stepwell.settings import format_bytes, parse_path
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.striped import StripedTier

__all__ = ["StorageTier", "check_options", "open_tier", "run_storage"]

_SLACK_BYTES = 64 << 20  # for directories and what a file system keeps for itself
_SWEEP_BYTES = 1 << 30  # enough to tell queue depths from each other
_SWEEP_PASSES = 2
_ROOT = Root(hashlib.sha256(b"stepwell bench storage").digest())


@dataclass(frozen=True, slots=True)
class _Plan:
    paths: tuple[Path, ...]
    shapes: tuple[Shape, ...]


class StorageTier(JobTier, Protocol):
    """What is used of a tier on drives beyond that."""

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        ...


class Contender(Protocol):
    """What is measured: writes and reads all the chunks of one generation at once."""

    name: ClassVar[str]
    folders: tuple[Path, ...]

    def prepare(self) -> None:
        """Whatever comes before a write and is not timed."""
        ...

    def write(self, generation: int) -> Section:
        """Write all chunks from the buffers."""
        ...

    def read(self, generation: int) -> Section:
        """Read all chunks into the buffers."""
        ...


def open_tier(paths: Sequence[Path], capacity_bytes: int, num_threads: int) -> StorageTier:
    """The tier to measure.

    Args:
        paths: its directories, one per drive.
        capacity_bytes: of all of it.
        num_threads: that read and write.

    Raises:
        ConfigError: one of them cannot be used; nothing is left open.
    """
    context = TierContext()
    drives: list[DiskTier] = []
    try:
        for idx, path in enumerate(paths):
            drive = DiskTier(
                path,
                capacity_bytes // len(paths),
                context,
                num_threads=num_threads,
                # A whole round may be submitted at once.
                inflight_writes_bytes=max(capacity_bytes, 4 << 30),
                name=f"disk{idx}",
            )
            drives.append(drive)
    except ConfigError:
        for drive in drives:
            drive.close()
        raise
    return drives[0] if len(drives) == 1 else _Stripe(drives, context)


class _Stripe(StripedTier):
    """Several drives as one tier, with what the benchmark asks besides."""

    def __init__(self, drives: Sequence[DiskTier], context: TierContext) -> None:
        super().__init__(drives, context)
        self._disks = tuple(drives)

    @property
    def direct(self) -> bool:
        """Whether all drives are read and written past the page cache."""
        return all(disk.direct for disk in self._disks)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no drive has a job running; False if that took longer."""
        return all(disk.drain(timeout_s) for disk in self._disks)


def run_storage(options: StorageOptions) -> StorageResult:
    """Run the whole benchmark; blocks, a minute and more.

    Raises:
        ConfigError: an option is wrong, or room or memory is missing; nothing was made.
        TierError: the tier refused or lost a chunk, or hangs.
        DataError: what was read back is not what was written.
        OSError: from the file system.
    """
    plan = check_options(options)
    steps_per_shape = _SWEEP_PASSES * len(DEPTHS) + (options.rounds + 1) * 6
    rows: list[Row] = []
    with (
        signals_as_exceptions(),
        Progress(len(plan.shapes) * steps_per_shape) as progress,
        working_folders(plan.paths) as folders,
    ):
        direct = all(direct_works(folder) for folder in folders)
        configuration = _configuration(options, plan)
        tier_direct = True
        huge_bytes, buffer_bytes = 0, 0
        for shape in plan.shapes:
            run = _ShapeRun(options, shape, folders, direct, progress)
            rows += run.rows()
            tier_direct = tier_direct and run.tier_direct
            huge_bytes += run.huge_bytes
            buffer_bytes += shape.num_chunks * shape.chunk_bytes
    return StorageResult(
        tuple(rows),
        configuration,
        direct,
        tier_direct,
        huge_bytes / buffer_bytes,
        options.small_pages,
    )


def check_options(options: StorageOptions) -> _Plan:
    """Check all that can be checked before anything is made.

    Raises:
        ConfigError: one line that says what to change.
    """
    shapes = shapes_of(options)
    paths = tuple(map(parse_path, options.paths)) or (Path.cwd(),)
    for path in paths:
        check_folder(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(
            f"a path is given twice; each drive has its own: path={','.join(map(str, paths))}"
        )
    plan = _Plan(paths, shapes)
    _check_room(plan)
    check_memory(plan.shapes, options)
    return plan


def _check_room(plan: _Plan) -> None:
    share_bytes = max(shape.room_bytes for shape in plan.shapes) // len(plan.paths)
    needed_bytes: dict[int, int] = {}
    for path in plan.paths:
        file_system = path.stat().st_dev
        needed_bytes[file_system] = needed_bytes.get(file_system, _SLACK_BYTES) + share_bytes
    for path in plan.paths:
        status = os.statvfs(path)
        free_bytes = status.f_bavail * status.f_frsize
        needed = needed_bytes[path.stat().st_dev]
        if free_bytes < needed:
            raise ConfigError(
                f"not enough room, which is about 3 times size; give a smaller --size or another "
                f"--path: needed={format_bytes(needed)} free={format_bytes(free_bytes)} "
                f"path={path}"
            )


class _ShapeRun:
    """One chunk size: choose the raw file's queue depth, then the rounds."""

    def __init__(
        self,
        options: StorageOptions,
        shape: Shape,
        folders: Sequence[Path],
        direct: bool,
        progress: Progress,
    ) -> None:
        self.tier_direct = False
        self.huge_bytes = 0
        self._options = options
        self._shape = shape
        self._direct = direct
        self._progress = progress
        self._folders = folders
        self._payloads = Payloads(
            shape.num_chunks, shape.chunk_bytes, huge_pages=not options.small_pages
        )

    def rows(self) -> list[Row]:
        """Measure; makes its own folders and removes them, so that the next has the room."""
        self._payloads.fill(0)
        self.huge_bytes = huge_page_bytes(self._payloads.memory)
        with self._subfolders("sweep") as folders:
            depths = self._sweep(folders)
        with (
            self._subfolders("raw") as raw_folders,
            self._subfolders("tier") as tier_folders,
            self._subfolders("files") as file_folders,
            RawFile(raw_folders, self._payloads, direct=self._direct) as raw,
            contextlib.closing(self._open_tier(tier_folders)) as tier,
        ):
            self.tier_direct = tier.direct
            raw.write_depth = _best(depths[Direction.WRITE])
            raw.read_depth = _best(depths[Direction.READ])
            load = TierLoad(
                tier,
                _ROOT,
                self._payloads,
                self._shape,
                jobs=self._options.jobs,
                folders=tier_folders,
            )
            contenders: list[Contender] = [
                raw,
                load,
                FilePerChunk(file_folders, self._payloads, direct=self._direct),
            ]
            rounds = [self._round(idx, contenders) for idx in range(self._options.rounds + 1)]
        return self._rows(rounds, raw, depths)

    def _open_tier(self, folders: Sequence[Path]) -> StorageTier:
        # Equal parts, each with room for its share of a round.
        share = -(-self._shape.num_chunks // len(folders))
        slot_bytes = self._shape.capacity_bytes // self._shape.num_chunks
        return open_tier(folders, share * slot_bytes * len(folders), self._options.threads)

    def _sweep(self, folders: Sequence[Path]) -> dict[Direction, dict[int, float]]:
        """Throughput of the raw file by queue depth, the better of two tries: up and down."""
        num_chunks = min(self._shape.num_chunks, max(1, _SWEEP_BYTES // self._shape.chunk_bytes))
        found: dict[Direction, dict[int, float]] = {Direction.WRITE: {}, Direction.READ: {}}
        with RawFile(folders, self._payloads, direct=self._direct, num_chunks=num_chunks) as raw:
            raw.write(0)  # the first fill is another thing
            for depth in (*DEPTHS, *reversed(DEPTHS)):
                self._phase(f"raw file, {depth} at once")
                raw.write_depth = raw.read_depth = depth
                for direction in (Direction.WRITE, Direction.READ):
                    if direction is Direction.WRITE:
                        section = raw.write(0)
                        self._settle(raw)
                    else:
                        section = raw.read(0)
                    found[direction][depth] = max(section.gbps, found[direction].get(depth, 0.0))
                self._progress.step()
        return found

    def _round(self, idx: int, contenders: Sequence[Contender]) -> dict[str, dict[str, Section]]:
        """Every contender writes, then every one reads; who comes first rotates."""
        start = idx % len(contenders)
        order = [*contenders[start:], *contenders[:start]]
        when = f"round {idx} of {self._options.rounds}"
        found: dict[str, dict[str, Section]] = {WRITE: {}, READ: {}}
        self._phase(when)
        self._payloads.fill(idx)
        for contender in order:
            self._phase(f"{when}: {contender.name} write")
            contender.prepare()
            found[WRITE][contender.name] = contender.write(idx)
            self._settle(contender)
            self._progress.step()
        for contender in order:
            self._phase(f"{when}: {contender.name} read")
            self._payloads.wipe()
            found[READ][contender.name] = contender.read(idx)
            self._payloads.check(idx, contender.name)
            self._progress.step()
        copied = copy_memory(self._payloads, self._options.threads)
        hashed = hash_memory(self._payloads, self._options.threads)
        for sections in found.values():
            sections[MEMORY_COPY] = copied
            sections[CHECKSUM] = hashed
        return found

    def _rows(
        self,
        rounds: Sequence[Mapping[str, Mapping[str, Section]]],
        raw: RawFile,
        depths: Mapping[Direction, Mapping[int, float]],
    ) -> list[Row]:
        rows = []
        for op, direction, chosen in (
            (FIRST_FILL, Direction.WRITE, rounds[:1]),
            (WRITE, Direction.WRITE, rounds[1:]),
            (READ, Direction.READ, rounds[1:]),
        ):
            row = make_row(
                op,
                [each[READ if direction is Direction.READ else WRITE] for each in chosen],
                chunk_bytes=self._shape.chunk_bytes,
                jobs=self._options.jobs,
                raw_queue_depth=(
                    raw.read_depth if direction is Direction.READ else raw.write_depth
                ),
                raw_gbps_by_depth=depths[direction],
            )
            rows.append(row)
        return rows

    def _settle(self, contender: Contender) -> None:
        """Outside of the timing: its files written down, and none of them in the page cache."""
        for folder in contender.folders:
            drop_page_cache(folder)

    @contextlib.contextmanager
    def _subfolders(self, name: str) -> Iterator[tuple[Path, ...]]:
        made = tuple(folder / name for folder in self._folders)
        for folder in made:
            folder.mkdir()
        try:
            yield made
        finally:
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)

    def _phase(self, what: str) -> None:
        self._progress.phase(f"{format_bytes(self._shape.chunk_bytes)}, {what}")


def _best(gbps_by_depth: Mapping[int, float]) -> int:
    return max(gbps_by_depth, key=lambda depth: gbps_by_depth[depth])


def _configuration(options: StorageOptions, plan: _Plan) -> dict[str, object]:
    return {
        **machine.storage_machine(),
        "paths": [machine.path_configuration(path) for path in plan.paths],
        "size_bytes": options.size_bytes,
        "chunks": [
            {
                "chunk_bytes": shape.chunk_bytes,
                "num_chunks": shape.num_chunks,
                "chunks_per_job": shape.chunks_per_job,
                "tier_capacity_bytes": shape.capacity_bytes,
            }
            for shape in plan.shapes
        ],
        "jobs": options.jobs,
        "rounds": options.rounds,
        "tier_threads": options.threads,
        "raw_queue_depths": list(DEPTHS),
        "files_at_once": FILES_AT_ONCE,
    }
