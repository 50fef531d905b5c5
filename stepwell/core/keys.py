"""Keys: a 32-byte root followed by the engine's own key of the chunk."""

from typing import NewType

import xxhash

__all__ = [
    "ENGINE_KEY_MAX_BYTES",
    "ROOT_BYTES",
    "Key",
    "Root",
    "engine_key_of",
    "fingerprint",
    "make_key",
    "root_of",
]

ROOT_BYTES = 32
ENGINE_KEY_MAX_BYTES = 64

Root = NewType("Root", bytes)
"""A 32-byte digest of who computed the KV and how it is laid out (`stepwell.core.identity`)."""

Key = NewType("Key", bytes)
"""A root (32 bytes) followed by an engine key (1 to 64 bytes): the full name of one chunk."""


def make_key(root: Root, engine_key: bytes) -> Key:
    """Join a root and an engine key.

    Args:
        root: 32 bytes.
        engine_key: 1 to 64 bytes that commit to every token up to the end of the chunk.

    Raises:
        ValueError: a length is out of range.
    """
    if len(root) != ROOT_BYTES:
        raise ValueError(f"a root has {ROOT_BYTES} bytes: root_bytes={len(root)}")
    if not 1 <= len(engine_key) <= ENGINE_KEY_MAX_BYTES:
        raise ValueError(
            f"an engine key has 1 to {ENGINE_KEY_MAX_BYTES} bytes: key_bytes={len(engine_key)}"
        )
    return Key(root + engine_key)


def root_of(key: Key) -> Root:
    """The first 32 bytes of a key."""
    return Root(key[:ROOT_BYTES])


def engine_key_of(key: Key) -> bytes:
    """What follows the root in a key."""
    return key[ROOT_BYTES:]


def fingerprint(key: bytes) -> int:
    """A number below 2**60 that stands for a key in tables; the record's header has the truth.

    60 bits because such a number takes 32 bytes in memory where 64 bits take more. Of 100
    million chunks two share a number with a chance of 1 in 230; one of them is then a miss for
    as long as the other is there, since the header names the whole key.
    """
    return xxhash.xxh3_64_intdigest(key) >> 4
