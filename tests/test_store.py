"""The store: several tiers behave as one, and one tier's fault costs no more than that tier."""

import itertools
import math
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.clock import ManualClock
from stepwell.core.identity import Identity
from stepwell.core.keys import Key, fingerprint, make_key
from stepwell.core.leases import Lease
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    Job,
    JobResult,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.errors import ClosedError, ConfigError
from stepwell.manager import Manager, WriteMode
from stepwell.policy.breaker import Breaker
from stepwell.policy.breaker import State as BreakerState
from stepwell.settings import Settings
from stepwell.store import Store
from stepwell.testing import FaultyTier, buffer_of, key_of, payload_of
from stepwell.tiers.base import Tier, TierContext
from stepwell.tiers.disk import DiskTier, slot_cost_bytes
from stepwell.tiers.guarded import GuardedTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.striped import StripedTier

SIZE = 4096
DONE = ChunkResult(Outcome.DONE)
ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
BAD = ChunkResult(Outcome.MISS, Reason.CHECKSUM)
BROKEN = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
REFUSED = ChunkResult(Outcome.FULL, Reason.QUEUE_FULL)
NOT_ADMITTED = ChunkResult(Outcome.FULL, Reason.NOT_ADMITTED)
KEYS = [key_of(f"c{idx}") for idx in range(8)]


class Harness:
    """A store over an upper and a lower tier of DRAM, each wrapped for faults."""

    def __init__(self, upper_chunks: int = 64, lower_chunks: int = 64, **faults: Callable) -> None:
        self.clock = ManualClock()
        self.context = TierContext(clock=self.clock)
        self.upper = FaultyTier(
            HostTier(upper_chunks * SIZE, self.context), name="upper",
            **{k.removeprefix("upper_"): v for k, v in faults.items() if k.startswith("upper_")},
        )  # fmt: skip
        self.lower = FaultyTier(
            HostTier(lower_chunks * SIZE, self.context), name="lower",
            **{k.removeprefix("lower_"): v for k, v in faults.items() if k.startswith("lower_")},
        )  # fmt: skip
        self.store = Store([self.upper, self.lower], self.context)

    def write_to(self, tier: Tier, keys: list[Key]) -> None:
        """Past the store."""
        inner = Store([tier], self.context)
        inner.write(chunks_of(keys))
        (result,) = inner.drain(30)
        assert result.done


def chunks_of(keys: list[Key]) -> list[Chunk]:
    return [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in keys]


def wait(store: Store, job_id: int) -> JobResult:
    ended = store.drain(30)
    assert [result.job_id for result in ended] == [job_id]
    assert store.unfinished == 0
    return ended[0]


def write(store: Store, keys: list[Key]) -> JobResult:
    return wait(store, store.write(chunks_of(keys)))


def read(store: Store, keys: list[Key], deadline_s: float = 10.0) -> JobResult:
    """Read; whatever is DONE must be the right bytes."""
    chunks = [Chunk(key, buffer_of(SIZE)) for key in keys]
    result = wait(store, store.read(chunks, deadline_s))
    for chunk, chunk_result in zip(chunks, result.results, strict=True):
        if chunk_result.outcome is Outcome.DONE:
            assert bytes(chunk.buffer) == payload_of(chunk.key, SIZE)
    return result


def present(tier: Tier | Store, keys: list[Key]) -> list[bool]:
    answers = tier.lookup(keys) if isinstance(tier, Store) else tier.contains(keys)
    return [answer is Lookup.HIT for answer in answers]


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def factory(*args: int, **faults: Callable) -> Harness:
        made.append(Harness(*args, **faults))
        return made[-1]

    yield factory
    for harness in made:
        harness.store.close()


def nth(*numbers: int, result: ChunkResult = BAD) -> Callable[[int], ChunkResult | None]:
    return lambda number: result if number in numbers else None


# One tier.


def test_a_store_of_one_tier(make: Callable[..., Harness]) -> None:
    harness = make()
    store = Store([harness.upper], harness.context)
    assert store.lookup(KEYS) == [Lookup.MISS] * 8
    assert write(store, KEYS[:4]).results == (DONE,) * 4
    assert present(store, KEYS) == [True] * 4 + [False] * 4
    result = read(store, KEYS[2:6])
    assert result.results == (DONE, DONE, ABSENT, ABSENT)
    assert result.tiers == ("upper", "upper", "", "")
    assert result.moved_bytes == 2 * SIZE
    assert store.delete(KEYS[:1]) == 1
    assert present(store, KEYS[:2]) == [False, True]


def test_a_store_needs_a_tier_and_a_job_a_chunk(make: Callable[..., Harness]) -> None:
    harness = make()
    with pytest.raises(ValueError, match="at least one tier"):
        Store([], harness.context)
    for call in (harness.store.read, harness.store.write, harness.store.touch):
        with pytest.raises(ValueError, match="at least one chunk"):
            call([])
    assert harness.store.unfinished == 0


# Two tiers.


def test_writes_go_to_every_tier(make: Callable[..., Harness]) -> None:
    harness = make()
    assert write(harness.store, KEYS).results == (DONE,) * 8
    assert present(harness.upper, KEYS) == present(harness.lower, KEYS) == [True] * 8


def test_the_upper_tier_serves_what_both_have(make: Callable[..., Harness]) -> None:
    harness = make()
    write(harness.store, KEYS)
    result = read(harness.store, KEYS)
    assert result.tiers == ("upper",) * 8
    assert result.moved_bytes == 8 * SIZE


