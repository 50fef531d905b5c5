"""The kinds of storage and what they promise, as text and as JSON values."""

from dataclasses import asdict

from stepwell.tiers.media.kinds import KINDS, Kind

__all__ = ["tiers_json", "tiers_text"]


def tiers_json() -> dict[str, object]:
    """Every kind as JSON values."""
    kinds: list[dict[str, object]] = [
        {
            "name": kind.name,
            "schemes": list(kind.schemes),
            "example": kind.example,
            "words": kind.words,
            "installed": kind.installed,
            "extra": kind.extra or None,
            "install": None if kind.installed else kind.install_command,
            "way": kind.way or None,
            **asdict(kind.promises),
        }
        for kind in KINDS
    ]
    return {"kinds": kinds}


def tiers_text() -> str:
    """Every kind for people."""
    return "\n\n".join(map(_paragraph, KINDS))


def _paragraph(kind: Kind) -> str:
    promises = kind.promises
    facts = {
        "durable": "yes" if promises.durable else "no",
        "shared": "yes" if promises.shared else "no",
        "expires": "by itself" if promises.expires else "when it is read",
        "evicts": promises.evicts,
    }
    ready = ", ".join(filter(None, ("ready", kind.way)))
    if not kind.installed:
        ready = f"not installed: {kind.install_command}"
    return "\n".join(
        [
            f"{', '.join(f'{scheme}://' for scheme in kind.schemes)}  ({ready})",
            f"  {kind.words}",
            f"  {kind.example}",
            f"  {'  '.join(f'{name}: {words}' for name, words in facts.items())}",
        ]
    )
