"""Time as a value that is passed in, so that tests and simulators can own it."""

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds that never go back; for deadlines and leases."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for what is stored."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s

    def advance(self, seconds: float) -> None:
        """Move both readings forward by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back: seconds={seconds}")
        self._now_s += seconds

    def monotonic(self) -> float:
        """The present reading."""
        return self._now_s

    def wall(self) -> float:
        """The present reading."""
        return self._now_s
