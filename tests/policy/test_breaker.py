"""The breaker: tables of its life, and long random lives against a plain model."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.policy.breaker import Breaker, State

LIMIT_S = 2.0


def breaker(**changes: float) -> Breaker:
    values = {"latency_limit_s": LIMIT_S, "num_in_a_row": 3, "num_recent": 8, "bad_share": 0.5}
    values |= {"open_s": 4.0, "max_open_s": 16.0}
    return Breaker(**values | changes)  # type: ignore[arg-type]


def opened(now_s: float = 0.0) -> Breaker:
    """One that opened at ``now_s``."""
    subject = breaker()
    for _ in range(3):
        assert subject.allow(now_s)
        subject.on_error(now_s, now_s)
    assert subject.state is State.OPEN
    return subject


RESULTS = {
    "g": lambda subject: subject.on_done(0.0, 0.1, 0.1),
    "l": lambda subject: subject.on_done(0.0, LIMIT_S, LIMIT_S),  # at the limit: not slow
    "s": lambda subject: subject.on_done(0.0, LIMIT_S + 0.001, LIMIT_S + 0.001),
    "e": lambda subject: subject.on_error(0.0, 0.1),
    "o": lambda subject: subject.on_overdue(0.0, LIMIT_S + 0.1),
    "u": lambda subject: subject.on_given_up(0.0),
}


@pytest.mark.parametrize(
    ("results", "opens"),
    [
        # In a row, of whatever kind.
        ("eee", True),
        ("sss", True),
        ("ooo", True),
        ("eso", True),
        ("ee", False),
        ("geee", True),
        ("eege", False),
        ("eele", False),
        ("eeuugeu", False),
        ("eeue", True),  # given up is no result, so it does not interrupt the row
        # Too many of the last eight: four.
        ("egegeg", False),
        ("egegege", True),
        ("egsgogs", True),
        ("eggggggg" + "egege", False),  # the first error is no longer among the last eight
        ("eggggege", False),
        ("eggggege" + "e", False),
        ("eggegege", True),
        ("eeggggggeeg", False),
        ("eegggggeege", False),
        ("g" * 100 + "eegeg", False),
        ("g" * 100 + "eegege", True),
    ],
)
def test_what_opens_it(results: str, opens: bool) -> None:
    subject = breaker()
    for result in results:
        assert subject.state is State.CLOSED
        assert subject.allow(0.0)
        RESULTS[result](subject)
    assert (subject.state is State.OPEN) is opens
    assert subject.num_opened == opens


@pytest.mark.parametrize(
    ("bad_share", "num_recent", "num_bad"), [(0.5, 8, 4), (0.5, 7, 4), (1.0, 8, 8), (0.01, 20, 1)]
)
def test_the_share_is_rounded_up(bad_share: float, num_recent: int, num_bad: int) -> None:
    subject = breaker(bad_share=bad_share, num_recent=num_recent, num_in_a_row=1000)
    for _ in range(num_bad):
        assert subject.state is State.CLOSED
        subject.on_error(0.0, 0.0)
    assert subject.state is State.OPEN


def test_an_overdue_operation_counts_before_it_ends() -> None:
    """A tier that hangs opens the breaker although nothing ever ends."""
    subject = breaker()
    for began_s in (0.0, 0.1, 0.2):
        assert subject.allow(began_s)
    for began_s in (0.0, 0.1, 0.2):
        subject.on_overdue(began_s, LIMIT_S + 0.3)
    assert subject.state is State.OPEN
    assert subject.retry_at_s == LIMIT_S + 0.3 + 4.0


def test_while_open_nothing_is_allowed_until_one_probe_is() -> None:
    subject = opened(100.0)
    assert subject.retry_at_s == 104.0
    assert not any(subject.allow(now_s) for now_s in (100.0, 102.0, 103.999))
    assert [subject.allow(104.0) for _ in range(5)] == [True, False, False, False, False]
    assert subject.state is State.HALF_OPEN
    assert not subject.allow(110.0)


def test_a_good_probe_closes_it_and_all_is_forgotten() -> None:
    subject = opened()
    assert subject.allow(4.0)
    subject.on_done(4.0, 0.1, 4.1)
    assert subject.state is State.CLOSED
    for _ in range(2):
        assert subject.allow(5.0)
        subject.on_error(5.0, 5.0)
    assert subject.state is State.CLOSED


@pytest.mark.parametrize("bad", ["slow", "error", "overdue"])
def test_bad_probes_double_the_time_up_to_the_maximum_and_a_good_one_resets_it(bad: str) -> None:
    subject = opened()
    now_s = 0.0
    for wait_s in (4.0, 8.0, 16.0, 16.0, 16.0):
        assert subject.retry_at_s == now_s + wait_s
        now_s = subject.retry_at_s
        assert subject.allow(now_s)
        if bad == "slow":
            subject.on_done(now_s, LIMIT_S + 1, now_s)
        elif bad == "error":
            subject.on_error(now_s, now_s)
        else:
            subject.on_overdue(now_s, now_s)
        assert subject.state is State.OPEN
    assert subject.num_opened == 1
    now_s = subject.retry_at_s
    assert subject.allow(now_s)
    subject.on_done(now_s, 0.1, now_s)
    for _ in range(3):
        subject.on_error(now_s, now_s)
    assert subject.retry_at_s == now_s + 4.0
    assert subject.num_opened == 2


@pytest.mark.parametrize("probing", [False, True])
@pytest.mark.parametrize("late", ["done", "error", "overdue", "given_up"])
def test_what_began_before_it_opened_changes_nothing(probing: bool, late: str) -> None:
    """Thirty reads hang, three are overdue, and the rest ends while the probe is under way."""
    subject = opened()
    if probing:
        assert subject.allow(5.0)
    before = (subject.state, subject.retry_at_s)
    for _ in range(10):
        if late == "done":
            subject.on_done(0.0, 0.1, 5.5)
        elif late == "error":
            subject.on_error(0.0, 5.5)
        elif late == "overdue":
            subject.on_overdue(0.0, 5.5)
        else:
            subject.on_given_up(0.0)
    assert (subject.state, subject.retry_at_s) == before
    assert not subject.allow(5.6) or not probing


def test_what_began_before_it_closed_does_not_open_it_again() -> None:
    subject = opened()
    assert subject.allow(4.0)
    subject.on_done(4.0, 0.1, 4.1)
    for _ in range(10):
        subject.on_done(0.0, 30.0, 30.0)
        subject.on_error(0.0, 30.0)
    assert subject.state is State.CLOSED


def test_a_probe_that_was_overdue_does_not_close_it_when_it_ends_after_all() -> None:
    subject = opened()
    assert subject.allow(4.0)
    subject.on_overdue(4.0, 6.5)
    subject.on_done(4.0, 0.1, 6.6)
    assert subject.state is State.OPEN
    assert subject.allow(14.5)
    subject.on_done(4.0, 0.1, 14.6)
    assert subject.state is State.HALF_OPEN


def test_a_probe_that_never_ran_leaves_the_turn_to_the_next() -> None:
    """Its chunk was absent, so the tier was not asked; nobody may wait for its result."""
    subject = opened()
    for now_s in (4.0, 4.0, 5.0):
        assert subject.allow(now_s)
        assert not subject.allow(now_s)
        subject.on_given_up(now_s)
        assert subject.state is State.OPEN
    assert subject.allow(5.0)
    subject.on_error(5.0, 5.0)
    assert subject.retry_at_s == 5.0 + 8.0  # given up is no failure: doubled once


def test_a_probe_that_is_never_reported_does_not_close_the_tier_for_ever() -> None:
    subject = opened()
    assert subject.allow(4.0)
    assert not subject.allow(19.9)
    assert [subject.allow(20.0), subject.allow(20.0)] == [True, False]
    subject.on_done(4.0, 0.1, 20.1)
    assert subject.state is State.HALF_OPEN
    subject.on_done(20.0, 0.1, 20.1)
    assert subject.state is State.CLOSED


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_limit_s": 0.0},
        {"num_in_a_row": 0},
        {"num_recent": 0},
        {"bad_share": 0.0},
        {"bad_share": 1.1},
        {"open_s": 0.0},
        {"open_s": 17.0},
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        breaker(**changes)


def test_defaults_open_after_one_bounded_delay() -> None:
    """Three reads at once hang: they are overdue together, and the fourth is not sent."""
    subject = Breaker()
    for _ in range(3):
        subject.on_overdue(0.0, subject.latency_limit_s)
    assert not subject.allow(subject.latency_limit_s)


@dataclass(eq=False)
class Operation:
    began_s: float
    life: int


class PlainBreaker:
    """The same rules, told by names instead of by times: each operation knows in which life of
    the breaker it began, and every result of the present life is kept."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.life = 0
        self.results: list[str] = []
        self.failed_probes = 0
        self.retry_at_s = 0.0
        self.probe_s = 0.0

    def begin(self, state: State) -> None:
        self.state = state
        self.life += 1
        self.results = []

    def open(self, now_s: float) -> None:
        self.begin(State.OPEN)
        self.retry_at_s = now_s + min(16.0, 4.0 * 2**self.failed_probes)

    def allow(self, now_s: float) -> bool:
        if self.state is State.CLOSED:
            return True
        lost = self.state is State.HALF_OPEN and now_s >= self.probe_s + 16.0
        if lost or (self.state is State.OPEN and now_s >= self.retry_at_s):
            self.begin(State.HALF_OPEN)
            self.probe_s = now_s
            return True
        return False

    def end(self, operation: Operation, result: str, now_s: float) -> None:
        if operation.life != self.life:
            return
        if self.state is State.HALF_OPEN:
            if result == "good":
                self.failed_probes = 0
                self.begin(State.CLOSED)
            elif result == "bad":
                self.failed_probes += 1
                self.open(now_s)
            else:
                self.begin(State.OPEN)
            return
        if result == "given_up":
            return
        self.results.append(result)
        if self.results[-3:] == ["bad"] * 3 or self.results[-8:].count("bad") >= 4:
            self.open(now_s)


