"""The table of a tier: its states, its sums of bytes, who leaves next, and what a row takes."""

import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.core.keys import Key, fingerprint
from stepwell.core.types import Lookup
from stepwell.policy.eviction import POLICY_NAMES, make_policy
from stepwell.testing import key_of
from stepwell.tiers.table import ChunkTable, State

A, B, C, D = (key_of(name) for name in "abcd")
HIT, PENDING, MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS


def nobody(_: int) -> bool:
    return False


def empty(held: Callable[[int], bool] = nobody) -> ChunkTable:
    return ChunkTable(make_policy(), held)


def put(table: ChunkTable, key: Key, size_bytes: int = 10, *, ttl_s: float = 0.0) -> int:
    row = table.begin(fingerprint(key), size_bytes, 0)
    table.commit([row], 100.0, [100.0 + ttl_s] if ttl_s else ())
    return row


def victims(table: ChunkTable, count: int) -> list[int | None]:
    return [table.take_victim() for _ in range(count)]


def test_the_life_of_a_chunk() -> None:
    table = empty()
    assert table.states([A], 0.0) == [MISS]
    row = table.begin(fingerprint(A), 10, 77, 3)
    assert table.states([A, B], 0.0) == [PENDING, MISS]
    assert (table.used_bytes, table.writing_bytes, len(table)) == (10, 10, 0)
    assert table.commit([row], 100.0) == [True]
    assert table.states([A], 0.0) == [HIT]
    assert (table.used_bytes, table.writing_bytes, len(table)) == (10, 0, 1)
    assert table.find(fingerprint(A)) == row
    assert (table.tag(row), table.place(row), table.root(row)) == (fingerprint(A), 77, 3)
    assert table.remove(row), "it may be discarded at once"
    assert table.states([A], 0.0) == [MISS]
    assert table.find(fingerprint(A)) is None
    assert table.state(row) is State.LEAVING
    assert (table.used_bytes, len(table)) == (10, 0), "until it is gone it counts"
    assert not table.remove(row), "once"
    table.freed(row)
    assert table.used_bytes == 0
    assert table.begin(fingerprint(B), 1, 0) == row, "a row is used again"


def test_an_aborted_write_gives_its_bytes_back() -> None:
    table = empty()
    row = table.begin(fingerprint(A), 30, 0)
    table.abort(row)
    assert (table.used_bytes, table.writing_bytes) == (0, 0)
    assert table.states([A], 0.0) == [MISS]
    assert put(table, B) == row
    assert table.states([A, B], 0.0) == [MISS, HIT]


@pytest.mark.parametrize("good", [True, False], ids=["written", "failed"])
def test_what_was_removed_while_it_was_written_does_not_come_back(good: bool) -> None:
    """And another write of the same chunk, begun meanwhile, is not mistaken for it."""
    table = empty()
    first = table.begin(fingerprint(A), 10, 1)
    assert not table.remove(first), "its write has not ended"
    assert table.states([A], 0.0) == [MISS]
    second = table.begin(fingerprint(A), 10, 2)
    assert second != first
    if good:
        assert table.commit([first], 100.0) == [False]
        assert table.state(first) is State.LEAVING
        table.freed(first)
    else:
        table.abort(first)
    assert table.states([A], 0.0) == [PENDING]
    assert table.find(fingerprint(A)) == second
    assert table.commit([second], 100.0) == [True]
    assert (table.used_bytes, table.writing_bytes, len(table)) == (10, 0, 1)


def test_a_row_that_is_read_is_no_victim_and_stays_until_the_last_reader_ends() -> None:
    table = empty()
    first, second = put(table, A), put(table, B)
    table.begin_read(first)
    table.begin_read(first)
    assert victims(table, 2) == [second, None]
    assert not table.remove(first), "it is being read"
    assert table.states([A], 0.0) == [MISS]
    assert not table.end_read(first)
    assert table.end_read(first), "the last reader discards it"
    table.freed(first)
    table.freed(second)
    assert table.used_bytes == 0
    third = put(table, C)
    table.begin_read(third)
    assert not table.end_read(third), "it was not removed"


