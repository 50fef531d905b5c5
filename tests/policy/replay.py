"""Caches without contents, driven by traces of blocks, and a small trace of our own."""

import random
from collections.abc import Container, Iterable, Sequence

from stepwell.policy.eviction import EvictionPolicy

from .slow import SlowPolicy


class Cache:
    """Which block is in which row of a full or filling cache."""

    def __init__(self, policy: EvictionPolicy | SlowPolicy, capacity: int) -> None:
        self.policy = policy
        self.row_of: dict[int, int] = {}
        self._block_at = [-1] * capacity

    def take_row(self, block: int, held: Container[int] = ()) -> int:
        """A row for a new block: unused, or that of the policy's victim."""
        row = len(self.row_of)
        if row == len(self._block_at):
            victim = self.policy.evict(held.__contains__)
            assert victim is not None
            row = victim
            del self.row_of[self._block_at[row]]
        self.row_of[block] = row
        self._block_at[row] = block
        return row


def count_hits(
    policy: EvictionPolicy | SlowPolicy, capacity: int, requests: Iterable[Sequence[int]]
) -> int:
    """Blocks by themselves, from head to tail: a hit touches, a miss inserts."""
    cache = Cache(policy, capacity)
    hits = 0
    for request in requests:
        for block in request:
            row = cache.row_of.get(block)
            if row is not None:
                hits += 1
                policy.touch((row,))
            else:
                policy.insert((cache.take_row(block),), (block,))
    return hits


def count_hits_by_prefix(
    policy: EvictionPolicy | SlowPolicy, capacity: int, requests: Iterable[Sequence[int]]
) -> tuple[int, int]:
    """Requests as a store sees them: what is there is held, the rest inserted, then the use told.

    In this order the head of a prefix is more recent than its end, and each use is told once. A
    request fits in the cache.

    Returns:
        Hits, and those of them before the first miss of their request.
    """
    cache = Cache(policy, capacity)
    hits = usable_hits = 0
    for request in requests:
        there = [block in cache.row_of for block in request]
        usable_hits += there.index(False) if False in there else len(there)
        in_use = [cache.row_of[block] for block in request if block in cache.row_of]
        hits += len(in_use)
        held = set(in_use)
        missing = [block for block in request if block not in cache.row_of]
        policy.insert([cache.take_row(block, held) for block in missing], missing)
        policy.touch(in_use)
    return hits, usable_hits


def agents_and_strangers(seed: int, num_requests: int) -> list[list[int]]:
    """Sessions of three agents that grow by a block or two per turn, and others that never return.

    A session begins with four blocks of its agent, and ends when six younger ones have begun.
    Only `random.Random.random` is used, whose numbers Python promises to keep.
    """
    rng = random.Random(seed)
    next_block = 100
    sessions: list[list[int]] = []
    requests = []
    for _ in range(num_requests):
        if rng.random() < 0.3:
            length = 1 + int(rng.random() * 8)
            requests.append(list(range(next_block, next_block + length)))
            next_block += length
            continue
        if len(sessions) < 6 or rng.random() < 0.1:
            agent = int(rng.random() * 3)
            sessions = [*sessions[-5:], [agent * 10 + position for position in range(4)]]
        session = sessions[int(rng.random() * len(sessions))]
        for _ in range(1 + int(rng.random() * 2)):
            session.append(next_block)
            next_block += 1
        requests.append(list(session))
    return requests
