"""The manager: what goes where, decided with plain values; no tier, no thread, no clock."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell import manager as manager_module
from stepwell.core.keys import Key, fingerprint
from stepwell.core.types import Chunk, Lookup, Reason
from stepwell.manager import Demotion, Manager, Promotion, WriteMode, WritePlan
from stepwell.testing import key_of

SIZE = 100
HIT, PENDING, MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS
KEYS = [key_of(idx) for idx in range(12)]
CHUNKS = [Chunk(key, memoryview(b"")) for key in KEYS]


class Gate:
    """An admission that lets in what it was told to, and remembers everything it was told."""

    name = "gate"

    def __init__(self, admits: Callable[[int], bool] = lambda tag: True) -> None:
        self.admits = admits
        self.offers: list[tuple[int, int, float, float]] = []
        self.read: list[tuple[int, float]] = []
        self.evicted: list[tuple[int, float]] = []

    def admit(self, tag: int, end_token: int, pressure: float, now_s: float) -> bool:
        self.offers.append((tag, end_token, pressure, now_s))
        return self.admits(tag)

    def on_read(self, tag: int, now_s: float) -> None:
        self.read.append((tag, now_s))

    def on_evicted(self, tag: int, now_s: float) -> None:
        self.evicted.append((tag, now_s))

    @property
    def offered(self) -> list[int]:
        return [tag for tag, *_ in self.offers]


def only(*keys: Key) -> Gate:
    tags = {fingerprint(key) for key in keys}
    return Gate(tags.__contains__)


def chunks_of(keys: Sequence[Key], size_bytes: int = SIZE) -> list[Chunk]:
    return [Chunk(key, memoryview(bytes(size_bytes)), 16 * idx) for idx, key in enumerate(keys, 1)]


def tags_of(keys: Sequence[Key]) -> list[int]:
    return [fingerprint(key) for key in keys]


def back(*admissions: Gate | None, top_chunks: int = 8, **settings: object) -> Manager:
    """Write-back over an uppermost tier of so many chunks, half of which may be dirty."""
    return Manager(
        [None, *(admissions or [None])],
        write_mode=WriteMode.BACK,
        top_capacity_bytes=top_chunks * SIZE,
        **settings,  # type: ignore[arg-type]
    )


def plan(subject: Manager, keys: Sequence[Key], *answers: Sequence[Lookup]) -> WritePlan:
    """Plan a write; by default no tier has anything."""
    given = answers or [[MISS] * len(keys)] * 3
    return subject.plan_write(chunks_of(keys), given, 0.0)


def written(subject: Manager, keys: Sequence[Key]) -> None:
    """Write chunks, one after the other."""
    for key in keys:
        plan(subject, [key])
        subject.on_written(key)


def plan_down(
    subject: Manager,
    budget_bytes: int = 1 << 30,
    now_s: float = 0.0,
    *,
    without: Sequence[int] = (),
) -> list[Demotion]:
    """Plan demotions while the tiers ``without`` are not available; end those to nowhere."""
    available = [tier_idx not in without for tier_idx in range(4)]
    plans = subject.plan_demotions(budget_bytes, available, now_s)
    for each in plans:
        if not each.targets:
            subject.on_demoted(each)
    return [each for each in plans if each.targets]


def demoted(plans: Sequence[Demotion]) -> list[Key]:
    return [each.key for each in plans]


def kept(subject: Manager, keys: Sequence[Key]) -> list[bool]:
    return [subject.keeps(fingerprint(key)) for key in keys]


# Writing through.


def test_through_every_tier_gets_everything() -> None:
    subject = Manager([None, None, None])
    assert plan(subject, KEYS[:3]) == WritePlan({0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}, {})


def test_through_nothing_is_dirty() -> None:
    subject = Manager([None, None], top_capacity_bytes=1)
    written(subject, KEYS)
    assert (subject.dirty_bytes, subject.has_dirty) == (0, False)
    assert kept(subject, KEYS) == [False] * 12
    assert plan_down(subject) == []


def test_each_tier_has_an_admission_of_its_own() -> None:
    subject = Manager([None, only(KEYS[0], KEYS[2]), only(KEYS[2], KEYS[1])])
    assert plan(subject, KEYS[:4]) == WritePlan(
        {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 2]}, {1: [1, 3], 2: [0, 3]}
    )


def test_what_a_tier_refuses_is_said() -> None:
    subject = Manager([only(KEYS[1]), only(KEYS[1], KEYS[3])])
    assert plan(subject, KEYS[:4]) == WritePlan({0: [1], 1: [1, 3]}, {0: [0, 2, 3], 1: [0, 2]})


def test_a_tier_without_anything_is_no_target() -> None:
    assert plan(Manager([only(), None]), KEYS[:2]).targets == {1: [0, 1]}


@pytest.mark.parametrize("known", [HIT, PENDING])
def test_what_a_tier_has_is_not_offered_again(known: Lookup) -> None:
    """It goes there all the same, where it is found and made recent; that costs no write."""
    gate = only()
    subject = Manager([None, gate])
    plans = plan(subject, KEYS[:3], [MISS] * 3, [MISS, known, MISS])
    assert plans == WritePlan({0: [0, 1, 2], 1: [1]}, {1: [0, 2]})
    assert gate.offered == tags_of([KEYS[0], KEYS[2]])


def test_what_another_tier_has_is_offered() -> None:
    gate = Gate()
    plans = plan(Manager([None, gate]), KEYS[:2], [HIT] * 2, [MISS] * 2)
    assert plans.targets[1] == [0, 1]
    assert gate.offered == tags_of(KEYS[:2])


def test_an_offer_names_tag_position_pressure_and_time_in_prefix_order() -> None:
    gates = Gate(), Gate()
    subject = Manager(gates, pressure=lambda tier_idx: 0.25 + tier_idx / 2)
    subject.plan_write(chunks_of(KEYS[:2]), [[MISS] * 2] * 2, 7.0)
    first, second = tags_of(KEYS[:2])
    assert gates[0].offers == [(first, 16, 0.25, 7.0), (second, 32, 0.25, 7.0)]
    assert gates[1].offers == [(first, 16, 0.75, 7.0), (second, 32, 0.75, 7.0)]


# Writing back.


def test_back_only_the_uppermost_tier_is_written() -> None:
    gate = Gate()
    assert plan(back(gate, None), KEYS[:3]) == WritePlan({0: [0, 1, 2]}, {})
    assert gate.offers == [], "the lower tiers are asked when it is demoted"


def test_with_a_single_tier_there_is_no_back() -> None:
    """Nothing would ever be demoted, so everything would be kept for ever."""
    subject = Manager([None], write_mode=WriteMode.BACK, top_capacity_bytes=1 << 20)
    written(subject, KEYS[:2])
    assert not subject.has_dirty


def test_a_chunk_is_kept_from_the_plan_on_and_dirty_once_written() -> None:
    subject = back()
    plan(subject, KEYS[:2])
    assert kept(subject, KEYS[:3]) == [True, True, False]
    assert (subject.dirty_bytes, subject.has_dirty) == (0, True)
    subject.on_written(KEYS[0])
    assert subject.dirty_bytes == SIZE
    subject.on_written(KEYS[0])
    assert subject.dirty_bytes == SIZE, "written is written once"
    assert kept(subject, KEYS[:3]) == [True, True, False]


def test_what_is_being_written_is_not_demoted() -> None:
    subject = back(top_chunks=0)
    plan(subject, KEYS[:2])
    subject.on_written(KEYS[1])
    assert demoted(plan_down(subject)) == [KEYS[1]]


@pytest.mark.parametrize("known", [HIT, PENDING])
def test_what_the_uppermost_tier_has_does_not_become_dirty(known: Lookup) -> None:
    """It has a copy below or is dirty already."""
    subject = back()
    assert plan(subject, KEYS[:2], [known, MISS], [MISS] * 2).targets == {0: [0, 1]}
    assert kept(subject, KEYS[:2]) == [False, True]


def test_what_lies_below_already_does_not_become_dirty() -> None:
    """A chunk that the drive had was written again, and counted as the only copy: it was not
    evicted, was offered to the admission a second time, which then admitted it, and was copied
    through the staging memory, only to be found there."""
    gate = Gate()
    subject = back(gate, top_chunks=0)
    assert plan(subject, KEYS[:2], [MISS] * 2, [HIT, MISS]).targets == {0: [0, 1]}
    for key in KEYS[:2]:
        subject.on_written(key)
    assert kept(subject, KEYS[:2]) == [False, True]
    assert demoted(plan_down(subject)) == [KEYS[1]]
    assert gate.offered == tags_of(KEYS[1:2])


def test_what_the_uppermost_tier_does_not_admit_is_not_kept() -> None:
    subject = Manager([only(KEYS[1]), None], write_mode=WriteMode.BACK, top_capacity_bytes=8 * SIZE)
    assert plan(subject, KEYS[:3]) == WritePlan({0: [1]}, {0: [0, 2]})
    assert kept(subject, KEYS[:3]) == [False, True, False]


# Demoting.


def test_half_of_the_uppermost_tier_may_be_dirty() -> None:
    """The other half can be evicted at once, so that a write never waits for a demotion."""
    subject = back(top_chunks=8)
    written(subject, KEYS[:4])
    assert plan_down(subject) == []
    written(subject, KEYS[4:6])
    assert demoted(plan_down(subject)) == KEYS[:2]
    assert subject.dirty_bytes == 4 * SIZE
    assert plan_down(subject) == []


def test_a_demotion_says_what_to_copy_and_where_to() -> None:
    subject = back(None, only(), None, top_chunks=0)
    subject.plan_write(chunks_of(KEYS[:1], 123), [[MISS]] * 4, 0.0)
    subject.on_written(KEYS[0])
    (found,) = plan_down(subject)
    assert (found.key, found.size_bytes, found.end_token) == (KEYS[0], 123, 16)
    assert found.targets == (1, 3)


def test_chunks_are_demoted_in_the_order_of_their_last_use() -> None:
    subject = back(top_chunks=0)
    written(subject, KEYS[:5])
    subject.on_served(0, [KEYS[1]], 0.0)
    subject.on_touched([KEYS[0]])
    assert demoted(plan_down(subject)) == [*KEYS[2:5], KEYS[1], KEYS[0]]


@pytest.mark.parametrize("use", ["serve", "touch"])
def test_of_what_was_used_together_the_end_goes_first(use: str) -> None:
    subject = back(top_chunks=0)
    written(subject, KEYS[:6])
    if use == "serve":
        subject.on_served(0, [*KEYS[:3], key_of("unknown")], 0.0)
    else:
        subject.on_touched([*KEYS[:3], key_of("unknown")])
    expected = [*KEYS[3:6], KEYS[2], KEYS[1], KEYS[0]]
    assert demoted(plan_down(subject)) == expected


def test_of_what_was_written_together_the_end_goes_first() -> None:
    """As in every list of Stepwell: a prefix is shortened from its end. What was written was
    entered first chunk first, so that the beginning of a prompt, which is used longest, left the
    half that may be dirty before its end did."""
    subject = back(top_chunks=0)
    for prefix in (KEYS[:3], KEYS[3:6]):
        plan(subject, prefix)
        for key in prefix:
            subject.on_written(key)
    order = [*KEYS[2::-1], *KEYS[5:2:-1]]
    assert demoted(plan_down(subject)) == order


def test_the_budget_bounds_what_is_under_way() -> None:
    subject = back(top_chunks=0)
    written(subject, KEYS[:6])
    assert plan_down(subject, 0) == []
    assert plan_down(subject, -SIZE) == []
    assert demoted(plan_down(subject, 2 * SIZE)) == KEYS[:2]
    assert demoted(plan_down(subject, 1)) == [KEYS[2]], "one chunk is always allowed"
    assert demoted(plan_down(subject, 3 * SIZE)) == KEYS[3:6]


def test_a_demotion_is_begun_once() -> None:
    subject = back(top_chunks=0)
    written(subject, KEYS[:2])
    assert len(plan_down(subject)) == 2
    assert plan_down(subject) == []
    assert (subject.dirty_bytes, subject.has_dirty) == (0, True)
    assert kept(subject, KEYS[:2]) == [True, True], "it is the only copy until the copy is made"


def test_after_its_demotion_a_chunk_may_be_evicted() -> None:
    subject = back(top_chunks=0)
    written(subject, KEYS[:2])
    first, second = plan_down(subject)
    subject.on_demoted(first)
    assert kept(subject, KEYS[:2]) == [False, True]
    subject.on_demoted(first)  # harmless
    subject.on_demoted(second)
    assert (subject.dirty_bytes, subject.has_dirty) == (0, False)


def test_what_no_lower_tier_admits_may_be_evicted_at_once() -> None:
    """It is offered once, and costs no budget."""
    gate = only(KEYS[2])
    subject = back(gate, top_chunks=2)
    written(subject, KEYS[:4])
    assert demoted(plan_down(subject, SIZE, 9.0)) == [KEYS[2]]
    assert kept(subject, KEYS[:4]) == [False, False, True, True]
    assert gate.offers == [(tag, 16, 0.0, 9.0) for tag in tags_of(KEYS[:3])]
    assert subject.dirty_bytes == SIZE


def test_an_offer_to_a_lower_tier_is_made_under_its_pressure() -> None:
    gates = Gate(), Gate()
    subject = back(*gates, top_chunks=0, pressure=lambda tier_idx: tier_idx / 10)
    written(subject, KEYS[:1])
    plan_down(subject)
    assert [gate.offers[0][2] for gate in gates] == [0.1, 0.2]


def test_what_no_tier_below_can_take_at_present_may_be_evicted() -> None:
    """A drive hung. What was to be demoted waited for it, could not be evicted, and filled the
    uppermost tier, which then refused everything that was new."""
    gate = Gate()
    subject = back(gate, top_chunks=4)
    written(subject, KEYS[:5])
    assert plan_down(subject, 0, without=[1]) == []
    assert kept(subject, KEYS[:5]) == [False] * 3 + [True] * 2, "no more than has to be"
    assert gate.offers == [], "nobody would write it"
    assert subject.dirty_bytes == 2 * SIZE


@pytest.mark.parametrize(("without", "reason"), [([], Reason.NOT_ADMITTED), ([1], Reason.BREAKER)])
def test_why_a_chunk_was_not_demoted_is_said(without: list[int], reason: Reason) -> None:
    """It is lost with its next eviction; nobody could see how many that were."""
    subject = back(only(), top_chunks=0)
    written(subject, KEYS[:1])
    available = [tier_idx not in without for tier_idx in range(2)]
    (found,) = subject.plan_demotions(1 << 30, available, 0.0)
    assert (found.key, found.targets, found.reason) == (KEYS[0], (), reason)
    assert kept(subject, KEYS[:1]) == [True], "until it is reported"
    subject.on_demoted(found)
    assert kept(subject, KEYS[:1]) == [False]


def test_a_tier_that_cannot_be_written_to_is_left_out() -> None:
    subject = back(None, None, top_chunks=0)
    written(subject, KEYS[:1])
    (plan,) = plan_down(subject, without=[1])
    assert plan.targets == (2,)


def test_a_flush_demotes_all_there_is() -> None:
    subject = back(top_chunks=100)
    written(subject, KEYS[:4])
    plan(subject, KEYS[4:5])
    assert plan_down(subject) == []
    subject.plan_flush()
    plans = plan_down(subject, 3 * SIZE)
    assert demoted(plans) == KEYS[:3], "the budget holds"
    subject.on_written(KEYS[4])
    plans += plan_down(subject)
    assert demoted(plans) == KEYS[:5]
    assert subject.has_dirty
    for each in plans:
        subject.on_demoted(each)
    assert not subject.has_dirty


# Losing.


@pytest.mark.parametrize("state", ["unknown", "writing", "dirty", "demoting"])
def test_what_was_forgotten_is_not_kept(state: str) -> None:
    subject = back(top_chunks=0)
    key, other = KEYS[:2]
    written(subject, [other])
    if state != "unknown":
        plan(subject, [key])
    if state in ("dirty", "demoting"):
        subject.on_written(key)
    plans = plan_down(subject) if state == "demoting" else []
    subject.forget([key])
    assert kept(subject, [key, other]) == [False, True]
    assert subject.dirty_bytes == (0 if state == "demoting" else SIZE)
    subject.on_written(key)
    for each in plans:
        if each.key == key:
            subject.on_demoted(each)
    assert kept(subject, [key, other]) == [False, True], "late news of it changes nothing"


@pytest.mark.parametrize("state", ["unknown", "writing", "dirty", "demoting"])
def test_what_could_not_be_written(state: str) -> None:
    """A chunk that had no copy below was written again, and refused because the queue was full.
    The copy that was there counted for nothing from then on: it was evicted, and lost."""
    subject = back(top_chunks=0)
    key, other = KEYS[:2]
    written(subject, [other])
    if state != "unknown":
        plan(subject, [key])
    if state in ("dirty", "demoting"):
        subject.on_written(key)
    if state == "demoting":
        plan_down(subject)
    dirty_bytes = subject.dirty_bytes
    subject.on_not_written(key)
    assert kept(subject, [key, other]) == [state in ("dirty", "demoting"), True]
    assert subject.dirty_bytes == dirty_bytes


@pytest.mark.parametrize("refused_first", [True, False])
def test_one_of_two_writes_of_a_chunk_is_refused(refused_first: bool) -> None:
    """Both were planned before either began. The one that was refused at once took the other's
    chunk for lost: it was written, and nobody kept it or ever demoted it."""
    subject = back(top_chunks=0)
    plan(subject, KEYS[:1])
    plan(subject, KEYS[:1])
    ends = [subject.on_not_written, subject.on_written]
    for end in ends if refused_first else reversed(ends):
        end(KEYS[0])
    assert kept(subject, KEYS[:1]) == [True]
    assert demoted(plan_down(subject)) == KEYS[:1]


def test_both_of_two_writes_of_a_chunk_are_refused() -> None:
    subject = back()
    plan(subject, KEYS[:1])
    plan(subject, KEYS[:1])
    subject.on_not_written(KEYS[0])
    subject.on_not_written(KEYS[0])
    assert not subject.has_dirty


def test_a_dirty_chunk_that_is_written_anew_is_counted_once() -> None:
    """The uppermost tier lost a chunk that had no copy below yet: its time had run out, or it was
    damaged. When it was written again its bytes were counted again, and never taken off: in the
    end everything was demoted at once, as if half of the tier were always dirty."""
    subject = back(top_chunks=8)
    for _ in range(20):
        written(subject, KEYS[:1])
        assert subject.dirty_bytes == SIZE
    assert plan_down(subject) == []
    subject.forget(KEYS[:1])
    assert subject.dirty_bytes == 0


def test_a_chunk_that_is_written_anew_while_it_is_demoted() -> None:
    """A chunk was deleted while it was copied down, and written again. The end of the old
    demotion was taken for one of the new chunk: it was no longer kept, and its bytes were
    counted as dirty for ever."""
    subject = back(top_chunks=0)
    written(subject, KEYS[:1])
    (old,) = plan_down(subject)
    subject.forget(KEYS[:1])
    written(subject, KEYS[:1])
    subject.on_demoted(old)
    assert kept(subject, KEYS[:1]) == [True]
    assert subject.dirty_bytes == SIZE
    (new,) = plan_down(subject)
    subject.on_demoted(old)
    assert kept(subject, KEYS[:1]) == [True]
    subject.on_demoted(new)
    assert (subject.dirty_bytes, subject.has_dirty) == (0, False)


# Promoting, and what admissions learn.


@pytest.mark.parametrize(
    ("promotion", "served"),
    [
        (Promotion.ALWAYS, [True, True, True]),
        (Promotion.NEVER, [False, False, False]),
        (Promotion.SECOND_HIT, [False, True, True]),
    ],
)
def test_when_a_chunk_is_promoted(promotion: Promotion, served: list[bool]) -> None:
    subject = Manager([None, None], promotion=promotion)
    assert [subject.plan_promotion(CHUNKS[:2], 0.0) for _ in range(3)] == [
        [each] * 2 for each in served
    ]


def test_what_wears_out_admits_what_is_promoted_to_it() -> None:
    """What engines share was copied to the drive, with no tier above it, past its admission."""
    gate = only(KEYS[1])
    subject = Manager([gate, None])
    assert subject.plan_promotion(CHUNKS[:2], 7.0) == [False, True]
    assert [offer[3] for offer in gate.offers] == [7.0, 7.0]


def test_a_second_hit_counts_for_each_chunk() -> None:
    subject = Manager([None, None], promotion=Promotion.SECOND_HIT)
    subject.plan_promotion(CHUNKS[:2], 0.0)
    assert subject.plan_promotion(CHUNKS[1:4], 0.0) == [True, False, False]
    assert subject.plan_promotion(CHUNKS[:4], 0.0) == [True] * 4


def test_the_memory_of_first_hits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was served last the longest ago is forgotten."""
    monkeypatch.setattr(manager_module, "_SEEN_TAGS", 4)
    subject = Manager([None, None], promotion=Promotion.SECOND_HIT)
    subject.plan_promotion(CHUNKS[:4], 0.0)
    assert subject.plan_promotion(CHUNKS[:1], 0.0) == [True]
    assert subject.plan_promotion(CHUNKS[4:5], 0.0) == [False]
    assert subject.plan_promotion([CHUNKS[0], *CHUNKS[2:5]], 0.0) == [True] * 4
    assert subject.plan_promotion(CHUNKS[1:2], 0.0) == [False], "forgotten for the fifth"


