"""What `stepwell inspect` says of a store: text for people, values for JSON."""

import math

from stepwell.ops import words
from stepwell.ops.contents import JournalState
from stepwell.ops.inspect import RootReport, SlotSize, StoreReport, Wear
from stepwell.ops.live import LiveCounters
from stepwell.policy.endurance import Observation
from stepwell.settings import format_bytes

__all__ = ["inspect_json", "inspect_text"]


def inspect_json(report: StoreReport) -> dict[str, object]:
    """JSON values of `stepwell inspect --json`."""
    return {
        "path": report.path,
        "format": report.format,
        "owner": {"pid": report.owner_pid} if report.owned else None,
        "journal": {
            "state": report.journal.value,
            "error": report.journal_error or None,
            "bytes": report.journal_bytes,
        },
        "chunks": report.num_chunks,
        "bytes": report.size_bytes,
        "free_bytes": report.free_bytes,
        "total_bytes": report.total_bytes,
        "allocated_bytes": report.allocated_bytes,
        "slots": [
            {
                "slot_bytes": each.slot_bytes,
                "extents": each.num_extents,
                "slots": each.num_slots,
                "used": each.num_used,
                "free": each.num_free,
                "set_aside": each.num_aside,
            }
            for each in report.slots
        ],
        "roots": [_root_json(root, report.now_s) for root in report.roots],
        "quarantine": [
            {"reason": each.reason, "slots": each.num_slots, "bytes": each.size_bytes}
            for each in report.quarantine
        ],
        "wear": None if report.wear is None else _wear_json(report.wear, report.now_s),
        "partial": {"files": report.num_partial, "bytes": report.partial_bytes},
        "abandoned_shared_memory": [
            {"path": each.path, "bytes": each.size_bytes, "age_s": report.now_s - each.changed_s}
            for each in report.abandoned
        ],
        "live": None if report.live is None else _live_json(report.live),
    }


def inspect_text(report: StoreReport) -> str:
    """What `stepwell inspect` prints."""
    if not report.owned:
        owner = "no process uses it"
    else:
        owner = f"process {report.owner_pid or '(unknown)'} uses it"
    free, total = format_bytes(report.free_bytes), format_bytes(report.total_bytes)
    head = [
        f"{report.path}: a Stepwell store of format {report.format}; {owner}",
        f"{words.plural(report.num_chunks, 'chunk')} of "
        f"{words.plural(len(report.roots), 'root')}, {format_bytes(report.size_bytes)}; "
        f"{free} of {total} are free on its file system",
    ]
    if report.journal is not JournalState.USED:
        head.append(
            f"{_without_journal(report)}, so the records' headers were read instead: what was "
            f"evicted and not written over counts as well, and times are those of writing"
        )
    paragraphs = ["\n".join(head)]
    paragraphs += [_root_text(root, report.now_s) for root in report.roots]
    paragraphs.append("\n".join([*_capacity_lines(report), *_wear_lines(report)]))
    if report.live is not None:
        paragraphs.append("\n".join(_live_lines(report.live)))
    last = [*_partial_lines(report), *_abandoned_lines(report)]
    if last:
        paragraphs.append("\n".join(last))
    return "\n\n".join(paragraphs)


def _root_json(root: RootReport, now_s: float) -> dict[str, object]:
    identity = root.identity
    return {
        "root": root.root.hex(),
        "model": None if identity is None else identity.labels.get("model"),
        "fields": None if identity is None else dict(identity.fields),
        "labels": None if identity is None else dict(identity.labels),
        "chunks": root.num_chunks,
        "bytes": root.size_bytes,
        "oldest_age_s": None if root.oldest_used_s is None else now_s - root.oldest_used_s,
        "newest_age_s": None if root.newest_used_s is None else now_s - root.newest_used_s,
        "compared_with": None if root.compared_with is None else root.compared_with.hex(),
        "differences": [
            {
                "field": name,
                "here": here,
                "there": there,
                "words": words.difference_words(name, here, there),
            }
            for name, (here, there) in (root.differences or {}).items()
        ],
    }


def _root_text(root: RootReport, now_s: float) -> str:
    chunks = f"{root.num_chunks}, {format_bytes(root.size_bytes)}"
    if root.newest_used_s is not None and root.oldest_used_s is not None:
        newest, oldest = (
            words.age(now_s - root.newest_used_s),
            words.age(now_s - root.oldest_used_s),
        )
        chunks += f", last used {newest} ago"
        chunks += f", the oldest {oldest} ago" if oldest != newest else ""
    text = [words.root_text(root.root.hex(), root.identity, [("chunks", chunks)])]
    if root.compared_with is not None:
        text.append(f"  compared with the root in use last, {root.compared_with.hex()[:16]}...:")
        text += [f"    - {difference}" for difference in words.differences(root.differences or {})]
    return "\n".join(text)


def _without_journal(report: StoreReport) -> str:
    if report.journal is JournalState.MISSING:
        return "The journal is missing"
    return f"The journal cannot be used ({report.journal_error})"


