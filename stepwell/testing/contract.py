"""The contract of a tier, as suites that every tier's tests inherit.

`TierContract` is every tier's; `BoundedTierContract` besides that of tiers which keep their own
room, `stepwell.testing.shared.SharedTierContract` that of tiers on a medium that others use too.
"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from stepwell.clock import ManualClock
from stepwell.core.keys import Key
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, Lookup, Outcome, Reason
from stepwell.errors import ClosedError
from stepwell.testing.driving import Driver, buffer_of, key_of, payload_of
from stepwell.tiers.base import Tier, TierContext

__all__ = ["BoundedTierContract", "TierContract"]

DONE = ChunkResult(Outcome.DONE)
EXISTS = ChunkResult(Outcome.DONE, Reason.EXISTS)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
NO_ROOM = ChunkResult(Outcome.FULL, Reason.CAPACITY)
SIZE = 4096


def keys_of(count: int, prefix: str = "a") -> list[Key]:
    """The keys of a prefix of ``count`` chunks."""
    return [key_of(f"{prefix}{idx}") for idx in range(count)]


class TierContract:
    """What must hold for every tier. A subclass, whose name begins with Test, gives:

    - `make_tier`, which may use ``self.place``, an empty directory of this test;
    - `used_bytes`, `size_of`: what the tier takes at present, and would take for a payload;
    - `stalled`: a context manager within which the medium stands still;
    - ``persistent``: whether a tier made again at the same place finds what was written;
    - ``granularity``: in how many equal parts it keeps room and order, see there;
    - `counted_as`, where it counts under other names than its own.

    Time is ``self.clock``, a `stepwell.clock.ManualClock`.
    """

    persistent = False
    """Whether chunks survive `close`; the tier then finds them again, in about their order."""

    granularity = 1
    """In how many equal parts the tier keeps its room, its order of use and its limits.

    A tier made of n others, each with an n-th of the capacity, fills and evicts in each of them by
    itself. New chunks have to be dealt out to the parts in turns; then whatever holds for a chunk
    of a tier in one part holds for n chunks that were written together. The suite asks for
    capacities that are multiples of it, and counts in groups of so many chunks."""

    place: Path
    clock: ManualClock
    context: TierContext

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> Tier:
        """A new tier; made again after `close`, a persistent one finds its chunks."""
        raise NotImplementedError

    def used_bytes(self, tier: Tier) -> int:
        """Bytes that the tier takes at present; called from another thread as well."""
        raise NotImplementedError

    def size_of(self, payload_bytes: int) -> int:
        """Bytes of the capacity that one payload takes."""
        raise NotImplementedError

    def stalled(self) -> AbstractContextManager[None]:
        """Within it, reads and writes begin but do not end; those that began end after it."""
        raise NotImplementedError

    def counted_as(self, tier: Tier) -> Sequence[str]:
        """The names under which the tier counts what it does; together they tell all of it."""
        return [tier.name]

    def make_clock(self) -> ManualClock:
        """The clock that a test begins with."""
        return ManualClock()

    @pytest.fixture(autouse=True)
    def _set_up(self, tmp_path: Path) -> Iterator[None]:
        self.place = tmp_path
        self.clock = self.make_clock()
        self.context = TierContext(clock=self.clock)
        self._opened: list[Tier] = []
        yield
        for tier in self._opened:
            tier.close()

    def open(
        self, num_chunks: int = 64, payload_bytes: int = SIZE, inflight_writes_bytes: int = 1 << 30
    ) -> Driver:
        """A driver of a tier that has room for ``num_chunks`` and not one more.

        Rounded up to a multiple of ``granularity``, where that is not 1.
        """
        num_chunks = -(-num_chunks // self.granularity) * self.granularity
        tier = self.make_tier(
            self.context,
            num_chunks * self.size_of(payload_bytes),
            inflight_writes_bytes=inflight_writes_bytes,
        )
        self._opened.append(tier)
        return Driver(tier, payload_bytes)

    def reopen(self, driver: Driver, num_chunks: int = 64) -> Driver:
        """Close a tier and make it again."""
        driver.tier.close()
        return self.open(num_chunks)

    def groups_of(self, keys: Sequence[Key]) -> list[Sequence[Key]]:
        """Keys in groups of ``granularity``."""
        each = self.granularity
        return [keys[begin : begin + each] for begin in range(0, len(keys), each)]

    def value(self, driver: Driver, counter: str, **labels: str) -> int:
        """What the tier has counted."""
        names = self.counted_as(driver.tier)
        return sum(self.context.metrics.value(counter, tier=name, **labels) for name in names)

    # Writing and reading.

    def test_contains_says_miss_before_a_write_and_hit_after(self) -> None:
        driver = self.open()
        keys = keys_of(3)
        assert driver.lookup(keys) == [Lookup.MISS] * 3
        assert driver.write(keys[:2]) == (DONE, DONE)
        assert driver.lookup(keys) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]

    def test_contains_answers_in_the_order_asked(self) -> None:
        driver = self.open()
        keys = keys_of(8)
        driver.write(keys[::2])
        assert driver.present(reversed(keys)) == [False, True] * 4
        assert driver.tier.contains([]) == []

    def test_a_read_returns_what_was_written(self) -> None:
        driver = self.open()
        keys = keys_of(16)
        driver.write(keys)
        result, contents = driver.read(keys)
        assert result.results == (DONE,) * 16
        assert contents == [payload_of(key, SIZE) for key in keys]

    @pytest.mark.parametrize("length", [1, 511, 4095, 4096, 4097, 12288, (1 << 20) + 1])
    @pytest.mark.parametrize("offset", [0, 1, 64])
    def test_any_length_and_alignment(self, length: int, offset: int) -> None:
        """Every byte is written and read, and none beside the buffer."""
        driver = self.open(2, length)
        key = key_of("odd")
        data = payload_of(key, length)
        source = buffer_of(length, data, offset)
        written = driver.wait(driver.submit(Direction.WRITE, [Chunk(key, source)]))
        assert (written.results, written.moved_bytes) == ((DONE,), length)
        assert bytes(source) == data, "a write changed its source"
        around = buffer_of(length + 256, b"\xa5" * (length + 256), offset)
        target = around[128 : 128 + length]
        read = driver.wait(driver.submit(Direction.READ, [Chunk(key, target)]))
        assert (read.results, read.moved_bytes) == ((DONE,), length)
        assert bytes(target) == data
        assert bytes(around[:128]) == bytes(around[128 + length :]) == b"\xa5" * 128

    def test_a_source_that_cannot_be_written_to(self) -> None:
        """A write asks no more of its buffers than to be readable."""
        driver = self.open()
        key = key_of("constant")
        source = memoryview(payload_of(key, SIZE))
        assert driver.wait(driver.submit(Direction.WRITE, [Chunk(key, source)])).done
        assert driver.read([key])[1] == [payload_of(key, SIZE)]

    def test_later_changes_of_the_source_are_not_stored(self) -> None:
        """After the report the buffer is the caller's again."""
        driver = self.open()
        key = key_of("reused")
        source = buffer_of(SIZE, payload_of(key, SIZE))
        driver.wait(driver.submit(Direction.WRITE, [Chunk(key, source)]))
        source[:] = bytes(SIZE)
        assert driver.read([key])[1] == [payload_of(key, SIZE)]

    def test_a_read_of_another_length_is_a_miss(self) -> None:
        """Neither a part of a chunk nor a chunk and more is served."""
        for length in (SIZE - 1, SIZE + 1, SIZE // 2, SIZE * 2):
            driver = self.open(8)
            key = key_of(f"length {length}")
            driver.write([key])
            result, _ = driver.read([key], length)
            assert result.results[0].outcome is Outcome.MISS
            assert result.results[0].reason is not Reason.NONE
            driver.tier.close()

    def test_a_read_of_what_is_not_there(self) -> None:
        driver = self.open()
        result, _ = driver.read(keys_of(2))
        assert result.results == (ABSENT, ABSENT)
        assert result.moved_bytes == 0
        assert not result.done

    def test_holes_do_not_shift_answers(self) -> None:
        """Each chunk's result stands at the chunk's place, whatever its neighbours are."""
        driver = self.open()
        keys = keys_of(9)
        driver.write(keys[::2])
        result, contents = driver.read(keys)
        assert result.results == tuple(ABSENT if idx % 2 else DONE for idx in range(9))
        assert result.tiers == tuple("" if idx % 2 else driver.tier.name for idx in range(9))
        assert contents[::2] == [payload_of(key, SIZE) for key in keys[::2]]
        assert result.moved_bytes == 5 * SIZE
        written = driver.write(keys)
        assert written == tuple(DONE if idx % 2 else EXISTS for idx in range(9))

    def test_rewriting_moves_nothing(self) -> None:
        """A key commits to its content: what is there stays, and stays readable."""
        driver = self.open()
        key = key_of("again")
        driver.write([key])
        other = Chunk(key, buffer_of(SIZE, b"other"))
        result = driver.wait(driver.submit(Direction.WRITE, [other]))
        assert (result.results, result.moved_bytes) == ((EXISTS,), 0)
        assert driver.read([key])[1] == [payload_of(key, SIZE)]

    def test_a_key_twice_in_one_job(self) -> None:
        driver = self.open()
        key = key_of("twice")
        assert all(result.outcome is Outcome.DONE for result in driver.write([key]))
        chunks = [Chunk(key, buffer_of(SIZE)) for _ in range(2)]
        assert driver.wait(driver.submit(Direction.READ, chunks)).results == (DONE, DONE)
        assert {bytes(chunk.buffer) for chunk in chunks} == {payload_of(key, SIZE)}
        assert self.used_bytes(driver.tier) == self.size_of(SIZE)

    def test_roots_do_not_see_each_other(self) -> None:
        """The same engine key under another root is another chunk."""
        driver = self.open()
        here, there = key_of("same", "here"), key_of("same", "there")
        driver.write([here])
        assert driver.present([here, there]) == [True, False]
        assert driver.read([there])[0].results == (ABSENT,)
        driver.write([there])
        assert driver.read([here, there])[1] == [payload_of(k, SIZE) for k in (here, there)]
        driver.tier.delete([here])
        assert driver.present([here, there]) == [False, True]

    # Jobs.

    def test_every_job_is_reported_once(self) -> None:
        """Many jobs of every kind, submitted before the first poll; `Driver` watches."""
        driver = self.open(256)
        keys = keys_of(120)
        jobs = []
        for begin in range(0, 120, 4):
            four = keys[begin : begin + 4]
            data = driver.write_chunks({key: payload_of(key, SIZE) for key in four})
            jobs.append(driver.submit(Direction.WRITE, data))
            jobs.append(driver.submit(Direction.READ, [Chunk(k, buffer_of(SIZE)) for k in four]))
            jobs.append(driver.submit(Direction.TOUCH, [Chunk(k, memoryview(b"")) for k in four]))
        results = [driver.wait(job_id) for job_id in jobs]
        assert [r.job_id for r in results] == jobs
        assert all(len(r.results) == 4 for r in results)
        kinds = [Direction.WRITE, Direction.READ, Direction.TOUCH]
        assert [r.direction for r in results] == kinds * 30
        assert driver.outstanding == 0
        assert driver.tier.poll() == []
        assert driver.read(keys)[0].done

    def test_a_job_needs_a_chunk(self) -> None:
        driver = self.open()
        with pytest.raises(ValueError, match="at least one chunk"):
            driver.tier.submit(Job(1, Direction.READ, []))
        assert driver.tier.poll() == []

    def test_nothing_waits_for_a_slow_medium(self) -> None:
        """While every thread is stuck, submit, contains, poll and delete return, with no report."""
        driver = self.open(256)
        keys = keys_of(100)
        stored = keys_of(4, "stored")
        driver.write(stored)
        with self.stalled():
            jobs = [
                driver.submit(Direction.WRITE, driver.write_chunks({k: payload_of(k, SIZE)}))
                for k in keys
            ]
            jobs.append(driver.submit(Direction.READ, [Chunk(stored[0], buffer_of(SIZE))]))
            driver.collect()
            assert Lookup.HIT not in driver.tier.contains(keys)
            assert driver.present(stored) == [True] * 4
            assert driver.tier.delete([stored[3]]) == 1
            assert driver.present(stored) == [True, True, True, False]
            driver.collect()
            assert driver.outstanding == len(jobs)
        assert all(driver.wait(job_id).done for job_id in jobs)
        assert driver.present(keys) == [True] * 100

    @pytest.mark.parametrize(
        ("direction", "given_up"),
        [
            (Direction.READ, ChunkResult(Outcome.MISS, Reason.DEADLINE)),
            (Direction.WRITE, ChunkResult(Outcome.FULL, Reason.DEADLINE)),
        ],
    )
    def test_what_has_not_begun_by_its_deadline_is_given_up(
        self, direction: Direction, given_up: ChunkResult
    ) -> None:
        """Chunks that began in time are DONE, the others are given up and may be tried again."""
        driver = self.open(512 * self.granularity)
        keys = keys_of(300 * self.granularity)
        if direction is Direction.READ:
            driver.write(keys)
        payloads = {key: payload_of(key, SIZE) for key in keys}
        with self.stalled():
            jobs = [driver.submit(direction, [c], 5.0) for c in driver.write_chunks(payloads)]
            driver.collect()
            self.clock.advance(5.5)
        ended = [driver.wait(job_id) for job_id in jobs]
        results = [each.results[0] for each in ended]
        assert results[-1] == given_up
        assert set(results) <= {DONE, given_up}
        assert [each.moved_bytes for each in ended] == [SIZE * (r == DONE) for r in results]
        assert {each.elapsed_s for each in ended} == {5.5}
        if direction is Direction.WRITE:
            assert driver.present(keys) == [r == DONE for r in results]
            assert self.used_bytes(driver.tier) == self.size_of(SIZE) * results.count(DONE)
            driver.write(keys)
        assert driver.read(keys)[0].done

    def test_a_job_within_its_deadline_is_done(self) -> None:
        driver = self.open()
        keys = keys_of(2)
        driver.write(keys, deadline_s=0.001)
        assert driver.read(keys, deadline_s=0.001)[0].done

    def test_writes_beyond_the_limit_in_flight_are_refused(self) -> None:
        """The end of a job is refused, its beginning goes on; then there is room again."""
        n = self.granularity
        driver = self.open(64 * n, inflight_writes_bytes=4 * n * SIZE)
        keys = keys_of(8 * n)
        refused = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
        jobs = {}
        with self.stalled():
            for begin, end in ((0, 3), (3, 5), (5, 6), (6, 8)):
                data = {key: payload_of(key, SIZE) for key in keys[begin * n : end * n]}
                jobs[begin] = driver.submit(Direction.WRITE, driver.write_chunks(data))
            assert driver.wait(jobs[5]).results == (refused,) * n
            assert driver.wait(jobs[6]).results == (refused,) * 2 * n
        assert driver.wait(jobs[0]).results == (DONE,) * 3 * n
        assert driver.wait(jobs[3]).results == (DONE,) * n + (refused,) * n
        assert driver.write(keys[4 * n : 6 * n]) == (DONE,) * 2 * n
        assert driver.write(keys[5 * n :]) == (EXISTS,) * n + (DONE,) * 2 * n

    def test_a_write_larger_than_the_limit_in_flight_keeps_its_beginning(self) -> None:
        n = self.granularity
        driver = self.open(64 * n, inflight_writes_bytes=4 * n * SIZE)
        refused = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
        keys = keys_of(9 * n)
        assert driver.write(keys) == (DONE,) * 4 * n + (refused,) * 5 * n
        assert driver.present(keys) == [True] * 4 * n + [False] * 5 * n

    def test_a_chunk_deleted_while_it_is_written_stays_deleted(self) -> None:
        """The write went on and brought the chunk back."""
        driver = self.open(64)
        keys = keys_of(2)
        with self.stalled():
            data = {key: payload_of(key, SIZE) for key in keys}
            job_id = driver.submit(Direction.WRITE, driver.write_chunks(data))
            driver.wait_until(
                lambda: driver.tier.contains([keys[0]]) == [Lookup.PENDING], "the write's begin"
            )
            assert driver.tier.delete([keys[0]]) == 1
            assert driver.tier.contains([keys[0]]) == [Lookup.MISS]
        driver.wait(job_id)
        assert driver.present(keys) == [False, True]
        driver.wait_until(
            lambda: self.used_bytes(driver.tier) == self.size_of(SIZE), "the space that it took"
        )
        assert driver.write(keys) == (DONE, EXISTS)

    def test_a_chunk_written_again_after_it_was_deleted_stays(self) -> None:
        """The second write waited for the first, which ended well and came to nothing."""
        driver = self.open(64)
        keys = keys_of(2)
        with self.stalled():
            data = {key: payload_of(key, SIZE) for key in keys}
            first = driver.submit(Direction.WRITE, driver.write_chunks(data))
            driver.wait_until(
                lambda: driver.tier.contains([keys[0]]) == [Lookup.PENDING], "the write's begin"
            )
            driver.tier.delete([keys[0]])
            second = driver.submit(Direction.WRITE, driver.write_chunks(data))
        driver.wait(first)
        assert driver.wait(second).done
        assert driver.present(keys) == [True, True]
        assert driver.read(keys)[0].done

    def test_close_reports_everything_that_was_submitted(self) -> None:
        """What has begun ends, what has not is given up as CLOSED; nothing is lost or doubled."""
        given_up = ChunkResult(Outcome.FULL, Reason.CLOSED)
        driver = self.open(512)
        stored = keys_of(50, "stored")
        driver.write(stored)
        with self.stalled():
            writes = [
                driver.submit(Direction.WRITE, driver.write_chunks({k: payload_of(k, SIZE)}))
                for k in keys_of(100)
            ]
            reads = [driver.submit(Direction.READ, [Chunk(k, buffer_of(SIZE))]) for k in stored]
            touch = driver.submit(Direction.TOUCH, [Chunk(k, memoryview(b"")) for k in stored])
            closing = threading.Thread(target=driver.tier.close)
            closing.start()
            late = self._touch_until_closed(driver)
            # What has not begun does not wait for what has.
            last = driver.wait(writes.pop()).results + driver.wait(reads.pop()).results
            assert last == (given_up, ChunkResult(Outcome.MISS, Reason.CLOSED))
        closing.join(30)
        assert not closing.is_alive()
        written = [driver.wait(job_id).results[0] for job_id in writes] + [given_up]
        found = [driver.wait(job_id).results[0] for job_id in reads]
        assert {r.reason for r in written} <= {Reason.NONE, Reason.CLOSED}
        assert {r.reason for r in found} <= {Reason.NONE, Reason.CLOSED}
        assert len(driver.wait(touch).results) == 50
        assert all(len(driver.wait(job_id).results) == 1 for job_id in late)
        counted = self.context.metrics.value("write_chunks", reason=Reason.CLOSED)
        assert counted == written.count(given_up)

    @staticmethod
    def _touch_until_closed(driver: Driver) -> list[int]:
        jobs = []
        give_up_s = time.monotonic() + 30
        while time.monotonic() < give_up_s:
            try:
                jobs.append(driver.submit(Direction.TOUCH, [Chunk(key_of("x"), memoryview(b""))]))
            except ClosedError:
                return jobs
            time.sleep(0.001)
        raise AssertionError("close does not close while the medium stands still")

    def test_after_close_nothing_is_taken(self) -> None:
        driver = self.open()
        driver.write(keys_of(1))
        driver.tier.close()
        for direction in Direction:
            with pytest.raises(ClosedError):
                driver.submit(direction, [Chunk(key_of("late"), buffer_of(SIZE))])
        assert driver.tier.poll() == []
        driver.tier.close()  # harmless

    def test_metrics_count_every_chunk_by_outcome_and_reason(self) -> None:
        """What the metrics say adds up to what was asked, chunk by chunk and byte by byte."""
        n = self.granularity
        driver = self.open(4 * n)
        keys = keys_of(6 * n)
        driver.write(keys[: 4 * n])
        driver.write(keys[:1])
        driver.read(keys[: 4 * n + 1])
        assert self.value(driver, "write_chunks") == 4 * n + 1
        assert self.value(driver, "write_chunks", outcome="done", reason="") == 4 * n
        assert self.value(driver, "write_chunks", outcome="done", reason="exists") == 1
        assert self.value(driver, "write_bytes") == 4 * n * SIZE
        assert self.value(driver, "read_chunks") == 4 * n + 1
        assert self.value(driver, "read_chunks", outcome="done") == 4 * n
        assert self.value(driver, "read_chunks", outcome="miss", reason="absent") == 1
        assert self.value(driver, "read_bytes") == 4 * n * SIZE

    # Deleting and using.

    def test_a_deleted_chunk_is_a_miss_at_once(self) -> None:
        """And can be written again; others stay."""
        driver = self.open()
        keys = keys_of(4)
        driver.write(keys)
        assert driver.tier.delete([*keys[:2], key_of("unknown")]) == 2
        assert driver.present(keys) == [False] * 2 + [True] * 2
        assert driver.read(keys)[0].results == (ABSENT, ABSENT, DONE, DONE)
        assert driver.tier.delete(keys[:2]) == 0
        assert driver.write(keys) == (DONE, DONE, EXISTS, EXISTS)
        result, contents = driver.read(keys)
        assert result.done
        assert contents == [payload_of(key, SIZE) for key in keys]

    def test_a_touch_says_what_is_there(self) -> None:
        driver = self.open()
        keys = keys_of(3)
        driver.write([keys[1]])
        assert driver.touch(keys) == (ABSENT, DONE, ABSENT)
        assert driver.present(keys) == [False, True, False]

    # A tier's life.

    def test_what_a_tier_finds_when_it_is_made_again(self) -> None:
        """A persistent tier finds all of it, whole; another begins empty."""
        driver = self.open(64)
        keys = keys_of(20)
        driver.write(keys)
        used_bytes = self.used_bytes(driver.tier)
        driver = self.reopen(driver, 64)
        assert driver.present(keys) == [self.persistent] * 20
        assert self.used_bytes(driver.tier) == (used_bytes if self.persistent else 0)
        result, contents = driver.read(keys)
        assert result.done == self.persistent
        if self.persistent:
            assert contents == [payload_of(key, SIZE) for key in keys]

    def test_two_tiers_at_two_places_do_not_meet(self) -> None:
        here = self.open()
        self.place = self.place / "elsewhere"
        there = self.open()
        here.write([key_of("mine")])
        assert there.present([key_of("mine")]) == [False]
        there.tier.delete([key_of("mine")])
        assert here.present([key_of("mine")]) == [True]


class BoundedTierContract(TierContract):
    """What must hold besides for a tier that keeps its own room and its own order of use."""

    def test_metrics_count_what_leaves_to_make_room(self) -> None:
        n = self.granularity
        driver = self.open(4 * n)
        keys = keys_of(6 * n)
        driver.write(keys[: 4 * n])
        assert self.value(driver, "evicted_chunks") == 0
        driver.write(keys[4 * n :])
        assert self.value(driver, "evicted_chunks") == 2 * n

    def test_a_deleted_chunk_is_a_miss_at_once_and_its_space_comes_back(self) -> None:
        n = self.granularity
        driver = self.open(4 * n)
        keys, new = keys_of(4 * n), keys_of(2 * n, "new")
        driver.write(keys)
        assert driver.tier.delete([*keys[: 2 * n], key_of("unknown")]) == 2 * n
        assert driver.present(keys) == [False] * 2 * n + [True] * 2 * n
        assert driver.tier.delete(keys[: 2 * n]) == 0
        self._write_into_room(driver, new)
        assert driver.present([*keys, *new]) == [False] * 2 * n + [True] * 4 * n
        assert driver.read(keys[:1])[0].results == (ABSENT,)
        assert self.context.metrics.value("evicted_chunks") == 0
        assert driver.tier.delete(keys_of(1, "new")) == 1
        self._write_into_room(driver, keys[:1])
        assert driver.read(keys[:1])[1] == [payload_of(keys[0], SIZE)]

    def _write_into_room(self, driver: Driver, keys: list[Key]) -> None:
        # A deleted chunk's space follows a little later. Leases keep it from being made.
        n = self.granularity
        with self.context.leases.acquire([*keys_of(4 * n), *keys_of(2 * n, "new")], 60.0):
            for key in keys:
                for _ in range(10_000):
                    (result,) = driver.write([key])
                    if result != NO_ROOM:
                        break
                assert result == DONE

    def test_a_tier_is_filled_to_its_last_byte_and_not_beyond(self) -> None:
        n = self.granularity
        driver = self.open(5 * n)
        keys = keys_of(6 * n)
        driver.write(keys[: 5 * n])
        assert driver.present(keys) == [True] * 5 * n + [False] * n
        assert self.used_bytes(driver.tier) == 5 * n * self.size_of(SIZE)
        driver.write(keys[5 * n :])
        assert sum(driver.present(keys)) == 5 * n
        assert self.used_bytes(driver.tier) == 5 * n * self.size_of(SIZE)

    def test_capacity_is_kept_at_every_moment(self) -> None:
        """Seeded random writes, reads and deletes, watched from another thread."""
        rng = random.Random(7)
        driver = self.open(24)
        capacity_bytes = 24 * self.size_of(SIZE)
        seen: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                seen.append(self.used_bytes(driver.tier))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            jobs = []
            for _ in range(150):
                names = [key_of(f"r{rng.randrange(60)}") for _ in range(rng.randrange(1, 6))]
                length = rng.choice([1, 100, SIZE, 2 * SIZE, 3 * SIZE])
                data = {key: payload_of(key, length) for key in names}
                jobs.append(driver.submit(Direction.WRITE, driver.write_chunks(data)))
                if rng.random() < 0.3:
                    driver.tier.delete(names[:1])
                if rng.random() < 0.3:
                    reads = [Chunk(key, buffer_of(length)) for key in names]
                    jobs.append(driver.submit(Direction.READ, reads))
            for job_id in jobs:
                driver.wait(job_id)
        finally:
            stop.set()
            watcher.join()
        assert len(seen) > 10
        assert max(seen) <= capacity_bytes
        assert min(seen) >= 0

    def test_a_chunk_larger_than_the_tier_is_refused(self) -> None:
        """And nothing is evicted for it."""
        driver = self.open(4)
        keys = keys_of(2)
        driver.write(keys)
        giant_bytes = 16 * self.granularity * self.size_of(SIZE)
        assert driver.write([key_of("giant")], giant_bytes) == (NO_ROOM,)
        assert driver.present([*keys, key_of("giant")]) == [True, True, False]

    def test_the_least_recently_used_leaves_first(self) -> None:
        n = self.granularity
        driver = self.open(4 * n)
        keys, new = keys_of(4 * n), self.groups_of(keys_of(3 * n, "new"))
        groups = self.groups_of(keys)
        for group in groups:
            driver.write(group)
        driver.read(groups[0])
        driver.touch(groups[1])
        driver.write(new[0])
        assert driver.present(keys) == [True] * 2 * n + [False] * n + [True] * n
        driver.write(new[1])
        assert driver.present(keys) == [True] * 2 * n + [False] * 2 * n
        driver.write(new[2])
        assert driver.present(keys) == [False] * n + [True] * n + [False] * 2 * n

    @pytest.mark.parametrize("use", ["write", "read", "touch"])
    def test_a_prefix_is_shortened_from_its_end(self, use: str) -> None:
        """A chunk is worth nothing without those before it, so of a job the last leaves first."""
        n = self.granularity
        driver = self.open(8 * n)
        old, new = keys_of(4 * n, "old"), keys_of(4 * n, "new")
        driver.write(old)
        driver.write(new)
        if use != "write":
            for key in new:
                driver.touch([key])
            for key in old:
                driver.touch([key])
            for prefix in (old, new):
                driver.read(prefix) if use == "read" else driver.touch(prefix)
        driver.write(keys_of(2 * n, "x"))
        assert driver.present(old) == [True] * 2 * n + [False] * 2 * n
        assert driver.present(new) == [True] * 4 * n
        driver.write(keys_of(3 * n, "y"))
        assert driver.present(old) == [False] * 4 * n
        assert driver.present(new) == [True] * 3 * n + [False] * n

    def test_a_prefix_of_which_a_part_was_there_is_shortened_from_its_end(self) -> None:
        """What is new of a prefix and what is not are one prefix."""
        n = self.granularity
        driver = self.open(3 * n)
        begin, end = keys_of(n, "begin"), keys_of(n, "end")
        driver.write(end)
        assert driver.write([*begin, *end]) == (DONE,) * n + (EXISTS,) * n
        driver.write(keys_of(n, "x"))
        driver.write(keys_of(n, "y"))
        assert driver.present(begin) == [True] * n
        assert driver.present(end) == [False] * n

    def test_a_leased_chunk_is_not_evicted(self) -> None:
        n = self.granularity
        driver = self.open(4 * n)
        keys = keys_of(4 * n)
        driver.write(keys)
        with self.context.leases.acquire(keys[2 * n :], 60.0):
            assert driver.write(keys_of(2 * n, "x")) == (DONE,) * 2 * n
            assert driver.present(keys) == [False] * 2 * n + [True] * 2 * n
        driver.write(keys_of(2 * n, "y"))
        assert sum(driver.present(keys)) < 2 * n, "a lease that was given back holds nothing"

    def test_a_lease_runs_out_by_itself(self) -> None:
        n = self.granularity
        driver = self.open(2 * n)
        keys = keys_of(2 * n)
        driver.write(keys)
        self.context.leases.acquire(keys, 60.0)
        self.clock.advance(59.0)
        assert driver.write(keys_of(n, "x")) == (NO_ROOM,) * n
        self.clock.advance(1.0)
        assert driver.write(keys_of(n, "x")) == (DONE,) * n

    def test_a_tier_full_of_leased_chunks_refuses(self) -> None:
        """It refuses that write and no other; what is there can be read."""
        n = self.granularity
        driver = self.open(3 * n)
        keys = keys_of(3 * n)
        driver.write(keys)
        with self.context.leases.acquire(keys, 60.0):
            assert driver.write([key_of("x"), keys[1]]) == (NO_ROOM, EXISTS)
            assert driver.read(keys)[0].done
        assert self.context.metrics.value("write_chunks", outcome="full", reason="capacity") == 1
        assert driver.write([key_of("x")]) == (DONE,)

    def test_the_order_of_use_when_a_tier_is_made_again(self) -> None:
        """A persistent tier shortens the prefix that was not used for longest, from its end."""
        n = self.granularity
        driver = self.open(9 * n)
        first, second, third = (keys_of(3 * n, prefix) for prefix in "abc")
        for prefix in (first, second, third):
            driver.write(prefix)
            self.clock.advance(120.0)
        driver.read(first)
        driver = self.reopen(driver, 9 * n)
        driver.write(keys_of(4 * n, "new"))
        kept = [driver.present(prefix) for prefix in (first, second, third)]
        if self.persistent:
            assert kept == [[True] * 3 * n, [False] * 3 * n, [True] * 2 * n + [False] * n]
        else:
            assert kept == [[False] * 3 * n] * 3

    def test_a_smaller_capacity_when_a_tier_is_made_again(self) -> None:
        """The new bound holds from the start."""
        n = self.granularity
        driver = self.open(12 * n)
        keys = keys_of(12 * n)
        driver.write(keys)
        driver = self.reopen(driver, 5 * n)
        assert driver.present(keys) == [self.persistent] * 5 * n + [False] * 7 * n
        assert self.used_bytes(driver.tier) <= 5 * n * self.size_of(SIZE)
        driver.write(keys_of(2 * n, "new"))
        assert self.used_bytes(driver.tier) <= 5 * n * self.size_of(SIZE)
