"""Threads with memory of their own, for libraries whose calls cannot be given up.

A call that is late is left alone, and so is its memory, to which the library may still write;
both are used again when the call has come back, and not before.
"""

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from stepwell.core.memory import aligned_memory
from stepwell.errors import ClosedError, TierError

__all__ = ["Lane", "Lanes"]

T = TypeVar("T")

_Task = tuple[Callable[[], Any], "Future[Any]"]


class Lane:
    """A thread and its memory. Belongs to whoever took it, until then or until its call is over."""

    def __init__(self, name: str, on_idle: Callable[["Lane"], None]) -> None:
        self.memory = memoryview(b"")
        """At least as long as was asked for; page-aligned. Whoever sets it to nothing keeps it."""
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._is_calling = False
        self._is_taken = False
        self.has_ended = False
        """It was idle, and will not be used any more."""
        # A daemon: a call that never comes back must not keep the process.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, work: Callable[[], T], within_s: float) -> T:
        """Run on the lane's thread, and wait.

        Raises:
            TierError: it is not over in time; the lane must not be used any more, nor its memory.
            Whatever the work raises.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_calling:
                raise TierError("an earlier call of this lane is not over")
            self._is_calling = True
        self._tasks.put((work, future))
        try:
            return future.result(max(0.0, within_s))
        except TimeoutError as error:
            if future.done() and future.exception() is error:
                raise  # the work's own
            raise TierError(f"no answer in time: within_s={within_s:.3f}") from None

    def take(self) -> None:
        """It has an owner."""
        with self._lock:
            self._is_taken = True

    def release(self) -> None:
        """Its owner is done with it; its call may not be."""
        with self._lock:
            self._is_taken = False
            idle = not self._is_calling
        if idle:
            self._on_idle(self)

    def end(self) -> None:
        """End the thread, which has nothing to do any more."""
        self.has_ended = True
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, future = task
            result: Any = None
            failure: BaseException | None = None
            try:
                result = work()
            except BaseException as error:  # counted by whoever waits: it is raised there
                failure = error
            with self._lock:
                self._is_calling = False
                idle = not self._is_taken
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del work, task, future, result, failure  # they may hold what somebody waits for
            if idle:
                self._on_idle(self)


class Lanes:
    """So many lanes, made when they are first needed.

    Threading: any number of threads take lanes at once.

    Args:
        name: of the threads.
        count: of the lanes, which is how many calls run at once, late ones included.
        on_memory: told of memory before it is used for the first time.
        on_memory_gone: told of memory before it is given up.
    """

    def __init__(
        self,
        name: str,
        count: int,
        *,
        on_memory: Callable[[memoryview], None] = lambda memory: None,
        on_memory_gone: Callable[[memoryview], None] = lambda memory: None,
    ) -> None:
        self._name = name
        self._count = count
        self._on_memory = on_memory
        self._on_memory_gone = on_memory_gone
        self._changed = threading.Condition()
        self._idle: list[Lane] = []
        self._made = 0
        self._closed = False

    @contextlib.contextmanager
    def taken(self, size_bytes: int, within_s: float) -> Iterator[Lane]:
        """A lane with so much memory.

        Args:
            size_bytes: 0 for none.
            within_s: how long to wait for one.

        Raises:
            TierError: all lanes are in calls, which may be late ones; or there is no thread for
                one. ClosedError: `close` was called. OSError: there is not so much memory.
        """
        lane = self._take(within_s)
        try:
            self._make_room(lane, size_bytes)
            yield lane
        finally:
            lane.release()

    def close(self, within_s: float) -> bool:
        """Wait until no call runs, and give up the memory; returns whether that was in time.

        If it was not, the memory of what still runs is never given up.
        """
        give_up_s = time.monotonic() + within_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while len(self._idle) < self._made:
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            idle, self._idle = self._idle, []
            self._made -= len(idle)
            all_idle = not self._made
        for lane in idle:
            lane.end()
            self._drop_memory(lane)
        return all_idle

    def _take(self, within_s: float) -> Lane:
        give_up_s = time.monotonic() + within_s
        with self._changed:
            while True:
                if self._closed:
                    raise ClosedError(f"closed: lanes={self._name}")
                if self._idle:
                    lane = self._idle.pop()
                    break
                if self._made < self._count:
                    try:
                        lane = Lane(f"{self._name}-{self._made}", self._take_back)
                    except RuntimeError as error:
                        raise TierError(f"there is no thread for a call: error={error}") from error
                    self._made += 1
                    break
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise TierError(f"all calls wait for answers: calls={self._count}")
                self._changed.wait(left_s)
            lane.take()
            return lane

    def _take_back(self, lane: Lane) -> None:
        with self._changed:
            self._idle.append(lane)
            self._changed.notify_all()

    def _make_room(self, lane: Lane, size_bytes: int) -> None:
        if len(lane.memory) >= size_bytes:
            return
        self._drop_memory(lane)
        memory = aligned_memory(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._on_memory(memory)
        lane.memory = memory

    def _drop_memory(self, lane: Lane) -> None:
        memory, lane.memory = lane.memory, memoryview(b"")
        if len(memory):
            self._on_memory_gone(memory)
