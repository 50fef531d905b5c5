"""Is reading worth it: the cut against all cuts, and the estimates against simulated tiers."""

import dataclasses
import heapq
import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from stepwell.policy.worth import (
    FORGET_AFTER_S,
    PROBE_AFTER_S,
    PROBE_BYTES,
    PrefillRate,
    Run,
    TierEstimate,
    TierSpeed,
    worth_chunks,
)

MIB = 1 << 20
GB = 10**9

# ----------------------------------------------------------------------------- the cut


def tier(latency_s: float, bytes_per_s: float, queued_bytes: int = 0) -> TierEstimate:
    return TierEstimate(latency_s, bytes_per_s, queued_bytes)


def one(num_chunks: int, tier_idx: int = 0) -> Run:
    """Chunks of 8 MB for 64 tokens: 125 kB per token, about Llama-3.1-8B."""
    return Run(tier_idx, num_chunks, 8_000_000, 64)


@pytest.mark.parametrize(
    ("runs", "estimates", "tokens_per_s", "floor_tokens", "chunks"),
    [
        # 100 chunks are 800 MB or 6,400 tokens: 0.8 s to read at 1 GB/s.
        ([one(100)], [tier(0.0, 1e9)], 6_400.0, 0, 100),  # 1 s to compute
        ([one(100)], [tier(0.0, 1e9)], 8_000.0, 0, 100),  # 0.8 s: a tie prefers reading
        ([one(100)], [tier(0.0, 1e9)], 8_001.0, 0, 0),
        ([one(100)], [tier(0.21, 1e9)], 6_400.0, 0, 0),  # latency and queue count, once
        ([one(100)], [tier(0.2, 1e9)], 6_399.0, 0, 100),
        ([one(100)], [tier(0.0, 1e9, 210_000_000)], 6_400.0, 0, 0),
        ([one(100)], [tier(0.0, 1e9, 190_000_000)], 6_400.0, 0, 100),
        # The floor.
        ([one(100)], [tier(0.0, 1e9)], 6_400.0, 6_400, 100),
        ([one(100)], [tier(0.0, 1e9)], 6_400.0, 6_401, 0),
        # What is unknown is worth it.
        ([one(100)], [None], 1e9, 0, 100),
        ([one(100)], [tier(1e9, 1.0)], None, 0, 100),
        ([one(100)], [None], None, 6_400, 100),
        ([one(100)], [None], None, 6_401, 0),
        ([one(10), one(90, 1)], [tier(9.0, 1.0), None], 6_400.0, 0, 0),
        ([one(10), one(90, 1)], [tier(0.0, 1e9), None], 6_400.0, 0, 100),
        # A fast tier above one that is not worth it: only the former's chunks.
        ([one(50), one(50, 1)], [tier(0.0, 1e10), tier(0.0, 1e8)], 6_400.0, 0, 50),
        # What the second reads in the first one's 0.4 s costs nothing: five chunks.
        ([one(50), one(50, 1)], [tier(0.0, 1e9), tier(0.0, 1e8)], 6_400.0, 0, 55),
        ([one(50), one(50, 1)], [tier(0.0, 1e10), tier(0.5, 1e9)], 6_400.0, 0, 50),
        # The second tier reads while the first does: 4 s and 4 s are 4 s.
        ([one(50), one(50, 1)], [tier(0.0, 1e8), tier(0.0, 1e8)], 1_200.0, 0, 100),
        ([one(100), one(100)], [tier(0.0, 1e8)], 1_200.0, 0, 0),
        ([], [], 1.0, 0, 0),
        ([], [], None, 0, 0),
    ],
)
def test_the_cut(
    runs: list[Run],
    estimates: list[TierEstimate | None],
    tokens_per_s: float | None,
    floor_tokens: int,
    chunks: int,
) -> None:
    assert worth_chunks(runs, estimates, tokens_per_s, floor_tokens) == chunks


def test_break_even_is_as_published() -> None:
    """docs/SOURCES.md S3: at 32k tokens Llama-70B on 8 H100 (21.3k tok/s, 320 KiB per token)
    reads in less time than it computes from 7.0 GB/s on, DeepSeek-V3 from 1.0 GB/s on."""
    for rate, token_bytes, break_even in ((21_300, 327_680, 7.0), (14_800, 70_272, 1.0)):
        run = Run(0, 128, 256 * token_bytes, 256)
        assert worth_chunks([run], [tier(0.001, 1.06 * break_even * GB)], rate) == 128
        assert worth_chunks([run], [tier(0.001, 0.94 * break_even * GB)], rate) == 0