def test_lookup_is_the_best_answer_of_any_tier(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.write_to(harness.upper, KEYS[:2])
    harness.write_to(harness.lower, KEYS[1:4])
    assert present(harness.store, KEYS) == [True] * 4 + [False] * 4
    assert present(harness.upper, KEYS) == [True] * 2 + [False] * 6, "a lookup moves nothing"


def test_a_read_takes_each_chunk_from_where_it_is_and_copies_it_up(
    make: Callable[..., Harness],
) -> None:
    harness = make()
    harness.write_to(harness.upper, [KEYS[0], KEYS[3]])
    harness.write_to(harness.lower, [KEYS[1], KEYS[3], KEYS[5]])
    result = read(harness.store, KEYS[:6])
    assert result.results == (DONE, DONE, ABSENT, DONE, ABSENT, DONE)
    assert result.tiers == ("upper", "lower", "", "upper", "", "lower")
    assert result.moved_bytes == 4 * SIZE, "what is copied up is no second read"
    assert present(harness.upper, KEYS[:6]) == [True, True, False, True, False, True]
    assert read(harness.store, [KEYS[1], KEYS[5]]).tiers == ("upper", "upper")


def test_what_does_not_fit_above_is_served_all_the_same(make: Callable[..., Harness]) -> None:
    harness = make(upper_chunks=2)
    harness.write_to(harness.lower, KEYS)
    with harness.context.leases.acquire(KEYS, 60.0):
        result = read(harness.store, KEYS)
    assert result.results == (DONE,) * 8
    assert result.tiers == ("lower",) * 8
    assert sum(present(harness.upper, KEYS)) == 2


def test_a_large_tier_below_a_small_one_keeps_what_was_evicted(
    make: Callable[..., Harness],
) -> None:
    harness = make(upper_chunks=2)
    for key in KEYS:
        write(harness.store, [key])
    assert present(harness.store, KEYS) == [True] * 8
    assert read(harness.store, KEYS[:2]).tiers == ("lower", "lower")


@pytest.mark.parametrize("fault", [BAD, BROKEN, ChunkResult(Outcome.MISS, Reason.VANISHED)])
def test_a_miss_above_falls_through_to_the_tier_below(
    make: Callable[..., Harness], fault: ChunkResult
) -> None:
    """The upper tier said it has the chunk, and then could not serve it."""
    harness = make(upper_read_faults=nth(2, 3, result=fault))
    write(harness.store, KEYS[:4])
    result = read(harness.store, KEYS[:4])
    assert result.results == (DONE,) * 4
    assert result.tiers == ("upper", "lower", "lower", "upper")


def test_a_miss_everywhere_has_the_last_tiers_reason(make: Callable[..., Harness]) -> None:
    harness = make(upper_read_faults=nth(2), lower_read_faults=nth(1, result=BROKEN))
    write(harness.store, KEYS[:3])
    result = read(harness.store, KEYS[:3])
    assert result.results == (DONE, BROKEN, DONE)
    assert result.tiers == ("upper", "", "upper")


def test_a_miss_above_that_nobody_below_has_keeps_its_reason(make: Callable[..., Harness]) -> None:
    harness = make(upper_read_faults=nth(1))
    harness.write_to(harness.upper, KEYS[:1])
    assert read(harness.store, KEYS[:1]).results == (BAD,)


def test_every_chunk_may_fail_at_any_place(make: Callable[..., Harness]) -> None:
    """For every pattern of faults above and below, results stand where they belong."""
    for pattern in range(64):
        above = [idx + 1 for idx in range(3) if pattern >> idx & 1]
        broken_below = [idx for idx in range(3) if pattern >> idx + 3 & 1]
        order: list[int] = []

        def below(number: int, order: list[int] = order, bad: list[int] = broken_below) -> (
            ChunkResult | None
        ):  # fmt: skip
            return BROKEN if order[number - 1] in bad else None

        harness = make(upper_read_faults=nth(*above), lower_read_faults=below)
        write(harness.store, KEYS[:3])
        order += [idx - 1 for idx in above]
        result = read(harness.store, KEYS[:3])
        for idx in range(3):
            fell = idx + 1 in above
            expected = BROKEN if fell and idx in broken_below else DONE
            assert result.results[idx] == expected
            assert result.tiers[idx] == ("" if expected == BROKEN else "lower" if fell else "upper")
        harness.store.close()


def test_a_write_is_done_if_any_tier_took_it(make: Callable[..., Harness]) -> None:
    refused = ChunkResult(Outcome.FULL, Reason.CAPACITY)
    harness = make(
        upper_write_faults=nth(1, 3, result=refused), lower_write_faults=nth(2, 3, result=BROKEN)
    )
    result = write(harness.store, KEYS[:4])
    assert [r.outcome is Outcome.DONE for r in result.results] == [True, True, False, True]
    assert present(harness.store, KEYS[:4]) == [True, True, False, True]


def test_a_failed_copy_up_is_no_failed_read(make: Callable[..., Harness]) -> None:
    harness = make(upper_write_faults=lambda _: BROKEN)
    harness.write_to(harness.lower, KEYS[:2])
    assert read(harness.store, KEYS[:2]).results == (DONE, DONE)
    assert present(harness.upper, KEYS[:2]) == [False, False]


def test_a_read_is_reported_when_its_copies_up_have_ended(make: Callable[..., Harness]) -> None:
    """Its buffers belong to the store until then."""
    harness = make()
    harness.write_to(harness.lower, KEYS[:1])
    copying = []

    def hold(result: JobResult) -> bool:
        copying.append(result.direction)
        return result.direction is Direction.WRITE

    harness.upper.hold = hold
    job_id = harness.store.read([Chunk(KEYS[0], buffer_of(SIZE))])
    while Direction.WRITE not in copying:
        assert harness.store.poll() == []
    assert harness.store.unfinished == 1
    harness.upper.hold = lambda _: False
    assert wait(harness.store, job_id).results == (DONE,)


def test_jobs_end_in_any_order_and_are_reported_once(make: Callable[..., Harness]) -> None:
    harness = make()
    write(harness.store, KEYS[:1])
    slow: set[Direction] = {Direction.READ}
    harness.upper.hold = lambda result: result.direction in slow
    first = harness.store.read([Chunk(KEYS[0], buffer_of(SIZE))])
    second = harness.store.write(chunks_of(KEYS[1:2]))
    third = harness.store.touch(KEYS[:2])
    early: list[JobResult] = []
    while len(early) < 2:
        early += harness.store.poll()
    assert {result.job_id for result in early} == {second, third}
    slow.clear()
    assert wait(harness.store, first).done
    assert harness.store.poll() == []


def test_a_touch_reaches_every_tier(make: Callable[..., Harness]) -> None:
    harness = make(upper_chunks=3, lower_chunks=3)
    for key in KEYS[:3]:
        write(harness.store, [key])
    result = wait(harness.store, harness.store.touch([KEYS[0], KEYS[7]]))
    assert result.results == (DONE, ABSENT)
    assert result.direction is Direction.TOUCH
    write(harness.store, KEYS[3:4])
    assert present(harness.upper, KEYS[:4]) == [True, False, True, True]
    assert present(harness.lower, KEYS[:4]) == [True, False, True, True]


def test_delete_reaches_every_tier(make: Callable[..., Harness]) -> None:
    harness = make()
    write(harness.store, KEYS)
    harness.upper.delete(KEYS[:1])
    assert harness.store.delete(KEYS[:2]) == 3
    assert present(harness.store, KEYS) == [False, False] + [True] * 6


def test_a_lease_holds_in_every_tier_until_it_is_given_back(make: Callable[..., Harness]) -> None:
    harness = make(upper_chunks=2, lower_chunks=2)
    write(harness.store, KEYS[:2])
    with harness.store.acquire(KEYS[:2], 60.0):
        assert write(harness.store, KEYS[2:3]).results[0].outcome is Outcome.FULL
        assert present(harness.upper, KEYS[:2]) == present(harness.lower, KEYS[:2]) == [True, True]
    assert write(harness.store, KEYS[2:3]).done


def test_one_deadline_for_all_tiers(make: Callable[..., Harness]) -> None:
    """A read that a slow upper tier held up began again with its whole deadline below, so that
    a store of n tiers waited n times as long as it was allowed to."""
    harness = make(upper_read_faults=lambda _: BAD)
    write(harness.store, KEYS[:1])
    waited = []

    def hold(result: JobResult) -> bool:
        if result.direction is Direction.READ and not waited:
            waited.append(result)
            harness.clock.advance(5.5)
            return True
        return False

    harness.upper.hold = hold
    result = read(harness.store, KEYS[:1], deadline_s=5.0)
    assert result.results == (ChunkResult(Outcome.MISS, Reason.DEADLINE),)
    assert result.elapsed_s == 5.5
    assert read(harness.store, KEYS[:1], deadline_s=5.0).tiers == ("lower",)


# The end.


def test_close_in_the_middle_reports_everything(make: Callable[..., Harness]) -> None:
    """Reads between the first and the second tier, writes in one tier of two: all are reported."""
    harness = make(upper_read_faults=lambda _: BAD)
    write(harness.store, KEYS)
    jobs = {harness.store.read([Chunk(key, buffer_of(SIZE)) for key in KEYS]) for _ in range(5)}
    more = [key_of(f"m{idx}") for idx in range(20)]
    jobs |= {harness.store.write(chunks_of([key])) for key in more}
    jobs.add(harness.store.touch(KEYS))
    harness.store.close()
    ended = harness.store.drain(30)
    assert sorted(result.job_id for result in ended) == sorted(jobs)
    for result in ended:
        if result.direction is Direction.READ:
            assert {r.outcome for r in result.results} <= {Outcome.MISS}
    assert harness.store.unfinished == 0
    harness.store.close()  # harmless
    for call in (
        lambda: harness.store.read(chunks_of(KEYS[:1])),
        lambda: harness.store.write(chunks_of(KEYS[:1])),
        lambda: harness.store.touch(KEYS[:1]),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_tier_that_was_closed_below_the_store(make: Callable[..., Harness]) -> None:
    """A job whose tiers were all closed was never reported."""
    harness = make()
    write(harness.store, KEYS[:2])
    harness.lower.close()
    assert read(harness.store, KEYS[:2]).done
    assert write(harness.store, KEYS[2:3]).done
    harness.upper.close()
    assert not write(harness.store, KEYS[3:4]).done
    assert not read(harness.store, KEYS[:1]).done
    assert not wait(harness.store, harness.store.touch(KEYS[:1])).done


# As the settings say.


def test_a_store_as_the_settings_say(tmp_path: Path) -> None:
    """Host over disk; after a restart the disk tier has everything, the host tier fills again."""
    settings = Settings((tmp_path / "kv",), 1 << 20, min_free_bytes=0, host_capacity_bytes=1 << 20)
    identity = Identity({"model": "m"})
    for run in range(2):
        store = Store.open(settings)
        try:
            root = store.use_root(identity)
            keys = [make_key(root, bytes([idx])) for idx in range(4)]
            assert [tier.name for tier in store.tiers] == ["host", "disk"]
            if run == 0:
                assert write(store, keys).done
            else:
                assert read(store, keys).tiers == ("disk",) * 4
            assert read(store, keys).tiers == ("host",) * 4
        finally:
            store.close()
    described = tmp_path / "kv" / "roots" / f"{identity.root.hex()}.json"
    assert Identity.from_json(described.read_text()) == identity


def test_a_store_that_writes_back_as_the_settings_say(tmp_path: Path) -> None:
    """Nothing is on the drive until half of the host tier is written, and all of it at the end."""
    settings = Settings(
        (tmp_path / "kv",), 4 << 20, min_free_bytes=0, host_capacity_bytes=64 * SIZE,
        write_mode="back", io_threads=2,
    )  # fmt: skip
    keys = [key_of(idx) for idx in range(48)]
    store = Store.open(settings)
    assert write(store, keys[:32]).tiers == ("host",) * 32
    assert store.num_chunks == 0
    assert write(store, keys[32:]).tiers == ("host",) * 16
    give_up_s = time.monotonic() + 30
    while store.num_chunks < 16 and time.monotonic() < give_up_s:
        store.poll()
    assert store.num_chunks == 16
    store.close()
    store = Store.open(settings)
    assert store.num_chunks == 48
    assert read(store, keys).tiers == ("disk",) * 48
    store.close()


def test_a_store_without_a_host_tier(tmp_path: Path) -> None:
    store = Store.open(Settings((tmp_path / "kv",), 1 << 20, min_free_bytes=0))
    assert [tier.name for tier in store.tiers] == ["disk"]
    store.close()


def test_a_store_that_cannot_be_opened_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    before = threading.active_count()
    with pytest.raises(ConfigError):
        Store.open(Settings((tmp_path / "file",), 1 << 20, host_capacity_bytes=1 << 20))
    assert threading.active_count() == before


def test_a_tier_that_refuses_a_job_does_not_lose_the_others() -> None:
    """The exception went to the caller, who took buffers back that another tier still filled."""
    harness = Harness()
    harness.write_to(harness.upper, KEYS[:2])
    harness.write_to(harness.lower, KEYS[2:4])

    def refuse(job: object) -> None:
        raise MemoryError("no room for a job")

    harness.lower.submit = refuse  # type: ignore[method-assign]
    chunks = [Chunk(key, buffer_of(SIZE)) for key in KEYS[:4]]
    result = wait(harness.store, harness.store.read(chunks))
    failed = ChunkResult(Outcome.FAILED, Reason.INTERNAL)
    assert result.results == (DONE, DONE, failed, failed), "and not that they are absent"
    assert wait(harness.store, harness.store.write(chunks_of(KEYS[4:6]))).done
    assert harness.context.metrics.value("internal_errors") == 2


# Many jobs at a time.


@pytest.mark.parametrize("mode", list(WriteMode))
@pytest.mark.parametrize("seed", range(6))
def test_a_long_history_of_many_jobs_at_a_time(tmp_path: Path, seed: int, mode: WriteMode) -> None:
    """Over a stripe of two drives, with faults, leases and deletes while all is under way.

    Every job is reported once, what is DONE is right, what was deleted last is gone, and nothing
    is left of it all.
    """
    rng = random.Random(seed)
    context = TierContext(clock=ManualClock())
    manager = Manager([None, None], write_mode=mode, top_capacity_bytes=6 * SIZE)
    drives = [
        DiskTier(tmp_path / str(idx), 10 * slot_cost_bytes(SIZE), context, num_threads=2,
                 name=f"disk{idx}", inflight_writes_bytes=8 * SIZE)
        for idx in range(2)
    ]  # fmt: skip
    broken = [0.0, 0.0]

    def faults(drive_idx: int) -> Callable[[int], ChunkResult | None]:
        return lambda _: rng.choice([BAD, BROKEN]) if rng.random() < broken[drive_idx] else None

    guarded = [
        GuardedTier(
            FaultyTier(each, read_faults=faults(idx), write_faults=faults(idx)),
            Breaker(),
            context,
        )
        for idx, each in enumerate(drives)
    ]
    host = HostTier(6 * SIZE, context, keeps=manager.keeps, inflight_writes_bytes=5 * SIZE)
    store = Store([host, StripedTier(guarded, context)], context, manager, drives=drives)
    names = [key_of(idx) for idx in range(24)]
    reads: dict[int, list[Chunk]] = {}
    begun: list[int] = []
    ended: list[int] = []
    deleted: set[Key] = set()
    leases: list[Lease] = []

    def poll() -> None:
        for result in store.poll():
            ended.append(result.job_id)
            for chunk, each in zip(reads.pop(result.job_id, ()), result.results, strict=False):
                if each.outcome is Outcome.DONE:
                    assert bytes(chunk.buffer) == payload_of(chunk.key, SIZE)

    for _ in range(400):
        keys = rng.sample(names, rng.randrange(1, 7))
        match rng.choice(["write", "write", "read", "read", "touch", "delete", "poll", "other"]):
            case "write":
                begun.append(store.write(chunks_of(keys)))
                deleted -= set(keys)
            case "read":
                chunks = [Chunk(key, buffer_of(SIZE)) for key in keys]
                begun.append(store.read(chunks))
                reads[begun[-1]] = chunks
            case "touch":
                begun.append(store.touch(keys))
            case "delete":
                store.delete(keys)
                deleted |= set(keys)
            case "poll":
                poll()
            case "other":
                broken[rng.randrange(2)] = rng.choice([0.0, 0.0, 0.3, 1.0])
                if rng.random() < 0.5:
                    leases.append(store.acquire(keys, 30.0))
                while len(leases) > 3:
                    leases.pop(0).release()
                context.clock.advance(rng.choice([0.0, 0.1, 6.0]))  # type: ignore[attr-defined]
    broken[:] = [0.0, 0.0]
    give_up_s = time.monotonic() + 30
    while (store.unfinished or manager.dirty_bytes > 3 * SIZE) and time.monotonic() < give_up_s:
        poll()
    assert sorted(ended) == sorted(begun)
    store.close()
    assert not manager.has_dirty
    assert store.poll() == []
    for idx, each in enumerate(drives):
        drives[idx] = DiskTier(tmp_path / str(idx), each.capacity_bytes, context)
    lying = [key for key in names if any(present(each, [key])[0] for each in drives)]
    assert not deleted & set(lying), "deleted, and back"
    for each in drives:
        each.close()


# Any history.


class Counted:
    """Passes everything on to a tier, and counts what it reports as its metrics ought to."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.submitted = 0
        self.reported = 0
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def contains(self, keys: Sequence[Key]) -> list[Lookup]:
        return self.tier.contains(keys)

    def submit(self, job: Job) -> None:
        self.tier.submit(job)
        self.submitted += 1

    def poll(self) -> list[JobResult]:
        results = self.tier.poll()
        self.reported += len(results)
        for job in results:
            if job.direction is not Direction.TOUCH:
                self.counts[f"{job.direction}_bytes", (self.name,)] += job.moved_bytes
                for each in job.results:
                    labels = (self.name, each.outcome.value, each.reason.value)
                    self.counts[f"{job.direction}_chunks", labels] += 1
        return results

    def delete(self, keys: Sequence[Key]) -> int:
        return self.tier.delete(keys)

    def close(self) -> None:
        self.tier.close()


class StoreMachine(RuleBasedStateMachine):
    """A small host tier over a disk tier that has room for all, with faults, against sets of keys.

    Never a wrong byte; nothing is served that was not written or that was deleted; what is safe,
    because the disk has it or the host tier keeps it, can be read; and the counters tell exactly
    what the tiers did.
    """

    mode = WriteMode.THROUGH

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Key] = set()
        self.safe: set[Key] = set()
        self.faults: dict[tuple[str, Direction], list[ChunkResult | None]] = {}
        self.leases: list[Lease] = []
        self.place = Path(tempfile.mkdtemp(prefix="store-machine-"))

    @initialize()
    def open(self) -> None:
        self.context = TierContext(clock=ManualClock())
        self.manager = Manager(
            [None, None], write_mode=self.mode, top_capacity_bytes=self.host_chunks * SIZE
        )
        host = HostTier(self.host_chunks * SIZE, self.context, keeps=self.manager.keeps)
        disk = DiskTier(self.place, 32 * slot_cost_bytes(SIZE), self.context, num_threads=2)
        self.tiers = [Counted(host), Counted(disk)]
        self.store = Store([self.faulty(each) for each in self.tiers], self.context, self.manager)

    host_chunks = 4

    def faulty(self, tier: Counted) -> FaultyTier:
        def next_fault(direction: Direction) -> Callable[[int], ChunkResult | None]:
            plan = self.faults.setdefault((tier.name, direction), [])
            return lambda _: plan.pop(0) if plan else None

        return FaultyTier(
            tier, read_faults=next_fault(Direction.READ), write_faults=next_fault(Direction.WRITE)
        )

    @property
    def may_fail(self) -> bool:
        return any(plan for plan in self.faults.values())

    def is_safe(self, key: Key) -> bool:
        return present(self.tiers[1], [key]) == [True] or self.manager.keeps(fingerprint(key))

    def settle(self) -> None:
        """Poll until nothing changes any more, demotions included."""
        give_up_s = time.monotonic() + 30
        before: object = None
        while True:
            assert self.store.poll() == []
            demoted = self.context.metrics.value("demoted_chunks")
            now = [demoted, self.manager.dirty_bytes, *(each.submitted for each in self.tiers)]
            idle = all(each.submitted == each.reported for each in self.tiers)
            if idle and now == before:
                return
            before = now
            assert time.monotonic() < give_up_s, "something never ends"

    def after(self, may_have_failed: bool) -> None:
        """An operation ended; what faults took along is no longer expected."""
        self.settle()
        if may_have_failed:
            self.safe = {key for key in self.safe if self.is_safe(key)}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.place)

    keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)

    @rule(keys=keys)
    def write(self, keys: list[Key]) -> None:
        may_fail = self.may_fail
        # What the host tier has although it could not be demoted once is not tried again.
        left = {key for key in keys if present(self.tiers[0], [key]) == [True]} - self.safe
        result = write(self.store, keys)
        self.after(may_fail)
        assert may_fail or result.done
        for key, each in zip(keys, result.results, strict=True):
            if each.outcome is Outcome.DONE:
                self.written.add(key)
            if self.is_safe(key):
                self.safe.add(key)
        assert may_fail or self.safe | left >= set(keys)

    @rule(keys=keys)
    def read(self, keys: list[Key]) -> None:
        may_fail = self.may_fail
        expected = present(self.store, keys)
        result = read(self.store, keys)
        self.after(may_fail)
        done = [each.outcome is Outcome.DONE for each in result.results]
        assert all(key in self.written for key, each in zip(keys, done, strict=True) if each)
        assert may_fail or done == expected
        assert [bool(tier) for tier in result.tiers] == done
        assert result.moved_bytes == SIZE * sum(done)

    @rule(keys=keys)
    def touch(self, keys: list[Key]) -> None:
        expected = present(self.store, keys)
        result = wait(self.store, self.store.touch(keys))
        assert [each.outcome is Outcome.DONE for each in result.results] == expected

    @rule(keys=keys)
    def delete(self, keys: list[Key]) -> None:
        before = [
            sum(copies) for copies in zip(*(present(t, keys) for t in self.tiers), strict=True)
        ]
        assert self.store.delete(keys) == sum(before)
        assert present(self.store, keys) == [False] * len(keys)
        self.written -= set(keys)
        self.safe -= set(keys)

    @rule(
        tier=st.sampled_from(["host", "disk"]),
        direction=st.sampled_from([Direction.READ, Direction.WRITE]),
        plan=st.lists(st.sampled_from([None, BAD, BROKEN, REFUSED]), min_size=1, max_size=4),
    )
    def fail(self, tier: str, direction: Direction, plan: list[ChunkResult | None]) -> None:
        self.faults[tier, direction][:] = plan

    @rule()
    def mend(self) -> None:
        for plan in self.faults.values():
            plan.clear()

    @rule(keys=keys)
    def lease(self, keys: list[Key]) -> None:
        self.leases.append(self.store.acquire(keys, 60.0))

    @rule()
    def release(self) -> None:
        while self.leases:
            self.leases.pop().release()

    @rule()
    def restart(self) -> None:
        """Everything that is safe is on the disk then."""
        self.mend()
        self.store.close()
        self.leases.clear()
        self.open()
        self.written = {key for key in self.written if present(self.store, [key]) == [True]}
        assert self.safe <= self.written

    @invariant()
    def lookups_agree(self) -> None:
        if hasattr(self, "store"):
            found = {key for key in KEYS if present(self.store, [key]) == [True]}
            assert self.safe <= found <= self.written
            assert all(self.is_safe(key) for key in self.safe)

    @invariant()
    def counters_tell_what_the_tiers_did(self) -> None:
        if hasattr(self, "store"):
            counted = {
                key: value
                for key, value in self.context.metrics.snapshot().items()
                if key[0].startswith(("read_", "write_"))
            }
            expected = self.tiers[0].counts + self.tiers[1].counts
            assert counted == {key: value for key, value in expected.items() if value}

    @invariant()
    def the_host_tier_is_not_full_of_what_has_no_copy(self) -> None:
        if hasattr(self, "store"):
            assert self.manager.dirty_bytes <= self.host_chunks * SIZE / 2


class BackMachine(StoreMachine):
    """The same under write-back."""

    mode = WriteMode.BACK


SETTINGS = hypothesis_settings(max_examples=20, stateful_step_count=30)
TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = SETTINGS
TestBackMachine = BackMachine.TestCase
TestBackMachine.settings = SETTINGS


# The caller's mistakes.


class Strict(Harness):
    """A store over one guarded tier that opens its breaker at the first bad result."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(num_in_a_row=1, latency_limit_s=1e6)
        self.store = Store([GuardedTier(self.upper, self.breaker, self.context)], self.context)
        assert write(self.store, KEYS[:2]).done

    def check_nothing_begun(self) -> None:
        """Nothing waits to be reported, nobody is overdue, and all goes on as before."""
        assert self.store.unfinished == 0
        self.clock.advance(1000.0)
        assert self.store.poll() == []
        assert self.store.overdue() == []
        assert self.breaker.state is BreakerState.CLOSED
        assert not self.store.degraded
        assert self.context.metrics.value("internal_errors") == 0
        assert self.context.metrics.value("write_chunks") == 2
        assert read(self.store, KEYS[:3]).results == (DONE, DONE, ABSENT)
        self.context.leases.acquire(KEYS[:1], 1.0).release()


@pytest.fixture
def strict() -> Iterator[Strict]:
    harness = Strict()
    yield harness
    harness.store.close()


@pytest.mark.parametrize("key_bytes", [0, 5, 32, 97, 1000])
@pytest.mark.parametrize("first", [False, True])
def test_a_key_of_a_wrong_length_is_refused(strict: Strict, key_bytes: int, first: bool) -> None:
    """Before anything is begun of the chunks beside it; and it is no failure of the tier's."""
    keys = [KEYS[0], Key(bytes(key_bytes))]
    if first:
        keys.reverse()
    chunks = [Chunk(key, buffer_of(SIZE, b"\xee" * SIZE)) for key in keys]
    for call in (
        lambda: strict.store.read(chunks),
        lambda: strict.store.write(chunks),
        lambda: strict.store.touch(keys),
    ):
        with pytest.raises(ValueError, match=f"key_bytes={key_bytes}$"):
            call()
    assert {bytes(chunk.buffer) for chunk in chunks} == {b"\xee" * SIZE}
    strict.check_nothing_begun()


def test_the_shortest_and_the_longest_key(strict: Strict) -> None:
    for key_bytes in (33, 96):
        keys = [Key(bytes(key_bytes))]
        assert write(strict.store, keys).done
        assert read(strict.store, keys).done
        assert wait(strict.store, strict.store.touch(keys)).done


def every_second(size_bytes: int) -> memoryview:
    return memoryview(bytearray(2 * size_bytes))[::2]


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (memoryview(b""), "bytes=0"),
        (memoryview(bytearray(SIZE))[:0], "bytes=0"),
        (every_second(SIZE), "contiguous=False"),
        (memoryview(bytearray(SIZE)).cast("I"), "format=I"),
        (memoryview(bytearray(SIZE)).cast("b"), "format=b"),
        (memoryview(bytearray(SIZE)).cast("c"), "format=c"),
        (memoryview(bytearray(SIZE)).cast("B", [64, SIZE // 64]), "ndim=2"),
    ],
)
def test_a_buffer_that_no_tier_could_use_is_refused(
    strict: Strict, buffer: memoryview, words: str
) -> None:
    """It failed on a tier's thread, which looked like a drive that fails: three of them, and
    nobody asked that drive any more."""
    good = Chunk(KEYS[0], buffer_of(SIZE, b"\xee" * SIZE))
    for chunks in ([good, Chunk(KEYS[1], buffer)], [Chunk(KEYS[1], buffer), good]):
        for call in (strict.store.read, strict.store.write):
            with pytest.raises(ValueError, match=words):
                call(chunks)
    assert bytes(good.buffer) == b"\xee" * SIZE
    strict.check_nothing_begun()


def test_a_buffer_that_cannot_be_written_to_is_refused_for_a_read(strict: Strict) -> None:
    """And is as good as any for a write."""
    good, fixed = Chunk(KEYS[0], buffer_of(SIZE)), Chunk(KEYS[1], memoryview(bytes(SIZE)))
    with pytest.raises(ValueError, match="readonly=True"):
        strict.store.read([good, fixed])
    strict.check_nothing_begun()
    assert wait(strict.store, strict.store.write([fixed])).results[0].reason is Reason.EXISTS


@pytest.mark.parametrize("key", ["k" * 40, bytearray(40), memoryview(bytes(40)), list(range(40))])
def test_a_key_that_is_no_bytes_is_refused(strict: Strict, key: Any) -> None:
    """It was found out when half was done: the job was kept, and never reported."""
    chunks = [Chunk(key, buffer_of(SIZE))]
    for call in (
        lambda: strict.store.read(chunks),
        lambda: strict.store.write(chunks),
        lambda: strict.store.touch([key]),
    ):
        with pytest.raises(TypeError, match="a key is bytes"):
            call()
    strict.check_nothing_begun()


@pytest.mark.parametrize(
    ("end_token", "expires_at_s"), [(-1, 0.0), (1 << 63, 0.0), (0, -1.0), (0, 1e30), (0, math.nan)]
)
def test_numbers_that_no_record_holds_are_refused(
    strict: Strict, end_token: int, expires_at_s: float
) -> None:
    """They failed on a tier's thread, which looked like a drive that fails."""
    chunk = Chunk(KEYS[0], buffer_of(SIZE), end_token, expires_at_s)
    with pytest.raises(ValueError, match=f"end_token={end_token}"):
        strict.store.write([chunk])
    strict.check_nothing_begun()


def test_touch_takes_what_can_be_gone_through_once(strict: Strict) -> None:
    job_id = strict.store.touch(key for key in KEYS[:2])  # type: ignore[arg-type]
    assert len(wait(strict.store, job_id).results) == 2


@pytest.mark.parametrize("deadline_s", [10**400, math.inf])
def test_a_deadline_that_nothing_is_later_than_is_refused(
    strict: Strict, deadline_s: float
) -> None:
    """What is more than a float holds was refused too late, and then at every poll."""
    with pytest.raises(ValueError, match="at most 1e"):
        strict.store.read(chunks_of(KEYS[:2]), deadline_s)
    strict.check_nothing_begun()


@pytest.mark.parametrize("deadline_s", [0, 0.0, -1.0, float("-inf"), float("nan"), None])
def test_a_deadline_that_is_none_is_refused(strict: Strict, deadline_s: float) -> None:
    """One that nothing is ever later than would never be given up."""
    chunks = chunks_of(KEYS[:2])
    for call in (
        lambda: strict.store.read(chunks, deadline_s),
        lambda: strict.store.write(chunks, deadline_s),
        lambda: strict.store.touch(KEYS[:2], deadline_s),
    ):
        with pytest.raises(ValueError, match=f"deadline_s={deadline_s}"):
            call()
    strict.check_nothing_begun()


@pytest.mark.parametrize(("chunk_bytes", "chunk_tokens"), [(0, 16), (SIZE, 0), (-1, 16), (1, -16)])
def test_a_look_ahead_at_chunks_of_nothing_is_refused(
    strict: Strict, chunk_bytes: int, chunk_tokens: int
) -> None:
    """It divided by zero, if the store had anything of the prompt, and only then."""
    for keys in (KEYS[:2], KEYS[4:6], []):
        for rate in (None, 100.0):
            with pytest.raises(ValueError, match=f"chunk_bytes={chunk_bytes} chunk_tokens="):
                strict.store.look_ahead(
                    keys, chunk_bytes=chunk_bytes, chunk_tokens=chunk_tokens,
                    prefill_tokens_per_s=rate,
                )  # fmt: skip
    strict.check_nothing_begun()


# A drive whose budget is spent.


class Worn:
    """A store on a drive of which a budget of ``day_bytes`` may be written a day."""

    def __init__(self, path: Path, day_bytes: int, **settings: str | int) -> None:
        status = os.statvfs(path.parent)
        drive_bytes = status.f_blocks * status.f_frsize
        self.settings = Settings(
            (path,), 64 << 20, min_free_bytes=0, io_threads=1,
            drive_writes_per_day=day_bytes / drive_bytes, **settings,  # type: ignore[arg-type]
        )  # fmt: skip
        self.clock = ManualClock()
        self.next_key = 0
        self.open()

    def open(self) -> None:
        self.context = TierContext(clock=self.clock)
        self.store = Store.open(self.settings, self.context)

    @property
    def pressure(self) -> float:
        return self.store.gauges()["write_pressure", "disk"]

    @property
    def written_bytes(self) -> float:
        return self.store.gauges()["written_bytes", "disk"]

    def pass_time(self, seconds: float) -> None:
        """Time passes, once the drive has ended what it was at."""
        assert self.store.drives[0].drain(30)
        self.clock.advance(seconds)

    def offer(self, count: int) -> int:
        """Write so many new chunks one by one; how many the drive took."""
        taken = 0
        for _ in range(count):
            self.next_key += 1
            self.pass_time(0.2)
            (result,) = write(self.store, [key_of(f"n{self.next_key}")]).results
            assert result in (DONE, NOT_ADMITTED)
            taken += result == DONE
        return taken

    def spend(self) -> None:
        """Offer beginnings of prompts twice each, which are refused last, until nothing is left."""
        results = [DONE]
        while results[-1] == DONE:
            self.next_key += 1
            key = key_of(f"n{self.next_key}")
            results = []
            for _ in range(2):
                self.pass_time(0.2)
                chunk = Chunk(key, buffer_of(SIZE, payload_of(key, SIZE)), end_token=16)
                (result,) = wait(self.store, self.store.write([chunk])).results
                results.append(DONE if result.outcome is Outcome.DONE else result)
            assert results[-1] in (DONE, NOT_ADMITTED)
            assert self.next_key < 10_000, "it never ends"


@pytest.fixture
def worn(tmp_path: Path) -> Iterator[Worn]:
    worn = Worn(tmp_path / "kv", 2 << 20)
    yield worn
    worn.store.close()


def test_what_is_written_is_bounded_by_the_drives_endurance(worn: Worn) -> None:
    """Half of a day's budget is written freely; then less and less is admitted of what was never
    seen before, and as days pass as much again. What is there is served all the time."""
    assert worn.pressure == 0.0
    pressures, taken = [], []
    for _ in range(14):
        taken.append(worn.offer(25))
        pressures.append(worn.pressure)
    assert taken[:4] == [25] * 4, "half of two MiB are 128 records of 8 KiB"
    assert sum(taken[7:]) < 40, "of 175"
    assert sum(taken) * 2 * SIZE < 2 << 20
    steps = itertools.pairwise(pressures)
    assert all(after > before - 0.001 for before, after in steps), "some seconds give back little"
    assert 0.3 < pressures[-1] < 0.55, "from half pressure on nothing new is admitted"
    refused = {"tier": "disk", "reason": "not_admitted"}
    assert worn.context.metrics.value("write_chunks", **refused) == 350 - sum(taken)
    before = worn.written_bytes
    assert read(worn.store, [key_of(f"n{number}") for number in range(1, 21)]).done
    assert worn.written_bytes - before < 4096, "what is read says only that it was used"
    pressures = []
    for _ in range(4):
        worn.pass_time(6 * 3600.0)
        pressures.append(worn.pressure)
    assert pressures == sorted(pressures, reverse=True)
    assert pressures[-1] == 0.0, "after a day all is as at the beginning"
    assert worn.offer(100) == 100


def test_a_budget_that_is_spent_admits_nothing(worn: Worn) -> None:
    """Not even what was offered before, or what stands at the beginning of a prompt."""
    worn.spend()
    assert worn.pressure > 0.99
    assert (2 << 20) - (32 << 10) < worn.written_bytes < (2 << 20) + (32 << 10)
    before = worn.written_bytes
    for _ in range(3):
        assert worn.offer(20) == 0
    again = [key_of(f"n{worn.next_key}")]
    for _ in range(5):
        worn.pass_time(0.2)
        assert write(worn.store, again).results == (NOT_ADMITTED,)
    assert worn.written_bytes == before
    worn.pass_time(3 * 3600.0)
    assert 0.6 < worn.pressure < 0.9, "an eighth of a day's budget"
    worn.spend()
    assert worn.written_bytes < (2 << 20) * 9 / 8 + (64 << 10)
    for days in (1, 2):
        worn.pass_time(86_400.0)
        assert worn.pressure == 0.0
        assert worn.offer(100) == 100, days


def test_a_budget_is_spent_after_a_restart_as_well(worn: Worn) -> None:
    """Or a drive whose engine is started each hour would be worn out."""
    worn.spend()
    pressure, written_bytes = worn.pressure, worn.written_bytes
    wear = worn.store.drives[0].wear
    for _ in range(3):
        worn.store.close()
        worn.open()
        assert worn.pressure >= pressure - 1e-3
        assert written_bytes <= worn.written_bytes <= written_bytes + (64 << 10)
        assert worn.store.drives[0].wear.first_s == wear.first_s
        assert worn.offer(10) == 0
    worn.store.close()
    worn.clock.advance(2 * 86_400.0)
    worn.open()
    assert worn.pressure == 0.0, "days pass while nobody runs, too"
    assert worn.offer(20) == 20


def test_without_a_budget_nothing_is_refused(tmp_path: Path) -> None:
    worn = Worn(tmp_path / "kv", 0)
    assert worn.offer(350) == 350
    assert worn.pressure == 0.0
    worn.store.close()


def test_what_is_demoted_is_bounded_as_well(tmp_path: Path) -> None:
    """Under write-back it is the demotion that writes, and what it may not write is let go."""
    worn = Worn(tmp_path / "kv", 1 << 20, write_mode="back", host_capacity_bytes=8 * SIZE)
    metrics = worn.context.metrics
    give_up_s = time.monotonic() + 120
    for number in range(1, 301):
        assert worn.offer(1) == 1, "the host tier takes all of it"
        while metrics.value("demoted_chunks") < number - 4:  # half of that tier
            assert worn.store.poll() == []
            assert time.monotonic() < give_up_s
    refused = metrics.value("demoted_chunks", reason="not_admitted")
    assert refused > 100
    assert metrics.value("demoted_chunks", outcome="done") == 296 - refused
    assert worn.written_bytes < 1 << 20
    worn.store.close()