def test_an_admission_hears_of_its_own_tier() -> None:
    gates = Gate(), Gate()
    subject = Manager([None, *gates])
    subject.on_served(0, KEYS[:1], 1.0)
    subject.on_served(2, KEYS[1:3], 2.0)
    subject.on_evicted(0, 11, 3.0)
    subject.on_evicted(1, 22, 4.0)
    assert (gates[0].read, sorted(gates[1].read)) == (
        [],
        sorted((tag, 2.0) for tag in tags_of(KEYS[1:3])),
    )
    assert (gates[0].evicted, gates[1].evicted) == ([(22, 4.0)], [])


# Overflowing.


def overflow(
    subject: Manager, tier_idx: int, full: Sequence[int], *known: int, now_s: float = 0.0
) -> WritePlan:
    """Plan an overflow of six chunks, of which the tier below has the ``known``."""
    answers = [HIT if idx in known else MISS for idx in full]
    return subject.plan_overflow(chunks_of(KEYS[:6]), tier_idx, full, answers, now_s)


def test_what_does_not_fit_above_goes_below() -> None:
    gate = only(KEYS[1], KEYS[5])
    subject = back(gate, None)
    assert overflow(subject, 0, [1, 3, 5], now_s=5.0) == WritePlan({1: [1, 5]}, {1: [3]})
    assert gate.offers == [(fingerprint(KEYS[idx]), 16 * idx + 16, 0.0, 5.0) for idx in (1, 3, 5)]
    assert overflow(subject, 1, [1, 3]) == WritePlan({2: [1, 3]}, {})


