"""The demo's report: a paragraph, a table and a last line for people; JSON for programs."""

import math
import textwrap
from collections.abc import Mapping, Sequence

from stepwell.bench.results import DEVICE, DISK, SOURCES, VLLM_FS, DemoResult, Row
from stepwell.core.types import Reason
from stepwell.settings import format_bytes

_FEW_SESSIONS = 5
_WIDTH = 100
_MISS_WORDS: Mapping[str, str] = {
    Reason.NOT_WORTH: "since reading was expected to end later (read_when)",
    Reason.DEADLINE: "since the storage did not answer in time",
}
_HEADER = ("mode", "conc.", "TTFT p50", "p90", "p99", "out tok/s")
_LAST_HEADER = ("read", "from drive", "answers")


def to_json(result: DemoResult) -> dict[str, object]:
    """Returns the result as JSON values."""
    return {
        "model": result.model,
        "prompt_tokens": result.prompt_tokens,
        "sessions": result.sessions,
        "rows": [_row_json(row) for row in result.rows],
        "speedup_ttft_p50": {str(key): value for key, value in result.speedups().items()},
        "accounted": result.accounted,
        "configuration": dict(result.configuration),
    }


def to_text(result: DemoResult) -> str:
    """Returns the report for people, lines of at most 110 characters."""
    paragraph = textwrap.fill(_configuration(result), _WIDTH)
    sources = [source for source in SOURCES if source not in _unused(result)]
    header = (*_HEADER, *sources, *_LAST_HEADER)
    table = format_table(header, [_cells(row, sources) for row in result.rows])
    notes = (
        f"TTFT in seconds from sending to the first token. {', '.join(sources)}: prompt "
        "tokens by where their keys and values came from. read: bytes that the tier reports; "
        "from drive: bytes that the drive delivered to the engine's processes, page cache "
        "excluded. answers: token for token as recomputed."
    )
    parts = [paragraph, table, textwrap.fill(notes, _WIDTH), textwrap.fill(verdict(result), _WIDTH)]
    if result.kept is not None:
        parts.insert(3, f"Kept: {result.kept}")
    if result.left:
        parts.insert(3, textwrap.fill(result.left, _WIDTH))
    return "\n\n".join(parts)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns cells in columns, the first to the left, the others to the right."""
    widths = [max(len(row[idx]) for row in [header, *rows]) for idx in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def verdict(result: DemoResult) -> str:
    """Says in words how much sooner the first token came and whether all adds up."""
    parts = [
        _noise_sentence(result),
        _speed_sentence(result),
        _account_sentence(result),
        _missed_sentence(result),
        _answers_sentence(result),
    ]
    return " ".join(part for part in parts if part)


def _row_json(row: Row) -> dict[str, object]:
    return {
        "mode": row.mode,
        "concurrency": row.concurrency,
        "ttft_p50_s": row.percentile(50),
        "ttft_p90_s": row.percentile(90),
        "ttft_p99_s": row.percentile(99),
        "output_tokens_per_s": row.output_tokens_per_s,
        "tokens": {source: getattr(row.tokens, source) for source in SOURCES},
        "missed_tokens": dict(row.missed),
        "bytes_read": row.bytes_read,
        "bytes_read_physical": row.bytes_read_physical,
        "answers_equal": row.answers_equal,
    }


def _unused(result: DemoResult) -> set[str]:
    """Sources that this demo has no tier for."""
    return {"shared"} if result.store == DISK else {"disk"}


def _cells(row: Row, sources: Sequence[str]) -> list[str]:
    return [
        row.mode,
        str(row.concurrency),
        *(f"{row.percentile(percent):.3f}" for percent in (50, 90, 99)),
        f"{row.output_tokens_per_s:.1f}",
        *(str(getattr(row.tokens, source)) for source in sources),
        format_bytes(row.bytes_read),
        format_bytes(row.bytes_read_physical),
        "equal" if row.answers_equal else "DIFFER",
    ]


def _configuration(result: DemoResult) -> str:
    c = result.configuration
    return (
        f"{result.model}, {c['dtype']}; {result.sessions} sessions of {result.prompt_tokens} "
        f"prompt tokens, {c['output_tokens']} output tokens each, greedy. KV cache: "
        f"{format_bytes(int(str(c['kv_bytes_per_token'])))} per token. Every engine is a process "
        f"of its own, warmed up with other tokens, {c['threads']} compute thread(s) on a "
        f"{c['cpus']}-CPU machine ({c['cpu']}). Store: {_store(c)}. Stepwell {c['stepwell']}, vLLM "
        f"{c['vllm']}, torch {c['torch']}, Python {c['python']}."
    )


def _store(c: Mapping[str, object]) -> str:
    if "url" in c:
        return f"{c['url']}"
    dropped = "page cache of its files dropped before each reading"
    return f"{c['file_system']} on {c['device']}, {dropped}"


def _noise_sentence(result: DemoResult) -> str:
    """Warns where the figures cannot bear what is read into them."""
    if result.sessions < _FEW_SESSIONS:
        return f"Only {result.sessions} session(s): a sign of life, not a measurement."
    p50 = {(row.mode, row.concurrency): row.percentile(50) for row in result.rows}
    noisy = [
        c
        for (mode, c), device_s in p50.items()
        if mode == DEVICE and device_s > p50.get((result.store, c), math.inf)
    ]
    if noisy:
        at = ", ".join(map(str, noisy))
        return (
            f"NOISY: the device's own cache came later than {result.store} at concurrency {at}; "
            "run again."
        )
    return ""


def _speed_sentence(result: DemoResult) -> str:
    def times(mode: str) -> str:
        return ", ".join(
            f"{_times(factor)} at concurrency {concurrency}"
            for concurrency, factor in result.speedups(mode).items()
        )

    sentence = ""
    if times(result.store):
        sentence = (
            f"From {result.store} the first token came {times(result.store)} than by recomputing "
            "(p50)."
        )
    if times(VLLM_FS):
        sentence += f" With vLLM's own fs tier: {times(VLLM_FS)}."
    return sentence


def _times(factor: float) -> str:
    if factor >= 1:
        return f"{factor:.1f} times sooner"
    return f"{1 / factor:.1f} times LATER"


def _account_sentence(result: DemoResult) -> str:
    asked = sum(row.tokens_asked for row in result.rows)
    reused = sum(row.tokens.reused for row in result.rows)
    wrong = [row for row in result.rows if not row.accounted]
    if not wrong:
        return (
            f"Every reused token is accounted for: of {asked} prompt tokens asked {reused} were "
            "reused, and the tokens by source add up in every row."
        )
    rows = ", ".join(
        f"{row.mode} at {row.concurrency}: {row.tokens.total} of {row.tokens_asked}"
        for row in wrong
    )
    return f"NOT every token is accounted for: tokens by source of tokens asked: {rows}."


def _missed_sentence(result: DemoResult) -> str:
    """Says why lookups ended; not of how many tokens, as nothing is asked behind a miss."""
    rows = [
        f"{row.mode} at {row.concurrency}, {_MISS_WORDS.get(reason, reason)}"
        for row in result.rows
        for reason in row.missed
    ]
    return f"Not all that was written was read: {'; '.join(rows)}." if rows else ""


def _answers_sentence(result: DemoResult) -> str:
    if result.answers_equal:
        return "All answers were equal."
    rows = ", ".join(
        f"{row.mode} at {row.concurrency}" for row in result.rows if not row.answers_equal
    )
    return f"Answers DIFFER from recomputation: {rows}."
