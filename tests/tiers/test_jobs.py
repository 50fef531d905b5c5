"""The runner of jobs: order, one read per chunk, fairness, refusal, and that no job is lost."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from stepwell.clock import Clock, ManualClock, SystemClock
from stepwell.core.keys import Key
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, JobResult, Outcome, Reason
from stepwell.errors import ClosedError
from stepwell.testing import buffer_of, key_of, payload_of
from stepwell.tiers import jobs
from stepwell.tiers.base import TierContext
from stepwell.tiers.jobs import JobRunner

READ, WRITE, TOUCH = Direction.READ, Direction.WRITE, Direction.TOUCH
DONE = ChunkResult(Outcome.DONE)
INTERNAL = ChunkResult(Outcome.FAILED, Reason.INTERNAL)
WRONG = ChunkResult(Outcome.MISS, Reason.CHECKSUM)
MIB = 1 << 20
MANY = jobs._BATCH_CHUNKS
"""More than these do not go into one batch."""


class Bench:
    """A runner whose work is to remember its batches; it waits while ``gate`` is closed.

    A read fills the buffer with `payload_of`, unless ``answers`` has another result for the key.
    """

    name = "bench"

    def __init__(
        self, num_threads: int = 1, inflight_writes_bytes: int = 1 << 30,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.manual = ManualClock()
        self.gate = threading.Event()
        self.gate.set()
        self.pause_s = 0.0
        self.answers: dict[Key, ChunkResult] = {}
        self.batches: list[tuple[Direction, list[Key]]] = []
        self.used: list[list[Key]] = []
        self.num_settled = 0
        self.during: Callable[[], None] = lambda: None
        self.reported: list[JobResult] = []
        self.buffers: dict[int, list[memoryview]] = {}
        self.context = TierContext(clock=clock or self.manual)
        self.runner = JobRunner(self, num_threads, self.context, inflight_writes_bytes)

    # The work.

    def run_batch(
        self, direction: Direction, chunks: Sequence[Chunk], within_s: float
    ) -> list[ChunkResult]:
        self.batches.append((direction, [chunk.key for chunk in chunks]))
        self.during()
        self.gate.wait(60)
        time.sleep(self.pause_s)
        results = []
        for chunk in chunks:
            if chunk.key == key_of("bug"):
                raise RuntimeError("a bug")
            result = self.answers.get(chunk.key, DONE)
            if direction is READ and result == DONE:
                chunk.buffer[:] = payload_of(chunk.key, len(chunk.buffer))
            results.append(result)
        return results

    def use(self, prefix: Sequence[Key]) -> list[bool]:
        self.used.append(list(prefix))
        if key_of("bad use") in prefix:
            raise RuntimeError("a bug")
        return [True] * len(prefix)

    def settle(self) -> None:
        self.num_settled += 1

    # The owner.

    def submit(
        self, job_id: int, names: Sequence[object], direction: Direction = READ, *,
        length: int = 10, deadline_s: float = 10.0,
    ) -> None:  # fmt: skip
        self.buffers[job_id] = [buffer_of(length) for _ in names]
        each = zip(names, self.buffers[job_id], strict=True)
        chunks = [Chunk(key_of(name), buffer) for name, buffer in each]
        self.runner.submit(Job(job_id, direction, chunks, deadline_s))

    def block(self, num_threads: int = 1) -> None:
        """Close the gate, with every thread behind it; the jobs for that are -1, -2, ..."""
        self.gate.clear()
        before = len(self.batches)
        for idx in range(num_threads):
            self.submit(-1 - idx, [f"blocker {idx}"])
        wait_until(lambda: len(self.batches) == before + num_threads)

    def poll(self) -> dict[int, JobResult]:
        self.reported += self.runner.poll()
        results = {result.job_id: result for result in self.reported}
        assert len(results) == len(self.reported), "a job was reported twice"
        return results

    def wait(self) -> dict[int, JobResult]:
        assert self.runner.drain(60)
        return self.poll()

    def content_is_right(self, job_id: int, names: Sequence[object]) -> bool:
        each = zip(names, self.buffers[job_id], strict=True)
        return all(bytes(b) == payload_of(key_of(name), len(b)) for name, b in each)

    def counted(self, **labels: str) -> int:
        """Chunks that were counted, whatever became of them."""
        metrics = self.context.metrics
        return metrics.value("read_chunks", **labels) + metrics.value("write_chunks", **labels)


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def factory(*args: int, clock: Clock | None = None) -> Bench:
        made.append(Bench(*args, clock=clock))
        return made[-1]

    yield factory
    for bench in made:
        bench.gate.set()
        bench.runner.close()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def names_of(job_id: object, count: int) -> list[str]:
    return [f"{job_id}.{idx}" for idx in range(count)]


def keys_of(job_id: object, count: int) -> list[Key]:
    return [key_of(name) for name in names_of(job_id, count)]


# Order.


def test_reads_of_a_burst_end_one_after_the_other(make: Callable[..., Bench]) -> None:
    """The first is complete while the last still waits, and the use is told in prefix order."""
    bench = make(1)
    bench.block()
    for job_id in range(5):
        bench.submit(job_id, names_of(job_id, 3))
    bench.gate.set()
    bench.wait()
    assert bench.batches[1:] == [(READ, keys_of(job_id, 3)) for job_id in range(5)]
    assert [result.job_id for result in bench.reported] == [-1, *range(5)]
    assert bench.used[1:] == [keys_of(job_id, 3) for job_id in range(5)]


def test_the_read_with_the_least_left_goes_first(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    for job_id, count in enumerate((5, 2, MANY + 44, 1, 2)):
        bench.submit(job_id, names_of(job_id, count))
    bench.gate.set()
    bench.wait()
    assert [len(keys) for _, keys in bench.batches[1:]] == [1, 2, 2, 5, MANY, 44]
    assert [result.job_id for result in bench.reported] == [-1, 3, 1, 4, 0, 2]


def test_what_is_left_counts_and_not_what_was_asked(make: Callable[..., Bench]) -> None:
    """A long job that is nearly complete goes before a shorter one that has not begun."""
    bench = make(1)
    bench.gate.clear()
    bench.submit(0, names_of(0, MANY + 44))
    wait_until(lambda: len(bench.batches) == 1)
    bench.submit(1, names_of(1, 100))
    bench.gate.set()
    bench.wait()
    assert [keys[0] for _, keys in bench.batches] == [
        key_of("0.0"), key_of(f"0.{MANY}"), key_of("1.0")
    ]  # fmt: skip


def test_bytes_count_and_not_chunks(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    bench.submit(0, names_of(0, 2), length=1000)
    bench.submit(1, names_of(1, 50), length=10)
    bench.gate.set()
    bench.wait()
    assert [keys[0] for _, keys in bench.batches[1:]] == [key_of("1.0"), key_of("0.0")]


def test_a_large_read_is_not_kept_waiting_by_small_ones(make: Callable[..., Bench]) -> None:
    """Small reads came one after the other, and a long prompt was given up at its deadline. Once
    a job has waited for a second, every other turn is its own; and no small one starves for it."""
    bench = make(1)
    bench.block()
    bench.submit(0, names_of("large", 2 * MANY + 88), deadline_s=1000.0)
    bench.submit(1, ["small 1"])
    next_id = [2]

    def another_small_one() -> None:
        bench.manual.advance(0.3)
        if next_id[0] < 60:
            bench.submit(next_id[0], [f"small {next_id[0]}"])
            next_id[0] += 1

    bench.during = another_small_one
    bench.gate.set()
    bench.wait()
    lengths = [len(keys) for _, keys in bench.batches[1:]]
    first = lengths.index(MANY)
    assert first <= 4
    assert lengths[first : first + 5] == [MANY, 1, MANY, 1, 88]
    assert lengths[:first] == [1] * first, "before that, the small ones go first"


def test_writes_go_in_order(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    for job_id, count in enumerate((5, 2, 9)):
        bench.submit(job_id, names_of(job_id, count), WRITE)
    bench.gate.set()
    bench.wait()
    assert bench.batches[1:] == [(WRITE, keys_of(n, count)) for n, count in enumerate((5, 2, 9))]


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_batches_are_of_one_job_in_its_order_and_not_too_large(
    make: Callable[..., Bench], direction: Direction
) -> None:
    most = jobs._BATCH_BYTES // MIB
    bench = make(1)
    bench.submit(0, names_of(0, 2 * most + 3), direction, length=MIB)
    bench.submit(1, names_of(1, 3), direction, length=(most + 1) * MIB)
    bench.wait()
    assert [len(keys) for _, keys in bench.batches] == [most, most, 3, 1, 1, 1]
    every = keys_of(0, 2 * most + 3) + keys_of(1, 3)
    assert [key for _, keys in bench.batches for key in keys] == every


def test_a_job_is_read_by_several_threads(make: Callable[..., Bench]) -> None:
    bench = make(3)
    bench.gate.clear()
    names = names_of(0, 2 * MANY + 88)
    bench.submit(0, names)
    wait_until(lambda: len(bench.batches) == 3)
    bench.gate.set()
    assert bench.wait()[0].done
    assert bench.content_is_right(0, names)


# One read per chunk.


def test_two_jobs_that_wait_for_the_same_chunks(make: Callable[..., Bench]) -> None:
    """One read, and both have the bytes, in buffers of their own."""
    bench = make(1)
    bench.block()
    bench.submit(0, ["a", "b", "c"])
    bench.submit(1, ["b", "c", "d"])
    bench.gate.set()
    results = bench.wait()
    assert bench.batches[1:] == [
        (READ, [key_of(n) for n in "abc"]),
        (READ, [key_of("d")]),
    ]
    assert results[0].done
    assert results[1].done
    assert bench.content_is_right(0, ["a", "b", "c"])
    assert bench.content_is_right(1, ["b", "c", "d"])
    bench.buffers[0][1][:] = bytes(10)
    assert bench.content_is_right(1, ["b", "c", "d"])
    assert bench.context.metrics.value("joined_reads", tier="bench") == 2
    assert bench.counted(outcome="done") == 1 + 6
    assert (results[0].moved_bytes, results[1].moved_bytes) == (30, 30)
    assert bench.used[1:] == [[key_of(n) for n in "abc"], [key_of(n) for n in "bcd"]]


def test_the_same_chunk_twice_in_one_job(make: Callable[..., Bench]) -> None:
    bench = make(1)
    names = ["a", "b", "a", "a"]
    bench.submit(0, names)
    assert bench.wait()[0].results == (DONE,) * 4
    assert sorted(key for _, keys in bench.batches for key in keys) == sorted(
        [key_of("a"), key_of("b")]
    )
    assert bench.content_is_right(0, names)


def test_who_comes_while_a_chunk_is_being_read_waits_for_that(make: Callable[..., Bench]) -> None:
    bench = make(2)
    bench.gate.clear()
    bench.submit(0, ["a", "b"])
    wait_until(lambda: len(bench.batches) == 1)
    bench.submit(1, ["b"])
    bench.submit(2, ["b", "c"])
    wait_until(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == (READ, [key_of("c")])
    assert bench.poll() == {}
    bench.gate.set()
    results = bench.wait()
    assert all(results[job_id].done for job_id in range(3))
    assert bench.content_is_right(1, ["b"])
    assert bench.content_is_right(2, ["b", "c"])
    bench.submit(3, ["b"])
    bench.wait()
    assert bench.batches[2] == (READ, [key_of("b")]), "what has ended is read again"


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_what_one_is_told_the_others_are_told(make: Callable[..., Bench], when: str) -> None:
    bench = make(1)
    bench.answers[key_of("bad")] = WRONG
    bench.block()
    if when == "running":
        bench.gate.set()
        bench.wait()
        bench.gate.clear()
    bench.submit(0, ["good", "bad"])
    if when == "running":
        wait_until(lambda: len(bench.batches) == 2)
    bench.submit(1, ["bad", "good"])
    bench.gate.set()
    results = bench.wait()
    assert results[0].results == (DONE, WRONG)
    assert results[1].results == (WRONG, DONE)
    assert len(bench.batches) == 2
    assert bench.counted(reason="checksum") == 2
    assert bench.context.metrics.value("joined_reads") == 1


def test_a_bug_in_a_read_is_told_to_all_of_them(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    bench.submit(0, ["bug", "x"])
    bench.submit(1, ["y", "bug"])
    bench.gate.set()
    results = bench.wait()
    assert results[0].results == (INTERNAL, INTERNAL)
    assert results[1].results == (DONE, INTERNAL)


def test_another_length_is_no_copy(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    bench.submit(0, ["a"], length=10)
    bench.submit(1, ["a"], length=11)
    bench.gate.set()
    results = bench.wait()
    assert results[0].done
    assert results[1].results == (ChunkResult(Outcome.MISS, Reason.LAYOUT),)


def test_a_copy_that_went_wrong_is_a_miss(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is what has arrived, as for any other read."""
    bench = make(1)
    bench.block()
    bench.submit(0, ["a"])
    bench.submit(1, ["a"])
    monkeypatch.setattr(jobs.np, "copyto", lambda target, source: target.fill(7))
    bench.gate.set()
    results = bench.wait()
    assert results[0].done
    assert results[1].results == (WRONG,)