def cuts_s(
    runs: Sequence[Run], estimates: Sequence[Any], tokens_per_s: Any
) -> Iterator[tuple[int, Any, int]]:
    """Every cut, chunk by chunk: its number, its time, and the tokens that it saves."""
    chunks = [run for run in runs for _ in range(run.num_chunks)]
    for cut in range(len(chunks) + 1):
        num_bytes = [0] * len(estimates)
        for run in chunks[:cut]:
            num_bytes[run.tier_idx] += run.chunk_bytes
        reading_s = 0
        for each, tier_bytes in zip(estimates, num_bytes, strict=True):
            if tier_bytes and each is not None:
                took_s = each.latency_s + (each.queued_bytes + tier_bytes) / each.bytes_per_s
                reading_s = max(reading_s, took_s)
        saved = sum(run.chunk_tokens for run in chunks[:cut])
        left = sum(run.chunk_tokens for run in chunks[cut:])
        yield cut, reading_s + left / tokens_per_s, saved


def best_of_all(
    runs: Sequence[Run], estimates: Sequence[Any], tokens_per_s: Any, floor_tokens: int
) -> int:
    allowed = [
        (took_s, -cut)
        for cut, took_s, saved in cuts_s(runs, estimates, tokens_per_s)
        if cut == 0 or saved >= floor_tokens
    ]
    return -min(allowed)[1]


NUM_TIERS = 3
# Small fractions, so that ties happen and are ties exactly.
small = st.integers(1, 12)
fractions = st.builds(Fraction, small, small)
prefixes = st.lists(
    st.builds(Run, st.integers(0, NUM_TIERS - 1), st.integers(1, 6), small, small), max_size=6
)
known = st.builds(TierEstimate, st.integers(0, 6).map(Fraction), fractions, st.integers(0, 20))
tiers = st.lists(known | st.none(), min_size=NUM_TIERS, max_size=NUM_TIERS)
floors = st.integers(0, 60)


@given(prefixes, tiers, fractions, floors)
def test_no_cut_is_better(
    runs: list[Run], estimates: list[Any], tokens_per_s: Any, floor_tokens: int
) -> None:
    expected = best_of_all(runs, estimates, tokens_per_s, floor_tokens)
    assert worth_chunks(runs, estimates, tokens_per_s, floor_tokens) == expected


@given(
    prefixes,
    st.lists(
        st.builds(TierEstimate, st.floats(0, 10), st.floats(1e-3, 1e3), st.integers(0, 10**6)),
        min_size=NUM_TIERS,
        max_size=NUM_TIERS,
    ),
    st.floats(1e-3, 1e3),
)
def test_no_cut_is_better_in_floating_point_either(
    runs: list[Run], estimates: list[Any], tokens_per_s: float
) -> None:
    times_s = {cut: took_s for cut, took_s, _ in cuts_s(runs, estimates, tokens_per_s)}
    chosen = worth_chunks(runs, estimates, tokens_per_s)
    assert times_s[chosen] <= min(times_s.values()) * (1 + 1e-9)


def faster(estimate: TierEstimate | None, factor: Any) -> TierEstimate | None:
    if estimate is None:
        return None
    return dataclasses.replace(
        estimate,
        latency_s=estimate.latency_s / factor,
        bytes_per_s=estimate.bytes_per_s * factor,
    )


factors = st.builds(lambda above: 1 + above, fractions)


@given(prefixes, tiers, fractions, floors, factors)
def test_all_tiers_faster_never_reads_less(
    runs: list[Run], estimates: list[Any], tokens_per_s: Any, floor_tokens: int, factor: Any
) -> None:
    before = worth_chunks(runs, estimates, tokens_per_s, floor_tokens)
    sped_up = [faster(each, factor) for each in estimates]
    assert worth_chunks(runs, sped_up, tokens_per_s, floor_tokens) >= before