def _capacity_lines(report: StoreReport) -> list[str]:
    size = format_bytes(report.allocated_bytes)
    lines = [f"capacity in use: {size} in {words.plural(report.num_extents, 'extent')}"]
    lines += [f"  {_slots_words(each)}" for each in report.slots]
    if report.quarantine:
        count = words.plural(sum(each.num_slots for each in report.quarantine), "slot")
        size = format_bytes(sum(each.size_bytes for each in report.quarantine))
        reasons = ", ".join(f"{each.reason} {each.num_slots}" for each in report.quarantine)
        lines.append(
            f"quarantine: {count}, {size} ({reasons}); not served, the first to be used again"
        )
    return lines


def _slots_words(size: SlotSize) -> str:
    text = f"slots of {format_bytes(size.slot_bytes)}: {size.num_used} used, {size.num_free} free"
    text += f", {size.num_aside} set aside" if size.num_aside else ""
    return f"{text}, in {words.plural(size.num_extents, 'extent')}"


def _wear_json(wear: Wear, now_s: float) -> dict[str, object]:
    life = wear.life
    years = None if life is None else life.years
    return {
        "written_bytes": wear.written_bytes,
        "as_of_age_s": now_s - wear.as_of_s,
        "observed_s": now_s - wear.since_s,
        "bytes_per_day": wear.bytes_per_day(now_s),
        "rated_drive_writes_per_day": wear.rated_dwpd,
        "rated_bytes": None if life is None else life.rated_bytes,
        "used_share": None if life is None else life.used_share,
        "drive_writes_per_day": None if life is None else life.drive_writes_per_day,
        "years": None if years is None or math.isinf(years) else years,  # JSON has no infinity
        "observation": None if life is None else life.observation.value,
    }


def _wear_lines(report: StoreReport) -> list[str]:
    wear = report.wear
    if wear is None:
        return ["wear: unknown; only the journal has it"]
    observed_s = report.now_s - wear.since_s
    # A running engine notes it now and then; one that ended in order noted the last byte.
    stale = report.owned and wear.as_of_s < report.now_s
    noted = f", as it was {words.age(report.now_s - wear.as_of_s)} ago" if stale else ""
    line = (
        f"wear: {format_bytes(wear.written_bytes)} written since {words.day(wear.since_s)} "
        f"({words.age(observed_s)}{noted})"
    )
    per_day = wear.bytes_per_day(report.now_s)
    life = wear.life
    if life is None:
        return [line]
    if per_day is None or life.drive_writes_per_day is None or life.years is None:
        return [f"{line}; too short to say how long the drive will last"]
    line += f", {format_bytes(per_day)} a day or {life.drive_writes_per_day:.2f} drive writes a day"
    rough = ", roughly: less than a week was seen" if life.observation is Observation.ROUGH else ""
    return [
        line,
        f"  a drive of {format_bytes(report.total_bytes)}, rated for {wear.rated_dwpd:g} a day, "
        f"lasts {words.years(life.years)} at that{rough}; {life.used_share:.1%} of what it is "
        f"rated for is written",
    ]


def _partial_lines(report: StoreReport) -> list[str]:
    if not report.num_partial:
        return []
    state = "being made" if report.owned else "never finished, removed at the next start"
    size = format_bytes(report.partial_bytes)
    return [f"unfinished: {words.plural(report.num_partial, 'file')}, {size}; {state}"]


def _abandoned_lines(report: StoreReport) -> list[str]:
    return [
        f"shared memory: {each.path}, {format_bytes(each.size_bytes)}: no process uses it, last "
        f"changed {words.age(report.now_s - each.changed_s)} ago; left by an engine that was "
        f"stopped, may be removed"
        for each in report.abandoned
    ]


def _live_json(live: LiveCounters) -> dict[str, object]:
    return {
        "target": live.target,
        "error": live.error or None,
        "metrics": [
            {
                "name": name,
                "labels": dict(labels),
                "value": value if math.isfinite(value) else None,  # JSON has no infinity
            }
            for (name, labels), value in sorted(live.values.items())
        ],
    }


def _live_lines(live: LiveCounters) -> list[str]:
    """The running engine's books: what was asked, who served it, what became of the rest."""
    if live.error:
        return [f"counters: cannot be read at {live.target}: {live.error}"]
    asked = live.total("asked_tokens")
    served, missed = live.by("served_tokens", "tier"), live.by("missed_tokens", "reason")
    parts = [f"{tier} {_count(value)}" for tier, value in served.items() if value]
    parts += [f"missed, {reason} {_count(value)}" for reason, value in missed.items() if value]
    lines = [
        f"counters of the running engine, from {live.target}:",
        f"  tokens asked {_count(asked)} = {' + '.join(parts) or '0'}",
    ]
    rows = (
        ("read", "read_bytes", "tier"),
        ("written", "write_bytes", "tier"),
        ("evicted", "evicted_chunks", "reason"),
        ("set aside", "quarantined_chunks", "reason"),
    )
    for words_of, name, label in rows:
        shown = format_bytes if name.endswith("_bytes") else _count
        found = [f"{key} {shown(value)}" for key, value in live.by(name, label).items() if value]
        if found:
            lines.append(f"  {words_of:<9} {', '.join(found)}")
    open_breakers = [tier for tier, value in live.by("breaker_open", "tier").items() if value]
    if open_breakers:
        lines.append(
            f"  not asked at present, because they failed or were slow: {', '.join(open_breakers)}"
        )
    return lines


def _count(value: float) -> str:
    return f"{value:,.0f}"