def test_held_chunks_are_passed_over() -> None:
    held = {fingerprint(A)}
    table = empty(held.__contains__)
    first, second, third = put(table, A), put(table, B), put(table, C)
    assert table.busy(first)
    assert not table.busy(second)
    assert victims(table, 3) == [second, third, None]
    held.clear()
    assert victims(table, 2) == [first, None]


def test_a_prefix_leaves_from_its_end() -> None:
    table = empty()
    rows = [table.begin(fingerprint(key), 10, 0) for key in (A, B, C, D)]
    table.commit(rows[:2], 100.0)
    table.commit(rows[2:], 100.0)
    table.touch(rows[:1], 101.0)
    assert table.in_order().tolist() == [rows[1], rows[3], rows[2], rows[0]]
    assert victims(table, 5) == [rows[1], rows[3], rows[2], rows[0], None]


def test_what_is_being_written_is_no_victim() -> None:
    table = empty()
    table.begin(fingerprint(A), 10, 0)
    assert table.take_victim() is None


def test_time_runs_out() -> None:
    table = empty()
    first = put(table, A, ttl_s=5.0)
    second = put(table, B)
    assert table.states([A, B], 104.0) == [HIT, HIT]
    assert table.states([A, B], 106.0) == [MISS, HIT]
    assert (table.expired(first, 104.0), table.expired(first, 106.0)) == (False, True)
    assert not table.expired(second, 1e9)
    assert len(table) == 2, "whoever meets it removes it"
    assert table.remove(first)
    table.freed(first)
    third = put(table, C)
    assert third == first
    assert table.states([C], 1e9) == [HIT], "a row does not inherit its former chunk's end"


def test_each_chunk_of_a_prefix_has_its_own_end() -> None:
    table = empty()
    rows = [table.begin(fingerprint(key), 10, 0) for key in (A, B, C)]
    table.remove(rows[1])
    assert table.commit(rows, 100.0, [105.0, 103.0, 0.0]) == [True, False, True]
    assert table.states([A, C], 104.0) == [HIT, HIT]
    assert table.states([A, C], 106.0) == [MISS, HIT]


def test_a_time_to_live_longer_than_the_clock_of_the_table() -> None:
    """A time-to-live of two centuries raised in the middle of a commit: the row stayed neither
    written nor free, and every write failed."""
    table = empty()
    row = put(table, A, ttl_s=200 * 365 * 86400.0)
    assert table.state(row) is State.PRESENT
    assert table.states([A], 4e9) == [HIT]
    assert table.writing_bytes == 0
    assert victims(table, 2) == [row, None]


def test_loaded_rows_leave_in_their_order() -> None:
    table = empty()
    tags = np.array([fingerprint(key) for key in (B, A, C)], np.uint64)
    table.load(
        tags,
        np.array([10, 20, 30]),
        np.array([5, 1 << 40, 7]),
        np.array([0, 1, 2], np.uint16),
        np.array([50, 60, 70], np.uint32),
        np.array([0, 90, 0], np.uint32),
    )
    assert (table.used_bytes, len(table), table.writing_bytes) == (60, 3, 0)
    assert table.states([A, B, C, D], 80.0) == [HIT, HIT, HIT, MISS]
    assert table.states([A, B, C, D], 100.0) == [MISS, HIT, HIT, MISS]
    row = table.find(fingerprint(A))
    assert row is not None
    assert (table.place(row), table.root(row), table.size_bytes(row)) == (1 << 40, 1, 20)
    assert put(table, D) == 3
    leaving = [table.tag(row) for row in victims(table, 4) if row is not None]
    assert leaving == [fingerprint(key) for key in (B, A, C, D)]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_forgets_what_was_removed(name: str) -> None:
    """A policy that remembers a row that left would hand out its successor before its time."""
    table = ChunkTable(make_policy(name), nobody)
    rows = [put(table, key_of(idx)) for idx in range(8)]
    for row in rows[::2]:
        table.remove(row)
        table.freed(row)
    assert sorted(table.in_order().tolist()) == rows[1::2]
    assert sorted(row for row in victims(table, 5) if row is not None) == rows[1::2]


