"""Real stores for the tests of the tools, and ways to damage them."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepwell.clock import Clock, SystemClock
from stepwell.core.identity import Identity, JsonValue
from stepwell.core.keys import Key, Root, make_key
from stepwell.core.record import HEADER_BYTES, Header, payload_checksum, record_bytes
from stepwell.core.registry import RootRegistry
from stepwell.core.types import Chunk, Direction, Outcome
from stepwell.errors import DataError
from stepwell.testing import Driver, buffer_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.disk import DiskTier

PAYLOAD_BYTES = 5000  # not a multiple of a page, so that records have padding
SLOT_BYTES = record_bytes(PAYLOAD_BYTES)
CAPACITY_BYTES = 4 << 20
REGISTRY = RootRegistry()

FIELDS: Mapping[str, JsonValue] = {
    "engine": "vllm",
    "engine_version": "0.32.0",
    "platform": "cpu:AVX2:amx=False",
    "weights": "xxh3-128:full:00112233445566778899aabbccddeeff",
    "model_config": "2d08fdb8228ddd00d0edd3f04afcd35b",
    "model_dtype": "float32",
    "kv_dtype": "float32",
    "kv_cache_layout": "LBHNC",
    "kv_groups": [{"layers": "a2d5", "spec": "FullAttentionSpec:5f4e", "tokens_per_block": 128}],
    "block_tokens": 128,
    "blocks_per_chunk": 1,
    "chunk_bytes": PAYLOAD_BYTES,
    "tp": 1,
    "pp": 1,
    "prefill_cp": 1,
    "decode_cp": 1,
    "replicated": False,
    "quantization": None,
    "speculative": None,
    "model_runner": "v1",
    "hash_algorithm": "sha256",
    "hash_seed": "066b1e89",
}


def identity(**changes: JsonValue) -> Identity:
    """The identity of these tests, or one that differs from it."""
    return Identity({**FIELDS, **changes}, {"model": "/models/tiny"})


def payload_of(key: Key, length: int = PAYLOAD_BYTES) -> bytes:
    return (key * (length // len(key) + 1))[:length]


def open_store(
    path: Path, capacity_bytes: int = CAPACITY_BYTES, *, clock: Clock | None = None,
    ttl_s: float = 0.0,
) -> DiskTier:  # fmt: skip
    context = TierContext(clock=clock or SystemClock(), registry=REGISTRY)
    return DiskTier(path, capacity_bytes, context, num_threads=2, ttl_s=ttl_s)


@contextmanager
def opened(
    path: Path, capacity_bytes: int = CAPACITY_BYTES, *, clock: Clock | None = None,
    ttl_s: float = 0.0,
) -> Iterator[DiskTier]:  # fmt: skip
    tier = open_store(path, capacity_bytes, clock=clock, ttl_s=ttl_s)
    try:
        yield tier
    finally:
        tier.close()


def keys_of(root: Root, count: int = 3, begin: int = 0) -> list[Key]:
    return [make_key(root, idx.to_bytes(4, "big") * 9) for idx in range(begin, begin + count)]


def write_keys(
    tier: DiskTier, whose: Identity, keys: Sequence[Key], length: int = PAYLOAD_BYTES
) -> None:
    REGISTRY.add(whose)
    chunks = [Chunk(key, buffer_of(length, payload_of(key, length))) for key in keys]
    driver = Driver(tier)
    result = driver.wait(driver.submit(Direction.WRITE, chunks))
    assert result.done, result


def write_store(
    path: Path, whose: Identity | None = None, count: int = 3, *, clock: Clock | None = None,
    length: int = PAYLOAD_BYTES,
) -> list[Key]:  # fmt: skip
    """A store with ``count`` records of one root."""
    whose = whose or identity()
    keys = keys_of(whose.root, count)
    with opened(path, clock=clock) as tier:
        write_keys(tier, whose, keys, length)
    return keys


def read_store(path: Path, keys: Sequence[Key]) -> list[tuple[Outcome, str]]:
    """What the store itself says of each record: (outcome, reason)."""
    with opened(path) as tier:
        return read_keys(tier, keys)


def read_keys(tier: DiskTier, keys: Sequence[Key]) -> list[tuple[Outcome, str]]:
    result, contents = Driver(tier).read(keys, PAYLOAD_BYTES)
    for each, key, content in zip(result.results, keys, contents, strict=True):
        assert each.outcome is not Outcome.DONE or content == payload_of(key)
    return [(each.outcome, each.reason.value) for each in result.results]


@dataclass(frozen=True)
class Lying:
    """Where a record lies: a slot of an extent."""

    path: Path
    slot_idx: int
    slot_bytes: int

    @property
    def offset(self) -> int:
        return self.slot_idx * self.slot_bytes

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.slot_bytes)

    def write(self, content: bytes, at: int = 0) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.offset + at)
            file.write(content)

    def flip(self, at: int) -> None:
        self.write(bytes([self.read()[at] ^ 0x40]), at)


def slots(path: Path) -> Iterator[tuple[Lying, Header]]:
    """Every slot with a readable header."""
    for extent in StoreDirectory(path).find_extents():
        for idx in range(extent.size_bytes // extent.slot_bytes):
            lying = Lying(Path(extent.path), idx, extent.slot_bytes)
            try:
                yield lying, Header.unpack(lying.read()[:HEADER_BYTES])
            except DataError:
                continue


def where(path: Path, key: Key) -> Lying:
    """Where a record lies that lies in one place."""
    (lying,) = [lying for lying, header in slots(path) if header.key == key]
    return lying


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    """Every name below ``path``, with its size and the time of its last change."""
    return {
        str(each): (each.lstat().st_size, each.lstat().st_mtime_ns)
        for each in sorted(path.rglob("*"))
    }


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def description(path: Path, key: Key) -> Path:
    return path / "roots" / f"{key[:32].hex()}.json"


def replace_by(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _other_length(lying: Lying, key: Key) -> None:
    payload = payload_of(key, PAYLOAD_BYTES + 8)
    header = Header(key, len(payload), payload_checksum(payload), int(time.time() * 1e6))
    lying.write((header.pack() + payload).ljust(lying.slot_bytes, b"\0"))


def _smaller(lying: Lying, key: Key) -> None:
    payload = payload_of(key, 4096)
    header = Header(key, len(payload), payload_checksum(payload), int(time.time() * 1e6))
    lying.write(header.pack() + payload)


def _swap(path: Path, lying: Lying) -> None:
    other = next(each for each, _ in slots(path) if each != lying)
    content, other_content = lying.read(), other.read()
    lying.write(other_content)
    other.write(content)


def _of_another_root(lying: Lying, key: Key) -> None:
    header = Header.unpack(lying.read())
    stranger = make_key(Root(bytes(32)), key[32:])
    lying.write(Header(stranger, header.payload_bytes, header.checksum, header.stored_at_us).pack())


# name -> (damage to a record, the reason, how many records are bad then)
RECORD_DAMAGES: dict[str, tuple[Callable[[Path, Lying, Key], object], str, int]] = {
    "a flipped bit in the payload": (lambda p, s, k: s.flip(4096 + 1234), "checksum", 1),
    "a flipped bit at the payload's end": (lambda p, s, k: s.flip(4096 + 4999), "checksum", 1),
    "a flipped bit in the magic": (lambda p, s, k: s.flip(0), "header", 1),
    "another version": (lambda p, s, k: s.flip(8), "header", 1),
    "a flipped bit in the header's fields": (lambda p, s, k: s.flip(20), "header", 1),
    "a flipped bit in the header's rest": (lambda p, s, k: s.flip(4000), "header", 1),
    "a blank slot": (lambda p, s, k: s.write(bytes(s.slot_bytes)), "header", 1),
    "a flipped bit in the padding": (lambda p, s, k: s.flip(4096 + 5000), "padding", 1),
    "a record of another length": (lambda p, s, k: _other_length(s, k), "layout", 1),
    "a record of another size": (lambda p, s, k: _smaller(s, k), "layout", 1),
    "a record of another root": (lambda p, s, k: _of_another_root(s, k), "identity", 1),
    "swapped with another record": (lambda p, s, k: _swap(p, s), "identity", 2),
}


def _truncate(path: Path, size_bytes: int) -> None:
    os.truncate(path, size_bytes)


def _second_of_its_number(path: Path, lying: Lying) -> None:
    number = lying.path.name.partition("-")[0]
    (path / "extents" / f"{number}-8192.kv").write_bytes(bytes(16384))


def _their_file(path: Path) -> Path:
    theirs = path.parent / "theirs"
    theirs.write_text("mine")
    return theirs


def _in_the_place_of(path: Path, make: Callable[[Path], object]) -> None:
    """Something else where the store's file or directory was, which lies beside the store now."""
    if os.path.lexists(path):
        path.rename(path.parents[1] / f"was-{path.name}")
    make(path)


