"""The disk tier: the contract, a state machine, and the same through the page cache."""

import contextlib
from collections.abc import Iterator

import pytest

from stepwell.testing import BoundedTierContract, tier_machine
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import blockio, drive
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier, slot_cost_bytes


class TestDiskTier(BoundedTierContract):
    """Slots in extents, found again after a restart."""

    persistent = True

    def make_tier(
        self, context: TierContext, capacity_bytes: int, *, inflight_writes_bytes: int = 1 << 30
    ) -> DiskTier:
        return DiskTier(
            self.place / "kv", capacity_bytes, context, inflight_writes_bytes=inflight_writes_bytes
        )

    def used_bytes(self, tier: DiskTier) -> int:
        return tier.used_bytes

    def size_of(self, payload_bytes: int) -> int:
        return slot_cost_bytes(payload_bytes)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        with stalled_calls(blockio, "write_run", "read_run"):
            yield


TestDiskMachine = tier_machine(
    lambda context, place: DiskTier(place, 24 * slot_cost_bytes(5000), context), persistent=True
).TestCase


class TestDiskTierThroughThePageCache(TestDiskTier):
    """The same where the file system knows no O_DIRECT."""

    @pytest.fixture(autouse=True)
    def _no_direct_io(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drive, "probe_direct", lambda _: False)
