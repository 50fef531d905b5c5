"""Libraries that move records through memory of their own, on threads that may be late."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from stepwell.errors import ClosedError, ConfigError, TierError
from stepwell.tiers.media.lanes import Lane, Lanes

__all__ = ["TakenEngine", "TransferEngine", "TransferEngines"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LANES = 32  # calls at once, late ones included
_CLOSE_WITHIN_S = 5.0
_UNIT_BYTES = 4 << 20  # of an engine's memory, so that it is seldom made anew


class TransferEngine(Protocol):
    """A library's way of moving bytes; one thread at a time."""

    @property
    def memory(self) -> memoryview:
        """Page-aligned; another one after a transfer that failed, as the old may still change."""
        ...

    def close(self) -> None:
        """It is not used any more, and nothing is in flight."""
        ...


E = TypeVar("E", bound=TransferEngine)


class TakenEngine(Generic[E]):
    """An engine that nobody else uses, and its thread, until a time."""

    def __init__(self, engine: E, lane: Lane, give_up_s: float) -> None:
        self.engine = engine
        self._lane = lane
        self._give_up_s = give_up_s

    def run(self, work: Callable[[], T]) -> T:
        """Run something on the engine's thread.

        Raises:
            TierError: it is late; then the engine and its memory are not to be touched any more.
            Whatever the work raises.
        """
        return self._lane.call(work, self._give_up_s - time.monotonic())


class TransferEngines(Generic[E]):
    """TransferEngines, each with a thread; made when they are needed.

    One whose thread is late is left alone, and used again when it is over, not before.

    Args:
        name: of the library, for messages and threads.
        make: an engine with so many bytes of memory; runs on its thread. Raises ConfigError where
            it does not go, OSError where it does not go now.
    """

    def __init__(self, name: str, make: Callable[[int], E]) -> None:
        self.name = name
        self._make = make
        self._lanes = Lanes(f"stepwell-{name}", _LANES)
        self._engines: dict[Lane, E] = {}

    def try_to_make(self, within_s: float) -> None:
        """Make one, to see whether that goes.

        Raises:
            ConfigError: it does not. TierError: not now, or not in time.
        """
        try:
            with self._lanes.taken(0, within_s) as lane:
                lane.call(lambda: self._renew(lane, 1), within_s)
        except OSError as error:  # of its memory above all, and not of the directory
            raise TierError(
                f"{self.name} cannot start: memory_bytes={_UNIT_BYTES} error={error}"
            ) from error

    @contextlib.contextmanager
    def taken(self, size_bytes: int, within_s: float) -> Iterator[TakenEngine[E]]:
        """An engine with so much memory.

        Raises:
            TierError: there is none in time, or what is done with it fails.
        """
        give_up_s = time.monotonic() + within_s
        try:
            with self._lanes.taken(0, within_s) as lane:
                engine = self._engines.get(lane)
                if engine is None or len(engine.memory) < size_bytes:
                    left_s = give_up_s - time.monotonic()
                    engine = lane.call(lambda: self._renew(lane, size_bytes), left_s)
                yield TakenEngine(engine, lane, give_up_s)
        except (ClosedError, ConfigError, OSError) as error:
            raise TierError(f"{self.name} fails: error={error}") from error

    def close(self) -> None:
        """Nobody is in a call."""
        if not self._lanes.close(_CLOSE_WITHIN_S):
            logger.warning("transfers are not over, and are left: by=%s", self.name)
        for lane in [lane for lane in self._engines if lane.has_ended]:
            self._engines.pop(lane).close()

    def _renew(self, lane: Lane, size_bytes: int) -> E:
        former = self._engines.pop(lane, None)
        if former is not None:
            former.close()
        engine = self._make(max(1, -(-size_bytes // _UNIT_BYTES)) * _UNIT_BYTES)
        self._engines[lane] = engine
        return engine