def test_when_the_first_is_given_up_the_next_one_reads(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    bench.submit(0, ["a", "b"], deadline_s=5.0)
    bench.submit(1, ["b", "a"], deadline_s=50.0)
    bench.manual.advance(6.0)
    late = (ChunkResult(Outcome.MISS, Reason.DEADLINE),) * 2
    assert bench.poll()[0].results == late
    bench.gate.set()
    assert bench.wait()[1].done
    assert bench.batches[1:] == [(READ, [key_of("b"), key_of("a")])]
    assert bench.content_is_right(1, ["b", "a"])
    assert bytes(bench.buffers[0][0]) == bytes(10), "its buffer is its owner's again"


def test_writes_are_not_joined(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    bench.submit(0, ["a"], WRITE)
    bench.submit(1, ["a"], WRITE)
    bench.submit(2, ["a"])
    bench.gate.set()
    bench.wait()
    assert len(bench.batches) == 4


def test_many_readers_of_few_chunks(make: Callable[..., Bench]) -> None:
    """Seeded random overlaps on eight threads: each is reported once, with the right bytes."""
    rng = random.Random(3)
    bench = make(8, clock=SystemClock())
    bench.pause_s = 0.0005
    bench.answers = {key_of(7): WRONG, key_of(8): ChunkResult(Outcome.MISS, Reason.ABSENT)}
    asked = {}
    for job_id in range(800):
        asked[job_id] = [rng.randrange(30) for _ in range(rng.randrange(1, 9))]
        bench.submit(job_id, asked[job_id], deadline_s=rng.choice([0.001, 60.0, 60.0]))
        if job_id % 7 == 0:
            bench.poll()
    results = bench.wait()
    assert sorted(results) == list(range(800))
    late = ChunkResult(Outcome.MISS, Reason.DEADLINE)
    for job_id, names in asked.items():
        for name, result, buffer in zip(
            names, results[job_id].results, bench.buffers[job_id], strict=True
        ):
            if result != late:
                assert result == bench.answers.get(key_of(name), DONE)
            if result == DONE:
                assert bytes(buffer) == payload_of(key_of(name), 10)
    assert bench.runner.queued_read_bytes == 0
    assert bench.runner._seats == {}, "somebody still waits for a read that nobody does"
    num_read = sum(len(keys) for _, keys in bench.batches)
    joined = bench.context.metrics.value("joined_reads")
    assert num_read + joined <= bench.counted()
    assert num_read < bench.counted()


# Fairness.


def test_reads_go_before_writes_on_one_thread(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    bench.submit(1, names_of(1, 1), WRITE)
    bench.submit(2, names_of(2, 1))
    bench.gate.set()
    bench.wait()
    assert [direction for direction, _ in bench.batches] == [READ, READ, WRITE]


@pytest.mark.parametrize("num_threads", [2, 3, 4, 8])
@pytest.mark.parametrize("endless", [READ, WRITE])
def test_neither_direction_starves_the_other(
    make: Callable[..., Bench], num_threads: int, endless: Direction
) -> None:
    """With two or three threads none looked at writes first, and a write that had begun to wait
    behind a stream of reads was given up at its deadline."""
    bench = make(num_threads)
    bench.pause_s = 0.001
    bench.block(num_threads)
    for job_id in range(200):
        bench.submit(job_id, names_of(job_id, 1), endless)
    bench.submit(1000, names_of(1000, 1), WRITE if endless is READ else READ)
    bench.gate.set()
    bench.wait()
    other = [idx for idx, (d, _) in enumerate(bench.batches[num_threads:]) if d is not endless]
    assert other[0] < 100


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 8])
def test_endless_jobs_do_not_starve_errands(make: Callable[..., Bench], num_threads: int) -> None:
    """An errand behind both reads and writes would hold a deleted chunk's bytes for ever."""
    bench = make(num_threads)
    bench.pause_s = 0.001
    bench.block(num_threads)
    for job_id in range(200):
        bench.submit(job_id, names_of(job_id, 1), READ if job_id % 2 else WRITE)
    begun: list[int] = []
    bench.runner.run_soon(lambda: begun.append(len(bench.batches)))
    bench.gate.set()
    bench.wait()
    assert begun[0] < 150


def test_errands_of_an_only_thread_go_first_and_are_waited_for(make: Callable[..., Bench]) -> None:
    bench = make(1)
    done: list[str] = []
    bench.block()
    bench.submit(1, ["x"])
    bench.runner.run_soon(lambda: done.append(f"after {len(bench.batches)}"))
    assert bench.runner.unfinished == 3
    assert not bench.runner.drain(0.01)
    bench.gate.set()
    bench.wait()
    assert done == ["after 1"]
    bench.runner.close()
    bench.runner.run_soon(lambda: done.append("at once"))
    assert done[-1] == "at once"


# Results.


def test_results_stand_in_the_jobs_order_whoever_ends_first(make: Callable[..., Bench]) -> None:
    bench = make(4)
    names = [f"{idx}" for idx in range(600)]
    bench.answers = {key_of(name): WRONG for name in names[1::3]}
    bench.submit(7, names)
    result = bench.wait()[7]
    assert result.results == tuple(WRONG if idx % 3 == 1 else DONE for idx in range(600))
    assert result.tiers == tuple("" if idx % 3 == 1 else "bench" for idx in range(600))
    assert result.moved_bytes == 4000
    assert bench.counted() == 600
    assert bench.used == [[key_of(n) for idx, n in enumerate(names) if idx % 3 != 1]]


def test_many_small_jobs_on_many_threads(make: Callable[..., Bench]) -> None:
    """Nothing is lost or doubled."""
    bench = make(8)
    kinds = list(Direction)
    for job_id in range(600):
        bench.submit(job_id, names_of(job_id, 1 + job_id % 4), kinds[job_id % 3])
        bench.poll()
    results = bench.wait()
    assert sorted(results) == list(range(600))
    assert all(result.done for result in results.values())
    assert all(len(results[i].results) == 1 + i % 4 for i in range(600))
    assert bench.num_settled >= len(bench.batches)


def test_a_job_needs_a_chunk(make: Callable[..., Bench]) -> None:
    bench = make(1)
    with pytest.raises(ValueError, match="at least one chunk"):
        bench.submit(0, [])
    assert bench.runner.unfinished == 0


def test_the_limit_in_flight_refuses_the_end_of_a_job(make: Callable[..., Bench]) -> None:
    """A job larger than the limit was refused whole, so that long prompts were never stored."""
    bench = make(1, 100)
    bench.block()
    bench.submit(0, names_of(0, 4), WRITE)
    bench.submit(1, names_of(1, 8), WRITE)
    bench.submit(2, names_of(2, 1), WRITE)
    bench.submit(3, names_of(3, 20))
    refused = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
    assert [r.results for r in bench.poll().values()] == [(refused,)]
    bench.gate.set()
    results = bench.wait()
    assert results[0].done
    assert results[1].results == (DONE,) * 6 + (refused,) * 2
    assert results[3].done, "reads have no such limit"
    bench.submit(4, names_of(4, 10), WRITE)
    assert bench.wait()[4].done, "refused chunks gave back no room that they never took"
    bench.submit(5, names_of(5, 30), WRITE)
    assert bench.wait()[5].results == (DONE,) * 10 + (refused,) * 20
    assert bench.counted(reason="queue_full") == 1 + 2 + 20


def test_every_end_of_a_write_gives_its_bytes_in_flight_back(make: Callable[..., Bench]) -> None:
    """Done, failed, late: after each there is room for as much again."""
    bench = make(1, 100)
    bench.submit(0, ["bug", *names_of(0, 9)], WRITE)
    assert bench.wait()[0].results == (INTERNAL,) * 10
    bench.block()
    bench.submit(1, names_of(1, 10), WRITE, deadline_s=5.0)
    bench.manual.advance(6.0)
    assert bench.poll()[1].results == (ChunkResult(Outcome.FULL, Reason.DEADLINE),) * 10
    bench.submit(2, names_of(2, 10), WRITE)
    bench.gate.set()
    assert bench.wait()[2].done


def test_a_bug_in_the_owner_loses_no_job_and_no_thread(make: Callable[..., Bench]) -> None:
    """An exception outside of a chunk's own work ended the thread and lost the job."""
    bench = make(1)

    def errand() -> None:
        raise RuntimeError("a bug")

    bench.runner.run_soon(errand)
    for job_id, direction in enumerate((READ, WRITE, TOUCH)):
        bench.submit(job_id, ["bad use"], direction)
    bench.submit(3, ["x"])
    results = bench.wait()
    assert results[0].done
    assert results[1].done
    assert results[2].results == (INTERNAL,)
    assert results[3].done
    assert bench.context.metrics.value("internal_errors") == 3


def test_a_bug_when_settling_is_counted_and_costs_nothing(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(1)
    monkeypatch.setattr(bench, "settle", lambda: 1 // 0)
    bench.submit(0, ["x"])
    bench.submit(1, ["y"])
    assert all(result.done for result in bench.wait().values())
    wait_until(lambda: bench.context.metrics.value("internal_errors") == 2)


def test_what_is_under_way_and_how_long_it_took(make: Callable[..., Bench]) -> None:
    """So that whoever watches sees a drive that stands still."""
    bench = make(2)
    bench.gate.clear()
    begun_s = bench.manual.monotonic()
    bench.submit(4, ["a"])
    wait_until(lambda: len(bench.batches) == 1)
    bench.manual.advance(2.0)
    bench.submit(5, ["b"])
    wait_until(lambda: len(bench.batches) == 2)
    bench.submit(6, ["c"])
    assert sorted(bench.runner.under_way) == [(4, begun_s), (5, begun_s + 2.0)]
    assert bench.runner.queued_read_bytes == 10
    bench.manual.advance(3.0)
    bench.gate.set()
    results = bench.wait()
    assert [results[job_id].slowest_s for job_id in (4, 5)] == [5.0, 3.0]
    assert results[6].slowest_s == 0.0
    assert bench.runner.under_way == []
    assert bench.runner.queued_read_bytes == 0


# Deadlines, and the end.


@pytest.mark.parametrize(
    ("direction", "outcome"),
    [(READ, Outcome.MISS), (WRITE, Outcome.FULL), (TOUCH, Outcome.MISS)],
)
def test_a_job_past_its_deadline_is_given_up_whole(
    make: Callable[..., Bench], direction: Direction, outcome: Outcome
) -> None:
    bench = make(1)
    bench.block()
    bench.submit(1, names_of(1, 3), direction, deadline_s=5.0)
    bench.submit(2, names_of(2, 3), direction, deadline_s=50.0)
    bench.manual.advance(6.0)
    bench.gate.set()
    results = bench.wait()
    assert results[-1].done, "what has begun is waited for"
    assert results[1].results == (ChunkResult(outcome, Reason.DEADLINE),) * 3
    assert results[1].elapsed_s == 6.0
    assert results[2].done


@pytest.mark.parametrize("direction", list(Direction))
def test_deadlines_hold_while_every_thread_hangs(
    make: Callable[..., Bench], direction: Direction
) -> None:
    """Nobody but `poll` is left to notice them."""
    bench = make(2)
    bench.block(2)
    bench.submit(1, names_of(1, 300), direction, deadline_s=5.0)
    bench.submit(2, names_of(2, 2), direction, deadline_s=8.0)
    assert bench.poll() == {}
    bench.manual.advance(5.5)
    assert [result.job_id for result in bench.runner.poll()] == [1]
    bench.submit(3, names_of(3, 1), direction, deadline_s=1.0)
    bench.manual.advance(2.0)
    assert [result.job_id for result in bench.runner.poll()] == [3]
    bench.manual.advance(1.0)
    assert [result.job_id for result in bench.runner.poll()] == [2]
    assert bench.runner.queued_read_bytes == 0


def test_who_waits_for_another_ones_read_is_given_up_at_its_deadline(
    make: Callable[..., Bench],
) -> None:
    """A drive stood still with a prompt's beginning under way. Every later request for that
    prompt joined the read that hung and was never reported, although its own buffers were in
    nobody's hands."""
    bench = make(1)
    bench.gate.clear()
    bench.submit(0, ["a", "b"], deadline_s=5.0)
    wait_until(lambda: len(bench.batches) == 1)
    bench.submit(1, ["a", "b", "c"], deadline_s=5.0)
    bench.submit(2, ["b"], deadline_s=50.0)
    bench.manual.advance(6.0)
    late = ChunkResult(Outcome.MISS, Reason.DEADLINE)
    assert bench.poll()[1].results == (late,) * 3
    bench.gate.set()
    results = bench.wait()
    assert results[0].done, "what has begun is waited for"
    assert results[2].done
    assert bench.content_is_right(2, ["b"])
    assert [bytes(buffer) for buffer in bench.buffers[1]] == [bytes(10)] * 3
    assert bench.runner._seats == {}


def test_close_gives_up_what_waits_and_counts_it(make: Callable[..., Bench]) -> None:
    """What was given up at the end was missing from the metrics, so that they did not add up."""
    bench = make(1)
    bench.gate.clear()
    bench.submit(0, names_of(0, MANY + 44))
    wait_until(lambda: len(bench.batches) == 1)
    bench.submit(1, names_of(1, 2), WRITE)
    bench.submit(2, names_of(2, 2), TOUCH)
    bench.submit(3, names_of(0, 2))
    closing = threading.Thread(target=bench.runner.close)
    closing.start()
    wait_until(lambda: bench.counted(reason="closed") >= 46)
    bench.gate.set()
    closing.join(60)
    results = bench.wait()
    lost = ChunkResult(Outcome.MISS, Reason.CLOSED)
    assert results[0].results == (DONE,) * MANY + (lost,) * 44
    assert results[1].results == (ChunkResult(Outcome.FULL, Reason.CLOSED),) * 2
    assert results[2].results == (lost, lost)
    assert set(results[3].results) <= {DONE, lost}
    assert bench.counted() == MANY + 44 + 4
    with pytest.raises(ClosedError):
        bench.submit(4, ["x"])
    assert bench.runner.unfinished == 0
    assert bench.runner.close(), "a second time is harmless"


def test_close_leaves_a_thread_behind_that_hangs(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that does not answer held up the end of the process for ever. The job whose system
    call hangs is not reported, since its buffers are still in use; all others are."""
    monkeypatch.setattr(jobs, "_CLOSE_WAIT_S", 0.3)
    bench = make(3, clock=SystemClock())
    bench.gate.clear()
    bench.submit(0, ["a"])
    bench.submit(1, names_of(1, 2), WRITE)
    wait_until(lambda: len(bench.batches) == 2)
    bench.submit(2, ["a"])
    bench.submit(3, ["a"])
    begun_s = time.monotonic()
    assert not bench.runner.close()
    assert time.monotonic() - begun_s < 30, "a few times what was stated, not ten seconds a thread"
    results = bench.poll()
    assert sorted(results) == [2, 3]
    assert results[2].results == (ChunkResult(Outcome.MISS, Reason.CLOSED),)
    assert bench.runner.unfinished == 2
    assert not bench.runner.drain(0.01)
    bench.gate.set()
    assert bench.runner.close()


def test_errands_are_done_before_close_ends(make: Callable[..., Bench]) -> None:
    bench = make(2)
    bench.block(2)
    done: list[int] = []
    for idx in range(20):
        bench.runner.run_soon(lambda idx=idx: done.append(idx))
    threading.Timer(0.05, bench.gate.set).start()
    assert bench.runner.close()
    assert sorted(done) == list(range(20))


def test_a_start_without_enough_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    real, started = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError):
            Bench(8)
    assert set(threading.enumerate()) == before


# What is done after a job, and by whom.


def used_by(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Key], str]]:
    """What is told to be used from now on, each with the name of the thread that tells it."""
    told: list[tuple[list[Key], str]] = []

    def use(prefix: Sequence[Key]) -> list[bool]:
        told.append((list(prefix), threading.current_thread().name))
        return [True] * len(prefix)

    monkeypatch.setattr(bench, "use", use)
    return told


def hang_after_a_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Let what follows a batch hang; set when it does, and to be set that it goes on."""
    reached, goes_on = threading.Event(), threading.Event()

    def settle() -> None:
        reached.set()
        goes_on.wait(60)

    monkeypatch.setattr(bench, "settle", settle)
    return reached, goes_on


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_what_poll_gives_up_is_not_used_on_the_owners_thread(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """The rest of a job was given up by `poll`, which then waited for the tier's lock to say what
    had been used, on the engine's thread."""
    bench = make(1)
    told = used_by(bench, monkeypatch)
    reached, goes_on = hang_after_a_batch(bench, monkeypatch)
    names = names_of(0, MANY + 3)
    bench.submit(0, names, direction, deadline_s=5.0)
    assert reached.wait(60)
    bench.manual.advance(6.0)
    late = ChunkResult(Outcome.MISS if direction is READ else Outcome.FULL, Reason.DEADLINE)
    assert bench.poll()[0].results == (DONE,) * MANY + (late,) * 3
    assert told == [], "nobody but the owner is left to tell it"
    assert bench.runner.unfinished == 1, "and so it is still to be done"
    goes_on.set()
    bench.wait()
    assert told == [(keys_of(0, MANY), "stepwell-bench-0")]


def test_what_poll_gave_up_at_the_end_is_used_all_the_same(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(1)
    told = used_by(bench, monkeypatch)
    reached, goes_on = hang_after_a_batch(bench, monkeypatch)
    bench.submit(0, names_of(0, MANY + 1))
    assert reached.wait(60)
    threading.Timer(0.05, goes_on.set).start()
    assert bench.runner.close()
    assert len(bench.poll()[0].results) == MANY + 1
    assert [keys[:MANY] for keys, _ in told] == [keys_of(0, MANY)]


def test_what_submit_refuses_is_not_used_on_the_owners_thread(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a write the end was refused, and its beginning had been written by then: `submit` ended
    the job, and waited for the tier's lock on the engine's thread."""
    bench = make(1, 10)
    told = used_by(bench, monkeypatch)
    real = bench.context.metrics.add

    def add(name: str, labels: tuple[str, ...], amount: int = 1) -> None:
        if threading.current_thread() is threading.main_thread():
            wait_until(lambda: bench.num_settled == 1)  # the owner is slow
        real(name, labels, amount)

    monkeypatch.setattr(bench.context.metrics, "add", add)
    bench.submit(0, ["a", "b"], WRITE)
    refused = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
    assert bench.wait()[0].results == (DONE, refused)
    assert told == [([key_of("a")], "stepwell-bench-0")]


@pytest.mark.parametrize("limit_bytes", [0, 1, 9])
def test_a_limit_below_one_chunk_takes_one_at_a_time(
    make: Callable[..., Bench], limit_bytes: int
) -> None:
    """Every write was refused for ever, and nobody was told that the setting was too small."""
    bench = make(1, limit_bytes)
    refused = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
    bench.block()
    bench.submit(0, names_of(0, 3), WRITE)
    bench.submit(1, names_of(1, 2), WRITE)
    assert bench.poll()[1].results == (refused,) * 2, "one is on its way"
    bench.gate.set()
    assert bench.wait()[0].results == (DONE, refused, refused)
    for job_id in range(2, 5):
        bench.submit(job_id, names_of(job_id, 1), WRITE)
        assert bench.wait()[job_id].done


@pytest.mark.parametrize("direction", [READ, WRITE])
@pytest.mark.parametrize("copying", [False, True])
def test_what_the_store_copies_for_itself_is_not_used(
    make: Callable[..., Bench], direction: Direction, copying: bool
) -> None:
    """Each demotion made its chunk the most recent one, the next to leave the last to leave."""
    bench = make(1)
    chunks = [Chunk(key, buffer_of(10)) for key in keys_of(0, 3)]
    bench.runner.submit(Job(0, direction, chunks, copying=copying))
    assert bench.wait()[0].done
    assert bench.used == ([] if copying else [keys_of(0, 3)])


def test_a_copy_that_joins_a_read_takes_its_use_from_nobody(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.block()
    chunks = [Chunk(key_of("a"), buffer_of(10))]
    bench.runner.submit(Job(5, READ, chunks, copying=True))
    bench.submit(6, ["a"])
    bench.gate.set()
    results = bench.wait()
    assert results[5].done
    assert results[6].done
    assert bench.used[1:] == [[key_of("a")]]


def test_a_buffer_that_is_released_under_way_stops_no_thread(make: Callable[..., Bench]) -> None:
    """Its length could not be asked any more, which ended one thread after the other, and left
    what waited for the same chunk to wait for ever."""
    bench = make(1)
    bench.block()
    for direction in (READ, WRITE):
        bad = Chunk(key_of(f"bad {direction}"), memoryview(bytearray(MIB)))
        for job_id in (f"{direction} 1", f"{direction} 2"):
            chunks = [bad, Chunk(key_of(job_id), memoryview(bytearray(MIB)))]
            bench.runner.submit(Job(hash(job_id), direction, chunks, 60.0))
        bad.buffer.release()
    bench.gate.set()
    wait_until(lambda: not bench.runner.unfinished)
    assert len(bench.runner.poll()) == 5, "and the one that kept the thread busy"
    bench.submit(9, ["after"])
    assert bench.wait()[9].done
    assert bench.runner._inflight_writes_bytes == 0
