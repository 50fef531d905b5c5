"""What lies in a store, and why two roots do not share."""

import mmap
import os
from pathlib import Path

import pytest

from ops.stores import PAYLOAD_BYTES, flip, identity, record_path, snapshot, write_store
from stepwell.core.identity import JsonValue
from stepwell.core.record import record_bytes
from stepwell.errors import ConfigError
from stepwell.ops import words
from stepwell.ops.inspect import inspect_store
from stepwell.ops.report import inspect_json, inspect_text
from stepwell.ops.shm import find_abandoned


def test_one_root(tmp_path: Path) -> None:
    write_store(tmp_path / "kv")
    before = snapshot(tmp_path)
    report = inspect_store(tmp_path / "kv", shm_dir=tmp_path)
    assert snapshot(tmp_path) == before
    (root,) = report.roots
    assert root.identity == identity()
    assert (root.num_chunks, root.size_bytes) == (3, 3 * record_bytes(PAYLOAD_BYTES))
    assert root.oldest_used_s is not None
    assert root.newest_used_s is not None
    assert report.now_s - 60 < root.oldest_used_s <= root.newest_used_s <= report.now_s + 1
    assert root.compared_with is None
    assert not report.owned
    assert 0 < report.free_bytes <= report.total_bytes
    text = inspect_text(report)
    for part in ("/models/tiny", "float32", "vllm 0.32.0", "tp 1", "128 tokens", "LBHNC",
                 "no process uses it", "3 chunks of 1 root"):  # fmt: skip
        assert part in text


def test_age_is_that_of_the_oldest_and_the_newest(tmp_path: Path) -> None:
    keys = write_store(tmp_path / "kv")
    for key, used_at_s in zip(keys, (2_000, 1_000, 3_000), strict=True):
        os.utime(record_path(tmp_path / "kv", key), (used_at_s, used_at_s))
    (root,) = inspect_store(tmp_path / "kv", shm_dir=tmp_path).roots
    assert (root.oldest_used_s, root.newest_used_s) == (1_000, 3_000)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weights": "xxh3-128:full:ff"}, ["weights differ"]),
        ({"tp": 2}, ["tp 1 here, 2 there"]),
        (
            {"hash_seed": "ab"},
            ["hash seed differs: PYTHONHASHSEED or another hash algorithm"],
        ),
        (
            {"hash_seed": "ab", "hash_algorithm": "xxhash"},
            ["hash algorithm sha256 here, xxhash there"],
        ),
        (
            {"kv_dtype": "bfloat16", "model_dtype": "bfloat16", "chunk_bytes": 2500,
             "kv_groups": [{"spec": "x"}]},
            ["model dtype float32 here, bfloat16 there"],
        ),
        ({"kv_groups": [{"spec": "x"}]}, ["KV groups differ (layers, windows or block sizes)"]),
        ({"chunk_bytes": 8192}, ["chunk size 4.9 KiB here, 8.0 KiB there"]),
        ({"block_tokens": 64, "chunk_bytes": 2500}, ["tokens per block 128 here, 64 there"]),
        ({"quantization": "fp8:ab"}, ["quantization differs"]),
        ({"max_model_len": 8192}, ["longest sequence none here, 8192 there"]),
        ({"replicated": True}, ["replicated over ranks no here, yes there"]),
        ({"a new field": [1]}, ["a new field differs"]),
        ({"engine_version": "0.33.0"}, ["engine version 0.32.0 here, 0.33.0 there"]),
    ],
)  # fmt: skip
def test_why_two_roots_do_not_share(
    tmp_path: Path, changes: dict[str, JsonValue], expected: list[str]
) -> None:
    path = tmp_path / "kv"
    old = write_store(path)
    for key in old:
        os.utime(record_path(path, key), (1_000_000, 1_000_000))
    write_store(path, identity(**changes))
    newest, oldest = inspect_store(path, shm_dir=tmp_path).roots
    assert newest.root == identity(**changes).root
    assert newest.compared_with is None
    assert oldest.compared_with == newest.root
    assert oldest.differences is not None
    assert set(oldest.differences) == set(changes)
    assert words.differences(oldest.differences) == expected


def test_a_root_without_a_description(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    write_store(path, identity(tp=2))
    flip(record_path(path, keys[0]).parents[1] / "root.json", 5)
    for key in keys:  # the most recent one cannot be compared with
        os.utime(record_path(path, key))
    report = inspect_store(path, shm_dir=tmp_path)
    unknown, known = report.roots
    assert unknown.identity is None
    assert known.compared_with is None
    assert "root.json is missing or damaged" in inspect_text(report)
    assert inspect_json(report)["roots"]


def test_quarantine_and_unfinished_writes(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    for name in ("ab.checksum.01234567", "cd.checksum.01234567", "ef.truncated.01234567", "odd"):
        (path / "quarantine" / name).write_bytes(b"x" * 10)
    (path / "partial" / "aa").write_bytes(b"x" * 5)
    report = inspect_store(path, shm_dir=tmp_path)
    found = {each.reason: (each.num_files, each.size_bytes) for each in report.quarantine}
    assert found == {"checksum": (2, 20), "truncated": (1, 10), "unknown": (1, 10)}
    assert (report.num_partial, report.partial_bytes) == (1, 5)
    text = inspect_text(report)
    assert "checksum 2, truncated 1, unknown 1" in text
    assert "never finished" in text


def test_abandoned_shared_memory_is_noticed_and_not_removed(tmp_path: Path) -> None:
    left = tmp_path / "vllm_offload_left.mmap"
    left.write_bytes(bytes(range(256)) * 64)
    (tmp_path / "another.mmap").write_bytes(b"x")
    (found,) = find_abandoned(tmp_path)
    assert (found.path, found.size_bytes) == (str(left), 16384)
    with open(left, "r+b") as file:
        assert not find_abandoned(tmp_path)  # open
        mapped = mmap.mmap(file.fileno(), 0)
    assert not find_abandoned(tmp_path)  # mapped
    mapped.close()
    write_store(tmp_path / "kv")
    report = inspect_store(tmp_path / "kv", shm_dir=tmp_path)
    assert [each.path for each in report.abandoned] == [str(left)]
    assert f"{left}, 16.0 KiB: no process uses it" in inspect_text(report)
    assert left.exists()


def test_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, match in ((tmp_path / "none", "does not exist"), (tmp_path, "no Stepwell store"),
                        (tmp_path / "file", "is a file")):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            inspect_store(path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7200, "2 h"),
     (86400, "24 h"), (864000, "10 days")],
)  # fmt: skip
def test_age(seconds: float, text: str) -> None:
    assert words.age(seconds) == text
