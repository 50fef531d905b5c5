"""What identities, reasons and times are called in front of people."""

import time
from collections.abc import Mapping, Sequence

from stepwell.core.identity import Identity, JsonValue
from stepwell.settings import format_bytes, plural

__all__ = [
    "age",
    "day",
    "describe",
    "difference_words",
    "differences",
    "plural",
    "reason_words",
    "years",
]

_NAMES = {
    "engine": "engine",
    "engine_version": "engine version",
    "platform": "platform",
    "weights": "weights",
    "model_config": "model configuration",
    "model_dtype": "model dtype",
    "quantization": "quantization",
    "kv_dtype": "KV dtype",
    "kv_cache_layout": "KV layout",
    "canonical_layout": "canonical layout",
    "kv_groups": "KV groups",
    "block_tokens": "tokens per block",
    "blocks_per_chunk": "blocks per chunk",
    "chunk_bytes": "chunk size",
    "tp": "tp",
    "pp": "pp",
    "pp_partition": "pp layer partition",
    "prefill_cp": "prefill context parallel",
    "decode_cp": "decode context parallel",
    "cp_interleave": "context parallel interleave",
    "replicated": "replicated over ranks",
    "model_runner": "model runner",
    "speculative": "speculative decoding",
    "hash_algorithm": "hash algorithm",
    "hash_seed": "hash seed",
    "max_model_len": "longest sequence",
}

# Digests: that they differ says something, what they are does not.
_OPAQUE = {
    "weights": "weights differ",
    "loader": "loading differs (load format, patterns, code revision)",
    "multimodal": "multimodal processing differs",
    "environment": "vLLM's environment variables differ",
    "model_config": "model configuration differs (config.json, or an override of it)",
    "quantization": "quantization differs",
    "kv_groups": "KV groups differ (layers, windows or block sizes)",
    "speculative": "speculative decoding differs (method or draft model)",
    "hash_seed": "hash seed differs: PYTHONHASHSEED or another hash algorithm",
}

# What differs only because something else does; said only where nothing of that differs.
_FOLLOWS = {
    "hash_seed": {"hash_algorithm"},
    "kv_groups": {"model_config", "kv_dtype", "block_tokens", "tp", "pp", "platform"},
    "chunk_bytes": {"model_config", "kv_dtype", "block_tokens", "blocks_per_chunk", "tp", "pp"},
    "kv_dtype": {"model_dtype"},
}

_REASONS = {
    "checksum": "the payload is not what was written",
    "header": "the header is damaged, or no record's",
    "identity": "a record of another chunk than the journal says",
    "truncated": "the extent is cut short",
    "layout": "another length than it should have",
    "not_a_file": "something else than a file in an extent's place",
    "io_error": "the drive could not read it",
    "padding": "the bytes after the payload are not zero",
    "stray": "not the store's, yet it lies among its files",
    "description": "the description of a root is damaged",
    "journal": "the journal is damaged",
    "missing": "what the journal names is not there; an engine notes first what leaves",
    "blocked": "no engine would start with it",
    "unreadable": "not readable by this user",
}


def age(seconds: float) -> str:
    """A length of time for people: "12 s", "5 min", "3 h", "9 days"."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"


def day(time_s: float) -> str:
    """A day for people, in UTC: "2026-01-31"; "unknown" for one that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        return "unknown"


def years(number: float) -> str:
    """A length of life for people: "5 months", "2.5 years", "more than 100 years"."""
    if number < 2:
        return plural(max(1, round(number * 12)), "month")
    return f"{number:.1f} years" if number <= 100 else "more than 100 years"


def reason_words(reason: str) -> str:
    """What a reason means; "" for one that is not known here."""
    return _REASONS.get(reason, "")


def describe(identity: Identity) -> list[tuple[str, str]]:
    """An identity as a few lines (name, words)."""
    fields = identity.fields
    lines = [
        ("model", identity.labels.get("model", "unknown")),
        ("weights", _text(fields, "weights")),
        ("engine", f"{_text(fields, 'engine')} {_text(fields, 'engine_version')}, "
                   f"{_text(fields, 'platform')}"),
        ("dtype", f"{_text(fields, 'model_dtype')}, KV {_text(fields, 'kv_dtype')}"),
        ("layout", _layout(fields)),
        ("parallel", _parallel(fields)),
        ("chunk", _chunk(fields)),
        ("hash", _text(fields, "hash_algorithm")),
    ]  # fmt: skip
    lines += [
        (_NAMES[name], _text(fields, name))
        for name in ("quantization", "speculative", "max_model_len")
        if fields.get(name) is not None
    ]
    return lines


def root_text(root: str, identity: Identity | None, more: Sequence[tuple[str, str]] = ()) -> str:
    """A root as a paragraph: its digits, whose it is, and further lines (name, words)."""
    whose = [("whose", "unknown: its description is missing or damaged")]
    lines = [*(whose if identity is None else describe(identity)), *more]
    return "\n".join([f"root {root}", *(f"  {name:<10} {_plain(value)}" for name, value in lines)])


def difference_words(name: str, here: JsonValue, there: JsonValue) -> str:
    """One difference of two identities: "tp 1 here, 2 there", "weights differ"."""
    if name in _OPAQUE:
        return _OPAQUE[name]
    if name == "chunk_bytes" and isinstance(here, int) and isinstance(there, int):
        return f"chunk size {format_bytes(here)} here, {format_bytes(there)} there"
    words = _NAMES.get(name, name)
    if isinstance(here, dict | list) or isinstance(there, dict | list):
        return f"{words} differs"
    return f"{words} {_value(here)} here, {_value(there)} there"


def differences(found: Mapping[str, tuple[JsonValue, JsonValue]]) -> list[str]:
    """The differences of two identities in words, without those that only follow from others."""
    return [
        difference_words(name, here, there)
        for name, (here, there) in found.items()
        if not _FOLLOWS.get(name, set()) & found.keys()
    ]


def _plain(text: str) -> str:
    """Without what a terminal would obey: whoever writes to the storage chose the words."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _value(value: JsonValue) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _text(fields: Mapping[str, JsonValue], name: str) -> str:
    return _value(fields[name]) if name in fields else "unknown"


def _layout(fields: Mapping[str, JsonValue]) -> str:
    groups = fields.get("kv_groups")
    words = _text(fields, "kv_cache_layout")
    if isinstance(groups, list):
        words += f", {plural(len(groups), 'KV group')}"
    return f"{words}, replicated over ranks" if fields.get("replicated") is True else words


def _parallel(fields: Mapping[str, JsonValue]) -> str:
    words = f"tp {_text(fields, 'tp')}, pp {_text(fields, 'pp')}"
    for name in ("prefill_cp", "decode_cp"):
        if fields.get(name, 1) != 1:
            words += f", {_NAMES[name]} {_text(fields, name)}"
    return words


def _chunk(fields: Mapping[str, JsonValue]) -> str:
    words = f"{_text(fields, 'block_tokens')} tokens"
    if fields.get("blocks_per_chunk") != 1:
        words = f"{_text(fields, 'blocks_per_chunk')} blocks of {words}"
    size_bytes = fields.get("chunk_bytes")
    return f"{words}, {format_bytes(size_bytes)}" if isinstance(size_bytes, int) else words
