"""Admission: what every policy owes, each against a plain model, and days with a budget."""

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.policy.admission import (
    ADMISSION_NAMES,
    EXPLORE_S,
    EXPLORE_SHARE,
    HALF_LIFE_S,
    HEAD_TOKENS,
    MIN_REUSE,
    PRIOR_OUTCOMES,
    Admission,
    AlwaysAdmit,
    ReuseProbability,
    SecondDemotion,
    make_admission,
)
from stepwell.policy.endurance import EnduranceGovernor

every_policy = pytest.mark.parametrize("name", ADMISSION_NAMES)
tags = st.integers(0, 6).map(lambda number: number * 0x123456789ABCD % (1 << 60))
positions = st.sampled_from([0, 0, 64, 256, 4096, 8192, 8193, 30_000, 131_072])
calls = st.lists(
    st.tuples(st.sampled_from(["offer", "offer", "read", "evicted"]), tags, positions),
    max_size=40,
)
pressures = st.floats(0, 1)


def play(policy: Admission, history: list[tuple[str, int, int]], pressure: float) -> list[bool]:
    """The answers to a history's offers, one call every ten seconds."""
    answers = []
    for idx, (what, tag, end_token) in enumerate(history):
        now_s = 10.0 * idx
        if what == "offer":
            answers.append(policy.admit(tag, end_token, pressure, now_s))
        elif what == "read":
            policy.on_read(tag, now_s)
        else:
            policy.on_evicted(tag, now_s)
    return answers


# ----------------------------------------------------------------------------- all of them


def test_names() -> None:
    assert list(ADMISSION_NAMES) == sorted(ADMISSION_NAMES)
    for name in ADMISSION_NAMES:
        assert make_admission(name).name == name
        with pytest.raises(ValueError, match="num_tags=0"):
            make_admission(name, 0)
    with pytest.raises(ValueError, match="admission=allways"):
        make_admission("allways")


@every_policy
@given(history=calls, pressure=pressures)
def test_the_same_calls_have_the_same_answers(
    name: str, history: list[tuple[str, int, int]], pressure: float
) -> None:
    answers = play(make_admission(name, 4), history, pressure)
    assert play(make_admission(name, 4), history, pressure) == answers


@every_policy
@given(history=calls, pressure=pressures, more=pressures)
def test_more_pressure_admits_nothing_that_less_refuses(
    name: str, history: list[tuple[str, int, int]], pressure: float, more: float
) -> None:
    pressure, more = sorted((pressure, more))
    eased = play(make_admission(name, 4), history, pressure)
    pressed = play(make_admission(name, 4), history, more)
    assert not any(under and not over for under, over in zip(pressed, eased, strict=True))


@every_policy
@given(history=calls)
def test_at_full_pressure_nothing_is_admitted(
    name: str, history: list[tuple[str, int, int]]
) -> None:
    assert not any(play(make_admission(name, 4), history, 1.0))


@every_policy
@given(pressure=pressures, num_chunks=st.integers(1, 300), rounds=st.integers(1, 3))
def test_what_is_refused_is_the_end_of_a_prefix(
    name: str, pressure: float, num_chunks: int, rounds: int
) -> None:
    """A chunk behind a gap can never be read, so it would be written for nothing."""
    policy, rng = make_admission(name), random.Random(num_chunks)
    prefix = [(rng.getrandbits(60), (idx + 1) * 256) for idx in range(num_chunks)]
    for _ in range(rounds):
        answers = [policy.admit(tag, end, pressure, 1.0) for tag, end in prefix]
        assert answers == sorted(answers, reverse=True)


def share_admitted(policy: Admission, pressure: float, end_token: int = 0) -> float:
    num = 5000
    rng = random.Random(3)
    offers = [rng.getrandbits(60) for _ in range(num)]
    return sum(policy.admit(tag, end_token, pressure, 1.0) for tag in offers) / num


# ----------------------------------------------------------------------------- always


