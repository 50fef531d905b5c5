"""What lies in a store, and why two roots do not share."""

import json
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from ops.stores import (
    RECORD_DAMAGES,
    SLOT_BYTES,
    damage,
    description,
    earlier_format,
    flip,
    identity,
    keys_of,
    opened,
    read_keys,
    snapshot,
    where,
    write_keys,
    write_store,
)
from stepwell.clock import ManualClock
from stepwell.core.identity import JsonValue
from stepwell.core.keys import Root
from stepwell.core.types import Outcome
from stepwell.errors import ConfigError
from stepwell.ops import words
from stepwell.ops.contents import JournalState
from stepwell.ops.inspect import SlotSize, StoreReport, inspect_store
from stepwell.ops.report import inspect_json, inspect_text
from stepwell.ops.shm import find_abandoned
from stepwell.policy.endurance import EnduranceState, Observation
from stepwell.tiers import frames
from stepwell.tiers.slots import BOOKKEEPING_BYTES

DAY_S = 86_400


def inspect(path: Path) -> StoreReport:
    """Without whatever lies in /dev/shm of this machine."""
    return inspect_store(path, shm_dir=path.parent)


def write_journal(path: Path, body: bytes) -> None:
    """A journal of such frames; the head is the one that was there."""
    old = (path / "journal").read_bytes()
    (path / "journal").write_bytes(old[:16] + body)


def test_one_root(tmp_path: Path) -> None:
    write_store(tmp_path / "kv")
    before = snapshot(tmp_path)
    report = inspect(tmp_path / "kv")
    assert snapshot(tmp_path) == before
    (root,) = report.roots
    assert root.identity == identity()
    assert (root.num_chunks, root.size_bytes) == (3, 3 * SLOT_BYTES)
    assert root.oldest_used_s is not None
    assert root.newest_used_s is not None
    assert report.now_s - 60 < root.oldest_used_s <= root.newest_used_s <= report.now_s + 1
    assert root.compared_with is None
    assert not report.owned
    assert 0 < report.free_bytes <= report.total_bytes
    assert report.journal is JournalState.USED
    assert report.journal_bytes == (tmp_path / "kv" / "journal").stat().st_size
    text = inspect_text(report)
    for part in ("/models/tiny", "float32", "vllm 0.32.0", "tp 1", "128 tokens", "LBHNC",
                 "no process uses it", "3 chunks of 1 root"):  # fmt: skip
        assert part in text
    assert "headers" not in text


def test_an_empty_store(tmp_path: Path) -> None:
    with opened(tmp_path / "kv"):
        pass
    report = inspect(tmp_path / "kv")
    assert (report.num_chunks, report.roots, report.slots) == (0, (), ())
    assert "0 chunks of 0 roots" in inspect_text(report)


def test_beside_an_engine(tmp_path: Path) -> None:
    """What an engine has reported as done is seen at once, and nothing is changed."""
    path = tmp_path / "kv"
    with opened(path) as tier:
        for count in (3, 5):
            write_keys(tier, identity(), keys_of(identity().root, count))
            before = snapshot(path / "extents")
            report = inspect(path)
            assert snapshot(path / "extents") == before
            assert (report.owner_pid, report.num_chunks) == (os.getpid(), count)
            assert report.allocated_bytes == tier.allocated_bytes


def test_age_is_that_of_the_oldest_and_the_newest(tmp_path: Path) -> None:
    path, clock = tmp_path / "kv", ManualClock()
    keys = keys_of(identity().root)
    with opened(path, clock=clock) as tier:
        for key in keys:
            write_keys(tier, identity(), [key])
            clock.advance(1000)
        (root,) = inspect(path).roots
        assert (root.oldest_used_s, root.newest_used_s) == (1_000_000, 1_002_000)
        read_keys(tier, keys[:1])  # and a reading is a use
        tier.drain(10.0)
    (root,) = inspect(path).roots
    assert (root.oldest_used_s, root.newest_used_s) == (1_001_000, 1_003_000)