@given(prefixes, tiers, fractions, floors, factors)
def test_faster_prefill_never_reads_more(
    runs: list[Run], estimates: list[Any], tokens_per_s: Any, floor_tokens: int, factor: Any
) -> None:
    before = worth_chunks(runs, estimates, tokens_per_s, floor_tokens)
    assert worth_chunks(runs, estimates, tokens_per_s * factor, floor_tokens) <= before


@given(prefixes, tiers, fractions, floors, factors, st.integers(1, 50))
def test_the_last_tier_faster_never_reads_less_and_its_queue_never_more(
    runs: list[Run],
    estimates: list[Any],
    tokens_per_s: Any,
    floor_tokens: int,
    factor: Any,
    more_bytes: int,
) -> None:
    """The tier whose chunks come after those of all others; with one tier that is the one."""
    assume(runs)
    last = runs[-1].tier_idx
    runs = [run for run in runs if run.tier_idx != last] + [
        run for run in runs if run.tier_idx == last
    ]
    before = worth_chunks(runs, estimates, tokens_per_s, floor_tokens)
    sped_up = list(estimates)
    sped_up[last] = faster(estimates[last], factor)
    assert worth_chunks(runs, sped_up, tokens_per_s, floor_tokens) >= before
    if estimates[last] is None:
        return
    queued = list(estimates)
    queued[last] = dataclasses.replace(
        estimates[last], queued_bytes=estimates[last].queued_bytes + more_bytes
    )
    assert worth_chunks(runs, queued, tokens_per_s, floor_tokens) <= before


def test_a_faster_first_tier_may_read_less_of_the_second() -> None:
    """The exception, so that nobody takes it for a bug: what a slow tier hides is read for
    nothing. Once the first tier is fast, the second one's 8 s no longer pay for 5 s."""
    runs = [Run(0, 10, 10, 4), Run(1, 10, 10, 1)]
    second = tier(0.0, 12.5)
    assert worth_chunks(runs, [tier(0.0, 10.0), second], 2.0) == 20
    assert worth_chunks(runs, [tier(0.0, 50.0), second], 2.0) == 13


@given(prefixes, tiers, fractions, floors)
def test_splitting_runs_changes_nothing(
    runs: list[Run], estimates: list[Any], tokens_per_s: Any, floor_tokens: int
) -> None:
    single = [dataclasses.replace(run, num_chunks=1) for run in runs for _ in range(run.num_chunks)]
    assert worth_chunks(runs, estimates, tokens_per_s, floor_tokens) == worth_chunks(
        single, estimates, tokens_per_s, floor_tokens
    )


def test_cost_does_not_depend_on_the_number_of_chunks() -> None:
    """One that went chunk by chunk would not end."""
    runs = [Run(idx % 2, 10**15, MIB, 16) for idx in range(10)]
    assert worth_chunks(runs, [tier(0.0, 1e12), tier(0.0, 1e12)], 1.0) == 10**16
    assert worth_chunks(runs, [tier(0.0, 1.0), tier(0.0, 1.0)], 1.0) == 0


# ----------------------------------------------------------------------------- probes


def due(estimate: TierEstimate) -> TierEstimate:
    return dataclasses.replace(estimate, probe_due=True)


SLOW = tier(0.0, 1e6)
PROBE_CHUNKS = PROBE_BYTES // 8_000_000


@pytest.mark.parametrize(
    ("runs", "estimates", "floor_tokens", "chunks"),
    [
        ([one(100)], [SLOW], 0, 0),
        ([one(100)], [due(SLOW)], 0, PROBE_CHUNKS),
        ([one(1)], [due(SLOW)], 0, 1),
        ([Run(0, 100, 10**9, 64)], [due(SLOW)], 0, 1),
        ([one(100)], [due(SLOW)], 1000, PROBE_CHUNKS),
        ([one(100)], [due(SLOW)], 6_401, 0),
        # Only the tier at the cut.
        ([one(50), one(50, 1)], [tier(0.0, 1e10), due(tier(5.0, 1e8))], 0, 50 + PROBE_CHUNKS),
        ([one(50), one(50, 1)], [SLOW, due(SLOW)], 0, 0),
        ([one(50), one(50, 1)], [due(SLOW), SLOW], 0, PROBE_CHUNKS),
        # Nothing is left to probe.
        ([one(100)], [due(tier(0.0, 1e10))], 0, 100),
    ],
)
def test_a_probe_reads_a_little_behind_the_cut(
    runs: list[Run], estimates: list[TierEstimate], floor_tokens: int, chunks: int
) -> None:
    assert PROBE_CHUNKS == 2
    assert worth_chunks(runs, estimates, 6_400.0, floor_tokens) == chunks


