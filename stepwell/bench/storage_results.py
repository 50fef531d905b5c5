"""What `stepwell bench storage` found, as plain values, and the arithmetic on them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepwell.bench.results import percentile
from stepwell.settings import format_bytes

__all__ = [
    "CHECKSUM",
    "FILE_PER_CHUNK",
    "FIRST_FILL",
    "MEMORY_COPY",
    "RAW",
    "READ",
    "TIER",
    "WRITE",
    "Promise",
    "Row",
    "Section",
    "StorageResult",
    "make_row",
    "notes",
    "promises",
]

FIRST_FILL, WRITE, READ = "first_fill", "write", "read"
TIER, RAW, FILE_PER_CHUNK, MEMORY_COPY = "tier", "raw", "file_per_chunk", "memory_copy"
CHECKSUM = "checksum"

_GB = 1e9
_COLD_SHARE = 0.99  # of a cold read's bytes a drive must have delivered
_HUGE_SHARE = 0.9  # of the buffers that should lie in huge pages
_NOISY_SPREAD = 0.25  # (highest - lowest) / median of the raw file's rounds

# The promises of the disk tier.
_READ_RATIO, _WRITE_RATIO = 0.90, 0.85
_CPU_CHUNK, _CPU_CHUNK_BYTES = "8MiB", 8 << 20
_READ_CPU_S_PER_GB, _WRITE_CPU_S_PER_GB = 0.12, 0.15


@dataclass(frozen=True, slots=True)
class Section:
    """One timed section: all chunks moved once.

    Attributes:
        payload_bytes: that were moved.
        wall_s: seconds.
        cpu_s: user and system time of the whole process, seconds.
        drive_bytes: that drives were asked to read or to write, None if unknown.
        latencies_s: of the tier's jobs, from submission to the poll that reported them.
        first_job_s: from the start until the first job was reported, None if there are no jobs.
    """

    payload_bytes: int
    wall_s: float
    cpu_s: float
    drive_bytes: int | None
    latencies_s: tuple[float, ...] = ()
    first_job_s: float | None = None

    @property
    def gbps(self) -> float:
        """1e9 bytes per second."""
        return self.payload_bytes / _GB / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds per 1e9 bytes."""
        return self.cpu_s / (self.payload_bytes / _GB)


@dataclass(frozen=True, slots=True)
class Row:
    """One operation with one chunk size: medians over the rounds.

    Attributes:
        op: FIRST_FILL, WRITE or READ.
        chunk_bytes: of one chunk.
        jobs: in flight.
        num_jobs: of one round.
        payload_bytes: of one round.
        sections: by TIER, RAW, FILE_PER_CHUNK, MEMORY_COPY and CHECKSUM, one per round.
        raw_queue_depth: blocks in flight of the raw file.
        raw_gbps_by_depth: what the depths reached when the best was looked for.
    """

    op: str
    chunk_bytes: int
    jobs: int
    num_jobs: int
    payload_bytes: int
    sections: Mapping[str, Sequence[Section]]
    raw_queue_depth: int
    raw_gbps_by_depth: Mapping[int, float]

    def gbps(self, name: str) -> float:
        """Median throughput, 1e9 bytes per second."""
        return self._median(name, lambda section: section.gbps)

    def cpu_s_per_gb(self, name: str) -> float:
        """Median of CPU seconds per 1e9 bytes."""
        return self._median(name, lambda section: section.cpu_s_per_gb)

    def drive_share(self, name: str) -> float | None:
        """Median of the bytes that drives were asked for by the payload; None if unknown."""
        shares = [
            section.drive_bytes / section.payload_bytes
            for section in self.sections[name]
            if section.drive_bytes is not None
        ]
        return median(shares) if shares else None

    @property
    def rounds(self) -> int:
        """Rounds that the medians are taken of."""
        return len(self.sections[TIER])

    @property
    def ratio(self) -> float:
        """The tier's throughput by the raw file's."""
        return self.gbps(TIER) / self.gbps(RAW)

    @property
    def first_job_s(self) -> float:
        """Median of the time until the first of the jobs was done."""
        return self._median(TIER, lambda section: section.first_job_s or 0.0)

    @property
    def cold(self) -> bool | None:
        """Whether drives delivered what was read; None if unknown, or if this was no read."""
        if self.op != READ:
            return None
        shares = [self.drive_share(name) for name in (TIER, RAW, FILE_PER_CHUNK)]
        known = [share for share in shares if share is not None]
        return min(known) >= _COLD_SHARE if known else None

    @property
    def noisy(self) -> bool:
        """Whether the raw file's rounds differ so much that ratios say little."""
        values = [section.gbps for section in self.sections[RAW]]
        return (max(values) - min(values)) / median(values) > _NOISY_SPREAD

    def latency_s(self, percent: float) -> float:
        """A percentile of the latencies of the tier's jobs, all rounds together."""
        latencies = [each for section in self.sections[TIER] for each in section.latencies_s]
        return percentile(latencies, percent)

    def _median(self, name: str, value_of: Callable[[Section], float]) -> float:
        return median(value_of(section) for section in self.sections[name])


