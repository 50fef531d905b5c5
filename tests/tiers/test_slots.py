"""Where records lie: extents of equal slots against a bitmap."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.tiers.slots import BOOKKEEPING_BYTES, Extent, SlotSpace, place_of, slot_of

PAGE = 4096
SMALL, LARGE = 2 * PAGE, 5 * PAGE


def space_of(num_slots: int, slot_bytes: int = SMALL) -> SlotSpace:
    """A space whose only extent has so many free slots, the capacity used up."""
    space = SlotSpace(num_slots * SlotSpace.cost_of(slot_bytes))
    space.adopt(0, slot_bytes, num_slots)
    return space


def runs_of(places: list[int]) -> list[tuple[int, int]]:
    """Places, in their order, as (first, length) of runs of neighbours."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and place == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs


def test_a_place_is_an_extent_and_a_slot() -> None:
    for extent_id, slot_idx in ((0, 0), (1, 0), (0, 7), (99_999_999, (1 << 31) - 1)):
        assert slot_of(place_of(extent_id, slot_idx)) == (extent_id, slot_idx)
    assert place_of(3, 4) + 1 == place_of(3, 5), "neighbours are beside each other as places too"


def test_the_chunks_of_a_job_are_neighbours_in_an_empty_extent() -> None:
    space = space_of(64)
    assert [runs_of(space.take(SMALL, 16)) for _ in range(4)] == [
        [(place_of(0, first), 16)] for first in (0, 16, 32, 48)
    ]
    assert space.take(SMALL, 1) == []


def test_the_chunks_of_a_job_are_neighbours_after_whole_jobs_left() -> None:
    """What left together is one run again, in whatever order its chunks left."""
    space = space_of(64)
    jobs = [space.take(SMALL, 8) for _ in range(8)]
    for job in (jobs[2], jobs[5], jobs[4][::-1]):
        for place in job:
            space.give_back(place)
    assert runs_of(space.take(SMALL, 16)) == [(jobs[4][0], 16)], "4 and 5 had become one run"
    assert runs_of(space.take(SMALL, 8)) == [(jobs[2][0], 8)]


def test_the_shortest_run_that_is_long_enough() -> None:
    """Long runs are kept for long jobs."""
    space = space_of(40)
    places = space.take(SMALL, 40)
    for first, length in ((2, 10), (20, 4), (30, 6)):
        for place in places[first : first + length]:
            space.give_back(place)
    assert runs_of(space.take(SMALL, 4)) == [(places[20], 4)]
    assert runs_of(space.take(SMALL, 5)) == [(places[30], 5)]
    assert runs_of(space.take(SMALL, 9)) == [(places[2], 9)]
    assert sorted(space.take(SMALL, 9)) == [places[11], places[35]]


def test_a_job_larger_than_any_run_gets_the_longest_ones() -> None:
    space = space_of(40)
    places = space.take(SMALL, 40)
    for first, length in ((2, 10), (20, 4), (30, 6)):
        for place in places[first : first + length]:
            space.give_back(place)
    assert runs_of(space.take(SMALL, 18)) == [(places[2], 10), (places[30], 6), (places[20], 2)]


def test_the_longest_run_of_all_extents() -> None:
    space = SlotSpace(1 << 30)
    for extent_id, num_slots in enumerate((3, 8, 5)):
        space.adopt(extent_id, SMALL, num_slots)
    assert runs_of(space.take(SMALL, 7)) == [(place_of(1, 0), 7)]
    assert runs_of(space.take(SMALL, 6)) == [(place_of(2, 0), 5), (place_of(0, 0), 1)]


def test_sizes_do_not_mix() -> None:
    space = SlotSpace(1 << 20)
    small, large = space.adopt(4, SMALL, 3), space.adopt(7, LARGE, 3)
    assert [slot_of(place)[0] for place in space.take(SMALL, 9)] == [4, 4, 4]
    taken = space.take(LARGE, 9)
    assert [slot_of(place)[0] for place in taken] == [7, 7, 7]
    assert {space.size_at(place) for place in taken} == {LARGE}
    assert space.take(PAGE, 1) == []
    assert (small.num_free, large.num_free) == (0, 0)


