"""What `stepwell check` says of a store: text for people, values for JSON."""

from collections import Counter
from dataclasses import dataclass

from stepwell.ops import words
from stepwell.ops.contents import JournalState
from stepwell.ops.findings import Bad, CheckReport, Remedy
from stepwell.settings import format_bytes

__all__ = ["check_json", "check_text"]

_MAX_LISTED = 50


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
    Remedy.WRITE: _RemedyWords(
        "writes stepwell.json again, without which no engine takes the directory for a store",
        "written again",
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
