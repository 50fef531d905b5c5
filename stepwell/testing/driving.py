"""Keys, payloads, and a driver that runs a tier's jobs and watches that each is reported once."""

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from stepwell.core.keys import Key, Root, make_key
from stepwell.core.memory import aligned_memory
from stepwell.core.types import Chunk, ChunkResult, Direction, Job, JobResult, Lookup
from stepwell.tiers.base import Tier

__all__ = ["TIMEOUT_S", "Driver", "buffer_of", "key_of", "payload_of"]

TIMEOUT_S = 30.0
"""How long a job may take before a test gives it up; far longer than any should."""


def key_of(name: object, root: str = "root") -> Key:
    """A full key, the same for the same names."""
    return make_key(
        Root(hashlib.sha256(root.encode()).digest()), hashlib.sha256(str(name).encode()).digest()
    )


def payload_of(key: Key, length: int) -> bytes:
    """Bytes that are the same for the same key and length, and different otherwise."""
    return random.Random(key + length.to_bytes(8, "little")).randbytes(length)


def buffer_of(length: int, content: bytes = b"", offset: int = 0) -> memoryview:
    """A writable buffer, ``offset`` bytes into a memory page: ``content``, then zeros."""
    view = aligned_memory(max(length + offset, 1))[offset : offset + length]
    view[: len(content)] = content
    return view


class Driver:
    """Submits jobs to a tier and collects what `poll` reports.

    Args:
        tier: driven by nobody else.
        payload_bytes: the usual length of a payload.
    """

    def __init__(self, tier: Tier, payload_bytes: int = 4096) -> None:
        self.tier = tier
        self.payload_bytes = payload_bytes
        self._next_id = 0
        self._outstanding: set[int] = set()
        self._reported: dict[int, JobResult] = {}

    @property
    def outstanding(self) -> int:
        """Jobs that were submitted and not yet reported."""
        return len(self._outstanding)

    def submit(self, direction: Direction, chunks: Sequence[Chunk], deadline_s: float = 1e6) -> int:
        """Begin a job; returns its id."""
        job_id = self._next_id
        self._next_id += 1
        self.tier.submit(Job(job_id, direction, chunks, deadline_s))
        self._outstanding.add(job_id)
        return job_id

    def collect(self) -> None:
        """Poll once; checks that every report is of a job that waits for one."""
        for result in self.tier.poll():
            assert result.job_id in self._outstanding, f"reported twice or never begun: {result}"
            self._outstanding.discard(result.job_id)
            self._reported[result.job_id] = result

    def wait(self, job_id: int, timeout_s: float = TIMEOUT_S) -> JobResult:
        """Poll until a job is reported."""
        give_up_s = time.monotonic() + timeout_s
        while job_id not in self._reported:
            self.collect()
            if job_id not in self._reported:
                assert time.monotonic() < give_up_s, f"never reported: job_id={job_id}"
                time.sleep(0.00002)
        return self._reported.pop(job_id)

    def write_chunks(self, payloads: Mapping[Key, bytes]) -> list[Chunk]:
        """Chunks for a write, each with an aligned buffer of its own."""
        return [Chunk(key, buffer_of(len(data), data)) for key, data in payloads.items()]

    def write(
        self, keys: Iterable[Key], payload_bytes: int | None = None, deadline_s: float = 1e6
    ) -> tuple[ChunkResult, ...]:
        """Write a prefix of `payload_of` payloads and wait."""
        length = payload_bytes or self.payload_bytes
        chunks = self.write_chunks({key: payload_of(key, length) for key in keys})
        return self.wait(self.submit(Direction.WRITE, chunks, deadline_s)).results

    def read(
        self, keys: Iterable[Key], payload_bytes: int | None = None, deadline_s: float = 1e6
    ) -> tuple[JobResult, list[bytes]]:
        """Read a prefix and wait; returns the result and what the buffers hold."""
        length = payload_bytes or self.payload_bytes
        chunks = [Chunk(key, buffer_of(length)) for key in keys]
        result = self.wait(self.submit(Direction.READ, chunks, deadline_s))
        return result, [bytes(chunk.buffer) for chunk in chunks]

    def touch(self, keys: Iterable[Key]) -> tuple[ChunkResult, ...]:
        """Touch a prefix and wait."""
        chunks = [Chunk(key, memoryview(b"")) for key in keys]
        return self.wait(self.submit(Direction.TOUCH, chunks)).results

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look again and again until ``condition`` holds; ``what`` names it should it never."""
        give_up_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < give_up_s, f"never came: {what}"
            time.sleep(0.0005)

    def lookup(self, keys: Iterable[Key]) -> list[Lookup]:
        """What `contains` says, asked again until it knows."""
        wanted = list(keys)
        give_up_s = time.monotonic() + TIMEOUT_S
        while Lookup.UNKNOWN in (answers := self.tier.contains(wanted)):
            assert time.monotonic() < give_up_s, "never found out"
            time.sleep(0.0002)
        return answers

    def present(self, keys: Iterable[Key]) -> list[bool]:
        """For each key whether `lookup` says HIT."""
        return [answer is Lookup.HIT for answer in self.lookup(keys)]
