"""The report of `stepwell bench storage --path URL`: configuration and table; JSON for programs."""

import textwrap
from typing import Any

from stepwell.bench.report import format_table
from stepwell.bench.storage_results import CHECKSUM, MEMORY_COPY, RAW, TIER, Row, StorageResult
from stepwell.settings import format_bytes, plural

__all__ = ["medium_json", "medium_text"]

_WIDTH = 110
_HEADER = (
    "op", "chunk", "tier", "raw", "(threads)", "of raw", "memcpy", "CPU tier", "raw", "xxh3",
    "job p50", "p99", "first",
)  # fmt: skip
_LEGEND = (
    "tier, raw, memcpy: GB/s (1e9 bytes), median of the rounds. raw: the client library alone, "
    "{call} in a call, from as many (threads) as were fastest of {depths}. memcpy: the buffers "
    "copied by as many threads as the tier has. CPU: seconds of user and system time of this "
    "process per GB, the server's not counted; xxh3: of the checksum alone, which raw does not "
    "make. job p50, p99, first: seconds from submission until a job of the tier was done, and "
    "until the first was. Whether the server read from its memory or from a drive cannot be seen "
    "from here."
)


def medium_json(result: StorageResult) -> dict[str, object]:
    """Returns the result as JSON values; what both benchmarks have goes by the same names."""
    return {
        "rows": [_row_json(row) for row in result.rows],
        "notes": _notes(result),
        "huge_pages_share": result.huge_share,
        "small_pages": result.small_pages,
        "configuration": dict(result.configuration),
    }


def medium_text(result: StorageResult) -> str:
    """Returns the report for people."""
    c: Any = result.configuration
    legend = _LEGEND.format(
        call=format_bytes(c["call_bytes"]), depths=", ".join(map(str, c["raw_queue_depths"]))
    )
    parts = [
        _configuration(result),
        format_table(_HEADER, [_cells(row) for row in result.rows]),
        textwrap.fill(legend, _WIDTH),
        *(textwrap.fill(note, _WIDTH) for note in _notes(result)),
    ]
    return "\n\n".join(parts)


def _notes(result: StorageResult) -> list[str]:
    noisy = [f"{row.op} at {format_bytes(row.chunk_bytes)}" for row in result.rows if row.noisy]
    if not noisy:
        return []
    return [
        f"NOISY: the client's own rounds differ by more than a quarter ({', '.join(noisy)}). "
        "Something else uses this server, network or machine; run again, with more --rounds."
    ]


def _row_json(row: Row) -> dict[str, object]:
    return {
        "op": row.op,
        "chunk_bytes": row.chunk_bytes,
        "jobs": row.jobs,
        "tier_gbps": row.gbps(TIER),
        "raw_gbps": row.gbps(RAW),
        "ratio": row.ratio,
        "cpu_s_per_gb": row.cpu_s_per_gb(TIER),
        "p50_s": row.latency_s(50),
        "p99_s": row.latency_s(99),
        "first_job_s": row.first_job_s,
        "memcpy_gbps": row.gbps(MEMORY_COPY),
        "raw_queue_depth": row.raw_queue_depth,
        "raw_gbps_by_depth": {str(key): value for key, value in row.raw_gbps_by_depth.items()},
        "checksum_cpu_s_per_gb": row.cpu_s_per_gb(CHECKSUM),
        "raw_cpu_s_per_gb": row.cpu_s_per_gb(RAW),
        "num_jobs": row.num_jobs,
        "bytes": row.payload_bytes,
        "rounds": row.rounds,
        "gbps_by_round": {name: [each.gbps for each in row.sections[name]] for name in (TIER, RAW)},
    }


def _cells(row: Row) -> list[str]:
    return [
        row.op,
        format_bytes(row.chunk_bytes),
        f"{row.gbps(TIER):.2f}",
        f"{row.gbps(RAW):.2f}",
        f"({row.raw_queue_depth})",
        f"{row.ratio:.2f}",
        f"{row.gbps(MEMORY_COPY):.1f}",
        *(f"{row.cpu_s_per_gb(name):.3f}" for name in (TIER, RAW, CHECKSUM)),
        *(f"{row.latency_s(percent):.3f}" for percent in (50, 99)),
        f"{row.first_job_s:.3f}",
    ]


def _configuration(result: StorageResult) -> str:
    c: Any = result.configuration
    lines = [
        f"Stepwell {c['stepwell']}, Python {c['python']}, numpy {c['numpy']}, xxhash "
        f"{c['xxhash']}, {c['kernel']}",
        f"{c['cpus']} CPU(s) ({c['cpu']}), {format_bytes(c['memory_available_bytes'])} of memory "
        "available",
        f"{c['url']} ({c['kind']})",
        *(
            f"chunks of {format_bytes(shape['chunk_bytes'])}: {shape['num_chunks']} a round, "
            f"{format_bytes(shape['num_chunks'] * shape['chunk_bytes'])}, "
            f"{shape['chunks_per_job']} in a job"
            for shape in c["chunks"]
        ),
        f"{plural(c['jobs'], 'job')} in flight, {plural(c['tier_threads'], 'tier thread')}; a "
        f"round unreported and {plural(c['rounds'], 'round')}, client and tier in turns",
        f"{result.huge_share:.0%} of the buffers in huge pages"
        f"{', as asked for' if result.small_pages else ''}",
    ]
    return "\n".join(lines)
