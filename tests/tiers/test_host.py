"""The host tier: the contract, and what is its own."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.testing import BoundedTierContract, key_of, payload_of, tier_machine
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import host
from stepwell.tiers.base import TierContext
from stepwell.tiers.host import HostTier

DONE = ChunkResult(Outcome.DONE)


class TestHostTier(BoundedTierContract):
    """Chunks in DRAM; they do not outlive the process."""

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> HostTier:
        return HostTier(capacity_bytes, context, inflight_writes_bytes=inflight_writes_bytes)

    def used_bytes(self, tier: HostTier) -> int:
        return tier.used_bytes

    def size_of(self, payload_bytes: int) -> int:
        return payload_bytes

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        with stalled_calls(host, "payload_checksum"):
            yield

    def test_bytes_that_changed_in_memory_are_a_miss_and_can_be_stored_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """DRAM is checked like everything below the primary."""
        driver = self.open()
        keys = [key_of("good"), key_of("bad")]
        real = host.payload_checksum
        bad = real(payload_of(keys[1], 4096))
        with monkeypatch.context() as patch:
            # What the tier remembers of "bad" is the sum of other bytes than those it holds.
            patch.setattr(
                host, "payload_checksum", lambda p: bytes(16) if real(p) == bad else real(p)
            )
            driver.write(keys)
        result, _ = driver.read(keys)
        assert result.results == (DONE, ChunkResult(Outcome.MISS, Reason.CHECKSUM))
        assert driver.present(keys) == [True, False]
        metrics = self.context.metrics
        assert metrics.value("quarantined_chunks", tier="host", reason="checksum") == 1
        assert metrics.value("read_chunks", tier="host", reason="checksum") == 1
        assert driver.tier.used_bytes == 4096
        assert driver.write(keys[1:]) == (DONE,)
        assert driver.read(keys)[0].done

    def test_a_write_without_memory_leaves_nothing_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A write that failed between its reservation and its end kept its room for ever, and
        the chunk was PENDING, so that nobody could write it again."""
        driver = self.open()
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", _no_memory)
            (result,) = driver.write([key_of("a")])
        assert result == ChunkResult(Outcome.FAILED, Reason.INTERNAL)
        assert driver.tier.used_bytes == 0
        assert driver.write([key_of("a")]) == (DONE,)


def _no_memory(*_: object) -> None:
    raise MemoryError


TestHostMachine = tier_machine(lambda context, place: HostTier(12 * 5000, context)).TestCase
