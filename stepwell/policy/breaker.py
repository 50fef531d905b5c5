"""The breaker: keeps a tier that fails or is slow from being asked, for a while.

The life of a breaker::

    state      what happens                                            next state
    ---------  ------------------------------------------------------  -------------------------
    CLOSED     a good result                                           CLOSED
    CLOSED     a bad one: an error, slow, or overdue                   CLOSED, or OPEN if that is
                 the last of `num_in_a_row`, or one of too many among
                 the last `num_recent`
    OPEN       `allow` before `retry_at_s`                             OPEN, not allowed
    OPEN       `allow` from `retry_at_s` on                            HALF_OPEN, allowed: a probe
    HALF_OPEN  `allow`                                                 HALF_OPEN, not allowed
    HALF_OPEN  `allow`, and the probe is unheard of for `max_open_s`   HALF_OPEN, allowed: a probe
    HALF_OPEN  the probe ends well                                     CLOSED, all forgotten
    HALF_OPEN  the probe ends badly or is overdue                      OPEN, for twice as long
    HALF_OPEN  the probe was given up: it never ran                    OPEN, may be probed at once

What began in an earlier state says nothing about the present one, so it is ignored, good or bad:
while OPEN every result, while HALF_OPEN every result but the probe's, while CLOSED those of
operations that began before it closed.
"""

import math
from collections import deque
from enum import StrEnum

__all__ = ["Breaker", "State"]