class BreakerMachine(RuleBasedStateMachine):
    """Operations begin, overlap and end in any order; both agree after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.real = breaker()
        self.plain = PlainBreaker()
        self.now_s = 1000.0
        self.running: list[Operation] = []

    @rule(step_s=st.sampled_from([0.125, 0.5, 2.0, 4.0, 8.0, 16.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(times=st.integers(1, 4))
    def begin(self, times: int) -> None:
        for _ in range(times):
            allowed = self.plain.allow(self.now_s)
            assert self.real.allow(self.now_s) is allowed
            if allowed:
                self.running.append(Operation(self.now_s, self.plain.life))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        how=st.sampled_from(["done", "done", "done", "slow", "error", "overdue", "given_up"]),
    )
    def end(self, data: st.DataObject, how: str) -> None:
        idx = data.draw(st.integers(0, len(self.running) - 1))
        operation = self.running.pop(idx)
        began_s, now_s = operation.began_s, self.now_s
        if how == "done":
            self.real.on_done(began_s, 0.5, now_s)
        elif how == "slow":
            self.real.on_done(began_s, LIMIT_S * 2, now_s)
        elif how == "error":
            self.real.on_error(began_s, now_s)
        elif how == "overdue":
            self.real.on_overdue(began_s, now_s)
        else:
            self.real.on_given_up(began_s)
        result = {"done": "good", "given_up": "given_up"}.get(how, "bad")
        self.plain.end(operation, result, now_s)

    @invariant()
    def agree(self) -> None:
        assert self.real.state is self.plain.state
        if self.plain.state is State.OPEN:
            assert self.real.retry_at_s == self.plain.retry_at_s


BreakerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60)
TestBreakerMachine = BreakerMachine.TestCase
