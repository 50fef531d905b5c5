"""The disk tier: the contract, opening, and what is its own."""

import contextlib
from collections.abc import Iterator

import pytest

from stepwell.core.record import record_bytes
from stepwell.testing import TierContract, tier_machine
from stepwell.tiers import disk
from stepwell.tiers.base import TierContext
from stepwell.tiers.disk import DiskTier

from .stalling import stalled_calls


class TestDiskTier(TierContract):
    """One file per record, found again after a restart."""

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
        return record_bytes(payload_bytes)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        with stalled_calls(disk, "write_record", "read_record"):
            yield


TestDiskMachine = tier_machine(
    lambda context, place: DiskTier(place, 12 * record_bytes(5000), context), persistent=True
).TestCase


class TestDiskTierThroughThePageCache(TestDiskTier):
    """The same where the file system knows no O_DIRECT."""

    @pytest.fixture(autouse=True)
    def _no_direct_io(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "probe_direct", lambda _: False)