@dataclasses.dataclass
class Asked:
    """What became of requests that were asked for at a regular interval."""

    tries_s: list[float]
    full_s: list[float]


def ask(
    speed: TierSpeed, bytes_per_s: float, start_s: float, num: int, every_s: float = 0.5
) -> Asked:
    """Ask for a prefix of 100 chunks (1 s to compute) again and again; read what is worth it."""
    tries_s, full_s = [], []
    for step in range(num):
        now_s = start_s + step * every_s
        chunks = worth_chunks([one(100)], [speed.estimate(0, now_s)], 6_400.0)
        if chunks:
            tries_s.append(now_s)
            speed.on_submitted(now_s)
            # Asking once more before the result is there must not send a second probe.
            again = worth_chunks([one(100)], [speed.estimate(0, now_s)], 6_400.0)
            assert again in (0, 100)
            num_bytes = chunks * 8_000_000
            took_s = 0.001 + num_bytes / bytes_per_s
            speed.on_finished(num_bytes, took_s, 0, now_s + took_s)
            if chunks == 100:
                full_s.append(now_s)
    return Asked(tries_s, full_s)


def test_a_slow_tier_is_probed_no_more_often_than_stated() -> None:
    speed = TierSpeed()
    asked = ask(speed, 1e8, 1000.0, 20_000)
    gaps_s = [late - early for early, late in zip(asked.tries_s, asked.tries_s[1:], strict=False)]
    assert asked.full_s == [1000.0]  # the first one, when nothing was known
    assert min(gaps_s) >= PROBE_AFTER_S
    assert max(gaps_s[1:]) <= PROBE_AFTER_S + 1.0


@pytest.mark.parametrize("times_faster", [3, 30, 3000])
def test_a_tier_that_has_become_faster_is_found_out(times_faster: int) -> None:
    """It was slow for a while, so nothing was read; without probes it would be shunned for ever."""
    speed = TierSpeed()
    slow = ask(speed, 2e9 / times_faster, 1000.0, 1000)
    # Where it is only 1.2 times too slow, it takes a few minutes to tell latency and bandwidth
    # apart; until then each probe may mislead to one large read, and never to more.
    assert len(slow.full_s) <= 15
    assert all(b - a > PROBE_AFTER_S for a, b in zip(slow.full_s, slow.full_s[1:], strict=False))
    assert slow.full_s[-1] < 1450.0
    start_s = 4000.0
    recovered = ask(speed, 2e9, start_s, 1000)
    # Each probe corrects by up to a factor of 8.
    num_probes = 2 + math.ceil(math.log(times_faster, 8))
    assert recovered.full_s[0] <= start_s + num_probes * (PROBE_AFTER_S + 1.0)
    assert len(recovered.full_s) > 500


def test_a_tier_that_becomes_slow_is_left_after_a_few_reads() -> None:
    speed = TierSpeed()
    assert len(ask(speed, 5e9, 1000.0, 100).full_s) == 100
    assert len(ask(speed, 5e7, 2000.0, 2000).full_s) <= 3


def test_long_unread_a_tier_is_unknown_again_but_only_once() -> None:
    speed = TierSpeed()
    assert speed.estimate(0, 0.0) is None
    speed.on_submitted(100.0)
    speed.on_finished(8 * MIB, 1.0, 0, 101.0)
    for now_s, probe_due in ((101.0, False), (130.5, False), (131.0, True), (700.0, True)):
        estimate = speed.estimate(5, now_s)
        assert estimate is not None
        assert (estimate.probe_due, estimate.queued_bytes) == (probe_due, 5)
    assert speed.estimate(0, 101.0 + FORGET_AFTER_S) is None
    speed.on_submitted(101.0 + FORGET_AFTER_S)
    estimate = speed.estimate(0, 101.0 + FORGET_AFTER_S)
    assert estimate is not None
    assert not estimate.probe_due


