"""The runner of jobs: order, fairness, refusal, and that no job is ever lost."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from stepwell.clock import ManualClock
from stepwell.core.keys import Key
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, JobResult, Outcome, Reason
from stepwell.errors import ClosedError
from stepwell.testing import key_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.jobs import JobRunner

DONE = ChunkResult(Outcome.DONE)


class Bench:
    """A runner whose chunks do nothing but be remembered, and wait while ``gate`` is closed."""

    def __init__(self, num_threads: int = 1, inflight_writes_bytes: int = 1 << 20) -> None:
        self.clock = ManualClock()
        self.gate = threading.Event()
        self.gate.set()
        self.pause_s = 0.0
        self.begun: list[tuple[Direction, bytes]] = []
        self.used: list[list[Key]] = []
        self.reported: list[JobResult] = []
        self.context = TierContext(clock=self.clock)
        self.runner = JobRunner(self, num_threads, self.context, inflight_writes_bytes)

    name = "bench"

    @property
    def counted(self) -> int:
        """Chunks that were counted, whatever became of them."""
        metrics = self.context.metrics
        return metrics.value("read_chunks") + metrics.value("write_chunks")

    def run_chunk(self, direction: Direction, chunk: Chunk) -> ChunkResult:
        self.begun.append((direction, chunk.key))
        self.gate.wait(30)
        time.sleep(self.pause_s)
        if chunk.buffer[:3] == b"bug":
            raise RuntimeError("a bug")
        return DONE

    def use(self, prefix: Sequence[Key]) -> list[bool]:
        self.used.append(list(prefix))
        if key_of("bad.0") in prefix:
            raise RuntimeError("a bug")
        return [True] * len(prefix)

    def submit(
        self, job_id: int, direction: Direction = Direction.READ, chunks: int = 1,
        content: bytes = b"0123456789", deadline_s: float = 10.0,
    ) -> None:  # fmt: skip
        each = [Chunk(key_of(f"{job_id}.{i}"), memoryview(content)) for i in range(chunks)]
        self.runner.submit(Job(job_id, direction, each, deadline_s))

    def wait(self) -> dict[int, JobResult]:
        assert self.runner.drain(30)
        self.reported += self.runner.poll()
        return {result.job_id: result for result in self.reported}


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def factory(*args: int) -> Bench:
        made.append(Bench(*args))
        return made[-1]

    yield factory
    for bench in made:
        bench.gate.set()
        bench.runner.close()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def test_reads_of_a_burst_end_one_after_the_other(make: Callable[..., Bench]) -> None:
    """First come first served: the first is complete while the last still waits."""
    bench = make(1)
    for job_id in range(5):
        bench.submit(job_id, chunks=3)
    bench.wait()
    assert [key for _, key in bench.begun] == [
        key_of(f"{j}.{i}") for j in range(5) for i in range(3)
    ]
    assert [result.job_id for result in bench.reported] == list(range(5))
    assert bench.used == [[key_of(f"{j}.{i}") for i in range(3)] for j in range(5)]


def test_reads_go_before_writes(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.gate.clear()
    bench.submit(0)
    wait_until(lambda: len(bench.begun) == 1)
    bench.submit(1, Direction.WRITE)
    bench.submit(2, Direction.READ)
    bench.gate.set()
    bench.wait()
    assert [direction for direction, _ in bench.begun] == ["read", "read", "write"]


@pytest.mark.parametrize("num_threads", [2, 3, 4, 8])
def test_endless_reads_do_not_starve_writes(make: Callable[..., Bench], num_threads: int) -> None:
    """With two or three threads none looked at writes first, and a write that had begun to wait
    behind a stream of reads was given up at its deadline."""
    bench = make(num_threads)
    bench.pause_s = 0.001
    bench.submit(0, chunks=300)
    bench.submit(1, Direction.WRITE, chunks=3)
    bench.wait()
    last_write = max(i for i, (d, _) in enumerate(bench.begun) if d is Direction.WRITE)
    assert last_write < 200


def test_results_stand_in_the_jobs_order_whoever_ends_first(make: Callable[..., Bench]) -> None:
    bench = make(4)
    chunks = [Chunk(key_of(i), memoryview(b"bug" if i % 3 == 1 else b"good")) for i in range(20)]
    bench.runner.submit(Job(7, Direction.WRITE, chunks))
    result = bench.wait()[7]
    failed = ChunkResult(Outcome.FAILED, Reason.INTERNAL)
    assert result.results == tuple(failed if i % 3 == 1 else DONE for i in range(20))
    assert result.tiers == tuple("" if i % 3 == 1 else "bench" for i in range(20))
    assert result.moved_bytes == 4 * 13
    assert bench.counted == 20
    assert len(bench.used[0]) == 13, "only what succeeded was used"


def test_the_limit_in_flight_refuses_the_end_of_a_job(make: Callable[..., Bench]) -> None:
    """A job larger than the limit was refused whole, so that long prompts were never stored."""
    bench = make(1, 100)
    bench.gate.clear()
    bench.submit(0, Direction.WRITE, chunks=4)
    bench.submit(1, Direction.WRITE, chunks=8)
    bench.submit(2, Direction.WRITE, chunks=1)
    bench.submit(3, Direction.READ, chunks=20)
    refused = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
    assert [r.results for r in bench.runner.poll()] == [(refused,)]
    bench.gate.set()
    results = bench.wait()
    assert results[0].done
    assert results[1].results == (DONE,) * 6 + (refused,) * 2
    assert results[3].done, "reads have no such limit"
    bench.submit(4, Direction.WRITE, chunks=10)
    assert bench.wait()[4].done, "refused chunks gave back no room that they never took"
    bench.submit(5, Direction.WRITE, chunks=30)
    assert bench.wait()[5].results == (DONE,) * 10 + (refused,) * 20
    assert bench.context.metrics.value("write_chunks", reason="queue_full") == 1 + 2 + 20


def test_a_bug_in_the_owner_loses_no_job_and_no_thread(make: Callable[..., Bench]) -> None:
    """An exception outside of a chunk's own work ended the thread and lost the job."""
    bench = make(1)

    def errand() -> None:
        raise RuntimeError("a bug")

    bench.runner.run_soon(errand)
    for job_id, direction in enumerate((Direction.READ, Direction.WRITE, Direction.TOUCH)):
        chunks = [Chunk(key_of("bad.0"), memoryview(b"x"))]
        bench.runner.submit(Job(job_id, direction, chunks))
    bench.submit(3)
    results = bench.wait()
    assert results[0].done
    assert results[1].done
    assert results[2].results == (ChunkResult(Outcome.FAILED, Reason.INTERNAL),)
    assert results[3].done
    assert bench.context.metrics.value("internal_errors") == 3


