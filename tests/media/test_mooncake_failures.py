"""What only Mooncake can do to an engine: its master and its nodes fail one without the other.

Rows of docs/FAILURES.md, as in test_failures.py.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.types import Lookup, Outcome, Reason
from stepwell.testing import key_of
from stepwell.tiers.media.records import name_of

from .sites import MooncakeSite
from .test_failures import (
    DEADLINE_S,
    GRACE_S,
    KEYS,
    LONG_S,
    MOST_ASKED,
    SIZE,
    Caller,
    caller,
    open_store,
    row,
    within_bounds,
)
from .test_fs import until

__all__ = ["caller", "row"]

NEW = [key_of("after")]
OPTIONS: dict[str, dict[str, Any]] = {
    "test_node_killed_that_is_still_believed_in": {"ttl_s": 15},
    "test_one_node_of_two_killed": {"nodes": 2, "ttl_s": 15},
    "test_pool_full": {"node_bytes": 32 << 20},
    "test_fewer_replicas_than_asked_for": {"parameters": "?replicas=2"},
}


@pytest.fixture(params=["mooncake"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MooncakeSite]:
    site = MooncakeSite(tmp_path, **OPTIONS.get(request.node.originalname, {}))
    try:
        site.start_empty()
        yield site
    finally:
        site.close()


def believed_in(site: MooncakeSite) -> list[int]:
    """What the master says of every key."""
    client = site.pool.client()
    try:
        names = ["/".join(("stepwell", *name_of(key))) for key in KEYS]
        return list(client.batch_is_exist(names))
    finally:
        client.close()


def test_node_killed_that_is_still_believed_in(site: MooncakeSite, caller: Caller) -> None:
    """The master says for a while that everything is there."""
    caller.prepare()
    site.pool.nodes[0].kill()
    assert believed_in(site) == [1] * 16
    for _ in range(6):
        result = caller.read(KEYS[:4])
        assert not any(each.outcome is Outcome.DONE for each in result.results)
    within_bounds(caller)
    site.pool.nodes[0].start()
    caller.until_healed(NEW)
    until(lambda: believed_in(site) == [0] * 16)
    caller.until_gone(KEYS)
    caller.until_written_anew(KEYS)
    within_bounds(caller)


def test_one_node_of_two_killed(site: MooncakeSite, caller: Caller) -> None:
    """What the other has is served again as soon as the dead one is forgotten."""
    caller.prepare()
    site.pool.nodes[0].kill()
    for _ in range(4):
        caller.read(KEYS)
    within_bounds(caller)
    until(lambda: 0 in believed_in(site))
    caller.until_healed(NEW)
    there = [key for key, here in zip(KEYS, believed_in(site), strict=True) if here]
    if there:
        caller.until_read(there)
    gone = [key for key in KEYS if key not in there]
    caller.until_gone(gone)
    caller.until_written_anew(KEYS)
    within_bounds(caller)


def test_node_stopped(site: MooncakeSite, caller: Caller) -> None:
    """Its transfers hang, while the master answers."""
    caller.prepare()
    site.pool.nodes[0].pause()
    assert caller.num_asked() <= MOST_ASKED
    within_bounds(caller)
    site.pool.nodes[0].resume()
    caller.until_healed(NEW)
    caller.until_read(KEYS)


def test_master_stopped(site: MooncakeSite, caller: Caller) -> None:
    """Every call of the library hangs until its patience ends."""
    caller.prepare()
    site.pool.master.pause()
    for _ in range(8):
        assert not caller.read(KEYS[:4]).done
    assert not caller.write(NEW).done
    within_bounds(caller)
    site.pool.master.resume()
    caller.until_healed(NEW)
    caller.until_read(KEYS)


def test_master_stopped_before_it_was_asked(site: MooncakeSite, caller: Caller) -> None:
    """There is no client yet: it is not set up while the master says nothing."""
    site.pool.master.pause()
    began_s = time.monotonic()
    fresh = Caller(open_store(site))
    try:
        assert time.monotonic() - began_s < 2 * DEADLINE_S + GRACE_S
        assert fresh.lookup(KEYS) == [Lookup.MISS] * 16
        within_bounds(fresh)
        site.pool.master.resume()
        fresh.until_healed(NEW)
        caller.longest_s, caller.served = fresh.longest_s, fresh.served
        caller.healed_s = fresh.healed_s
    finally:
        fresh.store.close()


def test_master_restarted_which_forgets_all_keys(site: MooncakeSite, caller: Caller) -> None:
    """The nodes have the bytes, and nobody knows where."""
    caller.prepare()
    assert caller.lookup(KEYS) == [Lookup.HIT] * 16
    site.pool.master.kill()
    for _ in range(5):
        assert not caller.read(KEYS[:4]).done
    within_bounds(caller)
    site.pool.master.start()
    caller.until_healed(NEW)
    caller.until_gone(KEYS)
    caller.until_written_anew(KEYS)
    within_bounds(caller)


def test_pool_full(site: MooncakeSite, caller: Caller) -> None:
    """Of pinned objects, which never leave: writes are refused, and reads go on.

    Writes that waited for room took longer than the breaker's patience, and reads were refused.
    """
    from mooncake.store import ReplicateConfig

    caller.prepare()
    client = site.pool.client()
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    for key in KEYS:  # so that none of them makes room for what follows
        name = "/".join(("stepwell", *name_of(key)))
        stored = client.get(name)
        assert client.remove(name, True) == 0
        assert client.put(name, stored, pinned) == 0
    for size in (1 << 20, SIZE, 4096):
        count = 0
        while client.put(f"pinned{size}-{count}", bytes(size), pinned) == 0:
            count += 1
    refused = {(Outcome.FULL, Reason.CAPACITY), (Outcome.FULL, Reason.DEADLINE)}
    for attempt in range(4):
        new = [key_of(f"new{attempt}-{idx}") for idx in range(4)]
        result = caller.write(new, within_s=LONG_S)  # as long as a write has if nobody says else
        assert {(each.outcome, each.reason) for each in result.results} <= refused
    caller.until_read(KEYS)  # it is full, not broken
    within_bounds(caller)
    assert client.remove_by_regex("^pinned", True) > 0
    client.close()
    caller.until_healed(NEW)


def test_fewer_replicas_than_asked_for(site: MooncakeSite, caller: Caller) -> None:
    """One node cannot keep two: the record is kept once, and that is said."""
    caller.until_written_anew(KEYS)
    within_bounds(caller)
