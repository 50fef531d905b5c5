"""A process that writes, reads, deletes and evicts as fast as it can until somebody kills it.

It says what it was told, once it was told, at the end of a file; see `test_disk_crash`.
"""

import os
import random
import sys
from pathlib import Path

from stepwell.core.keys import Key
from stepwell.core.types import Chunk, Direction, Outcome
from stepwell.testing import Driver, buffer_of, key_of, payload_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier, slot_cost_bytes

SIZES = (5_000, 60_000, 200_000)
NUM_KEYS = 90
NUM_PINNED = 30
"""The first keys are leased all the time: they never leave to make room."""
CAPACITY_BYTES = sum(NUM_PINNED * slot_cost_bytes(size) for size in SIZES)
MAX_JOBS = 4


def size_of(idx: int) -> int:
    return SIZES[idx // 3 % 3]


def keys() -> list[Key]:
    return [key_of(idx, f"root {idx % 2}") for idx in range(NUM_KEYS)]


class Killed:
    """The process until its end."""

    def __init__(self, path: Path, log: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.keys = keys()
        context = TierContext()
        context.leases.acquire(self.keys[:NUM_PINNED], 1e9)
        tier = DiskTier(path, CAPACITY_BYTES, context, num_threads=4)
        self.driver = Driver(tier)
        self.jobs: list[tuple[int, list[int], list[Chunk]]] = []

    def say(self, words: list[str]) -> None:
        os.write(self.log_fd, "".join(f"{word}\n" for word in words).encode())

    def live(self) -> None:
        while True:
            # No chunk is in two jobs at once, so that what is said of it is certain.
            busy = {idx for _, idxs, _ in self.jobs for idx in idxs}
            begin = self.rng.randrange(NUM_KEYS)
            prefix = [(begin + idx) % NUM_KEYS for idx in range(self.rng.randrange(1, 9))]
            prefix = [idx for idx in prefix if idx not in busy]
            action = self.rng.random()
            if action < 0.1:
                self.say([f"- {idx}" for idx in prefix])
                self.driver.tier.delete([self.keys[idx] for idx in prefix])
                if not self.jobs and self.driver.tier.drain(30):  # type: ignore[attr-defined]
                    self.say([f"= {idx}" for idx in prefix])
            elif prefix:
                direction = Direction.WRITE if action < 0.6 else Direction.READ
                if direction is Direction.WRITE:
                    self.say([f"? {idx}" for idx in prefix])
                chunks = [self.chunk(idx, direction) for idx in prefix]
                self.jobs.append((self.driver.submit(direction, chunks), prefix, chunks))
            while len(self.jobs) > self.rng.randrange(MAX_JOBS):
                self.end(*self.jobs.pop(0))

    def chunk(self, idx: int, direction: Direction) -> Chunk:
        content = payload_of(self.keys[idx], size_of(idx)) if direction is Direction.WRITE else b""
        return Chunk(self.keys[idx], buffer_of(size_of(idx), content))

    def end(self, job: int, idxs: list[int], chunks: list[Chunk]) -> None:
        result = self.driver.wait(job)
        done = [r.outcome is Outcome.DONE for r in result.results]
        if result.direction is Direction.WRITE:
            self.say([f"+ {idx}" for idx, is_done in zip(idxs, done, strict=True) if is_done])
        for idx, is_done, chunk in zip(idxs, done, chunks, strict=True):
            if is_done and bytes(chunk.buffer) != payload_of(chunk.key, size_of(idx)):
                self.say([f"! {idx}"])


if __name__ == "__main__":
    killed = Killed(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write("open\n")
    sys.stdout.flush()
    killed.live()