@pytest.mark.parametrize(
    ("direction", "outcome"),
    [
        (Direction.READ, Outcome.MISS),
        (Direction.WRITE, Outcome.FULL),
        (Direction.TOUCH, Outcome.MISS),
    ],
)
def test_a_job_past_its_deadline_is_given_up_whole(
    make: Callable[..., Bench], direction: Direction, outcome: Outcome
) -> None:
    bench = make(1)
    bench.gate.clear()
    bench.submit(0)
    wait_until(lambda: len(bench.begun) == 1)
    bench.submit(1, direction, chunks=3, deadline_s=5.0)
    bench.submit(2, direction, chunks=3, deadline_s=50.0)
    bench.clock.advance(6.0)
    bench.gate.set()
    results = bench.wait()
    assert results[0].done, "what has begun is waited for"
    assert results[1].results == (ChunkResult(outcome, Reason.DEADLINE),) * 3
    assert results[1].elapsed_s == 6.0
    assert results[2].done


def test_close_gives_up_what_waits_and_counts_it(make: Callable[..., Bench]) -> None:
    """What was given up at the end was missing from the metrics, so that they did not add up."""
    bench = make(1)
    bench.gate.clear()
    bench.submit(0, chunks=3)
    wait_until(lambda: len(bench.begun) == 1)
    bench.submit(1, Direction.WRITE, chunks=2)
    bench.submit(2, Direction.TOUCH, chunks=2)
    closing = threading.Thread(target=bench.runner.close)
    closing.start()
    wait_until(lambda: bench.counted == 4)
    bench.gate.set()
    closing.join(30)
    results = bench.wait()
    lost = ChunkResult(Outcome.MISS, Reason.CLOSED)
    assert results[0].results == (DONE, lost, lost)
    assert results[1].results == (ChunkResult(Outcome.FULL, Reason.CLOSED),) * 2
    assert results[2].results == (lost, lost)
    assert bench.counted == 5
    with pytest.raises(ClosedError):
        bench.submit(3)
    assert bench.runner.unfinished == 0


def test_errands_of_an_only_thread_go_first_and_are_waited_for(make: Callable[..., Bench]) -> None:
    bench = make(1)
    done: list[str] = []
    bench.gate.clear()
    bench.submit(0)
    wait_until(lambda: len(bench.begun) == 1)
    bench.submit(1)
    bench.runner.run_soon(lambda: done.append(f"after {len(bench.begun)}"))
    assert bench.runner.unfinished == 3
    assert not bench.runner.drain(0.01)
    bench.gate.set()
    bench.wait()
    assert done == ["after 1"]
    bench.runner.close()
    bench.runner.run_soon(lambda: done.append("at once"))
    assert done[-1] == "at once"


def test_many_small_jobs_on_many_threads(make: Callable[..., Bench]) -> None:
    """Nothing is lost or doubled."""
    bench = make(8)
    kinds = list(Direction)
    for job_id in range(600):
        bench.submit(job_id, kinds[job_id % 3], chunks=1 + job_id % 4)
        bench.reported += bench.runner.poll()
    results = bench.wait()
    assert sorted(results) == list(range(600))
    assert len(bench.reported) == 600
    assert all(result.done for result in results.values())
    assert all(len(results[i].results) == 1 + i % 4 for i in range(600))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 8])
def test_endless_jobs_do_not_starve_errands(make: Callable[..., Bench], num_threads: int) -> None:
    """An errand behind both reads and writes would hold a deleted chunk's bytes for ever."""
    bench = make(num_threads)
    bench.pause_s = 0.001
    bench.submit(0, chunks=300)
    bench.submit(1, Direction.WRITE, chunks=300)
    begun: list[int] = []
    bench.runner.run_soon(lambda: begun.append(len(bench.begun)))
    bench.wait()
    assert begun[0] < 300
