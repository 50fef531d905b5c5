"""Is reading worth it? Only as much of a prefix is read as is faster than computing it.

A read job takes ``latency + (bytes queued ahead + its own bytes) / bandwidth``: tiers serve in
order. Both numbers are learned from finished jobs, per tier; how fast the engine computes is
learned from its prefills. Whatever is not known yet is taken for fast enough, or it would never be
measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "FORGET_AFTER_S",
    "PROBE_AFTER_S",
    "PROBE_BYTES",
    "PrefillRate",
    "Run",
    "TierEstimate",
    "TierSpeed",
    "worth_chunks",
]

PROBE_AFTER_S = 30.0
"""A tier that was judged not worth it is tried again, a little, at most once in this time."""

PROBE_BYTES = 16 << 20
"""That little: 1 % of the time between two probes is 0.3 s, which is 16 MiB at 56 MB/s, slower
than any medium that is of use here (at least 1 GB/s is, docs/SOURCES.md S3)."""

FORGET_AFTER_S = 600.0
"""Unread for so long, a tier is unknown again. Probes reach a tier only at the cut; this reaches
one that lies behind another's chunks in every prefix."""

JOB_VARIANCE = 0.25
"""Of the logarithm of one job's time: single jobs scatter by a half. In simulations of a queue with
up to 90 % load nine in ten jobs took 0.4 to 1.8 times what was expected."""

DRIFT_PER_JOB = JOB_VARIANCE / 64
"""What a job adds to the uncertainty of either part. In the long run each job then counts about
an eighth (the square root of the ratio): a new speed is learned within a dozen jobs."""

DRIFT_PER_S = JOB_VARIANCE / 10
"""What a second adds: after ten without a job the next one counts as much as all before it."""

MAX_VARIANCE = 4.0
"""Of the logarithm of a part that nothing is known of any more: within a factor of e**2, or 7."""

MAX_SURPRISE = math.log(8.0)
"""What took 8 times more or less than expected, or more yet, counts as that: one stalled job is no
new speed, and more of them are the breaker's matter."""

PREFILL_HALF_LIFE_TOKENS = 8192
"""A prefill of so many tokens counts as much as all before it, one of 512 tokens 4 %: short
ones are dominated by what every step costs (512 tokens take 34 ms where 8k take 344 ms,
docs/SOURCES.md S3)."""

_MIN_ELAPSED_S = 1e-6  # below a clock's resolution; its logarithm is taken


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """What reading from a tier is expected to take at present.

    Attributes:
        latency_s: of a job, however small, >= 0.
        bytes_per_s: what the tier delivers, > 0.
        queued_bytes: what it has to read before.
        probe_due: whether it may be tried although it is not worth it.
    """

    latency_s: float
    bytes_per_s: float
    queued_bytes: int = 0
    probe_due: bool = False

    def read_s(self, num_bytes: int) -> float:
        """How long a job of so many bytes takes; 0 for none."""
        if not num_bytes:
            return 0.0
        return self.latency_s + (self.queued_bytes + num_bytes) / self.bytes_per_s


