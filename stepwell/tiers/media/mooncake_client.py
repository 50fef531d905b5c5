"""A client of Mooncake's library: made, given up and made anew beside those who use it.

The library's calls cannot be given up, so they run in lanes (`stepwell.tiers.media.lanes`); two of
its calls, setting up and closing, keep the interpreter's lock while they last (docs/MOONCAKE.md),
and are done only where they are quick.
"""

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stepwell.errors import ClosedError, TierError
from stepwell.tiers.media.lanes import Lane, Lanes

__all__ = ["Connection", "Turn"]

logger = logging.getLogger(__name__)

_LANES = 16  # twice a tier's threads as they are by default: some calls may be late
_CLOSE_WITHIN_S = 2.0
_LATE_S = 120.0
_AGAIN_S = 1.0
# A client finds a master that comes back by itself, and a new one stops the interpreter for some
# tenths of a second, the end of the old one for a whole second: so only when nothing else helps.
_BAD_IN_A_ROW = 3
_PATIENCE_S = 15.0
_MAX_PATIENCE_S = 240.0
# What neither master nor nodes answered, or what a client says that has lost them.
_BAD_CODES = frozenset({-103, -601, -800, -900, -901})

# Clients that could not be closed. Their end would close them, and hold up the interpreter.
_left: list[Any] = []