def test_rows_by_place() -> None:
    table = empty()
    rows = [table.begin(fingerprint(key_of(idx)), 1, place) for idx, place in
            enumerate((1 << 32, (1 << 32) + 5, 2 << 32, 0))]  # fmt: skip
    table.commit(rows[:3], 1.0)
    assert table.rows_between(1 << 32, 2 << 32) == rows[:2]
    assert table.rows_between(0, 1 << 63) == rows[:3], "what is being written is left out"
    assert table.rows_between(3 << 32, 4 << 32) == []


@dataclass
class Row:
    """What the model knows of a row."""

    key: Key
    size_bytes: int
    place: int
    state: str = "writing"
    expires_s: float = 0.0
    readers: int = 0


class TableMachine(RuleBasedStateMachine):
    """Any order of calls that a tier may make, against dictionaries and a list."""

    KEYS = tuple(key_of(idx) for idx in range(5))
    keys = st.sampled_from(KEYS)

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.table = empty(self.is_held)
        self.rows: dict[int, Row] = {}
        self.order: list[int] = []
        self.now_s = 1000.0
        self.next_place = 0

    def is_held(self, tag: int) -> bool:
        return tag in self.held

    def of(self, *states: str) -> list[int]:
        return [row for row, known in self.rows.items() if known.state in states]

    def find(self, key: Key) -> int | None:
        named = [row for row in self.of("writing", "present") if self.rows[row].key == key]
        assert len(named) <= 1
        return named[0] if named else None

    @rule(key=keys, size_bytes=st.integers(1, 60))
    def begin(self, key: Key, size_bytes: int) -> None:
        if self.find(key) is None:
            self.next_place += 1
            row = self.table.begin(fingerprint(key), size_bytes, self.next_place)
            assert row not in self.rows, "a row of two chunks"
            self.rows[row] = Row(key, size_bytes, self.next_place)

    @precondition(lambda self: self.of("writing", "doomed"))
    @rule(data=st.data(), ttl_s=st.sampled_from([0.0, 0.0, 5.0]))
    def commit(self, data: st.DataObject, ttl_s: float) -> None:
        written = st.sampled_from(self.of("writing", "doomed"))
        prefix = data.draw(st.lists(written, min_size=1, unique=True))
        expires_at_s = [self.now_s + ttl_s] * len(prefix) if ttl_s else []
        present = self.table.commit(prefix, self.now_s, expires_at_s)
        assert present == [self.rows[row].state == "writing" for row in prefix]
        for row, here in zip(prefix, present, strict=True):
            self.rows[row].state = "present" if here else "leaving"
            self.rows[row].expires_s = int(self.now_s + ttl_s) if ttl_s else 0.0
        self.order += [row for row, here in zip(prefix, present, strict=True) if here][::-1]

    @precondition(lambda self: self.of("writing", "doomed"))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.of("writing", "doomed")))
        self.table.abort(row)
        del self.rows[row]

    @rule(key=keys)
    def remove(self, key: Key) -> None:
        row = self.find(key)
        if row is not None:
            known = self.rows[row]
            at_once = known.state == "present" and not known.readers
            assert self.table.remove(row) == at_once
            if known.state == "present":
                self.order.remove(row)
            known.state = "doomed" if known.state == "writing" else "leaving"

    @precondition(lambda self: self.of("present"))
    @rule(data=st.data())
    def begin_read(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.of("present")))
        self.table.begin_read(row)
        self.rows[row].readers += 1

    @precondition(lambda self: any(known.readers for known in self.rows.values()))
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([r for r, known in self.rows.items() if known.readers]))
        known = self.rows[row]
        known.readers -= 1
        assert self.table.end_read(row) == (known.state == "leaving" and not known.readers)

    @precondition(lambda self: any(not self.rows[r].readers for r in self.of("leaving")))
    @rule(data=st.data())
    def freed(self, data: st.DataObject) -> None:
        gone = [row for row in self.of("leaving") if not self.rows[row].readers]
        row = data.draw(st.sampled_from(gone))
        self.table.freed(row)
        del self.rows[row]

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        prefix = data.draw(st.lists(st.sampled_from(self.order or [0]), unique=True))
        prefix = [row for row in prefix if row in self.order]
        self.table.touch(prefix, self.now_s)
        self.order = [row for row in self.order if row not in prefix] + prefix[::-1]

    @rule(held=st.sets(keys))
    def evict(self, held: set[Key]) -> None:
        self.held = {fingerprint(key) for key in held}
        expected = None
        for _ in range(len(self.order)):
            row = self.order.pop(0)
            if not self.rows[row].readers and self.rows[row].key not in held:
                expected = row
                break
            self.order.append(row)  # it is in use
        assert self.table.take_victim() == expected
        if expected is not None:
            self.rows[expected].state = "leaving"
        self.held = set()

    @rule(seconds=st.floats(0.1, 4.0))
    def time_goes_on(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: len(self.of("present")) == len(self.rows) and self.rows)
    @rule()
    def load(self) -> None:
        """A table that takes over what this one holds goes on in its place."""
        if any(known.readers for known in self.rows.values()):
            return
        order = self.table.in_order()
        tags, places, roots, used_at_s, expires_at_s = self.table.columns(order)
        sizes = np.array([self.rows[row].size_bytes for row in order.tolist()], np.int64)
        table = empty(self.is_held)
        table.load(
            tags.astype(np.uint64), sizes, places.astype(np.int64), roots.astype(np.uint16),
            used_at_s.astype(np.uint32), expires_at_s.astype(np.uint32),
        )  # fmt: skip
        self.table = table
        self.rows = {new: self.rows[old] for new, old in enumerate(order.tolist())}
        self.order = list(self.rows)

    @invariant()
    def answers_agree(self) -> None:
        answers = self.table.states(self.KEYS, self.now_s)
        for key, answer in zip(self.KEYS, answers, strict=True):
            row = self.find(key)
            assert self.table.find(fingerprint(key)) == row
            if row is None:
                assert answer is MISS
                continue
            known = self.rows[row]
            expired = 0 < known.expires_s <= self.now_s
            assert self.table.expired(row, self.now_s) == expired
            if known.state == "writing":
                assert answer is PENDING
            else:
                assert answer is (MISS if expired else HIT)

    @invariant()
    def rows_agree(self) -> None:
        for row, known in self.rows.items():
            assert self.table.state(row).name == known.state.upper()
            assert self.table.tag(row) == fingerprint(known.key)
            assert self.table.place(row) == known.place
            assert self.table.size_bytes(row) == known.size_bytes
        assert self.table.in_order().tolist() == self.order

    @invariant()
    def sums_agree(self) -> None:
        sizes = dict.fromkeys(("present", "writing", "doomed", "leaving"), 0)
        for known in self.rows.values():
            sizes[known.state] += known.size_bytes
        assert self.table.used_bytes == sum(sizes.values())
        assert self.table.writing_bytes == sizes["writing"] + sizes["doomed"]
        assert len(self.table) == len(self.order)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize("how", ["written", "loaded"])
