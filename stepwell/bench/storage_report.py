"""The report of `stepwell bench storage`: configuration, table, verdicts; JSON for programs."""

import textwrap
from typing import Any

from stepwell.bench.report import format_table
from stepwell.bench.storage_results import (
    CHECKSUM,
    FILE_PER_CHUNK,
    MEMORY_COPY,
    RAW,
    READ,
    TIER,
    Promise,
    Row,
    StorageResult,
    notes,
    promises,
)
from stepwell.settings import format_bytes, plural

__all__ = ["storage_json", "storage_text", "verdict_text"]

_WIDTH = 110
_WORDS = {"first_fill": "first fill", "write": "write", "read": "cold read"}
_VERDICTS = {True: "met", False: "NOT MET", None: "not measured"}
_HEADER = (
    "op", "chunk", "tier", "raw", "(depth)", "of raw", "files", "memcpy", "CPU tier", "raw",
    "xxh3", "files", "job p50", "p99", "first", "drive",
)  # fmt: skip
_LEGEND = (
    "tier, raw, files, memcpy: GB/s (1e9 bytes), median of the rounds. raw: one preallocated file "
    "written and read in blocks of a chunk, (depth) of them at once, which was the best of "
    "{depths}. files: a file per chunk, temporary file and rename, {files} at once. memcpy: the "
    "buffers copied by as many threads as the tier has. CPU: seconds of user and system time per "
    "GB; xxh3: of the checksum alone, over memory that no cache holds. job p50, p99, first: "
    "seconds from submission until a job of the tier was done, and until the first was. drive: "
    "bytes that drives were asked for by the tier, per byte of payload. first fill: into empty "
    "space, one round; the writes after it overwrite and evict. Nothing is synced within the "
    "timing."
)


def storage_json(result: StorageResult) -> dict[str, object]:
    """Returns the result as JSON values."""
    return {
        "rows": [_row_json(row, result) for row in result.rows],
        "promises": [
            {"promise": each.words, "met": each.met, "detail": each.detail}
            for each in promises(result.rows)
        ],
        "notes": notes(result),
        "huge_pages_share": result.huge_share,
        "small_pages": result.small_pages,
        "configuration": dict(result.configuration),
    }


def storage_text(result: StorageResult) -> str:
    """Returns the report for people."""
    c: Any = result.configuration
    legend = _LEGEND.format(
        depths=", ".join(map(str, c["raw_queue_depths"])), files=c["files_at_once"]
    )
    parts = [
        _configuration(result),
        format_table(_HEADER, [_cells(row) for row in result.rows]),
        textwrap.fill(legend, _WIDTH),
        *(textwrap.fill(note, _WIDTH) for note in notes(result)),
        "\n".join(verdict_text(each) for each in promises(result.rows)),
    ]
    return "\n\n".join(parts)


def _row_json(row: Row, result: StorageResult) -> dict[str, object]:
    names = (TIER, RAW, FILE_PER_CHUNK)
    return {
        "op": row.op,
        "chunk_bytes": row.chunk_bytes,
        "jobs": row.jobs,
        "tier_gbps": row.gbps(TIER),
        "raw_gbps": row.gbps(RAW),
        "ratio": row.ratio,
        "file_per_chunk_gbps": row.gbps(FILE_PER_CHUNK),
        "cpu_s_per_gb": row.cpu_s_per_gb(TIER),
        "p50_s": row.latency_s(50),
        "p99_s": row.latency_s(99),
        "first_job_s": row.first_job_s,
        "memcpy_gbps": row.gbps(MEMORY_COPY),
        "raw_queue_depth": row.raw_queue_depth,
        "raw_gbps_by_depth": {str(key): value for key, value in row.raw_gbps_by_depth.items()},
        "checksum_cpu_s_per_gb": row.cpu_s_per_gb(CHECKSUM),
        "raw_cpu_s_per_gb": row.cpu_s_per_gb(RAW),
        "file_per_chunk_cpu_s_per_gb": row.cpu_s_per_gb(FILE_PER_CHUNK),
        "write_amplification": None if row.op == READ else row.drive_share(TIER),
        "drive_bytes_per_byte": {name: row.drive_share(name) for name in names},
        "cold": row.cold,
        "direct": result.direct,
        "tier_direct": result.tier_direct,
        "num_jobs": row.num_jobs,
        "bytes": row.payload_bytes,
        "rounds": row.rounds,
        "gbps_by_round": {name: [each.gbps for each in row.sections[name]] for name in names},
    }


def _cells(row: Row) -> list[str]:
    share = row.drive_share(TIER)
    return [
        _WORDS[row.op],
        format_bytes(row.chunk_bytes),
        f"{row.gbps(TIER):.2f}",
        f"{row.gbps(RAW):.2f}",
        f"({row.raw_queue_depth})",
        f"{row.ratio:.2f}",
        f"{row.gbps(FILE_PER_CHUNK):.2f}",
        f"{row.gbps(MEMORY_COPY):.1f}",
        *(f"{row.cpu_s_per_gb(name):.3f}" for name in (TIER, RAW, CHECKSUM, FILE_PER_CHUNK)),
        *(f"{row.latency_s(percent):.3f}" for percent in (50, 99)),
        f"{row.first_job_s:.3f}",
        "-" if share is None else f"{share:.3f}",
    ]


def _configuration(result: StorageResult) -> str:
    c: Any = result.configuration
    direct = {
        (True, True): "O_DIRECT for all three",
        (False, False): "no O_DIRECT",
    }.get((result.direct, result.tier_direct), "O_DIRECT for some (see below)")
    lines = [
        f"Stepwell {c['stepwell']}, Python {c['python']}, numpy {c['numpy']}, xxhash "
        f"{c['xxhash']}, {c['kernel']}",
        f"{c['cpus']} CPU(s) ({c['cpu']}), {format_bytes(c['memory_available_bytes'])} of memory "
        "available",
        *(
            f"{path['path']}: {path['file_system']} on {path['device']}, drive {path['drive']}, "
            f"{format_bytes(path['free_bytes'])} free; {direct}"
            for path in c["paths"]
        ),
        *(
            f"chunks of {format_bytes(shape['chunk_bytes'])}: {shape['num_chunks']} a round, "
            f"{format_bytes(shape['num_chunks'] * shape['chunk_bytes'])}, "
            f"{shape['chunks_per_job']} in a job; tier of "
            f"{format_bytes(shape['tier_capacity_bytes'])}"
            for shape in c["chunks"]
        ),
        f"{plural(c['jobs'], 'job')} in flight, {plural(c['tier_threads'], 'tier thread')}; first "
        f"fill and {plural(c['rounds'], 'round')}, raw file, tier and file per chunk in rotating "
        "order",
        f"{result.huge_share:.0%} of the buffers in huge pages"
        f"{', as asked for' if result.small_pages else ''}",
    ]
    return "\n".join(lines)


def verdict_text(promise: Promise) -> str:
    """One line: whether it was kept, the promise, the figures."""
    return f"{_VERDICTS[promise.met]:<12}  {promise.words}: {promise.detail}"