# ----------------------------------------------------------------------------- speeds


def test_before_any_measurement_reading_takes_no_time() -> None:
    speed = TierSpeed()
    assert speed.read_s(GB, GB) == 0.0
    assert (speed.latency_s, speed.bytes_per_s) == (None, None)
    speed.on_finished(0, 5.0, 0, 5.0)  # all absent: moved nothing, says nothing
    assert speed.bytes_per_s is None


def test_one_measurement_is_believed() -> None:
    speed = TierSpeed()
    speed.on_finished(8 * MIB, 0.25, 8 * MIB, 10.0)
    assert speed.read_s(8 * MIB, 8 * MIB) == pytest.approx(0.25)
    estimate = speed.estimate(8 * MIB, 10.0)
    assert estimate is not None
    assert estimate.read_s(8 * MIB) == pytest.approx(0.25)
    assert estimate.read_s(0) == 0.0


@pytest.mark.parametrize("latency_s", [0.0001, 0.01])
@pytest.mark.parametrize("bytes_per_s", [2e8, 7e9])
def test_latency_and_bandwidth_are_told_apart(latency_s: float, bytes_per_s: float) -> None:
    """From exact jobs of many sizes both are found, wherever each of them matters."""
    rng = random.Random(5)
    speed, now_s = TierSpeed(), 0.0
    for _ in range(2000):
        num_bytes, queued_bytes = (1 << rng.randrange(12, 30)), rng.choice([0, 0, 1 << 28])
        elapsed_s = latency_s + (num_bytes + queued_bytes) / bytes_per_s
        now_s += elapsed_s
        speed.on_finished(num_bytes, elapsed_s, queued_bytes, now_s)
    assert speed.latency_s == pytest.approx(latency_s, rel=0.01)
    assert speed.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40),
            st.floats(0, 1e6),
            st.integers(0, 1 << 40),
            st.floats(0, 1e5),
        ),
        min_size=1,
        max_size=30,
    )
)
@example([(1, 1e6, 0, 0.0), (1 << 40, 0.0, 1 << 40, 1e5)] * 10)
def test_no_measurements_make_an_estimate_that_is_no_number(
    jobs: list[tuple[int, float, int, float]],
) -> None:
    speed, now_s = TierSpeed(), 0.0
    for num_bytes, elapsed_s, queued_bytes, step_s in jobs:
        now_s += step_s
        speed.on_finished(num_bytes, elapsed_s, queued_bytes, now_s)
    if speed.bytes_per_s is not None:
        assert 0 < speed.bytes_per_s < math.inf
        assert speed.latency_s is not None
        assert 0 <= speed.latency_s < math.inf


@pytest.mark.parametrize(("before", "after"), [(MIB, 1024 * MIB), (1024 * MIB, MIB)])
def test_jobs_of_another_size_are_believed_at_once(before: int, after: int) -> None:
    """Hundreds of jobs of one size say nothing about another, and must not outvote it."""
    speed, now_s = TierSpeed(), 0.0
    for num_bytes in [before] * 500 + [after] * 3:
        elapsed_s = 0.003 + num_bytes / 6e9
        now_s += elapsed_s
        speed.on_finished(num_bytes, elapsed_s, 0, now_s)
    for num_bytes in (before, after):
        assert 0.45 < speed.read_s(num_bytes, 0) / (0.003 + num_bytes / 6e9) < 1.8


def test_one_stall_is_not_a_new_speed() -> None:
    speed = TierSpeed()
    for idx in range(100):
        speed.on_finished(8 * MIB, 0.01, 0, idx * 0.01)
    before_s = speed.read_s(8 * MIB, 0)
    speed.on_finished(8 * MIB, 30.0, 0, 1.0)
    assert speed.read_s(8 * MIB, 0) < 1.4 * before_s


