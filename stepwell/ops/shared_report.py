"""What `stepwell inspect URL` prints: JSON for programs, text for people."""

from stepwell.core.identity import Identity
from stepwell.ops import words
from stepwell.ops.shared import MediumReport, PoolReport, PoolRoot
from stepwell.settings import format_bytes

__all__ = ["shared_json", "shared_text"]


def shared_json(report: PoolReport | MediumReport) -> dict[str, object]:
    """JSON values of `stepwell inspect URL --json`."""
    if isinstance(report, MediumReport):
        return {
            "url": report.url,
            "kind": report.kind,
            "chunks": report.stats.num_chunks,
            "bytes": report.stats.used_bytes,
            "capacity_bytes": report.stats.capacity_bytes,
            "roots": None
            if report.roots is None
            else [
                {"root": root.hex(), **_identity_json(identity)}
                for root, identity in sorted(report.roots.items())
            ],
        }
    books = report.books
    granted = {} if books is None else books.granted
    return {
        "path": report.path,
        "kind": report.kind,
        "pool": report.pool_id,
        "chunks": report.num_chunks,
        "bytes": report.size_bytes,
        "capacity_bytes": None if books is None else books.quota.capacity_bytes,
        "charged_bytes": None if books is None else books.quota.used_bytes,
        "free_bytes": report.free_bytes,
        "total_bytes": report.total_bytes,
        "epoch": report.epoch,
        "sweeper": report.sweeper or None,
        "sweeper_age_s": report.now_s - report.heard_s if report.heard_s else None,
        "members": [
            {
                "member": name,
                "written_bytes": member.written_bytes,
                "granted_bytes": granted.get(name),
                "capacity_bytes": member.capacity_bytes,
                "refused": member.num_refused,
                "left": member.has_left,
                "age_s": report.now_s - heard_s,
            }
            for name, (member, heard_s) in report.members.items()
        ],
        "roots": [
            {
                "root": root.root,
                **_identity_json(root.identity),
                "chunks": root.num_chunks,
                "bytes": root.size_bytes,
                "oldest_age_s": _age(report, root.oldest_used_s),
                "newest_age_s": _age(report, root.newest_used_s),
            }
            for root in report.roots
        ],
        "partial": {"files": report.num_temp, "bytes": report.temp_bytes},
    }


def _identity_json(identity: Identity | None) -> dict[str, object]:
    return {
        "model": None if identity is None else identity.labels.get("model"),
        "fields": None if identity is None else dict(identity.fields),
        "labels": None if identity is None else dict(identity.labels),
    }


def _age(report: PoolReport, time_s: float | None) -> float | None:
    return None if time_s is None else report.now_s - time_s


def shared_text(report: PoolReport | MediumReport) -> str:
    """What `stepwell inspect URL` prints."""
    if isinstance(report, MediumReport):
        return _medium_text(report)
    num_members = sum(not member.has_left for member, _ in report.members.values())
    free, total = format_bytes(report.free_bytes), format_bytes(report.total_bytes)
    head = [
        f"{report.path}: a Stepwell pool; {words.plural(num_members, 'member')}",
        f"{words.plural(report.num_chunks, 'chunk')} of "
        f"{words.plural(len(report.roots), 'root')}, {format_bytes(report.size_bytes)}; "
        f"{free} of {total} are free on its file system",
        *_books_lines(report),
    ]
    paragraphs = ["\n".join(head)]
    if report.members:
        paragraphs.append("\n".join(_member_text(report, name) for name in report.members))
    paragraphs += [_root_text(report, root) for root in report.roots]
    if report.num_temp:
        count, size = words.plural(report.num_temp, "file"), format_bytes(report.temp_bytes)
        paragraphs.append(f"unfinished: {count}, {size}; what nobody writes any more is removed")
    return "\n\n".join(paragraphs)


def _books_lines(report: PoolReport) -> list[str]:
    if not report.epoch:
        return ["nobody has ever swept it"]
    who = report.sweeper or "(unknown)"
    if report.heard_s:
        heard = f"heard of {words.age(report.now_s - report.heard_s)} ago"
    else:
        heard = "which has left"
    lines = [f"swept by {who}, {heard}; epoch {report.epoch}"]
    if report.books is None:
        return [*lines, "it has told nothing so far"]
    quota = report.books.quota
    capacity = format_bytes(quota.capacity_bytes)
    if quota.counted_bytes is None:
        return [*lines, f"capacity {capacity}; it is being counted for the first time"]
    lines.append(
        f"{format_bytes(quota.used_bytes)} of {capacity} are charged, with what was granted and "
        "may not be written yet"
    )
    return lines


def _member_text(report: PoolReport, name: str) -> str:
    member, heard_s = report.members[name]
    granted = None if report.books is None else report.books.granted.get(name)
    text = f"member {name}\n  wrote {format_bytes(member.written_bytes)} since it came"
    if granted is not None:
        text += f", was granted {format_bytes(granted)}"
    text += f", heard of {words.age(report.now_s - heard_s)} ago"
    if member.has_left:
        text += "; has left, and what it wrote is charged until it is counted"
    quota = None if report.books is None else report.books.quota
    if quota is not None and member.capacity_bytes != quota.capacity_bytes:
        text += f"; takes {format_bytes(member.capacity_bytes)} for the capacity"
    if member.num_refused:
        refused = words.plural(member.num_refused, "write")
        text += f"; the file system was full at {refused}"
    return text


def _root_text(report: PoolReport, root: PoolRoot) -> str:
    text = f"{root.num_chunks}, {format_bytes(root.size_bytes)}"
    if root.newest_used_s is not None and root.oldest_used_s is not None:
        newest = words.age(report.now_s - root.newest_used_s)
        oldest = words.age(report.now_s - root.oldest_used_s)
        text += f", last used {newest} ago"
        text += f", the oldest {oldest} ago" if oldest != newest else ""
    return words.root_text(root.root, root.identity, [("chunks", text)])


def _medium_text(report: MediumReport) -> str:
    stats = report.stats
    lines = [f"{report.url}: storage of the kind {report.kind}"]
    chunks = "unknown" if stats.num_chunks is None else str(stats.num_chunks)
    used = "unknown" if stats.used_bytes is None else format_bytes(stats.used_bytes)
    lines.append(f"chunks: {chunks}; used: {used}")
    if stats.capacity_bytes is not None:
        lines[-1] += f" of {format_bytes(stats.capacity_bytes)}"
    if report.roots is None:
        lines.append("roots: it cannot list them")
    paragraphs = ["\n".join(lines)]
    for root, identity in sorted((report.roots or {}).items()):
        paragraphs.append(words.root_text(root.hex(), identity))
    return "\n\n".join(paragraphs)