def test_a_chunk_takes_at_most_200_bytes_of_memory(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default policy's part included: a million chunks fit into 200 MB."""
    count = 200_000
    rng = random.Random(1)
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        table = empty()
        if how == "written":
            for begin in range(0, count, 100):
                rows = [table.begin(rng.getrandbits(60), 4608, begin + idx) for idx in range(100)]
                table.commit(rows, 1e9 + begin)
        else:
            numbers = np.array([rng.getrandbits(60) for _ in range(count)], np.uint64)
            ones = np.ones(count, np.int64)
            table.load(numbers, ones, np.arange(count), ones.astype(np.uint16),
                       ones.astype(np.uint32), (0 * ones).astype(np.uint32))  # fmt: skip
            del numbers, ones
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    per_chunk = (after_bytes - before_bytes) / count
    with capsys.disabled():
        print(f"\n{how}: {per_chunk:.0f} bytes of memory per chunk, {speed(table)}")
    assert len(table) == count
    assert per_chunk <= 200


def speed(table: ChunkTable) -> str:
    """How fast it answers, in words; nothing depends on it."""
    keys = [key_of(idx) for idx in range(1000)]
    table.states(keys, 0.0)
    begun_s = time.perf_counter()
    for _ in range(20):
        table.states(keys, 0.0)
    return f"{(time.perf_counter() - begun_s) / 20_000 * 1e6:.2f} us per chunk looked up"