def test_slots_by_size(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    large = identity(chunk_bytes=100_000)
    with opened(path) as tier:
        write_keys(tier, identity(), keys_of(identity().root, 5))
        write_keys(tier, large, keys_of(large.root, 2), 100_000)
        damage(path, keys_of(identity().root)[1], "a flipped bit in the payload")
        read_keys(tier, keys_of(identity().root, 5))
        allocated_bytes, used_bytes = tier.allocated_bytes, tier.used_bytes
    report = inspect(path)
    small, other = report.slots
    target_bytes = (4 << 20) // 4
    num_small = target_bytes // (SLOT_BYTES + BOOKKEEPING_BYTES)
    num_other = target_bytes // (106_496 + BOOKKEEPING_BYTES)
    assert small == SlotSize(SLOT_BYTES, 1, num_small, 4, 1)
    assert other == SlotSize(106_496, 1, num_other, 2, 0)
    assert small.num_free == num_small - 5
    assert report.allocated_bytes == allocated_bytes
    assert report.size_bytes + 7 * BOOKKEEPING_BYTES + SLOT_BYTES == used_bytes
    text = inspect_text(report)
    assert f"slots of 12.0 KiB: 4 used, {num_small - 5} free, 1 set aside, in 1 extent" in text
    assert f"slots of 104.0 KiB: 2 used, {num_other - 2} free, in 1 extent" in text


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
    path, clock = tmp_path / "kv", ManualClock()
    for whose in (identity(), identity(**changes)):
        write_store(path, whose, clock=clock)
        clock.advance(60)
    newest, oldest = inspect(path).roots
    assert newest.root == identity(**changes).root
    assert newest.compared_with is None
    assert oldest.compared_with == newest.root
    assert oldest.differences is not None
    assert set(oldest.differences) == set(changes)
    assert words.differences(oldest.differences) == expected


def test_a_root_without_a_description(tmp_path: Path) -> None:
    path, clock = tmp_path / "kv", ManualClock()
    write_store(path, identity(tp=2), clock=clock)
    clock.advance(60)
    keys = write_store(path, clock=clock)  # the most recent one cannot be compared with
    flip(description(path, keys[0]), 5)
    report = inspect(path)
    unknown, known = report.roots
    assert unknown.identity is None
    assert known.compared_with is None
    assert "its description is missing or damaged" in inspect_text(report)
    assert inspect_json(report)["roots"]


@pytest.mark.parametrize(
    ("state", "name"),
    [(JournalState.MISSING, ""), (JournalState.DAMAGED, "a damaged journal"),
     (JournalState.DAMAGED, "the journal is a pipe"), (JournalState.DAMAGED, "an empty journal")],
)  # fmt: skip
def test_without_a_journal_the_headers_are_read(
    tmp_path: Path, state: JournalState, name: str
) -> None:
    path, clock = tmp_path / "kv", ManualClock()
    keys = write_store(path, clock=clock)
    clock.advance(100)
    write_store(path, identity(tp=2), count=2, clock=clock)
    expected = [(root.root, root.num_chunks, root.newest_used_s) for root in inspect(path).roots]
    if name:
        damage(path, keys[0], name)
    else:
        (path / "journal").unlink()
    report = inspect(path)
    assert report.journal is state
    assert report.wear is None
    found = [(root.root, root.num_chunks, root.newest_used_s) for root in report.roots]
    assert found == expected == [
        (identity(tp=2).root, 2, 1_000_100), (identity().root, 3, 1_000_000),
    ]  # fmt: skip
    text = inspect_text(report)
    assert "so the records' headers were read instead" in text
    assert ("The journal is missing" in text) is (state is JournalState.MISSING)
    assert "wear: unknown" in text


@pytest.mark.parametrize("name", RECORD_DAMAGES)
def test_what_an_engine_set_aside(tmp_path: Path, name: str) -> None:
    """The numbers of reasons in the journal are those that engines write."""
    path = tmp_path / "kv"
    keys = write_store(path)
    _, reason, num_bad = RECORD_DAMAGES[name]
    damage(path, keys[1], name)
    with opened(path) as tier:
        outcomes = read_keys(tier, keys)
    report = inspect(path)
    if reason == "padding":  # which an engine does not mind
        assert report.quarantine == ()
        return
    assert outcomes.count((Outcome.MISS, reason)) == num_bad
    (found,) = report.quarantine
    assert (found.reason, found.num_slots) == (reason, num_bad)
    assert found.size_bytes == num_bad * SLOT_BYTES
    assert report.num_chunks == 3 - num_bad
    assert f"quarantine: {words.plural(num_bad, 'slot')}, " in inspect_text(report)
    assert f"({reason} {num_bad})" in inspect_text(report)


def test_what_was_cut_short_and_other_reasons(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    with opened(path) as tier:
        lying = where(path, keys[2])
        size_bytes = lying.path.stat().st_size
        os.truncate(lying.path, lying.offset + 4096)
        assert read_keys(tier, keys[2:]) == [(Outcome.MISS, "truncated")]
        os.truncate(lying.path, size_bytes)
    with open(path / "journal", "ab") as file:
        file.write(frames.encode_aside(0, 0) + frames.encode_aside(1, 99))
    found = {each.reason: each.num_slots for each in inspect(path).quarantine}
    assert found == {"truncated": 1, "other": 2}


# Wear


def test_what_was_written_to_the_drive(tmp_path: Path) -> None:
    path, clock = tmp_path / "kv", ManualClock()
    with opened(path, clock=clock) as tier:
        write_keys(tier, identity(), keys_of(identity().root))
    report = inspect(path)
    assert report.wear is not None
    assert 3 * SLOT_BYTES < report.wear.written_bytes < 4 * SLOT_BYTES
    assert report.wear.since_s == 1_000_000


@pytest.mark.parametrize(
    ("days", "dwpd", "observation", "parts"),
    [
        (0.9, 1.0, Observation.TOO_SHORT, ["(22 h); too short to say how long the drive will"]),
        (2, 1.0, Observation.ROUGH,
         ["(2 days), 500.0 GiB a day or ", "less than a week was seen; "]),
        (100, 3.0, Observation.FAIR, ["(100 days), 10.0 GiB a day or ", " rated for 3 a day, "]),
    ],
)  # fmt: skip
def test_how_long_the_drive_will_last(
    tmp_path: Path, days: float, dwpd: float, observation: Observation, parts: list[str]
) -> None:
    path = tmp_path / "kv"
    write_store(path)
    written_bytes = 1000 << 30
    state = EnduranceState(written_bytes, time.time() - days * DAY_S, 0.0, time.time())
    write_journal(path, frames.encode_wear(state))
    report = inspect_store(path, rated_dwpd=dwpd, shm_dir=tmp_path)
    assert report.wear is not None
    life = report.wear.life
    assert life is not None
    assert life.observation is observation
    rated_bytes = dwpd * report.total_bytes * 5 * 365
    assert life.used_share == pytest.approx(written_bytes / rated_bytes)
    if observation is Observation.TOO_SHORT:
        assert life.years is None
        assert report.wear.bytes_per_day(report.now_s) is None
    else:
        assert report.wear.bytes_per_day(report.now_s) == pytest.approx(
            written_bytes / days, rel=1e-3
        )
        years = rated_bytes / (written_bytes / days) / 365
        assert life.years == pytest.approx(years, rel=1e-3)
    text = inspect_text(report)
    for part in ("wear: 1000.0 GiB written since 20", *parts):
        assert part in text
    values = json.loads(json.dumps(inspect_json(report)))["wear"]
    assert values["written_bytes"] == written_bytes
    assert values["observed_s"] == pytest.approx(days * DAY_S, abs=10)
    assert values["rated_drive_writes_per_day"] == dwpd
    assert values["observation"] == observation.value
    assert values["years"] == (None if life.years is None else life.years)


def test_a_drive_that_nothing_was_written_to(tmp_path: Path) -> None:
    """JSON knows no infinity."""
    path = tmp_path / "kv"
    write_store(path)
    state = EnduranceState(0, time.time() - 30 * DAY_S, 0.0, time.time())
    write_journal(path, frames.encode_wear(state))
    report = inspect(path)
    assert "more than 100 years" in inspect_text(report)
    assert json.loads(json.dumps(inspect_json(report), allow_nan=False))["wear"]["years"] is None


@pytest.mark.parametrize("dwpd", [0.0, -1.0, float("inf"), float("nan")])
def test_ratings_that_no_drive_has(tmp_path: Path, dwpd: float) -> None:
    write_store(tmp_path / "kv")
    with pytest.raises(ConfigError, match="above 0"):
        inspect_store(tmp_path / "kv", rated_dwpd=dwpd)


# Around it


def test_unfinished_files(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    (path / "partial" / "aa").write_bytes(b"x" * 5)
    report = inspect(path)
    assert (report.num_partial, report.partial_bytes) == (1, 5)
    assert "unfinished: 1 file, 5 B; never finished" in inspect_text(report)


def test_entries_that_lead_nowhere_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    damage(path, keys[0], "an extent ends early")
    report = inspect(path)
    assert report.num_chunks == 1
    where(path, keys[0]).path.unlink()
    report = inspect(path)
    assert (report.num_chunks, report.allocated_bytes) == (0, 0)
    assert report.roots[0].num_chunks == 0


def test_a_million_chunks_in_a_few_seconds(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write_store(path)
    count, per_extent = 1_000_000, 20_000
    for extent_id in range(count // per_extent):
        extent = path / "extents" / f"{extent_id:08d}-{SLOT_BYTES}.kv"
        with open(extent, "wb") as file:
            file.truncate(per_extent * SLOT_BYTES)
    rows = np.zeros(count, frames.ENTRY)
    idxs = np.arange(count, dtype=np.uint64)
    rows["tag"] = np.random.default_rng(7).permutation(idxs)
    rows["place"] = (idxs // per_extent << 32) + idxs % per_extent
    rows["root"] = idxs % 300
    rows["used_at_s"] = 1_000_000 + idxs
    roots = [Root(number.to_bytes(32, "big")) for number in range(300)]
    write_journal(
        path,
        b"".join(frames.encode_root(number, root) for number, root in enumerate(roots))
        + frames.encode_rows(frames.Kind.SNAPSHOT, rows),
    )
    began_s = time.process_time()
    report = inspect(path)
    took_s = time.process_time() - began_s
    assert report.num_chunks == count
    assert len(report.roots) == 301  # one is only described
    oldest = next(each for each in report.roots if each.root == roots[0])
    assert (oldest.num_chunks, oldest.oldest_used_s) == (3334, 1_000_000)
    assert (report.slots[0].num_used, report.slots[0].num_free) == (count, 0)
    assert took_s < 20  # a few seconds; the bound is for a busy machine


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


def test_an_earlier_format_is_refused_by_name(tmp_path: Path) -> None:
    path = earlier_format(tmp_path / "kv")
    before = snapshot(path)
    with pytest.raises(ConfigError) as caught:
        inspect_store(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "an earlier version of Stepwell" in message
    assert f"give another path, or remove it: path={path} format=1 known_format=2" in message
    assert snapshot(path) == before


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (7200, "2 h"),
     (86400, "24 h"), (864000, "10 days")],
)  # fmt: skip
def test_age(seconds: float, text: str) -> None:
    assert words.age(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.001, "1 month"), (0.5, "6 months"), (1.99, "24 months"), (2, "2.0 years"),
     (100, "100.0 years"), (100.1, "more than 100 years"), (float("inf"), "more than 100 years")],
)  # fmt: skip
def test_years(number: float, text: str) -> None:
    assert words.years(number) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0, "1970-01-01"), (1_767_225_599, "2025-12-31"), (float(1 << 62), "unknown")],
)
def test_day(time_s: float, text: str) -> None:
    assert words.day(time_s) == text