class TierSpeed:
    """How fast a tier reads, learned from jobs of any size and at any queue length.

    The model has two parts, latency and seconds per byte, of which only sums are ever seen. A job
    that took longer or shorter than expected corrects the part that it depends on more and that is
    less certain: small unqueued jobs teach the latency, large or queued ones the bandwidth.
    Each part's uncertainty grows with time and with jobs that say nothing about it, so the
    first large job after many small ones is believed. This is the extended Kalman filter (Kalman
    1960) for the logarithms of two drifting numbers: both stay positive, and noise is in proportion
    to a job's time. Bounded surprises bound what one job may change. Where all jobs have the
    same size the parts cannot be told apart; then their sum is right, which is what is asked for.

    Waiting for others does not look like slowness: what was queued ahead counts as work. What
    a tier serves at the same time although it came later does look like it, rightly.

    Threading: none; the owner locks. Cost: O(1).
    """

    def __init__(self) -> None:
        self._latency_s = 0.0
        self._s_per_byte = 0.0  # 0: nothing was measured
        # Variances of the logarithms of the two, and their covariance.
        self._latency_var = self._byte_var = MAX_VARIANCE
        self._covariance = 0.0
        self._measured_s = 0.0
        self._tried_s = 0.0

    @property
    def latency_s(self) -> float | None:
        """As measured; None before any measurement."""
        return self._latency_s if self._s_per_byte else None

    @property
    def bytes_per_s(self) -> float | None:
        """As measured; None before any measurement."""
        return 1 / self._s_per_byte if self._s_per_byte else None

    def read_s(self, num_bytes: int, queued_bytes: int) -> float:
        """How long a job takes behind so many bytes; 0 before any measurement."""
        return self._latency_s + (queued_bytes + num_bytes) * self._s_per_byte

    def on_submitted(self, now_s: float) -> None:
        """A read job was submitted. Until it was measured no other one is needed as a probe."""
        self._tried_s = now_s

    def on_finished(
        self, num_bytes: int, elapsed_s: float, queued_bytes: int, now_s: float
    ) -> None:
        """A read job ended; report also what a deadline cut short, with the bytes that it moved.

        Args:
            num_bytes: what it moved; if nothing, nothing is learned.
            elapsed_s: from submission to the end.
            queued_bytes: what was queued or being read at submission.
            now_s: the present.
        """
        if num_bytes <= 0:
            return
        elapsed_s = max(elapsed_s, _MIN_ELAPSED_S)
        work_bytes = num_bytes + queued_bytes
        if not self._s_per_byte:
            # One job cannot tell the two apart: half each, until one of another size comes.
            self._latency_s = elapsed_s / 2
            self._s_per_byte = elapsed_s / 2 / work_bytes
        self._correct(work_bytes, elapsed_s, max(0.0, now_s - self._measured_s))
        self._measured_s = self._tried_s = now_s

    def estimate(self, queued_bytes: int, now_s: float) -> TierEstimate | None:
        """What to expect at present; None if unknown.

        Between two probes of a tier lie at least `PROBE_AFTER_S`, between two times at which it is
        unknown at least `FORGET_AFTER_S`, if `on_submitted` is told of what they lead to.
        """
        idle_s = now_s - self._tried_s
        if not self._s_per_byte or idle_s >= FORGET_AFTER_S:
            return None
        return TierEstimate(
            self._latency_s, 1 / self._s_per_byte, queued_bytes, idle_s >= PROBE_AFTER_S
        )

    def _correct(self, work_bytes: int, elapsed_s: float, since_s: float) -> None:
        drift = DRIFT_PER_JOB + DRIFT_PER_S * since_s
        self._latency_var = min(MAX_VARIANCE, self._latency_var + drift)
        self._byte_var = min(MAX_VARIANCE, self._byte_var + drift)
        moving_s = work_bytes * self._s_per_byte
        expected_s = self._latency_s + moving_s
        latency_share, byte_share = self._latency_s / expected_s, moving_s / expected_s
        # How this job's surprise varies with either part, and by itself.
        latency_cov = self._latency_var * latency_share + self._covariance * byte_share
        byte_cov = self._covariance * latency_share + self._byte_var * byte_share
        variance = latency_cov * latency_share + byte_cov * byte_share + JOB_VARIANCE
        surprise = _bounded(math.log(elapsed_s / expected_s), MAX_SURPRISE)
        # A filter would also trade: make one part larger because the other is found smaller than
        # the former jobs seemed to say. Over long ways logarithms exaggerate that, and
        # a part that is too small is soon measured, while one too large may forbid it.
        self._latency_s *= math.exp(max(0.0, latency_cov) / variance * surprise)
        self._s_per_byte *= math.exp(max(0.0, byte_cov) / variance * surprise)
        self._latency_var -= latency_cov**2 / variance
        self._byte_var -= byte_cov**2 / variance
        self._covariance -= latency_cov * byte_cov / variance


def _bounded(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))


