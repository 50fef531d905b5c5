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
from stepwell.tiers.media.mooncake_left import check_room, leave, take_back

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
# A transfer that failed. The library gives it up after its time limit without ending it: bytes may
# still come.
_UNSETTLED = -800
# Pieces of memory that a client may have lost in that way: as many as it has in use.
_MAX_LOST = _LANES


class _Session:
    """One client, with lanes whose memory is registered with it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.lanes = Lanes("stepwell-mooncake", _LANES, on_memory_gone=self._drop)
        self._lock = threading.Lock()
        self._registered: dict[Lane, memoryview] = {}
        self._dropped: list[memoryview] = []
        # To which somebody may write until the client is closed.
        self._lost: list[memoryview] = []

    @property
    def is_spent(self) -> bool:
        """Whether so much memory is lost to it that it is to be replaced."""
        with self._lock:
            return len(self._lost) >= _MAX_LOST

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
        codes = work(self.client)
        if _UNSETTLED in codes:
            self._lose(lane)
        return codes

    def give_back_memory(self) -> None:
        """All but what is lost; the lanes have ended, and the client is not closed."""
        self._unregister_dropped()

    def _lose(self, lane: Lane) -> None:
        """The lane's memory is nobody's from now on; on its thread, so also after a late call."""
        with self._lock:
            memory = self._registered.pop(lane, None)
            if memory is not None:
                self._lost.append(memory)
        lane.memory = memoryview(b"")

    def _drop(self, memory: memoryview) -> None:
        # It is kept until it is registered no more.
        with self._lock:
            self._dropped.append(memory)

    def _unregister_dropped(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, []
            gone = [each for each in dropped if self._forget(each)]
        for memory in gone:
            code = self.client.unregister_buffer(_address(memory))
            if code:
                logger.warning("memory stays registered: code=%d bytes=%d", code, len(memory))
                with self._lock:
                    self._lost.append(memory)

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
        may_close: whether closing a client is quick now; else it is left until it is, or until
            the process ends. May block.
        patience_s: for how long calls have to fail, one after the other, until a new client is
            tried; twice as long each time.
        late_s: how often it is looked whether a client that was left may be closed now.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        may_close: Callable[[], bool] = lambda: True,
        patience_s: float = _PATIENCE_S,
        late_s: float = _LATE_S,
    ) -> None:
        self._connect = connect
        self._may_close = may_close
        self._late_s = late_s
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
            TierError: there is no client, all of its calls are late, or it is closed; or too much
                memory was lost to failed transfers, and it has to be replaced first.
        """
        give_up_s = time.monotonic() + within_s
        session = self._ready(give_up_s)
        if size_bytes and session.is_spent:
            with self._changed:
                if session is self._session:
                    self._connect_soon()
            raise TierError(
                f"too many transfers have failed; a new client is made: lost={_MAX_LOST}"
            )
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
            over = threading.Event()
            closing = threading.Thread(
                target=self._retire, args=(session, _CLOSE_WITHIN_S, over.set), daemon=True
            )
            try:
                closing.start()
            except RuntimeError:  # there are no more threads
                leave(session)
                return
            over.wait(2 * _CLOSE_WITHIN_S)

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
        making = threading.Thread(target=self._make, name="stepwell-mooncake-connect", daemon=True)
        try:
            making.start()
        except RuntimeError as error:
            self._connecting = False
            self._error = TierError(f"there is no thread to connect on: error={error}")
            self._again_at_s = now_s + _AGAIN_S

    def _make(self) -> None:
        session: _Session | None = None
        error: TierError | None = None
        try:
            check_room()
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
            self._retire(old, self._late_s)

    def _retire(
        self, session: _Session, within_s: float, on_over: Callable[[], None] = lambda: None
    ) -> None:
        """Close it, or leave it until that may be done; on a thread that waits for this.

        Args:
            session: nobody's any more.
            within_s: for its calls to end.
            on_over: called when it is closed or left.
        """
        ended = session.lanes.close(within_s)
        if ended and self._may_close():
            session.client.close()
            on_over()
            return
        leave(session)
        on_over()
        while not ended:
            ended = session.lanes.close(self._late_s)
        session.give_back_memory()
        while not self._may_close():
            time.sleep(self._late_s)
        session.client.close()
        take_back(session)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