class State(StrEnum):
    """What a tier may be asked. The values are metric labels and stay stable."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half_open"
    """Nothing, while one probe is under way."""


class Breaker:
    """Whether one tier may be asked.

    Every operation that `allow` let through is reported once: `on_done`, `on_error`,
    `on_overdue` or `on_given_up`. One that was reported overdue is not reported again.

    A caller with several tiers need not ask each time: only calls of this object change `state`,
    so those whose state is not CLOSED can be kept in a set, and asked again from `retry_at_s` on.

    Args:
        latency_limit_s: a result that took longer is bad, however it ended. It has to lie above a
            healthy medium's worst (32 reads of 8 MiB queued at 1 GB/s take 0.3 s) and not above
            what computing costs (32k tokens take 1 to 4 s, docs/SOURCES.md S3).
        num_in_a_row: so many bad results in a row open it. Envoy's outlier detection takes 5
            (consecutive_5xx), for requests of milliseconds; here each may cost a request
            ``latency_limit_s``, so fewer.
        num_recent: how many results are remembered; 20 is Hystrix's requestVolumeThreshold.
        bad_share: above 0, at most 1. So many of ``num_recent`` being bad open it, those that
            have not been seen yet counting as good; 0.5 is Hystrix's errorThresholdPercentage.
        open_s: how long it stays open at first; 5 is Hystrix's sleepWindow.
        max_open_s: the longest, after repeated doubling; 300 is Envoy's max_ejection_time.

    Threading: none; the owner locks. Cost: O(1) per call; `allow` compares once or twice.

    Attributes:
        state: the present one.
        retry_at_s: while OPEN, when `allow` will let a probe through; otherwise meaningless.
        num_opened: how often it has opened, failed probes not counted.
    """

    def __init__(
        self,
        *,
        latency_limit_s: float = 2.0,
        num_in_a_row: int = 3,
        num_recent: int = 20,
        bad_share: float = 0.5,
        open_s: float = 5.0,
        max_open_s: float = 300.0,
    ) -> None:
        if latency_limit_s <= 0:
            raise ValueError(f"the limit is above 0: latency_limit_s={latency_limit_s}")
        if num_in_a_row < 1 or num_recent < 1:
            raise ValueError(
                f"at least 1 each: num_in_a_row={num_in_a_row} num_recent={num_recent}"
            )
        if not 0 < bad_share <= 1:
            raise ValueError(f"a share above 0, at most 1: bad_share={bad_share}")
        if not 0 < open_s <= max_open_s:
            raise ValueError(f"0 < open_s <= max_open_s: open_s={open_s} max_open_s={max_open_s}")
        self._latency_limit_s = latency_limit_s
        self._num_in_a_row = num_in_a_row
        self._num_bad_limit = math.ceil(bad_share * num_recent)
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self.state = State.CLOSED
        self.retry_at_s = 0.0
        self.num_opened = 0
        self._open_s = open_s
        # Results of operations that began earlier do not count: see the top of the file.
        self._counts_from_s = -math.inf
        self._in_a_row = 0
        self._recent: deque[bool] = deque(maxlen=num_recent)
        self._num_bad = 0

    @property
    def latency_limit_s(self) -> float:
        """What is outstanding for longer is overdue."""
        return self._latency_limit_s

    def allow(self, now_s: float) -> bool:
        """Whether to ask the tier now; what is allowed has to be reported.

        When the time is over, exactly one caller is told True, and that one is the probe.

        Args:
            now_s: never goes back; also the ``began_s`` of the report.
        """
        if self.state is State.CLOSED:
            return True
        if not self.would_allow(now_s):
            return False
        # Open and the time is over; or nobody ever reported the last probe, which is the caller's
        # mistake, but must not cost the tier for ever.
        self.state = State.HALF_OPEN
        self._counts_from_s = now_s
        return True

    def would_allow(self, now_s: float) -> bool:
        """What `allow` would say; changes nothing."""
        if self.state is State.OPEN:
            return now_s >= self.retry_at_s
        return self.state is State.CLOSED or now_s - self._counts_from_s >= self._max_open_s

    def on_done(self, began_s: float, latency_s: float, now_s: float) -> None:
        """An operation ended well, though maybe too slowly.

        Args:
            began_s: what `allow` was told.
            latency_s: as the tier measured it. Not ``now_s - began_s``: a caller that looks for
                results once per engine step would blame the tier for the step.
            now_s: the present.
        """
        if began_s < self._counts_from_s:
            return
        if latency_s > self._latency_limit_s:
            self._bad(now_s)
        elif self.state is State.HALF_OPEN:
            self._close(now_s)
        else:
            self._in_a_row = 0
            self._remember(bad=False)

    def on_error(self, began_s: float, now_s: float) -> None:
        """An operation failed. A chunk that is absent or wrong is no failure of the medium."""
        if began_s >= self._counts_from_s:
            self._bad(now_s)

    def on_overdue(self, began_s: float, now_s: float) -> None:
        """An operation has been outstanding for longer than the limit, and still is.

        Counts as a slow result, without waiting for its end. Look for results first: what has
        ended and was not looked at is not overdue.
        """
        if began_s >= self._counts_from_s:
            self._bad(now_s)

    def on_given_up(self, began_s: float) -> None:
        """An operation never ran, so it says nothing: its chunk was absent, it was cancelled.

        If it was the probe, the next caller gets to be the probe.
        """
        if self.state is State.HALF_OPEN and began_s >= self._counts_from_s:
            self._open(self.retry_at_s)

    def _bad(self, now_s: float) -> None:
        if self.state is State.HALF_OPEN:
            self._open_s = min(2 * self._open_s, self._max_open_s)
            self._open(now_s + self._open_s)
            return
        self._in_a_row += 1
        self._remember(bad=True)
        if self._in_a_row >= self._num_in_a_row or self._num_bad >= self._num_bad_limit:
            self.num_opened += 1
            self._open(now_s + self._open_s)

    def _remember(self, *, bad: bool) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._num_bad -= self._recent[0]
        self._recent.append(bad)
        self._num_bad += bad

    def _open(self, retry_at_s: float) -> None:
        self.state = State.OPEN
        self.retry_at_s = retry_at_s
        self._counts_from_s = math.inf

    def _close(self, now_s: float) -> None:
        self.state = State.CLOSED
        self._counts_from_s = now_s
        self._open_s = self._first_open_s
        self._in_a_row = 0
        self._recent.clear()
        self._num_bad = 0
