"""What a caller sees of every kind of server that is killed, hangs, comes back empty, or lies.

The rows of docs/FAILURES.md are printed by these tests: `scripts/failures` writes the page.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import (
    Chunk,
    ChunkResult,
    Direction,
    JobResult,
    Lookup,
    Outcome,
    Reason,
)
from stepwell.settings import Settings
from stepwell.store import Store
from stepwell.testing import buffer_of, key_of, payload_of

from .sites import SITES, Site

SIZE = 64 << 10
DEADLINE_S = 1.0
# Of a busy machine, on top of what is promised: nothing here depends on how fast it is.
GRACE_S = 5.0
KEYS = [key_of(idx) for idx in range(16)]


@dataclass
class Caller:
    """An engine's view of a store on a site, and how long it has waited at most."""

    store: Store
    longest_s: float = 0.0
    served: int = 0
    healed_s: float | None = None
    held: list[list[Chunk]] = field(default_factory=list)

    def lookup(self, keys: list[Key]) -> list[Lookup]:
        """As an engine asks: again at every step, and not for ever."""
        began_s = time.monotonic()
        while True:
            call_s = time.monotonic()
            answers = self.store.lookup(keys)
            assert time.monotonic() - call_s < GRACE_S, "a lookup waited"
            waited_s = time.monotonic() - began_s
            if Lookup.UNKNOWN not in answers or waited_s > DEADLINE_S:
                self.longest_s = max(self.longest_s, waited_s)
                return [Lookup.MISS if each is Lookup.UNKNOWN else each for each in answers]
            self.store.poll()
            time.sleep(0.005)

    def read(self, keys: list[Key]) -> JobResult:
        """Read, and check every byte that was served."""
        chunks = [Chunk(key, buffer_of(SIZE)) for key in keys]
        result = self._wait(self.store.read(chunks, DEADLINE_S), chunks, Direction.READ)
        for chunk, each in zip(chunks, result.results, strict=True):
            if each.outcome is Outcome.DONE:
                assert bytes(chunk.buffer) == payload_of(chunk.key, SIZE), "a wrong byte"
                self.served += 1
        return result

    def write(self, keys: list[Key], within_s: float = DEADLINE_S) -> JobResult:
        """Write, and wait."""
        chunks = [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in keys]
        return self._wait(self.store.write(chunks, within_s), chunks, Direction.WRITE)

    def _wait(self, job_id: int, chunks: list[Chunk], direction: Direction) -> JobResult:
        began_s = time.monotonic()
        while True:
            for result in self.store.poll():
                if result.job_id == job_id:
                    self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                    return result
            if job_id in self.store.overdue():
                # A system call does not return. An engine computes, and leaves the buffers alone.
                self.held.append(chunks)
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                given_up = (ChunkResult(Outcome.FAILED, Reason.DEADLINE),) * len(chunks)
                return JobResult(job_id, direction, given_up, 0, 0.0, ("",) * len(chunks))
            assert time.monotonic() - began_s < 60.0, "never reported"
            time.sleep(0.002)

    def until_healed(self, keys: list[Key]) -> None:
        """Go on as an engine does until a write and a read are done."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < 60.0:
            self.lookup(keys)
            if self.write(keys).done and self.read(keys).done:
                self.healed_s = time.monotonic() - began_s
                return
            time.sleep(0.05)
        raise AssertionError("the tier does not heal")


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    site = SITES[request.param](tmp_path)
    try:
        site.start_empty()
        yield site
    finally:
        site.close()


@pytest.fixture
def caller(site: Site) -> Iterator[Caller]:
    store = open_store(site)
    yield Caller(store)
    store.close()


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, caller: Caller) -> Iterator[None]:
    """The test's row of docs/FAILURES.md, where somebody wants them."""
    yield
    where = os.environ.get("STEPWELL_FAILURES")
    if where:
        kind = request.node.callspec.params["site"]
        case = request.node.name.partition("[")[0].removeprefix("test_").replace("_", " ")
        how = [value for name, value in request.node.callspec.params.items() if name == "damage"]
        entry = {
            "kind": kind,
            "case": ": ".join([case, *how]),
            "longest_s": caller.longest_s,
            "served": caller.served,
            "healed_s": caller.healed_s,
        }
        with open(where, "a") as file:
            file.write(json.dumps(entry) + "\n")


def open_store(site: Site) -> Store:
    settings = {"url": site.url, "slow_after": f"{DEADLINE_S:.0f}s", "read_deadline": "1s"}
    return Store.open(Settings.parse(settings))


