"""How fast an engine computes, seen from its scheduler: in step, ahead of time, and idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.engines.prefill import StepTimer

RATE = 10_000.0  # tokens per second of the engines below


def near(rate: float) -> object:
    return pytest.approx(rate, rel=1e-6)


def test_nothing_is_known_at_first() -> None:
    timer = StepTimer()
    assert timer.rate.tokens_per_s is None
    timer.on_outputs(5.0)
    assert timer.rate.tokens_per_s is None, "outputs of a step that nobody scheduled"


def test_a_step_runs_from_its_scheduling_to_its_outputs() -> None:
    timer = StepTimer()
    timer.on_scheduled(1000, 1000, 100.0)
    timer.on_outputs(100.1)
    assert timer.rate.tokens_per_s == near(RATE)


def test_an_engine_that_schedules_ahead() -> None:
    """The second step is scheduled while the first one runs. It begins when that one ends; timed
    from its scheduling it would seem to take twice as long."""
    timer = StepTimer()
    timer.on_scheduled(1000, 1000, 0.0)
    for step in range(1, 50):
        timer.on_scheduled(1000, 1000, step / 10 - 0.09)
        timer.on_outputs(step / 10)
        assert timer.rate.tokens_per_s == near(RATE)


def test_an_engine_that_schedules_far_ahead() -> None:
    timer = StepTimer()
    for _ in range(4):
        timer.on_scheduled(1000, 1000, 0.0)
    for step in range(1, 5):
        timer.on_outputs(step / 10)
        assert timer.rate.tokens_per_s == near(RATE)


def test_idle_time_is_not_computing() -> None:
    """Nothing was scheduled for an hour: the next step begins when it is scheduled."""
    timer = StepTimer()
    timer.on_scheduled(1000, 1000, 0.0)
    timer.on_outputs(0.1)
    timer.on_scheduled(1000, 1000, 3600.0)
    timer.on_outputs(3600.1)
    assert timer.rate.tokens_per_s == near(RATE)


@pytest.mark.parametrize(
    ("prompt_tokens", "all_tokens", "counts"),
    [
        (64, 64, True),
        (63, 63, False),  # what every step costs outweighs the tokens
        (750, 1000, True),
        (749, 1000, False),  # much of it is others' decoding
        (0, 256, False),
        (1, 1, False),
    ],
)
def test_a_step_that_says_little_about_prefill(
    prompt_tokens: int, all_tokens: int, counts: bool
) -> None:
    timer = StepTimer()
    timer.on_scheduled(prompt_tokens, all_tokens, 0.0)
    timer.on_outputs(0.1)
    assert timer.rate.tokens_per_s == (near(prompt_tokens / 0.1) if counts else None)


def test_a_step_that_does_not_count_delays_the_next_one_all_the_same() -> None:
    timer = StepTimer()
    timer.on_scheduled(0, 256, 0.0)
    timer.on_scheduled(1000, 1000, 0.0)
    timer.on_outputs(0.9)
    timer.on_outputs(1.0)
    assert timer.rate.tokens_per_s == near(RATE)


def test_a_step_without_tokens_has_outputs_too() -> None:
    """While every request waits for what is read for it, a step computes nothing, and ends at
    once. Its outputs were taken for those of the prefill behind it, that had been scheduled
    a moment before, so that the engine seemed to compute a hundred times as fast as it did and
    nothing was worth reading any more."""
    timer = StepTimer()
    timer.on_scheduled(0, 0, 0.0)
    timer.on_scheduled(1000, 1000, 0.0)
    timer.on_outputs(0.001)
    assert timer.rate.tokens_per_s is None
    timer.on_outputs(0.101)
    assert timer.rate.tokens_per_s == near(RATE)


def test_an_engine_that_says_nothing_of_a_step_without_tokens() -> None:
    """vLLM's executor within the scheduler's own process: the next outputs are of the prefill."""
    timer = StepTimer(empty_steps_have_outputs=False)
    timer.on_scheduled(0, 0, 0.0)
    timer.on_scheduled(1000, 1000, 1.0)
    timer.on_outputs(1.1)
    assert timer.rate.tokens_per_s == near(RATE)


def test_steps_without_outputs_do_not_pile_up() -> None:
    """An engine whose outputs never come, or not all of them, costs no memory."""
    timer = StepTimer()
    for step in range(10_000):
        timer.on_scheduled(1000, 1000, float(step))
    for step in range(10_000):
        timer.on_outputs(10_000.0 + step)
    timer.on_scheduled(1000, 1000, 30_000.0)
    timer.on_outputs(30_000.1)
    assert timer.rate.tokens_per_s is not None


def test_outputs_at_the_moment_of_scheduling() -> None:
    """A clock that is too coarse is no division by zero."""
    timer = StepTimer()
    timer.on_scheduled(1000, 1000, 7.0)
    timer.on_outputs(7.0)
    assert timer.rate.tokens_per_s is not None


steps = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 64, 500, 2000, 8000]),  # prompt tokens
        st.sampled_from([0, 1, 8]),  # decoded ones beside
        st.floats(0.0, 5.0),  # idle before
    ),
    min_size=1,
    max_size=40,
)


@given(steps, st.integers(1, 4))
def test_an_engine_of_constant_speed_is_seen_as_one(
    history: list[tuple[int, int, float]], depth: int
) -> None:
    """However far ahead it schedules, whatever comes between, wherever it is idle."""
    timer = StepTimer()
    now_s = free_s = 0.0
    running: list[float] = []
    counted = False
    for prompt_tokens, decode_tokens, idle_s in history:
        if len(running) == depth:
            now_s = max(now_s, running.pop(0))
            timer.on_outputs(now_s)
        if idle_s > 4:
            while running:
                now_s = max(now_s, running.pop(0))
                timer.on_outputs(now_s)
            now_s += idle_s
        all_tokens = prompt_tokens + decode_tokens
        timer.on_scheduled(prompt_tokens, all_tokens, now_s)
        free_s = max(free_s, now_s) + prompt_tokens / RATE
        running.append(free_s)
        counted |= prompt_tokens >= 64
    for end_s in running:
        timer.on_outputs(end_s)
    assert timer.rate.tokens_per_s == (near(RATE) if counted else None)
