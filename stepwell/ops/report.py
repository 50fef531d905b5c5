"""Reports of inspect and check: text for people, values for JSON."""

from collections import Counter

from stepwell.ops import words
from stepwell.ops.check import Action, Bad, CheckReport
from stepwell.ops.inspect import RootReport, StoreReport
from stepwell.settings import format_bytes

__all__ = ["check_json", "check_text", "inspect_json", "inspect_text"]

_MAX_LISTED = 50


def inspect_json(report: StoreReport) -> dict[str, object]:
    """JSON values of `stepwell inspect --json`."""
    return {
        "path": report.path,
        "format": report.format,
        "owner": {"pid": report.owner_pid} if report.owned else None,
        "chunks": report.num_chunks,
        "bytes": report.size_bytes,
        "free_bytes": report.free_bytes,
        "total_bytes": report.total_bytes,
        "roots": [_root_json(root, report.now_s) for root in report.roots],
        "quarantine": [
            {"reason": each.reason, "files": each.num_files, "bytes": each.size_bytes}
            for each in report.quarantine
        ],
        "partial": {"files": report.num_partial, "bytes": report.partial_bytes},
        "abandoned_shared_memory": [
            {"path": each.path, "bytes": each.size_bytes, "age_s": report.now_s - each.changed_s}
            for each in report.abandoned
        ],
    }


def inspect_text(report: StoreReport) -> str:
    """What `stepwell inspect` prints."""
    if not report.owned:
        owner = "no process uses it"
    else:
        owner = f"process {report.owner_pid or '(unknown)'} uses it"
    free, total = format_bytes(report.free_bytes), format_bytes(report.total_bytes)
    paragraphs = [
        f"{report.path}: a Stepwell store of format {report.format}; {owner}\n"
        f"{words.plural(report.num_chunks, 'chunk')} of {words.plural(len(report.roots), 'root')}, "
        f"{format_bytes(report.size_bytes)}; {free} of {total} are free on its file system"
    ]
    paragraphs += [_root_text(root, report.now_s) for root in report.roots]
    last = [*_aside_lines(report), *_abandoned_lines(report)]
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
        "roots": report.num_roots,
        "records": report.num_records,
        "bytes": report.size_bytes,
        "expired": report.num_expired,
        "bad": [
            {
                "path": each.path,
                "reason": each.reason,
                "detail": each.detail,
                "bytes": each.size_bytes,
                "action": each.action.value,
            }
            for each in report.bad
        ],
        "bad_by_reason": dict(sorted(Counter(each.reason for each in report.bad).items())),
        "undescribed_roots": [root.hex() for root in report.undescribed],
        "leftovers": {"files": report.num_leftovers, "bytes": report.leftover_bytes},
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
        paragraphs.append(_what_was_done(report))
    notes = list(_notes(report))
    if notes:
        paragraphs.append("\n".join(notes))
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
    if root.identity is None:
        lines = [("whose", "unknown: root.json is missing or damaged")]
    else:
        lines = words.describe(root.identity)
    lines.append(("chunks", chunks))
    text = [f"root {root.root.hex()}", *(f"  {name:<10} {value}" for name, value in lines)]
    if root.compared_with is not None:
        text.append(f"  compared with the root in use last, {root.compared_with.hex()[:16]}...:")
        text += [f"    - {difference}" for difference in words.differences(root.differences or {})]
    return "\n".join(text)


def _aside_lines(report: StoreReport) -> list[str]:
    lines = []
    if report.quarantine:
        count = sum(each.num_files for each in report.quarantine)
        size = format_bytes(sum(each.size_bytes for each in report.quarantine))
        reasons = ", ".join(f"{each.reason} {each.num_files}" for each in report.quarantine)
        lines.append(
            f"quarantine: {count}, {size} ({reasons}); the first to go when room is needed"
        )
    if report.num_partial:
        state = "being written" if report.owned else "never finished, removed at the next start"
        size = format_bytes(report.partial_bytes)
        lines.append(f"unfinished: {words.plural(report.num_partial, 'write')}, {size}; {state}")
    return lines


def _abandoned_lines(report: StoreReport) -> list[str]:
    return [
        f"shared memory: {each.path}, {format_bytes(each.size_bytes)}: no process uses it, last "
        f"changed {words.age(report.now_s - each.changed_s)} ago; left by an engine that was "
        f"stopped, may be removed"
        for each in report.abandoned
    ]


def _reasons(report: CheckReport) -> list[str]:
    return [reason for reason, _ in Counter(each.reason for each in report.bad).most_common()]


def _reason_text(report: CheckReport, reason: str) -> str:
    bad = [each for each in report.bad if each.reason == reason]
    meaning = words.reason_words(reason)
    lines = [f"{reason}: {len(bad)} ({meaning})" if meaning else f"{reason}: {len(bad)}"]
    lines += [f"  {_relative(each, report)}\n    {each.detail}" for each in bad[:_MAX_LISTED]]
    if len(bad) > _MAX_LISTED:
        lines.append(f"  ... and {len(bad) - _MAX_LISTED} more; --json lists all")
    return "\n".join(lines)


def _relative(bad: Bad, report: CheckReport) -> str:
    return bad.path.removeprefix(f"{report.path}/")


def _what_was_done(report: CheckReport) -> str:
    if not report.fix:
        return "Nothing was changed; --fix moves what is wrong to the quarantine."
    moved = sum(each.action is Action.QUARANTINED for each in report.bad)
    text = f"{moved} of {len(report.bad)} moved to {report.path}/quarantine."
    if moved < len(report.bad):
        text += " The others could not be moved, or not be read by this user."
    return text


def _notes(report: CheckReport) -> list[str]:
    notes = []
    if report.owned:
        notes.append(
            f"Process {report.owner_pid or '(unknown)'} uses the store; what it wrote meanwhile "
            f"may not have been read."
        )
    notes += [
        f"Root {root.hex()} has no root.json, so whose records these are cannot be told in words."
        for root in report.undescribed
    ]
    if report.num_expired:
        notes.append(f"Expired: {words.plural(report.num_expired, 'record')}.")
    if report.num_leftovers:
        done = "were removed" if report.fix else "are removed at the engine's next start"
        notes.append(
            f"Unfinished writes of an engine that was killed "
            f"({words.plural(report.num_leftovers, 'file')}, "
            f"{format_bytes(report.leftover_bytes)}) {done}."
        )
    return notes