def within_bounds(caller: Caller) -> None:
    assert caller.longest_s < DEADLINE_S + GRACE_S


def test_killed(site: Site, caller: Caller) -> None:
    caller.write(KEYS)
    site.kill()
    results = [caller.read(KEYS[:4]) for _ in range(6)]
    assert not any(result.done for result in results)
    reasons = {each.reason for result in results for each in result.results}
    # Absent: while the breaker is open no tier is asked, and none has it.
    assert reasons <= {Reason.IO_ERROR, Reason.BREAKER, Reason.DEADLINE, Reason.ABSENT}
    assert caller.lookup(KEYS[:4]) == [Lookup.MISS] * 4
    assert caller.store.why_missed(KEYS[0]) in (Reason.BREAKER, Reason.IO_ERROR)
    assert not caller.write([key_of("new")]).done
    within_bounds(caller)
    site.start()
    caller.until_healed([key_of("after")])


def test_killed_before_it_was_asked(site: Site, caller: Caller) -> None:
    """Nothing is believed yet, so the question itself fails."""
    caller.write(KEYS)
    fresh = Caller(open_store(site))
    try:
        site.kill()
        assert fresh.lookup(KEYS) == [Lookup.MISS] * 16
        assert fresh.store.why_missed(KEYS[0]) in (Reason.IO_ERROR, Reason.BREAKER)
        within_bounds(fresh)
        caller.longest_s = fresh.longest_s
    finally:
        fresh.store.close()


def test_down_when_an_engine_starts(site: Site, caller: Caller) -> None:
    """The engine starts all the same, and uses the server once it is there."""
    site.kill()
    began_s = time.monotonic()
    fresh = Caller(open_store(site))
    try:
        assert time.monotonic() - began_s < 2 * DEADLINE_S + GRACE_S
        assert fresh.lookup(KEYS[:2]) == [Lookup.MISS] * 2
        within_bounds(fresh)
        site.start()
        fresh.until_healed(KEYS[:2])
        caller.longest_s, caller.served = fresh.longest_s, fresh.served
        caller.healed_s = fresh.healed_s
    finally:
        fresh.store.close()


def test_hangs(site: Site, caller: Caller) -> None:
    """It is asked a few times, and then left alone for a while."""
    caller.write(KEYS)
    site.pause()
    waits = []
    for _ in range(8):
        began_s = time.monotonic()
        assert not caller.read(KEYS[:4]).done
        waits.append(time.monotonic() - began_s)
    assert caller.lookup(KEYS) == [Lookup.MISS] * 16
    assert caller.store.why_missed(KEYS[0]) is Reason.BREAKER
    within_bounds(caller)
    # Each of the first few took its deadline; all of them would have taken eight seconds.
    assert sum(waited_s > 0.9 * DEADLINE_S for waited_s in waits) <= 4, "it is left alone"
    site.resume()
    caller.until_healed([key_of("after")])
    assert caller.read(KEYS).done


def test_comes_back_empty(site: Site, caller: Caller) -> None:
    """What is believed to be there is not: a miss, and then it is known."""
    caller.write(KEYS)
    assert caller.lookup(KEYS) == [Lookup.HIT] * 16
    site.kill()
    site.start_empty()
    caller.until_healed([key_of("after")])
    result = caller.read(KEYS)
    assert {each.reason for each in result.results} == {Reason.ABSENT}
    assert caller.lookup(KEYS) == [Lookup.MISS] * 16
    assert caller.write(KEYS).done
    assert caller.read(KEYS).done
    within_bounds(caller)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], Reason]] = {
    "bytes changed": (lambda stored: stored[:-100] + bytes(100), Reason.CHECKSUM),
    "header changed": (lambda stored: b"\xff" + stored[1:], Reason.HEADER),
    "half of it": (lambda stored: stored[: len(stored) // 2], Reason.TRUNCATED),
    "no payload": (lambda stored: stored[:HEADER_BYTES], Reason.TRUNCATED),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_answers_wrongly(site: Site, caller: Caller, damage: str) -> None:
    change, reason = DAMAGE[damage]
    caller.write(KEYS)
    site.change(KEYS[3], change)
    result = caller.read(KEYS)
    assert [each.reason for each in result.results] == [
        reason if idx == 3 else Reason.NONE for idx in range(16)
    ]
    assert caller.lookup([KEYS[3]]) == [Lookup.MISS]
    assert caller.write(KEYS).done
    assert caller.read(KEYS).done
    within_bounds(caller)
