"""Writes the golden files of format version 1, records and journals. They are never changed again.

A later version of Stepwell must still read them. The bytes are put together here by hand, from
docs/FORMAT.md and without `stepwell.core.record` or `stepwell.tiers.frames`, so that the two can
disagree.
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

# What the journals hold and what they mean: what is left of them, the first to leave first.
OTHER_ROOT = hashlib.sha256(b"another golden root").digest()
JOURNALS = {
    "journal-v1.bin": {
        # tag, place, root, used at, expires at
        "rows": [
            (0x55, 5, 9, 1_700_000_300, 1_900_000_000),
            (0x44, 2 << 32 | 1, 9, 1_700_000_400, 0),
            (0x22, 1, 0, 1_700_000_400, 0),
            (0x33, 2 << 32 | 7, 0, 1_700_000_500, 0),
        ],
        "roots": {0: ROOT, 9: OTHER_ROOT},
        "aside": {3: 1, 2 << 32 | 4: 5},
        # written, since, level, as of
        "wear": (5 << 40, 1_699_999_999, -7, 1_700_000_600),
    }
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


def frame_of(kind: int, *entries: bytes) -> bytes:
    """A frame of a journal: kind, check of kind and count, count, CRC, entries."""
    check = zlib.crc32(struct.pack("<HI", kind, len(entries))) & 0xFFFF
    head, body = struct.pack("<HHI", kind, check, len(entries)), b"".join(entries)
    crc = zlib.crc32(head + bytes(4) + body)
    return head + struct.pack("<I", crc) + body


def row_of(tag: int, place: int, root: int, used_at_s: int, expires_at_s: int) -> bytes:
    """An entry of SNAPSHOT and PUT."""
    return struct.pack("<QQHHIII", tag, place, root, 0, used_at_s, expires_at_s, 0)


def number_of(*numbers: int) -> list[bytes]:
    """Entries of FREE and TOUCH."""
    return [struct.pack("<Q", number) for number in numbers]


def journal_of() -> bytes:
    """A whole journal with frames of every kind, each of them overruled by another somewhere."""
    head = b"SWJOURNL" + struct.pack("<HH", 1, 0)
    second = 2 << 32
    return b"".join(
        [
            head,
            struct.pack("<I", zlib.crc32(head + bytes(4))),
            frame_of(1, struct.pack("<HH32s", 0, 0, ROOT)),
            frame_of(7, struct.pack("<QQqQ", 1 << 40, 1_699_999_999, 1 << 30, 1_700_000_000)),
            frame_of(
                2,
                row_of(0x11, 0, 0, 1_700_000_000, 0),
                row_of(0x22, 1, 0, 1_700_000_100, 0),
                row_of(0x33, 2, 0, 1_700_000_200, 0),
                row_of(0x66, 3, 0, 1_700_000_250, 0),
            ),
            frame_of(6, struct.pack("<QQ", second | 1, 2), struct.pack("<QQ", second | 4, 5)),
            frame_of(1, struct.pack("<HH32s", 9, 0, OTHER_ROOT)),
            # A prefix of two, the second of which leaves first; one of them where one was aside.
            frame_of(
                3,
                row_of(0x44, second | 1, 9, 1_700_000_300, 0),
                row_of(0x55, 5, 9, 1_700_000_300, 1_900_000_000),
            ),
            # 0x22 and 0x44 were used as one prefix; 0x11 was evicted, its slot is used for nothing.
            frame_of(5, *number_of(1_700_000_400, 1, second | 1)),
            frame_of(4, *number_of(0, 2)),
            # 0x33 was written once more, elsewhere; where it was touched before does not count.
            frame_of(5, *number_of(1_700_000_450, second | 7)),
            frame_of(3, row_of(0x33, second | 7, 0, 1_700_000_500, 0)),
            frame_of(6, struct.pack("<QQ", 3, 1)),
            frame_of(7, struct.pack("<QQqQ", 5 << 40, 1_699_999_999, -7, 1_700_000_600)),
        ]
    )


if __name__ == "__main__":
    contents = {name: record_of(*fields) for name, fields in GOLDEN.items()}
    contents |= {name: journal_of() for name in JOURNALS}
    for name, content in contents.items():
        path = HERE / name
        if not path.exists():
            path.write_bytes(content)
        elif path.read_bytes() != content:
            sys.exit(f"{path} is another one, and golden files do not change")
