"""Clients of Mooncake's library that fail, are replaced, or cannot be closed."""

import base64
import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.core.keys import root_of
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import TierError
from stepwell.testing import buffer_of, key_of, payload_of
from stepwell.tiers.media import mooncake_left, mooncake_setup
from stepwell.tiers.media.base import Record, Wanted
from stepwell.tiers.media.mooncake import MooncakeMedium
from stepwell.tiers.media.mooncake_client import Connection
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import DONE

from .mooncake_pool import Pool
from .servers import free_port
from .test_mooncake import LONG_S, SIZE, Broken, Recorder, _network, medium_of, pool

__all__ = ["_network", "pool"]

KEY = key_of(1)
RECORD = Record(KEY, b"\1" * HEADER_BYTES, buffer_of(SIZE, payload_of(KEY, SIZE)), 0.0)
FAILED = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)


def until(what: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def fails(names: Any, places: Any, sizes: Any) -> list[int]:
    return [-800] * len(names)


def works(connect: Callable[[], Any]) -> bool:
    medium = medium_of(Connection(connect), "works")
    try:
        return medium.exist([KEY], LONG_S) == [False]
    except TierError:
        return False
    finally:
        medium.close()


@contextlib.contextmanager
def stored(pool: Pool, prefix: str) -> Iterator[None]:
    """The record is there."""
    medium = medium_of(Connection(pool.client), prefix)
    try:
        assert medium.write([RECORD], LONG_S) == [DONE]
        yield
        assert medium.erase(root_of(KEY)) == 1
    finally:
        medium.close()


def is_served(medium: MooncakeMedium) -> bool:
    target = buffer_of(SIZE)
    (page,) = medium.read([Wanted(KEY, target)], LONG_S)
    return page == RECORD.header and bytes(target) == payload_of(KEY, SIZE)


@pytest.mark.parametrize("late", [False, True])
def test_memory_of_a_failed_transfer_is_not_used_again(pool: Pool, late: bool) -> None:
    """The library gives a transfer up and does not end it: what still came was somebody else's."""
    raw = Recorder(pool.client())
    doubtful: list[int] = []
    let_go = threading.Event()

    def fail(names: Any, places: Any, sizes: Any) -> list[int]:
        assert let_go.wait(60.0)
        doubtful.append(places[0])
        return fails(names, places, sizes)

    def get(names: Any, places: Any, sizes: Any) -> list[int]:
        lengths: list[int] = raw.batch_get_into(names, places, sizes)
        for place in doubtful:  # only now does it come
            ctypes.memset(place, 0xFF, HEADER_BYTES + SIZE)
        return lengths

    client = Broken(raw, batch_get_into=fail)
    with stored(pool, "doubtful"):
        medium = medium_of(Connection(lambda: client), "doubtful")
        wanted = Wanted(KEY, buffer_of(SIZE))
        if late:
            with pytest.raises(TierError, match="no answer in time"):
                medium.read([wanted], 0.2)
            let_go.set()
            until(lambda: bool(doubtful))
        else:
            let_go.set()
            assert medium.read([wanted], LONG_S) == [FAILED]
        client._answers["batch_get_into"] = get
        for _ in range(10):
            assert is_served(medium)
            time.sleep(0.02)
        assert doubtful[0] in raw.registered, "it is the client's until that is closed"
        medium.close()


def test_a_client_that_has_lost_too_much_memory_is_replaced(pool: Pool) -> None:
    clients = [Broken(pool.client(), batch_get_into=fails)]
    made: list[Any] = []

    def connect() -> Any:
        if made and not may_connect.is_set():
            raise TierError("not yet")
        made.append(clients.pop() if clients else pool.client())
        return made[-1]

    may_connect = threading.Event()
    with stored(pool, "spent"):
        medium = medium_of(Connection(connect, patience_s=1e6), "spent")
        for _ in range(16):
            assert medium.read([Wanted(KEY, buffer_of(SIZE))], LONG_S) == [FAILED]
        for _ in range(3):
            with pytest.raises(TierError, match="too many transfers have failed"):
                medium.read([Wanted(KEY, buffer_of(SIZE))], LONG_S)
            assert medium.exist([KEY], LONG_S) == [True], "which needs no memory"
        may_connect.set()

        def served() -> bool:
            with contextlib.suppress(TierError):
                return is_served(medium)
            return False

        until(served)
        assert len(made) == 2
        medium.close()


def test_memory_that_stays_registered_is_kept(pool: Pool) -> None:
    """It was freed, and the library went on knowing it."""
    raw = pool.client()
    kept: list[int] = []

    def unregister(address: int) -> int:
        kept.append(address)
        return -1

    client = Broken(raw, unregister_buffer=unregister)
    medium = medium_of(Connection(lambda: client), "kept")
    for size in (1 << 20, 3 << 20):
        wanted = Wanted(KEY, buffer_of(size))
        assert medium.read([wanted], LONG_S) == [ChunkResult(Outcome.MISS, Reason.ABSENT)]
    (address,) = kept
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in lines]
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in mapped)
    medium.close()


