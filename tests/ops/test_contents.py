"""What the tools take from a journal is what an engine takes from it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.stores import identity, keys_of, opened, where, write_keys, write_store
from stepwell.core.keys import Root, fingerprint
from stepwell.ops.contents import (
    Contents,
    JournalState,
    read_contents,
    read_journal,
    usable_extents,
)
from stepwell.testing import Driver
from stepwell.tiers import frames
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.slots import BOOKKEEPING_BYTES, place_of

# Extents 0 to 2 have slots 0 to 3 of 8192 bytes; what lies elsewhere is not there. Roots 0 and 1
# are named.
NUM_EXTENTS, NUM_SLOTS, SLOT_BYTES = 3, 4, 8192
PLACES = st.builds(place_of, st.integers(0, NUM_EXTENTS), st.integers(0, NUM_SLOTS))
ROWS = st.lists(
    st.tuples(st.integers(0, 9), PLACES, st.integers(0, 2), st.integers(0, 99)),
    max_size=20,
    unique_by=lambda row: row[1],
)


def write_image(path: Path, rows: Sequence[tuple[int, int, int, int]], aside: set[int]) -> None:
    """A store's journal of these rows (tag, place, root, time) and places set aside."""
    entries = np.zeros(len(rows), frames.ENTRY)
    for idx, (tag, place, root, used_at_s) in enumerate(rows):
        entries[idx] = (tag, place, root, 0, used_at_s, 0, 0)
    parts = [frames.encode_root(number, Root(bytes([number]) * 32)) for number in (0, 1)]
    parts.append(frames.encode_rows(frames.Kind.SNAPSHOT, entries))
    parts += [frames.encode_aside(place, 1) for place in aside]
    head = (path / "journal").read_bytes()[:16]
    (path / "journal").write_bytes(head + b"".join(parts))


def in_an_engine(path: Path) -> tuple[int, int]:
    """How many chunks an engine has then, and what they take."""
    with opened(path) as tier:
        return len(tier), tier.used_bytes


def roots_of(contents: Contents) -> set[Root]:
    return {contents.image.roots[number] for number in contents.rows["root"].tolist()}


def test_whatever_a_journal_says(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path):
        pass
    for extent_id in range(NUM_EXTENTS):
        extent = path / "extents" / f"{extent_id:08d}-{SLOT_BYTES}.kv"
        extent.write_bytes(bytes(NUM_SLOTS * SLOT_BYTES))

    @settings(max_examples=50)
    @given(ROWS, st.sets(PLACES, max_size=4))
    def agrees(rows: list[tuple[int, int, int, int]], aside: set[int]) -> None:
        write_image(path, rows, aside)
        contents = read_contents(StoreDirectory(path), now_s=0.0)
        assert contents.journal.state is JournalState.USED
        num_chunks, used_bytes = in_an_engine(path)
        assert len(contents.rows) == num_chunks
        assert (num_chunks + len(contents.aside)) * (SLOT_BYTES + BOOKKEEPING_BYTES) == used_bytes
        assert len(np.unique(contents.rows["tag"])) == num_chunks
        named = contents.image.rows["root"] < 2
        assert contents.num_unnamed == (~named).sum()
        elsewhere = {row[1] for row in rows if row[2] < 2 and row[1] not in aside and (
            row[1] >> 32 == NUM_EXTENTS or row[1] & 0xFFFFFFFF == NUM_SLOTS)}  # fmt: skip
        assert set(contents.lost["place"].tolist()) == elsewhere

    agrees()


def test_the_order_of_leaving_stays(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path):
        pass
    (path / "extents" / f"00000000-{SLOT_BYTES}.kv").write_bytes(bytes(4 * SLOT_BYTES))
    write_image(path, [(5, 0, 0, 1), (3, 2, 0, 2), (5, 1, 0, 3), (4, 3, 0, 4)], set())
    contents = read_contents(StoreDirectory(path), now_s=0.0)
    assert contents.rows["tag"].tolist() == [3, 5, 4]
    assert contents.rows["place"].tolist() == [2, 1, 3]


def test_headers_say_what_the_journal_said(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    large = identity(chunk_bytes=50_000)
    with opened(path) as tier:
        write_keys(tier, identity(), keys_of(identity().root, 9))
        write_keys(tier, large, keys_of(large.root, 4), 50_000)
    directory = StoreDirectory(path)
    with_journal = read_contents(directory, now_s=0.0)
    (path / "journal").unlink()
    without = read_contents(directory, now_s=0.0)
    assert without.journal.state is JournalState.MISSING
    assert len(without.rows) == 13
    assert roots_of(without) == roots_of(with_journal) == {identity().root, large.root}
    for name in ("tag", "place"):
        assert sorted(without.rows[name].tolist()) == sorted(with_journal.rows[name].tolist())


def test_a_journal_that_is_written_to_is_read_up_to_a_whole_frame(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path, count=5)
    whole = (path / "journal").read_bytes()
    before = -1
    for length in range(16, len(whole) + 1):
        (path / "journal").write_bytes(whole[:length])
        found = read_journal(StoreDirectory(path))
        assert found.state is JournalState.USED
        assert found.image is not None
        assert found.cut_bytes == length - found.image.valid_bytes
        assert len(found.image.rows) >= before
        before = len(found.image.rows)
    assert before == len(keys)


def test_extents_that_an_engine_cannot_tell_apart(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keys = write_store(path)
    lying = where(path, keys[0])
    for name in ("00000000-16384.kv", "0000000003-8192.kv", "00000004-8191.kv", "4-8192.kv"):
        (path / "extents" / name).write_bytes(bytes(32768))
    (path / "extents" / "00000005-8192.kv").write_bytes(bytes(8191))
    directory = StoreDirectory(path)
    (found,) = usable_extents(directory)
    assert found.path == str(lying.path)


def test_a_journal_that_is_made_anew_meanwhile(tmp_path: Path) -> None:
    """An engine puts a whole new file in its place; whichever is read is whole."""
    path = tmp_path / "kv"
    keys = keys_of(identity().root, 100)
    tags = sorted(map(fingerprint, keys))
    with opened(path) as tier:
        write_keys(tier, identity(), keys)
        driver = Driver(tier)
        num_new, size_bytes = 0, 0
        while num_new < 2:  # one is made after some thousand touches, and begins small
            for _ in range(10):
                driver.touch(keys)
            contents = read_contents(StoreDirectory(path), now_s=0.0)
            assert contents.journal.state is JournalState.USED
            assert sorted(contents.rows["tag"].tolist()) == tags
            num_new += contents.journal.size_bytes < size_bytes
            size_bytes = contents.journal.size_bytes