def test_what_lies_below_already_is_not_offered_when_it_overflows() -> None:
    gate = only()
    assert overflow(back(gate), 0, [1, 3], 3) == WritePlan({1: [3]}, {1: [1]})
    assert gate.offered == tags_of(KEYS[1:2])


def test_nothing_lies_below_the_last_tier() -> None:
    subject = back(None)
    assert subject.plan_overflow(chunks_of(KEYS[:2]), 1, [0, 1], [], 0.0) == WritePlan({}, {})


def test_through_nothing_overflows() -> None:
    """Every tier was offered everything at once."""
    assert overflow(Manager([None, None]), 0, [0, 1]) == WritePlan({}, {})


# Any history.


class DirtyMachine(RuleBasedStateMachine):
    """The states of write-back against a dictionary.

    Writes and demotions end in any order, also when the chunk was deleted or written anew
    meanwhile; the uppermost tier may lose a chunk without telling.
    """

    keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.top: set[Key] = set()
        self.refused: set[int] = set()
        self.subject = back(Gate(lambda tag: tag not in self.refused), top_chunks=6)
        self.limit_bytes = 3 * SIZE
        self.states: dict[Key, str] = {}
        self.sizes = {key: 10 + 17 * idx for idx, key in enumerate(KEYS)}
        self.writing: list[Key] = []
        self.demoting: list[tuple[Demotion, bool]] = []  # and whether it is still the chunk's

    @property
    def dirty_bytes(self) -> int:
        return sum(self.sizes[key] for key, state in self.states.items() if state == "dirty")

    @rule(keys=keys)
    def write(self, keys: list[Key]) -> None:
        chunks = [Chunk(key, memoryview(bytes(self.sizes[key]))) for key in keys]
        answers = [HIT if key in self.top else MISS for key in keys]
        plans = self.subject.plan_write(chunks, [answers, [MISS] * len(keys)], 0.0)
        assert plans == WritePlan({0: list(range(len(keys)))}, {})
        for key in keys:
            if key not in self.top:
                if self.states.get(key) != "writing":
                    self.writing = [each for each in self.writing if each != key]  # long past
                self.states[key] = "writing"
                self.writing.append(key)
                self.part_from(key)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), taken=st.booleans())
    def write_ends(self, data: st.DataObject, taken: bool) -> None:
        key = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        if taken:
            self.subject.on_written(key)
            self.top.add(key)
            if self.states.get(key) == "writing":
                self.states[key] = "dirty"
        else:
            self.subject.on_not_written(key)
            if self.states.get(key) == "writing" and key not in self.writing:
                del self.states[key]

    @rule(keys=keys)
    def lose(self, keys: list[Key]) -> None:
        self.top -= set(keys)

    @rule(keys=keys)
    def delete(self, keys: list[Key]) -> None:
        self.subject.forget(keys)
        self.top -= set(keys)
        # What is still being written of them ends now, as it may: those writes are past.
        self.writing = [key for key in self.writing if key not in keys]
        for key in keys:
            self.states.pop(key, None)
            self.part_from(key)

    def part_from(self, key: Key) -> None:
        """A new life of a chunk: a demotion that is under way belongs to the old one."""
        self.demoting = [(plan, own and plan.key != key) for plan, own in self.demoting]

    @rule(keys=keys, touch=st.booleans())
    def use(self, keys: list[Key], touch: bool) -> None:
        if touch:
            self.subject.on_touched(keys)
        else:
            self.subject.on_served(0, keys, 0.0)

    @rule(keys=keys)
    def refuse(self, keys: list[Key]) -> None:
        self.refused ^= set(tags_of(keys))

    @rule(budget_bytes=st.integers(-10, 500), available=st.booleans())
    def demote(self, budget_bytes: int, available: bool) -> None:
        room_bytes = budget_bytes if available else 1
        for each in plan_down(self.subject, budget_bytes, without=[] if available else [1]):
            assert available
            assert self.states[each.key] == "dirty"
            assert (each.size_bytes, each.targets) == (self.sizes[each.key], (1,))
            assert self.dirty_bytes > self.limit_bytes, "more than had to be"
            assert room_bytes > 0, "more than was allowed"
            room_bytes -= each.size_bytes
            self.states[each.key] = "demoting"
            self.demoting.append((each, True))
        # Those that were not admitted are no longer there; which ones, the order decides.
        for key in [key for key, state in self.states.items() if state == "dirty"]:
            passed = not available or fingerprint(key) in self.refused
            if passed and not self.subject.keeps(fingerprint(key)):
                del self.states[key]
        assert self.dirty_bytes <= self.limit_bytes or room_bytes <= 0, "less than had to be"

    @precondition(lambda self: self.demoting)
    @rule(data=st.data())
    def demotion_ends(self, data: st.DataObject) -> None:
        each, own = self.demoting.pop(data.draw(st.integers(0, len(self.demoting) - 1)))
        self.subject.on_demoted(each)
        if own:
            assert self.states.pop(each.key) == "demoting"

    @rule()
    def flush(self) -> None:
        self.subject.plan_flush()
        self.limit_bytes = 0

    @invariant()
    def the_books_agree(self) -> None:
        assert self.subject.dirty_bytes == self.dirty_bytes
        assert kept(self.subject, KEYS) == [key in self.states for key in KEYS]
        assert self.subject.has_dirty == bool(self.states)


TestDirtyMachine = DirtyMachine.TestCase
TestDirtyMachine.settings = settings(max_examples=60, stateful_step_count=40)