def test_an_extent_without_a_file_gives_no_slots() -> None:
    space = SlotSpace(1 << 20)
    extent = space.plan_extent(SMALL, 1 << 20)
    assert extent is not None
    assert space.take(SMALL, 1) == []
    assert space.allocated_bytes == extent.cost_bytes, "it counts from the plan on"
    space.made(extent)
    assert len(space.take(SMALL, 1)) == 1
    other = space.plan_extent(SMALL, 1 << 20)
    assert other is not None
    space.drop(other)
    assert space.allocated_bytes == extent.cost_bytes


def test_extents_fill_the_capacity_in_few_files() -> None:
    """To less than a slot, and small enough to be moved between slot sizes."""
    for capacity_bytes, fewest in ((100_000, 4), (50 << 20, 4), (10 << 30, 64), (1 << 40, 64)):
        for slot_bytes in (SMALL, LARGE, 2 << 20):
            space = SlotSpace(capacity_bytes)
            cost_bytes = space.cost_of(slot_bytes)
            assert cost_bytes == slot_bytes + BOOKKEEPING_BYTES
            assert space.fits(slot_bytes) == (cost_bytes <= capacity_bytes)
            while (extent := space.plan_extent(slot_bytes, capacity_bytes)) is not None:
                assert extent.num_slots >= 1
                space.made(extent)
            left_bytes = capacity_bytes - space.allocated_bytes
            assert 0 <= left_bytes < cost_bytes
            assert len(space.extents) <= 2 * fewest
            slots = sum(extent.num_slots for extent in space.extents.values())
            assert len(space.extents) >= min(fewest, slots)


def test_an_extent_takes_no_more_than_the_drive_has() -> None:
    space = SlotSpace(1 << 30)
    cost_bytes = space.cost_of(SMALL)
    assert space.plan_extent(SMALL, cost_bytes - 1) is None
    assert space.plan_extent(SMALL, 0) is None
    extent = space.plan_extent(SMALL, 3 * cost_bytes + 100)
    assert extent is not None
    assert extent.num_slots == 3


def test_an_id_is_never_given_again() -> None:
    space = SlotSpace(1 << 30)
    space.adopt(41, SMALL, 2)
    seen = []
    for _ in range(3):
        extent = space.plan_extent(SMALL, 1 << 20)
        assert extent is not None
        seen.append(extent.extent_id)
        space.drop(extent)
    assert seen == [42, 43, 44]


