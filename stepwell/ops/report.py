"""Reports of inspect and check: text for people, values for JSON."""

import math
from collections import Counter
from dataclasses import dataclass

from stepwell.ops import words
from stepwell.ops.contents import JournalState
from stepwell.ops.findings import Bad, CheckReport, Remedy
from stepwell.ops.inspect import RootReport, SlotSize, StoreReport, Wear
from stepwell.ops.live import LiveCounters
from stepwell.policy.endurance import Observation
from stepwell.settings import format_bytes

__all__ = ["check_json", "check_text", "inspect_json", "inspect_text"]

_MAX_LISTED = 50


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


def check_json(report: CheckReport) -> dict[str, object]:
    """JSON values of `stepwell check --json`."""
    return {
        "path": report.path,
        "ok": report.ok,
        "fix": report.fix,
        "owner": {"pid": report.owner_pid} if report.owned else None,
        "journal": {"state": report.journal.value, "cut_bytes": report.cut_bytes},
        "roots": report.num_roots,
        "records": report.num_records,
        "bytes": report.size_bytes,
        "expired": report.num_expired,
        "gone": report.num_gone,
        "stale": report.num_stale,
        "set_aside_before": report.num_aside,
        "bad": [
            {
                "path": each.path,
                "slot": each.slot_idx,
                "reason": each.reason,
                "detail": each.detail,
                "bytes": each.size_bytes,
                "remedy": each.remedy.value,
                "fixed": each.fixed,
            }
            for each in report.bad
        ],
        "bad_by_reason": dict(sorted(Counter(each.reason for each in report.bad).items())),
        "undescribed_roots": [root.hex() for root in report.undescribed],
        "leftovers": {"files": report.leftovers.num_files, "bytes": report.leftovers.size_bytes},
        "strays": {"files": report.strays.num_files, "bytes": report.strays.size_bytes},
    }


def check_text(report: CheckReport) -> str:
    """What `stepwell check` prints."""
    read = (
        f"{report.path}: read {words.plural(report.num_records, 'record')} of "
        f"{words.plural(report.num_roots, 'root')}, {format_bytes(report.size_bytes)}"
    )
    if report.ok:
        paragraphs = [f"{read}; all are good"]
    else:
        paragraphs = [f"{read}; {len(report.bad)} wrong"]
        paragraphs += [_reason_text(report, reason) for reason in _reasons(report)]
        paragraphs.append("\n".join(_what_was_done(report)))
    notes = list(_notes(report))
    if notes:
        paragraphs.append("\n".join(notes))
    return "\n\n".join(paragraphs)


# Inspect.


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
    if root.identity is None:
        lines = [("whose", "unknown: its description is missing or damaged")]
    else:
        lines = words.describe(root.identity)
    lines.append(("chunks", chunks))
    text = [f"root {root.root.hex()}", *(f"  {name:<10} {value}" for name, value in lines)]
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
    line = (
        f"wear: {format_bytes(wear.written_bytes)} written since {words.day(wear.since_s)} "
        f"({words.age(observed_s)})"
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


# Check.


@dataclass(frozen=True, slots=True)
class _RemedyWords:
    """What is said of a remedy: before, and with a number of things after it was tried."""

    offer: str
    done: str


_REMEDIES = {
    Remedy.SET_ASIDE: _RemedyWords(
        "sets bad records aside: they are served no more, and their slots are used again first",
        "set aside: served no more, and the slots are used again first",
    ),
    Remedy.RENEW: _RemedyWords(
        "writes the journal anew, from what can be read", "mended by a new journal"
    ),
    Remedy.CUT: _RemedyWords("cuts extents to whole slots", "cut to whole slots"),
    Remedy.MOVE: _RemedyWords(
        "moves what is not the store's to {path}/strays", "moved to {path}/strays"
    ),
}


def _reasons(report: CheckReport) -> list[str]:
    return [reason for reason, _ in Counter(each.reason for each in report.bad).most_common()]


def _reason_text(report: CheckReport, reason: str) -> str:
    bad = [each for each in report.bad if each.reason == reason]
    meaning = words.reason_words(reason)
    lines = [f"{reason}: {len(bad)} ({meaning})" if meaning else f"{reason}: {len(bad)}"]
    lines += [f"  {_where(each, report)}\n    {each.detail}" for each in bad[:_MAX_LISTED]]
    if len(bad) > _MAX_LISTED:
        lines.append(f"  ... and {len(bad) - _MAX_LISTED} more; --json lists all")
    return "\n".join(lines)


def _where(bad: Bad, report: CheckReport) -> str:
    path = bad.path.removeprefix(f"{report.path}/")
    if bad.slot_idx is None:
        return path
    return f"{path}, slot {bad.slot_idx} (from byte {bad.slot_idx * bad.size_bytes} on)"


def _what_was_done(report: CheckReport) -> list[str]:
    remedies = {each.remedy for each in report.bad}
    known = [(remedy, said) for remedy, said in _REMEDIES.items() if remedy in remedies]
    lines = []
    if report.fix:
        for remedy, said in known:
            fixed = sum(each.fixed for each in report.bad if each.remedy is remedy)
            lines.append(f"{fixed} {said.done.format(path=report.path)}.")
        left = sum(not each.fixed for each in report.bad)
        if left:
            lines.append(f"{left} could not be put right, or not be read by this user.")
        return lines
    lines.append("Nothing was changed.")
    if known:
        offers = "; it ".join(said.offer.format(path=report.path) for _, said in known)
        lines.append(f"--fix {offers}.")
    return lines


def _notes(report: CheckReport) -> list[str]:
    notes = []
    if report.journal is not JournalState.USED:
        notes.append("Where records lie was read from their headers, not from the journal.")
    if report.owned:
        notes.append(
            f"Process {report.owner_pid or '(unknown)'} uses the store; what it wrote meanwhile "
            f"may not have been read."
        )
    if report.num_gone:
        notes.append(f"Left while it was looked at: {words.plural(report.num_gone, 'record')}.")
    if report.num_stale:
        notes.append(
            f"The journal names {words.plural(report.num_stale, 'record')} that "
            f"{'is' if report.num_stale == 1 else 'are'} no more, as a killed engine leaves it."
        )
    notes += [
        f"Root {root.hex()} has no description, so whose records these are cannot be told in words."
        for root in report.undescribed
    ]
    if report.num_expired:
        notes.append(f"Expired: {words.plural(report.num_expired, 'record')}.")
    if report.num_aside:
        notes.append(f"Set aside earlier, not read: {words.plural(report.num_aside, 'slot')}.")
    if report.cut_bytes:
        notes.append(
            f"The journal ends in {report.cut_bytes} bytes of a write that was not finished, as a "
            f"killed engine leaves them."
        )
    notes += _file_notes(report)
    return notes


def _file_notes(report: CheckReport) -> list[str]:
    notes = []
    if report.leftovers.num_files:
        done = "were removed" if report.fix else "are removed at the engine's next start"
        notes.append(
            f"Unfinished files of an engine that was killed "
            f"({words.plural(report.leftovers.num_files, 'file')}, "
            f"{format_bytes(report.leftovers.size_bytes)}) {done}."
        )
    if report.strays.num_files:
        notes.append(
            f"Moved to {report.path}/strays earlier, and counted by nobody: "
            f"{words.plural(report.strays.num_files, 'file')}, "
            f"{format_bytes(report.strays.size_bytes)}; remove what nobody misses."
        )
    return notes


def _live_json(live: LiveCounters) -> dict[str, object]:
    return {
        "target": live.target,
        "error": live.error or None,
        "metrics": [
            {"name": name, "labels": dict(labels), "value": value}
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