class PrefillRate:
    """How fast an engine computes, learned from its prefills.

    The average is in logarithms, and surprises are bounded, as for tiers: the first prefill after
    a start may take a hundred times as long as the next. It needs no ageing: an engine that does
    not read computes, and so measures.

    Threading: none; the owner locks. Cost: O(1).
    """

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """As measured; None before any measurement."""
        return self._tokens_per_s

    def on_prefilled(self, num_tokens: int, elapsed_s: float) -> None:
        """The engine computed so many tokens in so long; nothing is learned from no tokens."""
        if num_tokens <= 0:
            return
        measured = num_tokens / max(elapsed_s, _MIN_ELAPSED_S)
        if self._tokens_per_s is None:
            self._tokens_per_s = measured
            return
        surprise = math.log(measured / self._tokens_per_s)
        gain = 1 - float(0.5 ** (num_tokens / PREFILL_HALF_LIFE_TOKENS))
        self._tokens_per_s *= math.exp(gain * _bounded(surprise, MAX_SURPRISE))

    def seconds(self, num_tokens: int) -> float:
        """How long so many tokens take; infinite before any measurement, 0 for none."""
        if not num_tokens:
            return 0.0
        return math.inf if self._tokens_per_s is None else num_tokens / self._tokens_per_s


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of a prefix that one tier has.

    Attributes:
        tier_idx: which tier.
        num_chunks: how many, >= 1.
        chunk_bytes: of each, >= 1.
        chunk_tokens: of each, >= 1.
    """

    tier_idx: int
    num_chunks: int
    chunk_bytes: int
    chunk_tokens: int


def worth_chunks(
    runs: Sequence[Run],
    estimates: Sequence[TierEstimate | None],
    tokens_per_s: float | None,
    floor_tokens: int = 0,
) -> int:
    """How many leading chunks of a hit prefix to read.

    Of all cuts the one is chosen with the least time to read what lies before it and then to
    compute what lies behind it, the larger one of equals. Tiers read at the same time, so reading
    takes as long as the slowest of them. What is unknown takes no time to read, and for ever to
    compute.

    If a tier at the cut is due for a probe, about `PROBE_BYTES` more are read from it, so that
    a tier that has become faster is found out; see `TierSpeed.estimate` for how often that is.

    With one tier, more speed never means that less is read, nor more queue that more is; with
    several that holds for the tier whose chunks come last, and for all of them together. It does
    not hold for the others: what a slow first tier hides may be read for nothing.

    Args:
        runs: the hit prefix in order.
        estimates: by ``tier_idx``; None where nothing is known.
        tokens_per_s: of prefill; None if unknown.
        floor_tokens: saving less is not worth the trouble, so nothing is read then; only a probe
            may be less, and only where the whole prefix is not.

    Returns:
        0 to the number of all chunks.

    Cost: O(runs x tiers), whatever the number of chunks.
    """
    total_tokens = sum(run.num_chunks * run.chunk_tokens for run in runs)
    if total_tokens < floor_tokens:
        return 0
    if tokens_per_s is None:
        return sum(run.num_chunks for run in runs)
    best = _best_cut(runs, estimates, tokens_per_s, floor_tokens, total_tokens)
    return best + _probe_chunks(runs, estimates, best)


def _best_cut(
    runs: Sequence[Run],
    estimates: Sequence[TierEstimate | None],
    tokens_per_s: float,
    floor_tokens: int,
    total_tokens: int,
) -> int:
    best, best_s = 0, total_tokens / tokens_per_s
    chunks_before = tokens_before = 0
    bytes_before = [0] * len(estimates)
    for run in runs:
        tier = estimates[run.tier_idx]
        tier_bytes = bytes_before[run.tier_idx]
        others_s = max(
            (
                each.read_s(bytes_before[tier_idx])
                for tier_idx, each in enumerate(estimates)
                if each is not None and tier_idx != run.tier_idx
            ),
            default=0.0,
        )
        least = -(-(floor_tokens - tokens_before) // run.chunk_tokens)
        for num in _candidates(run, tier, tier_bytes, others_s, least, tokens_per_s):
            tier_s = 0.0 if tier is None else tier.read_s(tier_bytes + num * run.chunk_bytes)
            tokens_left = total_tokens - tokens_before - num * run.chunk_tokens
            cut_s = max(others_s, tier_s) + tokens_left / tokens_per_s
            if cut_s <= best_s:
                best, best_s = chunks_before + num, cut_s
        chunks_before += run.num_chunks
        tokens_before += run.num_chunks * run.chunk_tokens
        bytes_before[run.tier_idx] += run.num_chunks * run.chunk_bytes
    return best


def _candidates(
    run: Run,
    tier: TierEstimate | None,
    tier_bytes: int,
    others_s: float,
    least: int,
    tokens_per_s: float,
) -> Sequence[int]:
    """Numbers of chunks of a run, ascending, that include the best cut within it.

    Within a run the time is max(constant, a line that rises) minus a line: first it falls, while
    other tiers take longer anyway, and then it rises or falls. So the best cut is at the end, or
    where the line overtakes the constant; ``least`` (the floor) only cuts off the beginning.
    """
    first, last = max(1, least), run.num_chunks
    if first > last:
        return ()
    if tier is None:
        return (last,)
    # Where reading the n-th chunk begins to take longer than the other tiers do.
    free_s = others_s - tier.latency_s
    free_bytes = free_s * tier.bytes_per_s - tier.queued_bytes - tier_bytes
    turn = min(last, max(first, math.floor(free_bytes / run.chunk_bytes)))
    return sorted({turn, min(last, turn + 1), last})


def _probe_chunks(runs: Sequence[Run], estimates: Sequence[TierEstimate | None], cut: int) -> int:
    """How many chunks behind the cut to read as a probe."""
    for run in runs:
        if cut < run.num_chunks:
            tier = estimates[run.tier_idx]
            if tier is None or not tier.probe_due:
                return 0
            return min(run.num_chunks - cut, max(1, PROBE_BYTES // run.chunk_bytes))
        cut -= run.num_chunks
    return 0