class SpaceMachine(RuleBasedStateMachine):
    """Any calls that an owner may make, against a list of booleans per extent (True: free)."""

    CAPACITY = 60 * SlotSpace.cost_of(SMALL)
    sizes = st.sampled_from([SMALL, LARGE])

    def __init__(self) -> None:
        super().__init__()
        self.space = SlotSpace(self.CAPACITY)
        self.free: dict[int, list[bool]] = {}
        self.planned: list[Extent] = []
        self.gone: set[int] = set()

    def allocated(self) -> int:
        extents = [*self.space.extents.values()]
        return sum(e.num_slots * (e.slot_bytes + BOOKKEEPING_BYTES) for e in extents)

    def taken(self) -> list[int]:
        return [
            place_of(extent_id, idx)
            for extent_id, bits in self.free.items()
            for idx, free in enumerate(bits)
            if not free
        ]

    def longest_run(self, slot_bytes: int) -> int:
        best = 0
        for extent_id, bits in self.free.items():
            if self.space.extents[extent_id].slot_bytes == slot_bytes:
                length = 0
                for free in bits:
                    length = length + 1 if free else 0
                    best = max(best, length)
        return best

    @rule(slot_bytes=sizes, limit_bytes=st.sampled_from([1 << 40, 30_000, 9_000]))
    def plan(self, slot_bytes: int, limit_bytes: int) -> None:
        cost_bytes = slot_bytes + BOOKKEEPING_BYTES
        room_bytes = min(self.CAPACITY - self.allocated(), limit_bytes)
        extent = self.space.plan_extent(slot_bytes, limit_bytes)
        assert (extent is not None) == (room_bytes >= cost_bytes)
        if extent is not None:
            assert extent.cost_bytes <= room_bytes
            assert extent.extent_id not in self.gone | set(self.free)
            self.planned.append(extent)

    @precondition(lambda self: self.planned)
    @rule(made=st.booleans())
    def end_plan(self, made: bool) -> None:
        extent = self.planned.pop()
        if made:
            self.space.made(extent)
            self.free[extent.extent_id] = [True] * extent.num_slots
        else:
            self.space.drop(extent)
            self.gone.add(extent.extent_id)

    @precondition(lambda self: not self.free and not self.planned and not self.gone)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """As at a start, where more may lie than the capacity allows by now."""
        for extent_id in (3, 9):
            slot_bytes, count = data.draw(self.sizes), data.draw(st.integers(1, 40))
            extent = self.space.adopt(extent_id, slot_bytes, count)
            taken = data.draw(st.lists(st.integers(0, count - 1), unique=True))
            self.space.occupy(extent_id, taken)
            self.free[extent_id] = [idx not in taken for idx in range(count)]
            assert extent.ready

    @rule(slot_bytes=sizes, count=st.integers(1, 20))
    def take(self, slot_bytes: int, count: int) -> None:
        missing = count
        num_free = sum(
            sum(bits)
            for extent_id, bits in self.free.items()
            if self.space.extents[extent_id].slot_bytes == slot_bytes
        )
        places = self.space.take(slot_bytes, count)
        # Each run is the longest there is, as long as it is not longer than what is missing.
        runs = runs_of(places)
        while runs:
            first, length = runs.pop(0)
            part = min(self.longest_run(slot_bytes), missing)
            assert 0 < part <= length, "a shorter run than there was"
            if part < length:  # two runs, taken one after the other, that touch
                runs.insert(0, (first + part, length - part))
            extent_id, idx = slot_of(first)
            for at in range(idx, idx + part):
                assert self.free[extent_id][at], "a slot was given twice"
                self.free[extent_id][at] = False
            missing -= part
        assert len(places) == len(set(places)) == min(count, num_free)

    @precondition(lambda self: self.taken())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        for place in data.draw(st.lists(st.sampled_from(self.taken()), min_size=1, unique=True)):
            extent_id, idx = slot_of(place)
            self.space.give_back(place)
            self.free[extent_id][idx] = True

    @rule(slot_bytes=st.sampled_from([0, SMALL, LARGE]))
    def drop_an_empty_one(self, slot_bytes: int) -> None:
        empty = [n for n, bits in self.free.items() if all(bits)]
        other = [n for n in empty if self.space.extents[n].slot_bytes != slot_bytes]
        extent = self.space.empty_extent(slot_bytes)
        assert (extent is not None) == bool(other)
        if extent is not None:
            assert extent.extent_id in other
            self.space.drop(extent)
            del self.free[extent.extent_id]
            self.gone.add(extent.extent_id)

    @rule(excess_bytes=st.integers(1, 60_000), works=st.booleans())
    def trim(self, excess_bytes: int, works: bool) -> None:
        before_bytes = self.space.allocated_bytes
        cut = self.space.trim(excess_bytes)
        if cut is None:
            assert not any(bits and bits[-1] for bits in self.free.values())
            return
        extent, num_cut = cut
        bits = self.free[extent.extent_id]
        cost_bytes = extent.slot_bytes + BOOKKEEPING_BYTES
        assert num_cut >= 1
        assert all(bits[-num_cut:]), "a slot that holds a record was cut off"
        assert (num_cut - 1) * cost_bytes < excess_bytes, "more than was asked for"
        assert self.space.allocated_bytes == before_bytes - num_cut * cost_bytes
        if not works:
            self.space.untrim(extent, num_cut)
            assert self.space.allocated_bytes == before_bytes
        else:
            del bits[-num_cut:]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take_at(self, data: st.DataObject) -> None:
        extent_id = data.draw(st.sampled_from([*self.free, 1000]))
        bits = self.free.get(extent_id, [])
        idx = data.draw(st.integers(0, len(bits)))
        free = idx < len(bits) and bits[idx]
        assert self.space.take_at(place_of(extent_id, idx)) == free
        if free:
            bits[idx] = False

    @rule(slot_bytes=sizes)
    def emptiest(self, slot_bytes: int) -> None:
        records = {
            n: bits.count(False)
            for n, bits in self.free.items()
            if self.space.extents[n].slot_bytes == slot_bytes
        }
        found = [records.pop(extent.extent_id) for extent in self.space.emptiest_first(slot_bytes)]
        assert found == sorted(found)
        assert not records

    @invariant()
    def runs_are_the_bitmaps(self) -> None:
        for extent_id, bits in self.free.items():
            extent = self.space.extents[extent_id]
            seen = [False] * len(bits)
            runs = sorted(extent.free_runs())
            for (first, length), after in zip(runs, [*runs[1:], (1 << 31, 0)], strict=False):
                assert first + length < after[0], "neighbouring runs are one"
                seen[first : first + length] = [True] * length
            assert seen == bits
            assert extent.num_slots == len(bits)
            assert extent.num_free == sum(bits)
            assert extent.empty == all(bits)

    @invariant()
    def bytes_add_up(self) -> None:
        assert set(self.space.extents) == set(self.free) | {e.extent_id for e in self.planned}
        assert self.space.allocated_bytes == self.allocated()
        if 3 not in self.free and 9 not in self.free:
            assert self.space.allocated_bytes <= self.CAPACITY


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(max_examples=150, stateful_step_count=40)


