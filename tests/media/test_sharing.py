"""Several stores on one place of every kind: what one wrote the others read, and nothing else."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, make_key
from stepwell.core.types import Chunk, JobResult, Lookup
from stepwell.settings import Settings
from stepwell.store import Store
from stepwell.testing import buffer_of, payload_of
from stepwell.tiers.media.kinds import kind_of
from stepwell.tiers.media.urls import MediumUrl

from .sites import SITES, Site

SIZE = 64 << 10
WITHIN_S = 60.0
MODEL = Identity({"model": "some", "dtype": "float32"}, {"model": "some"})
OTHER_DTYPE = Identity({"model": "some", "dtype": "bfloat16"}, {"model": "some"})


class Engine:
    """An engine's use of a store of its own."""

    def __init__(self, site: Site, identity: Identity = MODEL, **settings: str) -> None:
        patient = {"slow_after": "60s", "read_deadline": "60s", "read_when": "always"}
        self.store = Store.open(Settings.parse({"url": site.url, **patient, **settings}))
        self.root = self.store.use_root(identity)

    def keys(self, count: int) -> list[Key]:
        return [make_key(self.root, b"chunk %d" % idx) for idx in range(count)]

    def lookup(self, keys: list[Key]) -> list[Lookup]:
        give_up_s = time.monotonic() + WITHIN_S
        while Lookup.UNKNOWN in (answers := self.store.lookup(keys)):
            assert time.monotonic() < give_up_s, "no answer"
            self.store.poll()
            time.sleep(0.005)
        return answers

    def write(self, keys: list[Key]) -> JobResult:
        chunks = [Chunk(key, buffer_of(SIZE, payload_of(key, SIZE))) for key in keys]
        return self.wait(self.store.write(chunks, WITHIN_S))[0]

    def read(self, keys: list[Key]) -> JobResult:
        chunks = [Chunk(key, buffer_of(SIZE)) for key in keys]
        (result,) = self.wait(self.store.read(chunks, WITHIN_S))
        for chunk in chunks if result.done else ():
            assert bytes(chunk.buffer) == payload_of(chunk.key, SIZE)
        return result

    def wait(self, *job_ids: int) -> list[JobResult]:
        found: dict[int, JobResult] = {}
        give_up_s = time.monotonic() + WITHIN_S
        while len(found) < len(job_ids):
            found |= {result.job_id: result for result in self.store.poll()}
            assert time.monotonic() < give_up_s, "never reported"
            time.sleep(0.002)
        return [found[job_id] for job_id in job_ids]

    def count(self, counter: str, tier: str) -> int:
        return self.store.context.metrics.value(counter, tier=tier)

    @contextlib.contextmanager
    def reads_held(self) -> Iterator[None]:
        """Within it no read of the shared tier comes to its medium."""
        tier: Any = self.store.tiers[-1]
        medium, held = tier.tier.medium, threading.Event()
        real = medium.read

        def wait(*args: Any) -> Any:
            assert held.wait(WITHIN_S)
            return real(*args)

        medium.read = wait
        try:
            yield
        finally:
            held.set()
            medium.read = real

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    site = SITES[request.param](tmp_path)
    try:
        site.start_empty()
        yield site
    finally:
        site.close()


@pytest.fixture
def kind(site: Site) -> str:
    """The name of the tier."""
    return kind_of(MediumUrl.parse(site.url)).name


def test_what_one_wrote_the_other_reads_at_once(kind: str, site: Site) -> None:
    """With nothing to agree on but the model; and one of another dtype finds nothing."""
    with Engine(site) as one, Engine(site) as two, Engine(site, OTHER_DTYPE) as third:
        keys = one.keys(8)
        assert one.write(keys).done
        assert two.lookup(keys) == [Lookup.HIT] * 8
        result = two.read(keys)
        assert result.done
        assert set(result.tiers) == {kind}
        assert third.lookup(third.keys(8)) == [Lookup.MISS] * 8
        assert not any(each.reason == "exists" for each in third.write(third.keys(2)).results)
        assert third.read(third.keys(2)).done


def test_the_restart_of_either_loses_nothing(site: Site) -> None:
    with Engine(site) as one:
        keys = one.keys(8)
        with Engine(site) as two:
            assert one.write(keys[:4]).done
            assert two.write(keys[4:]).done
        with Engine(site) as again:
            assert again.lookup(keys) == [Lookup.HIT] * 8
            assert again.read(keys).done
        assert one.read(keys).done
    with Engine(site) as last:
        assert last.read(keys).done


def test_a_hot_chunk_is_fetched_once_for_all(kind: str, site: Site) -> None:
    """Eight requests at once share one read, and the host tier has it from then on."""
    with Engine(site) as one:
        keys = one.keys(4)
        assert one.write(keys).done
    with Engine(site, host_capacity="64MiB") as two:
        assert two.lookup(keys) == [Lookup.HIT] * 4
        requests = [[Chunk(key, buffer_of(SIZE)) for key in keys] for _ in range(8)]
        with two.reads_held():  # one that ended before all had asked would be read again
            job_ids = [two.store.read(chunks, WITHIN_S) for chunks in requests]
        assert all(result.done for result in two.wait(*job_ids))
        for chunks in requests:
            assert [bytes(each.buffer) for each in chunks] == [payload_of(k, SIZE) for k in keys]
        served = two.count("read_chunks", kind)
        assert served - two.count("joined_reads", kind) == 4
        assert set(two.read(keys).tiers) == {"host"}
        assert two.count("read_chunks", kind) == served
