"""A disk tier in a directory of its own, and what lies in it."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.clock import ManualClock
from stepwell.core.keys import Key
from stepwell.core.record import record_bytes
from stepwell.testing import Driver
from stepwell.tiers.base import TierContext
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.disk import DiskTier

PAYLOAD_BYTES = 8192


class DiskPlace:
    """A directory, the tier that is open in it, and a look at its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.context = TierContext(clock=self.clock)
        self.tier: DiskTier | None = None

    def open(
        self, num_chunks: int = 64, *, payload_bytes: int = PAYLOAD_BYTES, **settings: Any
    ) -> Driver:
        self.close()
        self.context = TierContext(clock=self.clock)
        capacity_bytes = settings.pop("capacity_bytes", num_chunks * record_bytes(payload_bytes))
        settings.setdefault("num_threads", 2)
        self.tier = DiskTier(self.path, capacity_bytes, self.context, **settings)
        return Driver(self.tier, payload_bytes)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def record(self, key: Key) -> Path:
        return Path(StoreDirectory(self.path).record_path(key))

    def files(self, *below: str) -> list[Path]:
        """Every file, link and pipe below one of these directories of the store."""
        return [
            Path(base, name)
            for top in below or ("roots", "partial", "quarantine")
            for base, _, names in os.walk(self.path / top)
            for name in names
            if name != "root.json"
        ]

    def lying_bytes(self) -> int:
        """What lies on the medium and must be counted: records, quarantine, partial files."""
        return sum(path.lstat().st_size for path in self.files())

    def reason(self, counter: str, reason: str) -> int:
        return self.context.metrics.value(counter, tier="disk", reason=reason)

    def check_books(self) -> None:
        """The tier counts what lies there, and nothing half-written is left."""
        assert self.tier is not None
        assert self.tier.drain(30)
        assert self.tier.used_bytes == self.lying_bytes()
        assert self.files("partial") == []


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where the machine has one, for tests of many thousand calls."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="stepwell-test-", dir=memory) as name:
        yield Path(name)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[DiskPlace]:
    place = DiskPlace(tmp_path / "kv")
    yield place
    place.close()