def _link_instead(path: Path) -> None:
    """What the store has under a name lies elsewhere, and a link leads there."""
    path.mkdir(exist_ok=True)
    (path / "notes").write_text("mine")
    _in_the_place_of(path, lambda p: p.symlink_to(p.parents[1] / f"was-{p.name}"))


# name -> (damage around the records, the reasons); what is bad is no record
OTHER_DAMAGES: dict[str, tuple[Callable[[Path, Lying, Key], object], list[str]]] = {
    "something follows an extent": (
        lambda p, s, k: _truncate(s.path, s.path.stat().st_size + 100), ["layout"],
    ),
    "an extent ends within a record": (
        lambda p, s, k: _truncate(s.path, 2 * s.slot_bytes + 5), ["layout", "missing"],
    ),
    "an extent of less than a slot": (
        lambda p, s, k: _truncate(s.path, 100), ["truncated", "missing"],
    ),
    "an extent is a directory": (
        lambda p, s, k: replace_by(s.path, Path.mkdir), ["not_a_file", "missing"],
    ),
    "an extent is a pipe": (
        lambda p, s, k: replace_by(s.path, os.mkfifo), ["not_a_file", "missing"],
    ),
    "an extent is a link": (
        lambda p, s, k: replace_by(s.path, lambda q: q.symlink_to(_their_file(p))),
        ["not_a_file", "missing"],
    ),
    "an extent ends early": (lambda p, s, k: _truncate(s.path, s.slot_bytes), ["missing"]),
    "an extent is gone": (lambda p, s, k: s.path.unlink(), ["missing"]),
    "two extents of one number": (lambda p, s, k: _second_of_its_number(p, s), ["stray"]),
    "an extent with needless zeros": (
        lambda p, s, k: (s.path.parent / "0000000007-8192.kv").write_bytes(bytes(8192)),
        ["stray"],
    ),
    "a file among the extents": (lambda p, s, k: (p / "extents" / "notes").touch(), ["stray"]),
    "a folder among the descriptions": (lambda p, s, k: (p / "roots" / "abc").mkdir(), ["stray"]),
    "a damaged description": (lambda p, s, k: flip(description(p, k), 3), ["description"]),
    "another root's description": (
        lambda p, s, k: description(p, k).write_text(identity(tp=8).to_json()), ["description"],
    ),
    "a damaged journal": (lambda p, s, k: flip(p / "journal", 40), ["journal"]),
    "an empty journal": (lambda p, s, k: _truncate(p / "journal", 0), ["journal"]),
    "a journal of another version": (lambda p, s, k: flip(p / "journal", 8), ["journal"]),
    "the journal is a pipe": (lambda p, s, k: replace_by(p / "journal", os.mkfifo), ["journal"]),
    "the journal is a link": (
        lambda p, s, k: replace_by(p / "journal", lambda q: q.symlink_to(_their_file(p))),
        ["journal"],
    ),
    "the journal is a directory": (
        lambda p, s, k: replace_by(p / "journal", Path.mkdir), ["journal"],
    ),
    "the marker is missing": (lambda p, s, k: (p / "stepwell.json").unlink(), ["blocked"]),
    "the marker is damaged": (lambda p, s, k: _truncate(p / "stepwell.json", 3), ["blocked"]),
    "the marker is a directory": (
        lambda p, s, k: replace_by(p / "stepwell.json", Path.mkdir), ["blocked"],
    ),
    "the marker is a link": (
        lambda p, s, k: replace_by(p / "stepwell.json", lambda q: q.symlink_to(_their_file(p))),
        ["blocked"],
    ),
    "LOCK is a directory": (lambda p, s, k: replace_by(p / "LOCK", Path.mkdir), ["blocked"]),
    "LOCK is a pipe": (lambda p, s, k: replace_by(p / "LOCK", os.mkfifo), ["blocked"]),
    "LOCK is a link": (
        lambda p, s, k: replace_by(p / "LOCK", lambda q: q.symlink_to(_their_file(p))),
        ["blocked"],
    ),
    "the extents are a file": (
        lambda p, s, k: _in_the_place_of(p / "extents", Path.touch), ["blocked"],
    ),
    "the descriptions are a file": (
        lambda p, s, k: _in_the_place_of(p / "roots", Path.touch), ["blocked"],
    ),
    "partial is a file": (
        lambda p, s, k: _in_the_place_of(p / "partial", Path.touch), ["blocked"],
    ),
    "strays is a file": (
        lambda p, s, k: _in_the_place_of(p / "strays", Path.touch), ["blocked"],
    ),
    "the extents are a link": (lambda p, s, k: _link_instead(p / "extents"), ["blocked"]),
    "the descriptions are a link": (lambda p, s, k: _link_instead(p / "roots"), ["blocked"]),
    "partial is a link": (lambda p, s, k: _link_instead(p / "partial"), ["blocked"]),
    "strays is a link": (lambda p, s, k: _link_instead(p / "strays"), ["blocked"]),
}  # fmt: skip


# Not damage: what an engine leaves that was killed while it removed records, and how many.
STALE: dict[str, tuple[Callable[[Path, Lying, Key], object], int]] = {
    "a wiped slot": (lambda p, s, k: s.write(bytes(4096)), 1),
}


def damage(path: Path, key: Key, name: str) -> None:
    """Do what one of the tables says to the record of ``key`` or around it."""
    do = {**RECORD_DAMAGES, **OTHER_DAMAGES, **STALE}[name][0]
    do(path, where(path, key), key)


def earlier_format(path: Path) -> Path:
    """A store as versions before this one left it: a file per record."""
    root = path / "roots" / ("ab" * 32) / "cd"
    root.mkdir(parents=True)
    (root / "cdef.kv").write_bytes(bytes(8192))
    (path / "stepwell.json").write_text(json.dumps({"format": 1}))
    return path