def test_no_thread_to_connect_on(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken to be connecting from then on, for ever."""
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("stepwell-mooncake") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    medium = medium_of(Connection(pool.client), "threads")
    with pytest.raises(TierError, match="no thread to connect on"):
        medium.exist([KEY], 1.0)

    def answered() -> bool:
        with contextlib.suppress(TierError):
            return medium.exist([KEY], LONG_S) == [False]
        return False

    until(answered)
    assert refused == ["stepwell-mooncake-connect"] * 2
    medium.close()


def test_no_thread_for_a_call(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "stepwell-mooncake-0":
            raise RuntimeError("can't start new thread")
        start(thread)

    medium = medium_of(Connection(pool.client), "threads")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TierError, match="no thread for a call"):
            medium.exist([KEY], LONG_S)
    assert medium.exist([KEY], LONG_S) == [False]
    medium.close()


def test_a_client_that_may_not_be_closed(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps no memory of ours, and is said; so many are the most."""
    let_go = threading.Event()
    closed: list[int] = []
    recorders: list[Recorder] = []
    taken: list[Broken] = []

    def connect() -> Any:
        recorders.append(Recorder(pool.client()))
        taken.append(Broken(recorders[-1], close=lambda: closed.append(1)))
        return taken[-1]

    def ask() -> bool:
        return let_go.is_set()

    def use() -> None:
        medium = medium_of(Connection(connect, may_close=ask, late_s=0.1), "left")
        try:
            assert medium.read([Wanted(KEY, buffer_of(SIZE))], LONG_S)
            assert recorders[-1].registered
        finally:
            medium.close()

    for _ in range(8):
        use()
    with pytest.raises(TierError, match=r"no further client .* left=8"):
        use()
    assert len(taken) == 8
    assert not closed
    until(lambda: not any(recorder.registered for recorder in recorders))
    assert len([each for each in caplog.messages if "is not closed" in each]) == 8
    let_go.set()  # and when they may be closed, they are, and there is room again
    until(lambda: len(closed) == 8)
    until(lambda: works(connect))
    assert len(taken) == 9
    for recorder in recorders:
        recorder.close()


class Etcd(BaseHTTPRequestHandler):
    """Answers as etcd's gateway does; by hand it was tried against etcd itself."""

    leader = ""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = base64.b64decode(asked["key"]).decode()
        found: dict[str, Any] = {"header": {"revision": "7"}}
        if self.path == "/v3/kv/range" and key == "mooncake-store/mooncake_cluster/master_view":
            value = base64.b64encode(self.leader.encode()).decode()
            found |= {"kvs": [{"key": asked["key"], "value": value}]} if self.leader else {}
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


class Refused:
    """A client that cannot be set up."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, *_: object, **__: object) -> int:
        self.calls.append("setup")
        return -1

    def close(self) -> None:
        self.calls.append("close")


def connected(url: str, client: Refused) -> str:
    """Why it cannot be."""
    library = SimpleNamespace(MooncakeDistributedStore=lambda: client)
    with pytest.raises(TierError) as failed:
        mooncake_setup.connect(library, mooncake_setup.target_of(MediumUrl.parse(url)), 5.0)
    return str(failed.value)


def test_with_etcd_its_master_is_asked_first(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting up a client stopped the interpreter for seconds while there was no master."""
    monkeypatch.delenv("MC_STORE_CLUSTER_ID", raising=False)
    with HTTPServer(("127.0.0.1", 0), Etcd) as etcd:
        threading.Thread(target=etcd.serve_forever, daemon=True).start()
        url = f"mooncake://127.0.0.1:{free_port()}?ha=etcd&more=127.0.0.1:{etcd.server_port}"
        client = Refused()
        for leader, words in (
            ("", "it names no master"),
            ("nonsense", "invalid literal"),
            (f"127.0.0.1:{free_port()}", "mooncake_master does not answer"),
            (f"127.0.0.1:{pool.metrics_port}", "somebody else is there"),
        ):
            monkeypatch.setattr(Etcd, "leader", leader)
            assert words in connected(url, client)
        assert client.calls == []
        monkeypatch.setattr(Etcd, "leader", pool.address)
        assert "Mooncake takes no client" in connected(url, client)
        assert client.calls == ["setup"], "closing it may wait half a minute"
        mooncake_left.take_back(client)
        monkeypatch.setenv("MC_STORE_CLUSTER_ID", "another")
        assert "it names no master" in connected(url, client)
        etcd.shutdown()


def test_a_client_that_was_refused_is_closed(pool: Pool) -> None:
    client = Refused()
    assert "Mooncake takes no client" in connected(pool.url, client)
    assert client.calls == ["setup", "close"]


def test_a_client_is_closed_only_while_its_master_answers(pool: Pool) -> None:
    for url, may in ((pool.url, True), (f"mooncake://127.0.0.1:{free_port()}", False)):
        target = mooncake_setup.target_of(MediumUrl.parse(url))
        assert mooncake_setup.may_close(target, 5.0) is may