def simulate(
    threads: int, bytes_per_s: float, load: float, sizes: Sequence[int], seed: int
) -> list[float]:
    """Expected over actual times of reads from a tier like ours: chunks in order of submission,
    some at a time, each with a latency of its own, through one pipe; arrivals at random."""
    rng, chunk_bytes = random.Random(seed), 4 * MIB
    free_s, pipe_s, now_s = [0.0] * threads, 0.0, 0.0
    events: list[tuple[float, int, int, int, float]] = []
    for job in range(1500):
        num = rng.choice(sizes)
        mean_s = sum(sizes) / len(sizes) * chunk_bytes / bytes_per_s
        now_s += rng.expovariate(load / mean_s)
        end_s = now_s
        for _ in range(num):
            begin_s = max(now_s, heapq.heappop(free_s)) + 0.002 * rng.lognormvariate(0, 0.3)
            pipe_s = max(pipe_s, begin_s) + chunk_bytes / bytes_per_s * rng.lognormvariate(0, 0.3)
            heapq.heappush(free_s, pipe_s)
            end_s = max(end_s, pipe_s)
        events.append((now_s, 0, job, num * chunk_bytes, 0.0))
        events.append((end_s, 1, job, num * chunk_bytes, end_s - now_s))
    speed, queued_bytes, ahead, ratios = TierSpeed(), 0, {}, []
    expected: dict[int, float] = {}
    for at_s, is_end, job, num_bytes, elapsed_s in sorted(events):
        if is_end:
            queued_bytes -= num_bytes
            ratios.append(expected[job] / elapsed_s)
            speed.on_finished(num_bytes, elapsed_s, ahead[job], at_s)
        else:
            expected[job], ahead[job] = speed.read_s(num_bytes, queued_bytes), queued_bytes
            queued_bytes += num_bytes
            speed.on_submitted(at_s)
    return sorted(ratios[100:])


@pytest.mark.parametrize("bytes_per_s", [2e8, 6e9])
@pytest.mark.parametrize("load", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("sizes", [[1], [1, 4, 16], [1, 2, 4, 8, 16, 64, 256], [256]])
def test_expectations_hold_on_a_busy_tier(
    bytes_per_s: float, load: float, sizes: list[int]
) -> None:
    """With seven-tenths of all reads being waiting for others, the expectation stays right: what
    was queued ahead is work, not slowness."""
    ratios = simulate(16, bytes_per_s, load, sizes, seed=11)
    assert 0.8 < ratios[len(ratios) // 2] < 1.2
    assert ratios[len(ratios) // 20] > 0.5
    assert ratios[-len(ratios) // 20] < 3.0


# ----------------------------------------------------------------------------- prefill


def test_prefill_rate_before_and_after_the_first_measurement() -> None:
    rate = PrefillRate()
    assert (rate.tokens_per_s, rate.seconds(5), rate.seconds(0)) == (None, math.inf, 0.0)
    rate.on_prefilled(0, 1.0)
    assert rate.tokens_per_s is None
    rate.on_prefilled(1000, 0.5)
    assert rate.tokens_per_s == 2000.0
    assert rate.seconds(500) == 0.25


def test_prefill_rate_follows_within_a_few_long_prompts() -> None:
    rate = PrefillRate()
    rate.on_prefilled(8192, 1.0)
    for _ in range(8):
        rate.on_prefilled(8192, 2.0)
    assert rate.tokens_per_s == pytest.approx(4096, rel=0.01)


def test_a_first_prefill_that_compiled_for_a_minute_is_forgotten() -> None:
    rate = PrefillRate()
    rate.on_prefilled(512, 60.0)
    for _ in range(10):
        rate.on_prefilled(8192, 0.5)
    assert rate.tokens_per_s == pytest.approx(16_384, rel=0.1)


def test_short_prefills_hardly_count() -> None:
    """They take what a step takes, and say little about long ones."""
    rate = PrefillRate()
    for _ in range(20):
        rate.on_prefilled(32_768, 2.0)
    for _ in range(100):
        rate.on_prefilled(1, 0.02)
    assert rate.tokens_per_s is not None
    assert rate.tokens_per_s > 0.9 * 16_384


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 1e6)), max_size=30))
def test_prefill_rate_stays_between_what_was_measured(
    measured: list[tuple[int, float]],
) -> None:
    rate = PrefillRate()
    for num_tokens, elapsed_s in measured:
        rate.on_prefilled(num_tokens, elapsed_s)
    rates = [tokens / max(took_s, 1e-6) for tokens, took_s in measured if tokens]
    if rates:
        assert rate.tokens_per_s is not None
        assert min(rates) * 0.999 <= rate.tokens_per_s <= max(rates) * 1.001