# One extent.


class ExtentMachine(RuleBasedStateMachine):
    """Any calls on one extent, against the set of its free slots.

    Its runs are kept in three tables, by first slot, by last and by length; each is compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extent = Extent(7, SMALL, 24, ready=True)
        self.extent.release(0, 24)
        self.free = set(range(24))

    @property
    def num_slots(self) -> int:
        return self.extent.num_slots

    def runs(self) -> dict[int, int]:
        """First slot of a free run -> its length."""
        return dict(runs_of(sorted(self.free)))

    def taken_runs(self) -> list[tuple[int, int]]:
        return runs_of([idx for idx in range(self.num_slots) if idx not in self.free])

    @precondition(lambda self: self.free)
    @rule(most=st.integers(1, 26))
    def take(self, most: int) -> None:
        lengths = self.runs().values()
        enough = [length for length in lengths if length >= most]
        before = self.runs()
        first, length = self.extent.take(most)
        assert before[first] == (min(enough) if enough else max(lengths))
        assert length == min(before[first], most)
        self.free -= set(range(first, first + length))

    @precondition(lambda self: len(self.free) < self.num_slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A part of a run that is taken: its neighbours may be free on either side, or both."""
        begin, length = data.draw(st.sampled_from(self.taken_runs()))
        first = data.draw(st.integers(begin, begin + length - 1))
        count = data.draw(st.integers(1, begin + length - first))
        self.extent.release(first, count)
        self.free |= set(range(first, first + count))

    @precondition(lambda self: self.num_slots - 1 in self.free)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        length = self.num_slots - max(self.runs())
        count = data.draw(st.integers(1, length))
        before = self.num_slots
        self.extent.cut(count)
        assert self.num_slots == before - count
        self.free -= set(range(before - count, before))

    @rule(count=st.integers(1, 8))
    def lengthen(self, count: int) -> None:
        """As where slots could not be cut off after all."""
        first = self.num_slots
        self.extent.num_slots += count
        self.extent.release(first, count)
        self.free |= set(range(first, first + count))

    @rule(data=st.data())
    def occupy(self, data: st.DataObject) -> None:
        taken = data.draw(st.permutations(range(self.num_slots)))
        taken = taken[: data.draw(st.integers(0, self.num_slots))]
        self.extent.occupy(taken)
        self.free = set(range(self.num_slots)) - set(taken)

    @rule(data=st.data())
    def take_at(self, data: st.DataObject) -> None:
        idx = data.draw(st.integers(0, self.num_slots))
        assert self.extent.take_at(idx) == (idx in self.free)
        self.free.discard(idx)

    @invariant()
    def runs_are_those_of_the_set(self) -> None:
        runs, extent = self.runs(), self.extent
        assert sorted(extent.free_runs()) == sorted(runs.items())
        assert extent.longest_run() == max(runs.values(), default=0)
        tail = self.num_slots - max(runs) if self.num_slots - 1 in self.free else 0
        assert extent.tail_run() == tail
        assert extent.num_free == len(self.free)
        assert extent.empty == (len(self.free) == self.num_slots)


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=200, stateful_step_count=50)