@given(history=calls)
def test_always_is_always_without_pressure(history: list[tuple[str, int, int]]) -> None:
    assert all(play(AlwaysAdmit(7), history, 0.0))


@pytest.mark.parametrize(
    ("pressure", "first", "second"),
    [(0.0, 1.0, 1.0), (0.2, 0.6, 1.0), (0.5, 0.0, 1.0), (0.75, 0.0, 0.5), (1.0, 0.0, 0.0)],
)
def test_always_gives_up_first_offers_and_then_second_ones(
    pressure: float, first: float, second: float
) -> None:
    """Positions unknown: by tag, and each time the same ones."""
    policy = AlwaysAdmit()
    assert share_admitted(policy, pressure) == pytest.approx(first, abs=0.03)
    assert share_admitted(policy, pressure) == pytest.approx(second, abs=0.03)


@pytest.mark.parametrize(
    ("pressure", "end_token", "first", "second"),
    [
        (0.25, HEAD_TOKENS, True, True),
        (0.25, HEAD_TOKENS + 1, False, True),
        (0.05, 9 * HEAD_TOKENS, True, True),
        (0.05, 9 * HEAD_TOKENS + 1, False, True),
        (0.5, 1, False, True),
        (0.5, 1 << 30, False, True),
        (0.75, HEAD_TOKENS, False, True),
        (0.75, HEAD_TOKENS + 1, False, False),
        (1.0, 1, False, False),
    ],
)
def test_always_keeps_the_beginning_of_a_prompt(
    pressure: float, end_token: int, first: bool, second: bool
) -> None:
    policy = AlwaysAdmit()
    assert [policy.admit(5, end_token, pressure, 0.0) for _ in range(2)] == [first, second]


def test_always_remembers_what_it_admitted_before_there_was_pressure() -> None:
    policy = AlwaysAdmit()
    assert policy.admit(5, 64, 0.0, 0.0)
    assert policy.admit(5, 64, 0.5, 1.0)
    assert not policy.admit(6, 64, 0.5, 1.0)


@pytest.mark.parametrize("pressure", [0.0, 0.6])
def test_always_remembers_the_last_offers(pressure: float) -> None:
    """Whatever the pressure was that they were made under."""
    policy, plain, rng = AlwaysAdmit(3), PlainGhost(3), random.Random(1)
    for _ in range(2000):
        tag = rng.randrange(7)
        known = plain.offer(tag)
        if rng.random() < 0.5:
            assert policy.admit(tag, 64, 0.5, 0.0) is known
        else:
            assert policy.admit(tag, 64, pressure, 0.0) is (known or not pressure)


# ----------------------------------------------------------------------------- second demotion


class PlainGhost:
    """The last few tags, oldest first."""

    def __init__(self, num_tags: int) -> None:
        self.num_tags = num_tags
        self.order: list[int] = []

    def offer(self, tag: int) -> bool:
        known = tag in self.order
        self.order = [*(each for each in self.order if each != tag), tag][-self.num_tags :]
        return known

    def refresh(self, tag: int) -> None:
        if tag in self.order:
            self.offer(tag)


@pytest.mark.parametrize("num_tags", [1, 2, 3, 8])
def test_second_demotion_is_a_memory_of_the_last_offers(num_tags: int) -> None:
    """Few more tags than are remembered, so that most answers depend on the order exactly."""
    rng = random.Random(num_tags)
    policy, plain = SecondDemotion(num_tags), PlainGhost(num_tags)
    for _ in range(5000):
        tag = rng.randrange(num_tags + 4)
        what = rng.choice(["offer", "offer", "read", "evicted"])
        if what == "offer":
            assert policy.admit(tag, 64, 0.0, 0.0) is plain.offer(tag)
        elif what == "read":
            policy.on_read(tag, 0.0)
            plain.refresh(tag)
        else:
            policy.on_evicted(tag, 0.0)


