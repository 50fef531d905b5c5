"""Real stores for the tests of the tools, and ways to damage them."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stepwell.core.identity import Identity, JsonValue
from stepwell.core.keys import Key, Root, make_key
from stepwell.core.record import Header, payload_checksum
from stepwell.core.types import Chunk, Outcome
from stepwell.settings import Settings
from stepwell.store import Store

PAYLOAD_BYTES = 5000  # not a multiple of a page, so that records have padding

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


def open_store(path: Path) -> Store:
    return Store.open(Settings(path=path, capacity_bytes=64 << 20, min_free_bytes=0, io_threads=2))


def keys_of(root: Root, count: int = 3) -> list[Key]:
    return [make_key(root, bytes([(16 * idx) % 251, idx]) * 16) for idx in range(count)]


def write_store(path: Path, whose: Identity | None = None, count: int = 3) -> list[Key]:
    """A store with ``count`` records of one root."""
    store = open_store(path)
    try:
        keys = keys_of(store.use_root(whose or identity()), count)
        store.write([Chunk(key, memoryview(payload_of(key))) for key in keys])
        (result,) = store.drain(10.0)
        assert result.done, result
    finally:
        store.close()
    return keys


def read_store(path: Path, keys: list[Key]) -> list[tuple[Outcome, str]]:
    """What the store itself says of each record: (outcome, reason)."""
    store = open_store(path)
    try:
        store.read([Chunk(key, memoryview(bytearray(PAYLOAD_BYTES))) for key in keys])
        (result,) = store.drain(10.0)
        return [(each.outcome, each.reason.value) for each in result.results]
    finally:
        store.close()


def record_path(path: Path, key: Key) -> Path:
    name = key[32:].hex()
    return path / "roots" / key[:32].hex() / name[:2] / f"{name}.kv"


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    """Every name below ``path``, with its size and the time of its last change."""
    return {
        str(each): (each.lstat().st_size, each.lstat().st_mtime_ns)
        for each in sorted(path.rglob("*"))
    }


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _other_length(path: Path, key: Key) -> None:
    payload = payload_of(key, 4096)
    header = Header(key, len(payload), payload_checksum(payload), int(time.time() * 1e6))
    path.write_bytes(header.pack() + payload)


def _wrong_folder(path: Path) -> None:
    other = path.parent.parent / "ff"
    other.mkdir()
    path.rename(other / path.name)


def _swap(path: Path) -> None:
    other = next(each for each in path.parent.parent.glob("*/*.kv") if each != path)
    content, other_content = path.read_bytes(), other.read_bytes()
    path.write_bytes(other_content)
    other.write_bytes(content)


def _rename(path: Path) -> None:
    path.rename(path.with_name(path.name[:-5] + "77.kv"))


# name -> (damage to the first record, reason, how many things are bad then)
DAMAGES: dict[str, tuple[Callable[[Path, Key], object], str, int]] = {
    "a flipped bit in the payload": (lambda p, k: flip(p, 4096 + 1234), "checksum", 1),
    "a flipped bit at the payload's end": (lambda p, k: flip(p, 4096 + 4999), "checksum", 1),
    "a flipped bit in the magic": (lambda p, k: flip(p, 0), "header", 1),
    "another version": (lambda p, k: flip(p, 8), "header", 1),
    "a flipped bit in the header's fields": (lambda p, k: flip(p, 20), "header", 1),
    "a flipped bit in the header's rest": (lambda p, k: flip(p, 4000), "header", 1),
    "a flipped bit in the padding": (lambda p, k: flip(p, 4096 + 5000), "padding", 1),
    "a page is missing": (lambda p, k: os.truncate(p, p.stat().st_size - 4096), "truncated", 1),
    "a byte is missing": (lambda p, k: os.truncate(p, p.stat().st_size - 1), "truncated", 1),
    "half a header": (lambda p, k: os.truncate(p, 2048), "truncated", 1),
    "an empty file": (lambda p, k: os.truncate(p, 0), "truncated", 1),
    "something follows": (lambda p, k: p.write_bytes(p.read_bytes() + b"x"), "layout", 1),
    "a good record of another length": (_other_length, "layout", 1),
    "swapped with another record": (lambda p, k: _swap(p), "identity", 2),
    "renamed to another key": (lambda p, k: _rename(p), "identity", 1),
    "moved to another folder": (lambda p, k: _wrong_folder(p), "identity", 1),
    "a directory": (lambda p, k: _replace(p, Path.mkdir), "not_a_file", 1),
    "a pipe": (lambda p, k: _replace(p, os.mkfifo), "not_a_file", 1),
    "a link": (lambda p, k: _replace(p, lambda q: q.symlink_to("/etc/hosts")), "not_a_file", 1),
    "a file that is no record": (lambda p, k: p.with_name("notes.txt").touch(), "stray", 1),
    "a folder that is no root": (lambda p, k: (p.parents[2] / "abc").mkdir(), "stray", 1),
    "a damaged description": (lambda p, k: flip(p.parents[1] / "root.json", 3), "description", 1),
    "another root's description": (
        lambda p, k: (p.parents[1] / "root.json").write_text(identity(tp=8).to_json()),
        "description",
        1,
    ),
}