class _Session:
    """One client, with lanes whose memory is registered with it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.lanes = Lanes("stepwell-mooncake", _LANES, on_memory_gone=self._drop)
        self._lock = threading.Lock()
        self._registered: dict[Lane, memoryview] = {}
        self._dropped: list[memoryview] = []

    def run(self, lane: Lane, work: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        """On the lane's thread: registering may take a round trip as well."""
        self._unregister_dropped()
        memory = lane.memory
        with self._lock:
            known = self._registered.get(lane) is memory
        if len(memory) and not known:
            code = self.client.register_buffer(_address(memory), len(memory))
            if code:
                raise TierError(f"memory is not registered: code={code} bytes={len(memory)}")
            with self._lock:
                self._registered[lane] = memory
        return work(self.client)

    def close(self, within_s: float, *, client: bool) -> bool:
        """End the lanes when no call runs, and the client if asked; returns whether both ended."""
        if not self.lanes.close(within_s) or not client:
            return False
        self.client.close()
        return True

    def _drop(self, memory: memoryview) -> None:
        # It is kept until it is registered no more.
        with self._lock:
            self._dropped.append(memory)

    def _unregister_dropped(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, []
            gone = [each for each in dropped if self._forget(each)]
        for memory in gone:
            self.client.unregister_buffer(_address(memory))

    def _forget(self, memory: memoryview) -> bool:
        for lane, registered in self._registered.items():
            if registered is memory:
                del self._registered[lane]
                return True
        return False


class Turn:
    """A lane that one caller has, and what is left of its time."""

    def __init__(
        self, session: _Session, lane: Lane, give_up_s: float, note: Callable[[bool], None]
    ) -> None:
        self.memory = lane.memory
        """Page-aligned, at least as long as was asked for."""
        self.address = _address(lane.memory) if len(lane.memory) else 0
        self._session = session
        self._lane = lane
        self._give_up_s = give_up_s
        self._note = note

    @property
    def left_s(self) -> float:
        """Seconds until the caller gives up."""
        return max(0.0, self._give_up_s - time.monotonic())

    def call(self, work: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        """Run calls of the library, and wait.

        Args:
            work: is given the library's client; returns codes, those below zero being errors.

        Raises:
            TierError: it is not over in time; then the turn is over too, and its memory nobody's.
        """
        try:
            codes = self._lane.call(lambda: self._session.run(self._lane, work), self.left_s)
        except TierError:
            self._note(False)
            raise
        self._note(not any(code in _BAD_CODES for code in codes))
        return codes


class Connection:
    """The present client. Made by the first who needs it, and anew when calls go on failing.

    Threading: any number of threads. Nobody waits for longer than he says; clients are made on
        threads of their own, and the old one is used until there is a new one.

    Args:
        connect: makes a client, or raises TierError.
        closes: whether closing a client is quick; else it is left to the end of the process.
        patience_s: for how long calls have to fail, one after the other, until a new client is
            tried; twice as long each time.
    """

    def __init__(
        self, connect: Callable[[], Any], *, closes: bool = True, patience_s: float = _PATIENCE_S
    ) -> None:
        self._connect = connect
        self._closes = closes
        self._changed = threading.Condition()
        self._session: _Session | None = None
        self._connecting = False
        self._closed = False
        self._error: TierError | None = None
        self._again_at_s = 0.0
        self._bad_in_a_row = 0
        self._bad_since_s = 0.0
        self._first_patience_s = self._patience_s = patience_s

    @contextlib.contextmanager
    def turn(self, size_bytes: int, within_s: float) -> Iterator[Turn]:
        """A turn with so much memory.

        Raises:
            TierError: there is no client, all of its calls are late, or it is closed.
        """
        give_up_s = time.monotonic() + within_s
        session = self._ready(give_up_s)
        with contextlib.ExitStack() as stack:
            try:
                left_s = give_up_s - time.monotonic()
                lane = stack.enter_context(session.lanes.taken(size_bytes, left_s))
            except OSError as error:
                raise TierError(f"there is no memory: bytes={size_bytes}") from error
            except ClosedError as error:
                raise TierError("the client was given up just now") from error
            yield Turn(session, lane, give_up_s, lambda well: self._note(session, well))

    def close(self) -> None:
        """Give up the client; takes a few seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            session, self._session = self._session, None
        if session is not None:
            closing = threading.Thread(
                target=self._retire, args=(session, _CLOSE_WITHIN_S), daemon=True
            )
            closing.start()
            closing.join(2 * _CLOSE_WITHIN_S)

    def _ready(self, give_up_s: float) -> _Session:
        with self._changed:
            if self._session is None:
                self._connect_soon()
            while self._session is None:
                if self._closed:
                    raise TierError("it is closed")
                if not self._connecting:
                    raise TierError(str(self._error))
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise TierError("no answer in time while connecting")
                self._changed.wait(left_s)
            return self._session

    def _note(self, session: _Session, well: bool) -> None:
        with self._changed:
            if session is not self._session:
                return
            if well:
                self._bad_in_a_row = 0
                self._patience_s = self._first_patience_s
                return
            now_s = time.monotonic()
            self._bad_in_a_row += 1
            if self._bad_in_a_row == 1:
                self._bad_since_s = now_s
            for_s = now_s - self._bad_since_s
            if self._bad_in_a_row >= _BAD_IN_A_ROW and for_s >= self._patience_s:
                self._bad_since_s = now_s
                self._patience_s = min(2 * self._patience_s, _MAX_PATIENCE_S)
                self._connect_soon()

    def _connect_soon(self) -> None:
        """Have a client made, unless that is under way, or was tried just now."""
        now_s = time.monotonic()
        if self._connecting or self._closed or now_s < self._again_at_s:
            return
        self._connecting = True
        threading.Thread(target=self._make, name="stepwell-mooncake-connect", daemon=True).start()

    def _make(self) -> None:
        session: _Session | None = None
        error: TierError | None = None
        try:
            session = _Session(self._connect())
        except TierError as failed:
            error = failed
        except BaseException as failed:  # counted: whoever waits is told
            logger.exception("an unforeseen error while connecting")
            error = TierError(f"an unforeseen error: error={failed!r}")
        with self._changed:
            self._connecting = False
            self._error = error
            self._again_at_s = time.monotonic() + _AGAIN_S
            old = session
            if session is not None and not self._closed:
                old, self._session = self._session, session
                self._bad_in_a_row = 0
            self._changed.notify_all()
        if old is not None:
            self._retire(old, _LATE_S)

    def _retire(self, session: _Session, within_s: float) -> None:
        if not session.close(within_s, client=self._closes):
            _left.append(session)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
