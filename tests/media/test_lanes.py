"""Calls that cannot be given up, on memory that is theirs until they are over."""

import threading
import time
from collections.abc import Iterator

import pytest

from stepwell.errors import ClosedError, TierError
from stepwell.tiers.media.lanes import Lane, Lanes

SOON_S = 0.05
LONG_S = 30.0


class Library:
    """Calls that hang until they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.registered: list[int] = []
        self.entered = threading.Semaphore(0)

    def hang(self) -> str:
        self.entered.release()
        assert self.let_go.wait(LONG_S)
        return "late"

    def register(self, memory: memoryview) -> None:
        self.registered.append(len(memory))

    def unregister(self, memory: memoryview) -> None:
        self.registered.remove(len(memory))


@pytest.fixture
def library() -> Iterator[Library]:
    library = Library()
    yield library
    library.let_go.set()


@pytest.fixture
def lanes(library: Library) -> Iterator[Lanes]:
    lanes = Lanes("test", 2, on_memory=library.register, on_memory_gone=library.unregister)
    yield lanes
    library.let_go.set()
    assert lanes.close(LONG_S)


def hang(lanes: Lanes, library: Library, size_bytes: int = 0) -> Lane:
    """A lane whose call is late, given back by whoever took it."""
    with lanes.taken(size_bytes, LONG_S) as lane:
        with pytest.raises(TierError, match="no answer in time"):
            lane.call(library.hang, SOON_S)
        assert library.entered.acquire(timeout=LONG_S)
    return lane


def test_a_call_runs_on_another_thread_and_answers(lanes: Lanes) -> None:
    with lanes.taken(0, LONG_S) as lane:
        assert lane.call(threading.get_ident, LONG_S) != threading.get_ident()
        assert lane.call(lambda: 7, LONG_S) == 7


def test_what_a_call_raises_is_raised(lanes: Lanes) -> None:
    def fail(error: Exception) -> None:
        raise error

    with lanes.taken(0, LONG_S) as lane:
        for error in (KeyError("x"), TimeoutError("its own")):
            with pytest.raises(type(error), match=str(error.args[0])):
                lane.call(lambda error=error: fail(error), LONG_S)  # type: ignore[misc]
        assert lane.call(lambda: 1, LONG_S) == 1


def test_a_lane_is_used_again(lanes: Lanes) -> None:
    with lanes.taken(10, LONG_S) as first:
        pass
    with lanes.taken(10, LONG_S) as second:
        assert second is first


def test_memory_is_as_long_as_was_asked_and_registered_once(lanes: Lanes, library: Library) -> None:
    with lanes.taken(5000, LONG_S) as lane:
        assert len(lane.memory) == 8192
        lane.memory[:3] = b"abc"
    with lanes.taken(100, LONG_S) as lane:
        assert bytes(lane.memory[:3]) == b"abc", "smaller needs are met by what is there"
        assert library.registered == [8192]
    with lanes.taken(9000, LONG_S) as lane:
        assert len(lane.memory) == 12288
        assert library.registered == [12288]
    assert lanes.close(LONG_S)
    assert library.registered == []


def test_the_memory_of_a_late_call_is_nobodys_until_it_is_over(
    lanes: Lanes, library: Library
) -> None:
    late = hang(lanes, library, 4096)
    with lanes.taken(4096, LONG_S) as other:
        assert other is not late
        assert other.memory is not late.memory
        with pytest.raises(TierError, match="all calls wait"), lanes.taken(4096, SOON_S):
            pass
    library.let_go.set()
    with lanes.taken(0, LONG_S) as one, lanes.taken(0, LONG_S) as two:
        assert late in (one, two), "it is used again when it has come back"
        assert one.call(lambda: 1, LONG_S) + two.call(lambda: 2, LONG_S) == 3


def test_a_late_lane_takes_no_second_call(lanes: Lanes, library: Library) -> None:
    with lanes.taken(0, LONG_S) as lane:
        with pytest.raises(TierError):
            lane.call(library.hang, SOON_S)
        with pytest.raises(TierError, match="not over"):
            lane.call(lambda: 1, SOON_S)


def test_who_waits_for_a_lane_gets_one_when_a_call_comes_back(
    lanes: Lanes, library: Library
) -> None:
    hang(lanes, library)
    hang(lanes, library)
    threading.Timer(SOON_S, library.let_go.set).start()
    with lanes.taken(0, LONG_S) as lane:
        assert lane.call(lambda: 1, LONG_S) == 1


def test_closing_does_not_wait_for_ever(library: Library) -> None:
    lanes = Lanes("test", 2, on_memory=library.register, on_memory_gone=library.unregister)
    with lanes.taken(4096, LONG_S):
        hang(lanes, library, 8192)
    began_s = time.monotonic()
    assert not lanes.close(SOON_S)
    assert time.monotonic() - began_s < LONG_S
    assert library.registered == [8192], "the library may still write there"
    with pytest.raises(ClosedError), lanes.taken(0, LONG_S):
        pass
    library.let_go.set()
    assert lanes.close(LONG_S)
    assert library.registered == []


def test_who_waits_is_told_of_the_close(lanes: Lanes, library: Library) -> None:
    hang(lanes, library)
    hang(lanes, library)
    threading.Timer(SOON_S, lambda: lanes.close(0.0)).start()
    with pytest.raises(ClosedError), lanes.taken(0, LONG_S):
        pass


def test_many_threads_share_few_lanes(lanes: Lanes) -> None:
    running = threading.Semaphore(2)
    done: list[str] = []

    def work() -> str:
        if not running.acquire(blocking=False):
            return "more calls than lanes"
        time.sleep(0.0005)
        running.release()
        return "well"

    def use() -> None:
        for _ in range(50):
            with lanes.taken(0, LONG_S) as lane:
                done.append(lane.call(work, LONG_S))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == ["well"] * 400