@dataclass(frozen=True, slots=True)
class Promise:
    """Something that the disk tier promises, and whether it was kept.

    Attributes:
        words: the promise.
        met: None if it could not be measured.
        detail: the figures, or why there are none.
    """

    words: str
    met: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class StorageResult:
    """The whole benchmark.

    Attributes:
        rows: by chunk size: FIRST_FILL, WRITE, READ.
        configuration: everything else that one needs to repeat it; JSON values.
        direct: whether O_DIRECT was used by raw file and file per chunk.
        tier_direct: whether the tier says that it uses O_DIRECT.
        huge_share: of the buffers, in huge pages, 0 to 1.
        small_pages: whether small ones were asked for.
    """

    rows: tuple[Row, ...]
    configuration: Mapping[str, object]
    direct: bool
    tier_direct: bool
    huge_share: float
    small_pages: bool


def make_row(
    op: str,
    rounds: Sequence[Mapping[str, Section]],
    *,
    chunk_bytes: int,
    jobs: int,
    raw_queue_depth: int,
    raw_gbps_by_depth: Mapping[int, float],
) -> Row:
    """The row of some rounds, each the sections by contender."""
    first = rounds[0][TIER]
    return Row(
        op=op,
        chunk_bytes=chunk_bytes,
        jobs=jobs,
        num_jobs=len(first.latencies_s),
        payload_bytes=first.payload_bytes,
        sections={name: tuple(each[name] for each in rounds) for name in rounds[0]},
        raw_queue_depth=raw_queue_depth,
        raw_gbps_by_depth=dict(raw_gbps_by_depth),
    )


def promises(rows: Sequence[Row]) -> list[Promise]:
    """What is promised of the disk tier, and whether it was kept; overwriting, not first fill."""
    reads = [row for row in rows if row.op == READ]
    writes = [row for row in rows if row.op == WRITE]
    warm = any(row.cold is False for row in reads)
    return [
        _ratio_promise("cold read", reads, _READ_RATIO, measurable=not warm),
        _ratio_promise("write", writes, _WRITE_RATIO),
        Promise(
            "write faster than a file per chunk",
            all(row.gbps(TIER) > row.gbps(FILE_PER_CHUNK) for row in writes),
            _by_chunk(
                writes,
                lambda row: f"{row.gbps(TIER):.2f} to {row.gbps(FILE_PER_CHUNK):.2f} GB/s",
            ),
        ),
        _cpu_promise("reads", reads, _READ_CPU_S_PER_GB),
        _cpu_promise("writes", writes, _WRITE_CPU_S_PER_GB),
    ]


def notes(result: StorageResult) -> list[str]:
    """What a reader must know before the figures are believed."""
    found = []
    if not (result.direct and result.tier_direct):
        who = {
            (False, False): "any of the three",
            (False, True): "the raw file and the file per chunk",
            (True, False): "the tier",
        }[result.direct, result.tier_direct]
        found.append(
            f"WITHOUT O_DIRECT for {who}: writes go to the page cache, so their figures are "
            "those of memory; before each reading the files were written down (fdatasync) and "
            "dropped from the page cache (POSIX_FADV_DONTNEED)."
        )
    if result.huge_share < _HUGE_SHARE and not result.small_pages:
        found.append(
            f"SMALL PAGES: {result.huge_share:.0%} of the buffers lie in huge pages, so that every "
            "figure of CPU is higher than it need be. "
            "/sys/kernel/mm/transparent_hugepage/enabled should say `madvise` or `always`, and "
            "memory must not be too fragmented."
        )
    warm = [format_bytes(row.chunk_bytes) for row in result.rows if row.cold is False]
    if warm:
        found.append(
            f"NOT COLD at {', '.join(warm)}: by the kernel's account drives delivered less than "
            "was read. The file system lies in memory, keeps a cache that cannot be dropped, or "
            "does not count."
        )
    noisy = [f"{row.op} at {format_bytes(row.chunk_bytes)}" for row in result.rows if row.noisy]
    if noisy:
        found.append(
            f"NOISY: the raw file's own rounds differ by more than {_NOISY_SPREAD:.0%} "
            f"({', '.join(noisy)}). Something else uses this drive or machine; run again, with "
            "more --rounds."
        )
    return found


def _ratio_promise(
    what: str, rows: Sequence[Row], least: float, *, measurable: bool = True
) -> Promise:
    detail = _by_chunk(
        rows, lambda row: f"{row.ratio:.2f} ({row.gbps(TIER):.2f} of {row.gbps(RAW):.2f} GB/s)"
    )
    met = all(row.ratio >= least for row in rows) if measurable else None
    return Promise(
        f"{what} >= {least:.2f} of raw", met, detail if measurable else f"not cold; {detail}"
    )


def _cpu_promise(what: str, rows: Sequence[Row], most: float) -> Promise:
    words = f"CPU of {what} at {_CPU_CHUNK} <= {most:.2f} s/GB"
    at_size = [row for row in rows if row.chunk_bytes == _CPU_CHUNK_BYTES]
    if not at_size:
        return Promise(words, None, f"not among the sizes measured: add --chunk {_CPU_CHUNK}")
    row = at_size[0]
    value, raw, checksum = (row.cpu_s_per_gb(name) for name in (TIER, RAW, CHECKSUM))
    detail = f"{value:.3f} s/GB, of which raw file {raw:.3f} and checksum {checksum:.3f}"
    return Promise(words, value <= most, detail)


def _by_chunk(rows: Sequence[Row], words_of: Callable[[Row], str]) -> str:
    return "; ".join(f"{format_bytes(row.chunk_bytes)}: {words_of(row)}" for row in rows)