@pytest.mark.parametrize(
    ("pressure", "end_token", "admitted"),
    [
        (0.0, 1 << 30, True),
        (0.5, HEAD_TOKENS, True),
        (0.5, HEAD_TOKENS + 1, False),
        (0.9, HEAD_TOKENS // 9, True),
        (0.9, HEAD_TOKENS // 9 + 1, False),
    ],
)
def test_second_demotion_keeps_the_beginning_of_a_prompt(
    pressure: float, end_token: int, admitted: bool
) -> None:
    policy = SecondDemotion()
    assert not policy.admit(5, end_token, pressure, 0.0)
    assert policy.admit(5, end_token, pressure, 0.0) is admitted


@pytest.mark.parametrize("pressure", [0.0, 0.3, 0.8, 1.0])
def test_second_demotion_without_positions_refuses_a_share(pressure: float) -> None:
    policy = SecondDemotion()
    assert share_admitted(policy, 0.0) == 0.0
    assert share_admitted(policy, pressure) == pytest.approx(1 - pressure, abs=0.03)


# ----------------------------------------------------------------------------- reuse probability


def reuse(num_tags: int = 1000, explore_share: float = 0.0) -> ReuseProbability:
    return ReuseProbability(num_tags, explore_share=explore_share)


class Traffic:
    """Offers new chunks of a class and lets a share of them be read before they are evicted."""

    def __init__(self, policy: ReuseProbability) -> None:
        self.policy = policy
        self.next_tag = 0

    def run(
        self, end_token: int, read_share: float, num: int, now_s: float, pressure: float = 0.0
    ) -> float:
        """Returns the share that was admitted."""
        admitted = 0
        for idx in range(num):
            tag = self.next_tag = self.next_tag + 1
            admitted += self.policy.admit(tag, end_token, pressure, now_s)
            if int((idx + 1) * read_share) > int(idx * read_share):
                self.policy.on_read(tag, now_s)
                self.policy.on_read(tag, now_s)  # only the first one is an outcome
            self.policy.on_evicted(tag, now_s)
        return admitted / num


@pytest.mark.parametrize("read_share", [0.0, 0.05, 0.5, 1.0])
def test_the_estimate_is_the_share_that_was_read(read_share: float) -> None:
    policy = reuse()
    Traffic(policy).run(4096, read_share, 3000, 0.0)
    assert policy.estimate(4096, 0.0) == pytest.approx(read_share, abs=0.01)
    # Positions 4096 to 8191 are one class.
    assert policy.estimate(8191, 0.0) == policy.estimate(4096, 0.0)
    assert policy.estimate(8192, 0.0) == 1.0


def test_a_class_that_pays_is_admitted_and_one_that_does_not_is_refused() -> None:
    policy = reuse()
    traffic = Traffic(policy)
    traffic.run(4096, 0.5, 1000, 0.0)
    traffic.run(65_536, 0.05, 1000, 0.0)
    assert traffic.run(4096, 0.5, 100, 1.0) == 1.0
    assert traffic.run(65_536, 0.05, 100, 1.0) == 0.0


def test_pressure_raises_what_is_asked_for() -> None:
    policy = reuse()
    Traffic(policy).run(4096, 0.6, 3000, 0.0)
    # 0.6 is what 0.2 becomes at half pressure.
    assert policy.admit(-1, 4096, 0.49, 0.0)
    assert not policy.admit(-2, 4096, 0.52, 0.0)


def test_a_shallow_class_is_carried_by_a_deeper_one() -> None:
    """Long prompts are read again, short ones are not. Of no use is a long prompt's end without
    its beginning, which cannot be told from a short one."""
    policy = reuse()
    traffic = Traffic(policy)
    traffic.run(1024, 0.0, 1000, 0.0)
    assert traffic.run(1024, 0.0, 10, 1.0) == 0.0
    traffic.run(65_536, 0.5, 1000, 2.0)
    assert traffic.run(1024, 0.0, 10, 3.0) == 1.0
    assert policy.estimate(1024, 3.0) == policy.estimate(65_536, 3.0)
    # But not by chunks whose position is unknown, nor the other way round.
    traffic.run(0, 1.0, 1000, 3.0)
    traffic.run(131_072, 0.0, 3000, 3.0)
    assert policy.estimate(131_072, 3.0) < MIN_REUSE
    # When the deep class is no longer seen, it no longer carries.
    traffic.run(1024, 0.0, 1000, 3.0 + HALF_LIFE_S)
    assert policy.estimate(1024, 3.0 + HALF_LIFE_S) < MIN_REUSE


def test_refused_chunks_that_come_again_revive_their_class() -> None:
    """Nothing of the class is written, so nothing of it can be read; but it is asked for."""
    policy = reuse()
    traffic = Traffic(policy)
    traffic.run(4096, 0.0, 500, 0.0)
    again = list(range(10_000, 10_300))
    assert not any(policy.admit(tag, 4096, 0.0, 1.0) for tag in again)
    answers = [policy.admit(tag, 4096, 0.0, 2.0) for tag in again]
    assert not answers[0]
    assert answers[-1]


def test_refused_chunks_that_do_not_come_again_are_bad_endings() -> None:
    policy = reuse(num_tags=50)
    for tag in range(1000):
        policy.admit(tag, 4096, 0.0, 0.0)
    # Nothing was evicted; all but the last fifty were forgotten.
    expected = PRIOR_OUTCOMES / (PRIOR_OUTCOMES + 950)
    assert policy.estimate(4096, 0.0) == pytest.approx(expected)


def test_a_class_of_which_nothing_is_heard_is_tried_again() -> None:
    policy = reuse()
    Traffic(policy).run(4096, 0.0, 1000, 0.0)
    assert not policy.admit(-1, 4096, 0.0, HALF_LIFE_S)
    assert policy.admit(-2, 4096, 0.0, 12 * HALF_LIFE_S)


def test_a_small_share_of_time_explores_with_whole_prompts() -> None:

    def explored(pressure: float) -> set[int]:
        policy = ReuseProbability()
        traffic, slices = Traffic(policy), set()
        traffic.run(4096, 0.0, 2000, 0.0)
        for idx in range(4000):
            share = traffic.run(4096, 0.0, 4, (idx + 0.5) * EXPLORE_S, pressure)
            assert share in (0.0, 1.0)
            if share:
                slices.add(idx)
        return slices

    freely, pressed = explored(0.0), explored(0.5)
    assert len(freely) / 4000 == pytest.approx(EXPLORE_SHARE, rel=0.3)
    assert len(pressed) / 4000 == pytest.approx(EXPLORE_SHARE / 2, rel=0.3)
    assert pressed < freely
    assert not explored(1.0)


outcomes = st.lists(
    st.tuples(st.sampled_from([64, 4096, 30_000]), st.booleans(), st.sampled_from([0, 60, 5000])),
    max_size=30,
)


@given(history=outcomes)
def test_the_estimate_is_a_sum_over_all_endings_that_fade(
    history: list[tuple[int, bool, int]],
) -> None:
    policy, endings, now_s = reuse(), [], 0.0
    for tag, (end_token, good, step_s) in enumerate(history):
        now_s += step_s
        policy.admit(tag, end_token, 0.0, now_s)
        (policy.on_read if good else policy.on_evicted)(tag, now_s)
        endings.append((end_token, good, now_s))

    def plain(end_token: int) -> float:
        good, bad = PRIOR_OUTCOMES, 0.0
        for ended_token, was_good, at_s in endings:
            if ended_token == end_token:
                weight = 2 ** (-(now_s - at_s) / HALF_LIFE_S)
                good += weight * was_good
                bad += weight * (not was_good)
        return good / (good + bad)

    for end_token in (64, 4096, 30_000):
        recent = {
            deeper
            for deeper, _, at_s in endings
            if deeper > end_token and now_s - at_s < HALF_LIFE_S
        }
        expected = max(plain(each) for each in {end_token} | recent)
        assert policy.estimate(end_token, now_s) == pytest.approx(expected)


@pytest.mark.parametrize("changes", [{"min_reuse": 1.1}, {"explore_share": -0.1}])
def test_values_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ReuseProbability(10, **changes)


# ----------------------------------------------------------------------------- days


CHUNK_BYTES = 1 << 20
CHUNK_TOKENS = 256
TIER_CHUNKS = 2000
DAY_S = 86_400.0


class Days:
    """A tier that evicts the least recently used, an endurance budget, and prompts of which half
    come from sessions that go on and half are never seen again."""

    def __init__(self, policy: Admission, writes_per_day: float | None, seed: int) -> None:
        self.policy = policy
        self.governor = EnduranceGovernor(TIER_CHUNKS * CHUNK_BYTES, writes_per_day, 0.0)
        self.held: OrderedDict[int, None] = OrderedDict()
        self.rng = random.Random(seed)
        self.read = self.written = self.asked = 0

    def prompt(self, tag_of: Callable[[int], int], num_chunks: int, now_s: float) -> None:
        tags = [tag_of(idx) for idx in range(num_chunks)]
        num_hit = next((idx for idx, tag in enumerate(tags) if tag not in self.held), num_chunks)
        self.asked += num_chunks
        self.read += num_hit
        for tag in reversed(tags[:num_hit]):
            self.policy.on_read(tag, now_s)
            self.held.move_to_end(tag)
        for idx, tag in enumerate(tags[num_hit:], num_hit):
            pressure = self.governor.pressure(now_s)
            wanted = self.policy.admit(tag, (idx + 1) * CHUNK_TOKENS, pressure, now_s)
            if wanted and tag not in self.held:
                self.held[tag] = None
                self.written += 1
                self.governor.on_written(CHUNK_BYTES, now_s)
                if len(self.held) > TIER_CHUNKS:
                    victim, _ = self.held.popitem(last=False)
                    self.policy.on_evicted(victim, now_s)

    def run(self, days: float) -> "Days":
        now_s, rng = 0.0, self.rng
        sessions = [rng.getrandbits(60) for _ in range(8)]
        lengths = [20] * 8
        while now_s < days * DAY_S:
            now_s += rng.expovariate(1 / 120.0)
            if rng.random() < 0.5:
                salt = rng.getrandbits(60)
                self.prompt(lambda idx, salt=salt: (salt + idx * 7919) % (1 << 60), 20, now_s)  # type: ignore[misc]
                continue
            which = rng.randrange(8)
            lengths[which] += 1
            if lengths[which] > 60:
                sessions[which], lengths[which] = rng.getrandbits(60), 20
            salt = sessions[which]
            self.prompt(
                lambda idx, salt=salt: (salt + idx * 7919) % (1 << 60),  # type: ignore[misc]
                lengths[which],
                now_s,
            )
        return self


@every_policy
def test_ten_days_stay_within_the_budget_and_still_serves(name: str) -> None:
    """Twice as much would be written as may be: the policies hold what the governor allows."""
    days, budget = 10, 1.5
    bounded = Days(make_admission(name, TIER_CHUNKS), budget, seed=8).run(days)
    free = Days(make_admission(name, TIER_CHUNKS), None, seed=8).run(days)
    allowed = (days + 1) * budget * TIER_CHUNKS
    assert bounded.written <= allowed + 1
    if free.written > allowed:
        assert bounded.written > 0.8 * allowed  # the budget is used, not shied away from
    assert bounded.read > 0.5 * free.read


def test_second_demotion_serves_more_for_each_chunk_written() -> None:
    """As in conversations (docs/SOURCES.md S6: 0.85 against 0.39 reads per write)."""
    always = Days(make_admission("always", TIER_CHUNKS), None, seed=5).run(5)
    second = Days(make_admission("second-demotion", TIER_CHUNKS), None, seed=5).run(5)
    assert second.read / second.written > 1.5 * always.read / always.written
    assert second.read > 0.8 * always.read
