"""Writes the golden records of format version 1. Run once; the files are never changed again.

A later version of Stepwell must still read them. The bytes are put together here by hand, from
docs/FORMAT.md and without `stepwell.core.record`, so that the two can disagree.
"""

import hashlib
import struct
import sys
import zlib
from pathlib import Path

import xxhash

HERE = Path(__file__).resolve().parent
ROOT = hashlib.sha256(b"golden root").digest()

# name -> engine key, payload length, stored at, expires at (microseconds), end token
GOLDEN = {
    "record-v1-page.kv": (bytes(range(32)), 4096, 1_700_000_000_000_000, 0, 256),
    "record-v1-odd.kv": (b"k" * 64, 1000, 1_700_000_000_000_001, 1_900_000_000_000_000, 0),
    "record-v1-shortest.kv": (b"\x01", 1, 1, (1 << 64) - 1, (1 << 64) - 1),
}


def payload_of(length: int) -> bytes:
    """The bytes 0, 1, ..., 250, 0, 1, ..."""
    return bytes(idx % 251 for idx in range(length))


def record_of(
    engine_key: bytes, length: int, stored_at_us: int, expires_at_us: int, end_token: int
) -> bytes:
    """A whole record: header page, payload, zeros to the end of the page."""
    payload = payload_of(length)
    page = bytearray(4096)
    page[0:8] = b"STEPWELL"
    struct.pack_into("<H", page, 8, 1)  # format version
    struct.pack_into("<H", page, 10, 0)  # codec: raw
    page[16:48] = ROOT
    struct.pack_into("<H", page, 48, len(engine_key))
    page[56 : 56 + len(engine_key)] = engine_key
    struct.pack_into("<Q", page, 120, length)
    page[128:144] = xxhash.xxh3_128_digest(payload)
    struct.pack_into("<QQQ", page, 144, stored_at_us, expires_at_us, end_token)
    struct.pack_into("<I", page, 12, zlib.crc32(page))
    return bytes(page) + payload + bytes(-length % 4096)


if __name__ == "__main__":
    for name, fields in GOLDEN.items():
        path = HERE / name
        if path.exists():
            sys.exit(f"{path} is there already, and golden files do not change")
        path.write_bytes(record_of(*fields))
