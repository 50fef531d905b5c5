"""The report of `stepwell bench index`: configuration, figures, verdicts; JSON for programs."""

from dataclasses import asdict
from typing import Any

from stepwell.bench.index import IndexResult
from stepwell.bench.storage_report import verdict_text
from stepwell.bench.storage_results import Promise
from stepwell.settings import format_bytes, plural

__all__ = ["index_json", "index_text"]

_INDEX_BYTES = 200
_LEAST_CHUNKS = 100_000  # with fewer, what opening a store takes beside the index weighs more
_KEYS_PER_S = 500_000


def index_json(result: IndexResult) -> dict[str, object]:
    """Returns the result as JSON values."""
    return {
        "num_chunks": result.num_chunks,
        "chunk_bytes": result.chunk_bytes,
        "write_s": result.write_s,
        "journal_bytes": result.journal_bytes,
        "index_bytes_per_chunk": result.index_bytes_per_chunk,
        "journal": asdict(result.journal),
        "scan": None if result.scan is None else asdict(result.scan),
        "promises": [
            {"promise": each.words, "met": each.met, "detail": each.detail}
            for each in _promises(result)
        ],
        "configuration": dict(result.configuration),
    }


def index_text(result: IndexResult) -> str:
    """Returns the report for people."""
    c: Any = result.configuration
    path = c["path"]
    lines = [
        f"Stepwell {c['stepwell']}, Python {c['python']}, numpy {c['numpy']}, xxhash "
        f"{c['xxhash']}, {c['kernel']}",
        f"{c['cpus']} CPU(s) ({c['cpu']}); {path['path']}: {path['file_system']} on "
        f"{path['device']}, drive {path['drive']}",
        f"{plural(result.num_chunks, 'chunk')} of {format_bytes(result.chunk_bytes)}, written in "
        f"{result.write_s:.1f} s; the journal has {format_bytes(result.journal_bytes)}",
        "",
    ]
    if result.scan is not None:
        lines.append(
            f"without the journal: first hit after {result.scan.first_hit_s:.2f} s, from every "
            f"record's header (opening {result.scan.open_s:.2f} s)"
        )
        lines.append("")
    lines += [verdict_text(each) for each in _promises(result)]
    return "\n".join(lines)


def _promises(result: IndexResult) -> list[Promise]:
    journal = result.journal
    in_all = f"{format_bytes(journal.memory_bytes)} in all"
    few = result.num_chunks < _LEAST_CHUNKS
    # In between and beyond the limit grows with the number of chunks.
    limit_s = max(1.0, 8.0 * result.num_chunks / 1e6)
    return [
        Promise(
            f"index memory <= {_INDEX_BYTES} bytes per chunk",
            None if few else result.index_bytes_per_chunk <= _INDEX_BYTES,
            f"too few chunks: give --chunks {_LEAST_CHUNKS} or more; {in_all}"
            if few
            else f"{result.index_bytes_per_chunk:.0f} bytes, {in_all}",
        ),
        Promise(
            f"lookup >= {_KEYS_PER_S} keys/s, 2048 a call, without I/O",
            journal.keys_per_s >= _KEYS_PER_S and journal.lookup_syscalls == 0,
            f"{journal.keys_per_s:,.0f} keys/s, {journal.lookup_syscalls} read system calls",
        ),
        Promise(
            f"first hit after a restart <= {limit_s:g} s, from the journal",
            journal.first_hit_s <= limit_s,
            f"{journal.first_hit_s:.2f} s (opening {journal.open_s:.2f} s)",
        ),
    ]
