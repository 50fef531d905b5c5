"""A disk tier in a directory of its own, and what lies in it."""

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepwell.clock import ManualClock
from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES, Header
from stepwell.errors import DataError
from stepwell.testing import Driver
from stepwell.tiers.base import TierContext
from stepwell.tiers.directory import FoundExtent
from stepwell.tiers.disk import DiskTier, slot_cost_bytes
from stepwell.tiers.ledger import Ledger
from stepwell.tiers.slots import BOOKKEEPING_BYTES, place_of
from stepwell.tiers.table import State

PAYLOAD_BYTES = 8192


@dataclass(frozen=True)
class Slot:
    """One slot of an extent, looked at and changed behind the tier's back."""

    path: Path
    offset: int
    slot_bytes: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.slot_bytes)

    def write(self, content: bytes, at: int = 0) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.offset + at)
            file.write(content)

    def flip(self, at: int, bit: int = 0) -> None:
        self.write(bytes([self.read()[at] ^ 1 << bit]), at)


class DiskPlace:
    """A directory, the tier that is open in it, and a look at its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.context = TierContext(clock=self.clock)
        self.capacity_bytes = 0
        self.tier: DiskTier | None = None

    def open(
        self, num_chunks: int = 64, *, payload_bytes: int = PAYLOAD_BYTES, **settings: Any
    ) -> Driver:
        """Close, and open anew with room for so many chunks, or ``capacity_bytes``."""
        self.close()
        self.context = TierContext(clock=self.clock)
        default_bytes = num_chunks * slot_cost_bytes(payload_bytes)
        self.capacity_bytes = settings.pop("capacity_bytes", default_bytes)
        settings.setdefault("num_threads", 2)
        self.tier = DiskTier(self.path, self.capacity_bytes, self.context, **settings)
        return Driver(self.tier, payload_bytes)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    def extents(self) -> list[FoundExtent]:
        """The extents that lie there, by their names; asked of the real system."""
        found = []
        for path in sorted((self.path / "extents").glob("*.kv")):
            number, _, slot_bytes = path.stem.partition("-")
            if path.is_file() and not path.is_symlink() and slot_bytes.isdigit():
                size_bytes = path.stat().st_size
                found.append(FoundExtent(int(number), int(slot_bytes), size_bytes, str(path)))
        return found

    def slots(self) -> Iterator[tuple[Slot, Header]]:
        """Every slot whose header is whole, the space given back included."""
        for extent in self.extents():
            for offset in range(0, extent.size_bytes, extent.slot_bytes):
                slot = Slot(Path(extent.path), offset, extent.slot_bytes)
                try:
                    yield slot, Header.unpack(slot.read()[:HEADER_BYTES])
                except DataError:
                    continue

    def slot_of(self, key: Key) -> Slot:
        """Where a chunk lies that lies in one place."""
        (slot,) = [slot for slot, header in self.slots() if header.key == key]
        return slot

    def files(self) -> list[Path]:
        """Every file, link and pipe below the store's directory."""
        return [Path(base, name) for base, _, names in os.walk(self.path) for name in names]

    def lying_bytes(self) -> int:
        """What all of it takes."""
        total = 0
        for path in self.files():
            try:
                total += path.lstat().st_size
            except OSError:
                continue
        return total

    def reason(self, counter: str, reason: str) -> int:
        return self.context.metrics.value(counter, tier="disk", reason=reason)

    def check_books(self, *, exact_sizes: bool = True) -> None:
        """Nothing is under way: the books agree with themselves and with what lies there.

        Args:
            exact_sizes: False where extents were cut or lengthened by hand.
        """
        assert self.tier is not None
        assert self.tier.drain(30)
        # What is left to do after a piece of work is waited for by nobody.
        give_up_s = time.monotonic() + 10
        while True:
            try:
                self._check_books(exact_sizes)
                return
            except (AssertionError, RuntimeError):
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.01)

    def _check_books(self, exact_sizes: bool) -> None:
        assert self.tier is not None
        ledger = self.tier._ledger
        check_slots(ledger)
        found = {extent.extent_id: extent for extent in self.extents()}
        extents = ledger._space.extents
        assert {n: e.slot_bytes for n, e in found.items()} == {
            n: e.slot_bytes for n, e in extents.items()
        }
        if exact_sizes:
            sizes = {n: e.num_slots * e.slot_bytes for n, e in extents.items()}
            assert {n: e.size_bytes for n, e in found.items()} == sizes
        assert len(found) == len(self.extents())
        assert self.tier.used_bytes <= self.tier.allocated_bytes <= self.capacity_bytes
        assert os.listdir(self.path / "partial") == []
        lying = sum(extent.size_bytes for extent in found.values())
        lying += self.journal.stat().st_size if self.journal.is_file() else 0
        assert lying <= self.capacity_bytes or not found


def remove_at_once(path: Path) -> None:
    """Remove a file or directory in one step, whatever is being made in it meanwhile."""
    aside = Path(tempfile.mkdtemp(dir=path.parents[1], prefix="removed-"))
    path.rename(aside / "it")
    shutil.rmtree(aside)


def check_slots(ledger: Ledger, *, settled: bool = True) -> None:
    """Every slot is free, set aside, bad, or one row's: none twice, none lost; the sums agree.

    Args:
        settled: nothing is being written, read or removed.
    """
    table, space = ledger._table, ledger._space
    every, owners, used_bytes, costs = [], Counter[int](), 0, {}
    for extent in space.extents.values():
        places = range(place_of(extent.extent_id, 0), place_of(extent.extent_id, extent.num_slots))
        every += places
        costs.update(dict.fromkeys(places, extent.slot_bytes + BOOKKEEPING_BYTES))
        runs = sorted(extent.free_runs())
        owners.update(places[idx] for first, length in runs for idx in range(first, first + length))
        assert extent.num_free == sum(length for _, length in runs)
        ends = [first + length for first, length in runs]
        assert all(end < first for end, (first, _) in zip(ends, runs[1:], strict=False)), runs
    rows = [row for row in range(len(table._state)) if table.state(row) is not State.FREE]
    if settled:
        assert {table.state(row) for row in rows} <= {State.PRESENT}
        assert table.writing_bytes == 0
        assert not table._readers
    taken = [table.place(row) for row in rows] + [place for place, _ in ledger._aside]
    owners.update([*taken, *ledger._bad])
    assert [place for place, count in owners.items() if count > 1] == [], "a slot of two owners"
    if settled:
        assert sorted(owners) == sorted(every), "slots are lost, or were never there"
    used_bytes = sum(costs[place] for place in taken)
    assert ledger.used_bytes == used_bytes
    assert ledger.allocated_bytes == sum(costs.values())
    assert ledger.num_slots == len(every)
    assert len(ledger) == sum(table.state(row) is State.PRESENT for row in rows)
    assert len(ledger) == len(table._policy), "who may leave is not who is there"


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
