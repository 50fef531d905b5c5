"""`stepwell bench storage --path URL`: the tier on shared storage beside its client alone.

In one run, round by round and in turns, the same buffers are written and read by the medium's own
calls on as many threads as are fastest (raw: what the client library, the network and the server
can do), and by the tier, which is asked as an engine asks. A round before the first one makes
connections and is not reported. All chunks are of two roots of this run alone, and are erased
after every round, and at the end whatever happens.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from stepwell.bench import machine
from stepwell.bench.payloads import Payloads
from stepwell.bench.procs import huge_page_bytes
from stepwell.bench.progress import Progress
from stepwell.bench.rawio import DEPTHS, copy_memory, hash_memory, run_parallel
from stepwell.bench.storage_options import Shape, StorageOptions, check_memory, shapes_of
from stepwell.bench.storage_results import (
    CHECKSUM,
    MEMORY_COPY,
    RAW,
    READ,
    WRITE,
    Row,
    Section,
    StorageResult,
    make_row,
)
from stepwell.bench.tierload import TierLoad, chunk_key
from stepwell.bench.workplace import check_pool, signals_as_exceptions
from stepwell.core.keys import Key, Root
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult, Direction
from stepwell.errors import ConfigError, TierError
from stepwell.tiers.base import TierContext
from stepwell.tiers.media.base import Medium, Record, Wanted
from stepwell.tiers.media.kinds import kind_of, open_medium
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import DONE
from stepwell.tiers.shared import SharedTier

__all__ = ["run_medium"]

_CALL_BYTES = 16 << 20  # of one call of the medium, as the tier's threads make them
_WITHIN_S = 60.0  # of one call, and of one job
_SWEEP_BYTES = 256 << 20  # enough to tell numbers of threads from each other
_HEADER = bytes(HEADER_BYTES)


def run_medium(options: StorageOptions) -> StorageResult:
    """Run the whole benchmark; blocks, a minute and more.

    Args:
        options: whose only path is a URL.

    Raises:
        ConfigError: an option is wrong, or the other side refuses; nothing was written.
        TierError: the other side fails, or refused or lost a chunk.
        DataError: what was read back is not what was written.
    """
    if len(options.paths) != 1:
        raise ConfigError("a URL is measured by itself, without further paths")
    url = MediumUrl.parse(options.paths[0])
    kind = kind_of(url)
    shapes = shapes_of(options)
    check_memory(shapes, options)
    check_pool(url, _writes_bytes(options, shapes))
    steps = len(shapes) * (len(DEPTHS) + 4 * (options.rounds + 1))
    rows: list[Row] = []
    huge_bytes = 0
    with signals_as_exceptions(), Progress(steps) as progress, _opened(url) as medium:
        tier = SharedTier(
            medium,
            TierContext(),
            name=kind.name,
            num_threads=options.threads,
            # A whole round may be submitted at once.
            inflight_writes_bytes=max(options.size_bytes, 4 << 30),
            answer_within_s=_WITHIN_S,
        )
        with contextlib.closing(tier):
            for shape in shapes:
                run = _ShapeRun(options, shape, tier, medium, progress)
                rows += run.rows()
                huge_bytes += run.huge_bytes
    buffer_bytes = sum(shape.num_chunks * shape.chunk_bytes for shape in shapes)
    return StorageResult(
        tuple(rows),
        _configuration(options, url, kind.name, shapes),
        direct=True,
        tier_direct=True,
        huge_share=huge_bytes / buffer_bytes,
        small_pages=options.small_pages,
    )


def _writes_bytes(options: StorageOptions, shapes: Sequence[Shape]) -> int:
    """What is written all in all, though never there at once."""
    rounds_bytes = 2 * (options.rounds + 1) * options.size_bytes
    return len(shapes) * (len(DEPTHS) * min(_SWEEP_BYTES, options.size_bytes) + rounds_bytes)


@contextlib.contextmanager
def _opened(url: MediumUrl) -> Iterator[Medium]:
    """The medium, asked whether it is there; whoever makes a tier of it closes it."""
    medium = open_medium(url, _WITHIN_S)
    try:
        medium.check()
    except BaseException:  # counted: it is raised on
        medium.close()
        raise
    yield medium


class _ShapeRun:
    """One chunk size: choose the number of threads of the client, then the rounds."""

    def __init__(
        self,
        options: StorageOptions,
        shape: Shape,
        tier: SharedTier,
        medium: Medium,
        progress: Progress,
    ) -> None:
        self._options = options
        self._shape = shape
        self._medium = medium
        self._progress = progress
        self._payloads = Payloads(
            shape.num_chunks, shape.chunk_bytes, huge_pages=not options.small_pages
        )
        self._payloads.fill(0)
        self.huge_bytes = huge_page_bytes(self._payloads.memory)
        # Of this run and nobody else: several may measure one server.
        self._roots = (Root(os.urandom(32)), Root(os.urandom(32)))
        self._raw = _Client(medium, self._roots[0], self._payloads)
        self._tier = TierLoad(
            tier, self._roots[1], self._payloads, shape, jobs=options.jobs, deadline_s=_WITHIN_S
        )

    def rows(self) -> list[Row]:
        """Measure."""
        try:
            found = self._sweep()
            rounds = [self._round(idx) for idx in range(self._options.rounds + 1)]
        finally:
            self._erase()
        return [
            make_row(
                op,
                [each[op] for each in rounds[1:]],
                chunk_bytes=self._shape.chunk_bytes,
                jobs=self._options.jobs,
                raw_queue_depth=self._raw.threads[direction],
                raw_gbps_by_depth=found[direction],
            )
            for op, direction in ((WRITE, Direction.WRITE), (READ, Direction.READ))
        ]

    def _sweep(self) -> dict[Direction, dict[int, float]]:
        """Throughput of the client by its threads."""
        found: dict[Direction, dict[int, float]] = {Direction.WRITE: {}, Direction.READ: {}}
        self._raw.num_chunks = max(1, _SWEEP_BYTES // self._shape.chunk_bytes)
        for threads in DEPTHS:
            self._phase(f"client, {threads} at once")
            for direction, gbps in found.items():
                self._raw.threads[direction] = threads
                run = self._raw.write if direction is Direction.WRITE else self._raw.read
                gbps[threads] = run(-threads).gbps
            self._erase()
            self._progress.step()
        for direction, gbps in found.items():
            _, self._raw.threads[direction] = max((each, count) for count, each in gbps.items())
        self._raw.num_chunks = self._payloads.num_chunks
        return found

    def _round(self, idx: int) -> dict[str, dict[str, Section]]:
        """Both write, then both read; who comes first takes turns."""
        order: list[_Client | TierLoad] = [self._raw, self._tier]
        if idx % 2:
            order.reverse()
        when = f"round {idx} of {self._options.rounds}"
        found: dict[str, dict[str, Section]] = {WRITE: {}, READ: {}}
        self._payloads.fill(idx)
        for each in order:
            self._phase(f"{when}: {each.name} write")
            found[WRITE][each.name] = each.write(idx)
            self._progress.step()
        for each in order:
            self._phase(f"{when}: {each.name} read")
            self._payloads.wipe()
            found[READ][each.name] = each.read(idx)
            self._payloads.check(idx, each.name)
            self._progress.step()
        self._erase()
        copied = copy_memory(self._payloads, self._options.threads)
        hashed = hash_memory(self._payloads, self._options.threads)
        for sections in found.values():
            sections[MEMORY_COPY] = copied
            sections[CHECKSUM] = hashed
        return found

    def _erase(self) -> None:
        for root in self._roots:
            self._medium.erase(root)

    def _phase(self, what: str) -> None:
        self._progress.phase(f"{self._shape.chunk_bytes >> 10} KiB, {what}")


class _Client:
    """The medium's own calls on threads: no jobs, no checksum, nothing remembered."""

    name: ClassVar[str] = RAW

    def __init__(self, medium: Medium, root: Root, payloads: Payloads) -> None:
        self.threads = {Direction.WRITE: 1, Direction.READ: 1}
        self.num_chunks = payloads.num_chunks
        self._medium = medium
        self._root = root
        self._payloads = payloads
        self._per_call = max(1, _CALL_BYTES // payloads.chunk_bytes)

    def write(self, generation: int) -> Section:
        """Write all chunks of a generation.

        Raises:
            TierError: one was not taken.
        """

        def write(call_idx: int) -> None:
            records = [
                Record(key, _HEADER, self._payloads.chunk(idx), 0.0)
                for idx, key in self._of_call(generation, call_idx)
            ]
            _check(Direction.WRITE, self._medium.write(records, _WITHIN_S))

        return self._run(Direction.WRITE, write)

    def read(self, generation: int) -> Section:
        """Read all chunks of a generation.

        Raises:
            TierError: one was not there.
        """

        def read(call_idx: int) -> None:
            wanted = [
                Wanted(key, self._payloads.chunk(idx))
                for idx, key in self._of_call(generation, call_idx)
            ]
            _check(Direction.READ, self._medium.read(wanted, _WITHIN_S))

        return self._run(Direction.READ, read)

    def _of_call(self, generation: int, call_idx: int) -> list[tuple[int, Key]]:
        start = call_idx * self._per_call
        end = min(start + self._per_call, self._num_chunks)
        return [(idx, chunk_key(self._root, generation, idx)) for idx in range(start, end)]

    @property
    def _num_chunks(self) -> int:
        return min(self.num_chunks, self._payloads.num_chunks)

    def _run(self, direction: Direction, call: Callable[[int], None]) -> Section:
        num_calls = -(-self._num_chunks // self._per_call)
        num_bytes = self._num_chunks * self._payloads.chunk_bytes
        return run_parallel(direction, self.threads[direction], num_calls, call, num_bytes)


def _check(direction: Direction, results: Sequence[object]) -> None:
    """Only what was written anew, or read, counts."""
    for result in results:
        if isinstance(result, ChunkResult) and (direction is Direction.READ or result != DONE):
            raise TierError(
                f"the storage did not {direction} a chunk, so there is nothing to measure; has it "
                f"room for twice --size?: outcome={result.outcome} reason={result.reason}"
            )


def _configuration(
    options: StorageOptions, url: MediumUrl, kind: str, shapes: Sequence[Shape]
) -> dict[str, object]:
    return {
        **machine.storage_machine(),
        "url": url.shown,
        "kind": kind,
        "size_bytes": options.size_bytes,
        "chunks": [
            {
                "chunk_bytes": shape.chunk_bytes,
                "num_chunks": shape.num_chunks,
                "chunks_per_job": shape.chunks_per_job,
            }
            for shape in shapes
        ],
        "jobs": options.jobs,
        "rounds": options.rounds,
        "tier_threads": options.threads,
        "raw_queue_depths": list(DEPTHS),
        "call_bytes": _CALL_BYTES,
    }
