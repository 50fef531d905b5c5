"""Mooncake as a medium: the contract against a real master and node, and what is Mooncake's own."""

import contextlib
import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.core.keys import Key, root_of
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.testing import Driver, SharedTierContract, buffer_of, key_of, payload_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.media import mooncake_client, mooncake_setup
from stepwell.tiers.media.base import Record, Wanted
from stepwell.tiers.media.kinds import open_medium as open_any
from stepwell.tiers.media.mooncake import MooncakeMedium, open_medium
from stepwell.tiers.media.mooncake_client import Connection
from stepwell.tiers.media.records import ABSENT, name_of
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, NO_ROOM
from stepwell.tiers.shared import SharedTier

from .mooncake_pool import Pool, change
from .namespace import own_network
from .servers import free_port

SIZE = 4096
LONG_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _network() -> Iterator[None]:
    with own_network():
        yield


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("mooncake")) as pool:
        yield pool


@pytest.fixture(scope="module")
def client(pool: Pool) -> Iterator[Any]:
    client = pool.client()
    yield client
    client.close()


class TestMooncake(SharedTierContract):
    """A pool for all tests, a prefix for each."""

    @pytest.fixture(autouse=True)
    def _server(self, pool: Pool, client: Any) -> Iterator[None]:
        self.pool, self.client = pool, client
        yield
        client.remove_by_regex(f"^{self.prefix}/", True)

    @property
    def prefix(self) -> str:
        return f"t{abs(hash(str(self.place))):x}"

    def make_medium(self) -> MooncakeMedium:
        return open_medium(MediumUrl.parse(f"{self.pool.url}?prefix={self.prefix}"), 10.0)

    def damage(self, key: Key, how: Callable[[bytes], bytes]) -> None:
        change(self.client, key, how, self.prefix)

    def count(self) -> int:
        return sum(name.startswith(f"{self.prefix}/") for name in self.pool.names())


# What is Mooncake's own.


def driver_of(medium: MooncakeMedium) -> Driver:
    return Driver(SharedTier(medium, TierContext(), name="mooncake"))


def open_url(text: str, timeout_s: float = 10.0) -> MooncakeMedium:
    return open_medium(MediumUrl.parse(text), timeout_s)


@contextlib.contextmanager
def opened(text: str, timeout_s: float = 10.0) -> Iterator[MooncakeMedium]:
    medium = open_url(text, timeout_s)
    try:
        yield medium
    finally:
        medium.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mooncake:///x", "the master's address is missing"),
        ("mooncake://h/pool", "the master's address is missing, or there is more"),
        ("mooncake://u:pw@h", "no users and passwords"),
        ("mooncake://h?protcol=tcp", 'the nearest is "protocol"'),
        ("mooncake://h?protocol=udp", 'protocol is "tcp" or "rdma"'),
        ("mooncake://h?protocol=rdma&devices=mlx%205", "devices are such as"),
        ("mooncake://h?devices=mlx5_0", "for protocol=rdma"),
        ("mooncake://h?metadata=redis://h:6379", "P2PHANDSHAKE"),
        ("mooncake://h?metadata=p2p", "P2PHANDSHAKE"),
        ("mooncake://h?replicas=0", "a number from 1 to 16"),
        ("mooncake://h?replicas=two", "a number from 1 to 16"),
        ("mooncake://h?ha=redis", 'ha is "etcd"'),
        ("mooncake://h?more=h2:1", "add ha=etcd"),
        ("mooncake://h?ha=etcd&more=h2", "more is such as"),
        ("mooncake://h?prefix=a/b", "prefix is a word"),
        ("mooncake://h?tenant=a%20b", "tenant is a word"),
        ("mooncake://h?host=", "host is a word"),
    ],
)
def test_a_wrong_url_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_any(MediumUrl.parse(text), 1.0)
    message = str(refused.value)
    assert words in message
    assert "pw" not in message
    assert "\n" not in message


def test_a_device_that_this_machine_lacks() -> None:
    """A machine that only writes an engine's configuration need not have it."""
    with opened("mooncake://127.0.0.1:1?protocol=rdma&devices=mlx5_77", 1.0) as medium:
        with pytest.raises(ConfigError, match=r"no such RDMA device.*mlx5_77.*url=mooncake:"):
            medium.check()
        with pytest.raises(TierError, match="no such RDMA device"):
            medium.exist([key_of(1)], LONG_S)


def test_what_the_library_is_told() -> None:
    plain = mooncake_setup.target_of(MediumUrl.parse("mooncake://h"))
    assert (plain.master, plain.metadata, plain.protocol) == ("h:50051", "P2PHANDSHAKE", "tcp")
    many = mooncake_setup.target_of(MediumUrl.parse("mooncake://a?ha=etcd&more=b:1,c:2&replicas=3"))
    assert many.master == "etcd://a:2379;b:1;c:2"
    assert many.replicas == 3
    v6 = mooncake_setup.target_of(MediumUrl.parse("mooncake://[::1]:7"))
    assert v6.master == "[::1]:7"


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A package of the system is missing, as on a small image."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    code = (
        "from stepwell.tiers.media.kinds import open_medium\n"
        "from stepwell.tiers.media.urls import MediumUrl\n"
        "open_medium(MediumUrl.parse('mooncake://h'), 1.0)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "it needs libibverbs1, libnuma1 and libcurl4 of the system" in done.stderr


def test_no_master() -> None:
    with opened(f"mooncake://127.0.0.1:{free_port()}", 1.0) as medium:
        with pytest.raises(TierError, match="mooncake_master does not answer; is it running") as no:
            medium.check()
        assert "\n" not in str(no.value)


def test_the_one_who_answers_is_no_master(pool: Pool) -> None:
    """Setting up a client there stopped the interpreter for seconds, again and again."""
    url = f"mooncake://127.0.0.1:{pool.metrics_port}"
    words = r"somebody else is there; .* has its --rpc_port"
    with opened(url, 5.0) as medium, pytest.raises(TierError, match=words):
        medium.check()


@pytest.mark.parametrize("metadata", ["http://127.0.0.1:1/metadata", "etcd://127.0.0.1:1"])
def test_metadata_that_is_not_there(pool: Pool, metadata: str) -> None:
    """The library says no more than that it failed."""
    words = r"of the same version, .*, and metadata the same as"
    url = f"{pool.url}?metadata={metadata}"
    with opened(url) as medium, pytest.raises(TierError, match=words):
        medium.check()


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "4321")
    patience = ("MC_RPC_CONNECT_TIMEOUT_MS", "MC_TCP_STATUS_TIMEOUT_SEC",
                "MC_TCP_PROGRESS_TIMEOUT_SEC")  # fmt: skip
    for name in patience:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    mooncake_setup.load_library(MediumUrl.parse("mooncake://h"), 76.5)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "4321"
    assert [os.environ[name] for name in patience] == ["77000", "77", "77"]


class Recorder:
    """The library's client, with notes of the memory that it was given."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.registered: dict[int, int] = {}
        self.given: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register_buffer(self, address: int, size: int) -> int:
        code: int = self._client.register_buffer(address, size)
        assert code == 0
        self.registered[address] = size
        return code

    def unregister_buffer(self, address: int) -> int:
        code: int = self._client.unregister_buffer(address)
        assert code == 0
        del self.registered[address]
        return code

    def _note(self, addresses: list[int], sizes: list[int]) -> None:
        for begin, size in zip(addresses, sizes, strict=True):
            self.given.append((begin, size))
            assert any(
                first <= begin and begin + size <= first + whole
                for first, whole in self.registered.items()
            ), "memory that is not registered"

    def batch_put_from(self, names: Any, addresses: Any, sizes: Any, config: Any) -> Any:
        self._note(addresses, sizes)
        return self._client.batch_put_from(names, addresses, sizes, config)

    def batch_get_into(self, names: Any, addresses: Any, sizes: Any) -> Any:
        self._note(addresses, sizes)
        return self._client.batch_get_into(names, addresses, sizes)


def test_all_memory_is_registered(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP the library takes any memory, over RDMA only what it knows."""
    from mooncake import store

    recorders: list[Recorder] = []
    real = store.MooncakeDistributedStore

    def make() -> Any:
        recorders.append(Recorder(real()))
        return recorders[-1]

    monkeypatch.setattr(store, "MooncakeDistributedStore", make)
    driver = driver_of(open_url(f"{pool.url}?prefix=registered"))
    for size in (SIZE, 100_000, 1 << 20, 5000):
        keys = [key_of(f"{size}-{idx}") for idx in range(5)]
        assert driver.write(keys, size) == (DONE,) * 5
        result, contents = driver.read(keys, size)
        assert result.done
        assert contents == [payload_of(key, size) for key in keys]
    (recorder,) = recorders
    assert len(recorder.given) == 40
    assert all(begin % 4096 == 0 for begin, _ in recorder.given)
    assert len(recorder.registered) == 1, "what was outgrown is given back"
    driver.tier.erase(root_of(key_of("x")))  # type: ignore[attr-defined]
    driver.tier.close()


def test_a_length_that_does_not_fit(pool: Pool, client: Any) -> None:
    """Neither a longer nor a shorter object is served, and none beside the memory is touched."""
    with opened(f"{pool.url}?prefix=lengths") as medium:
        key = key_of("long")
        name = "/".join(("lengths", *name_of(key)))
        payload = payload_of(key, SIZE)
        for length, reason in ((1, "truncated"), (HEADER_BYTES + SIZE + 1, "layout"),
                               (1 << 20, "layout")):  # fmt: skip
            assert client.put(name, bytes(length)) == 0
            around = buffer_of(3 * SIZE, payload * 3)
            (found,) = medium.read([Wanted(key, around[SIZE : 2 * SIZE])], LONG_S)
            assert isinstance(found, ChunkResult)
            assert found.outcome is Outcome.MISS
            assert found.reason == reason
            assert bytes(around[:SIZE]) == bytes(around[2 * SIZE :]) == payload
            medium.remove([key], LONG_S)


def test_what_a_reader_has_leased_is_removed_all_the_same(pool: Pool) -> None:
    driver = driver_of(open_url(f"{pool.url}?prefix=leased"))
    keys = [key_of(idx) for idx in range(3)]
    driver.write(keys)
    assert driver.read(keys)[0].done
    assert driver.tier.delete(keys[:1]) == 1
    driver.tier.drain(LONG_S)  # type: ignore[attr-defined]
    assert driver.tier.medium.exist(keys, LONG_S) == [False, True, True]  # type: ignore[attr-defined]
    driver.tier.close()


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    """Of a master that has tenants; one that has not keeps all in one place, and says nothing."""
    key = key_of("whose")
    record = Record(key, bytes(HEADER_BYTES), buffer_of(SIZE), 0.0)
    quotas = tmp_path / "quotas.yaml"
    entries = "".join(f"  - name: {name}\n    quota: 33554432\n" for name in ("one", "two"))
    quotas.write_text(f"version: 1\ntenants:\n{entries}")
    options = ["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={quotas}"]
    with (
        Pool(tmp_path, node_bytes=64 << 20, options=options) as pool,
        opened(f"{pool.url}?tenant=one") as one,
        opened(f"{pool.url}?tenant=two") as two,
    ):
        assert one.write([record], LONG_S) == [DONE]
        assert one.exist([key], LONG_S) == [True]
        assert two.exist([key], LONG_S) == [False]
        assert two.read([Wanted(key, buffer_of(SIZE))], LONG_S) == [ABSENT]
        assert two.erase(root_of(key)) == 0
        assert one.erase(root_of(key)) == 1


def test_a_prefix_is_no_pattern(pool: Pool) -> None:
    """A dot in it does not erase what belongs to others."""
    key = key_of("dot")
    record = Record(key, bytes(HEADER_BYTES), buffer_of(SIZE), 0.0)
    with opened(f"{pool.url}?prefix=a.b") as dot, opened(f"{pool.url}?prefix=axb") as other:
        for medium in (dot, other):
            assert medium.write([record], LONG_S) == [DONE]
        assert dot.erase(root_of(key)) == 1
        assert other.exist([key], LONG_S) == [True]
        assert other.erase(root_of(key)) == 1


def test_many_clients_in_one_process(pool: Pool) -> None:
    """None of them takes another's address."""
    with contextlib.ExitStack() as stack:
        media = [stack.enter_context(opened(f"{pool.url}?prefix=many")) for _ in range(6)]
        for idx, medium in enumerate(media):
            key = key_of(idx)
            record = Record(key, bytes([idx]) * HEADER_BYTES, buffer_of(SIZE), 0.0)
            assert medium.write([record], LONG_S) == [DONE]
        for medium in media:
            for idx in range(6):
                (page,) = medium.read([Wanted(key_of(idx), buffer_of(SIZE))], LONG_S)
                assert page == bytes([idx]) * HEADER_BYTES
        assert media[0].erase(root_of(key_of(0))) == 6


def test_a_full_pool_evicts_and_takes_more(tmp_path: Path) -> None:
    """It refuses while it makes room: those are asked again. Nobody is told of what left."""
    with Pool(tmp_path, node_bytes=64 << 20, options=["--default_kv_lease_ttl=1000"]) as small:
        driver = driver_of(open_url(small.url))
        keys = [key_of(idx) for idx in range(60)]
        for begin in range(0, 60, 6):
            assert driver.write(keys[begin : begin + 6], 2 << 20) == (DONE,) * 6
        results = driver.read(keys, 2 << 20)[0].results
        assert set(results) == {DONE, ABSENT}
        driver.tier.close()


def test_a_pool_without_room_refuses_in_time(pool: Pool, tmp_path: Path) -> None:
    """Pinned objects never leave: what is not taken is refused, and the caller does not wait."""
    from mooncake.store import ReplicateConfig

    with Pool(tmp_path, node_bytes=32 << 20) as small:
        raw = small.client()
        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        count = 0
        while raw.put(f"pinned{count}", bytes(1 << 20), pinned) == 0:
            count += 1
        assert 16 <= count <= 32
        medium = open_url(small.url)
        records = [Record(key_of(idx), bytes(HEADER_BYTES), buffer_of(4 << 20), 0.0)
                   for idx in range(2)]  # fmt: skip
        began_s = time.monotonic()
        assert medium.write(records, LONG_S) == [NO_ROOM, NO_ROOM]
        assert time.monotonic() - began_s < LONG_S / 2
        medium.close()
        raw.close()


def test_fewer_replicas_than_asked_for(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """The record is there, and is kept; that it is less safe than wanted is said once."""
    with opened(f"{pool.url}?replicas=2&prefix=replicas") as medium:
        records = [Record(key_of(idx), bytes(HEADER_BYTES), buffer_of(SIZE), 0.0)
                   for idx in range(3)]  # fmt: skip
        with caplog.at_level(logging.WARNING):
            assert medium.write(records[:2], LONG_S) == [DONE, DONE]
            assert medium.write(records[2:], LONG_S) == [DONE]
        said = [each for each in caplog.messages if "fewer replicas than asked for" in each]
        assert len(said) == 1
        assert "replicas=2 kept=1" in said[0]
        assert medium.num_short == 3
        assert medium.erase(root_of(key_of(0))) == 3


def test_as_many_replicas_as_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Pool(tmp_path, nodes=2, node_bytes=64 << 20) as two,
        opened(f"{two.url}?replicas=2") as medium,
    ):
        record = Record(key_of(1), bytes(HEADER_BYTES), buffer_of(SIZE), 0.0)
        with caplog.at_level(logging.WARNING):
            assert medium.write([record], LONG_S) == [DONE]
        assert medium.num_short == 0
        assert not [each for each in caplog.messages if "fewer replicas" in each]
        raw = two.client()
        name = "/".join(("stepwell", *name_of(key_of(1))))
        assert len(raw.get_replica_desc(name)) == 2
        raw.close()


def test_a_name_that_a_dead_writer_has_is_not_called_written(pool: Pool, client: Any) -> None:
    """The library says that it has put what somebody else has begun to put, and never ended."""
    with opened(f"{pool.url}?prefix=begun") as medium:
        key = key_of(1)
        name = "/".join(("begun", *name_of(key)))
        assert client.batch_put_session_start([name], [HEADER_BYTES + SIZE]) == [0]
        record = Record(key, bytes(HEADER_BYTES), buffer_of(SIZE), 0.0)
        assert medium.read([Wanted(key, buffer_of(SIZE))], LONG_S) == [ABSENT]
        assert medium.exist([key], LONG_S) == [False]
        began_s = time.monotonic()
        (result,) = medium.write([record], LONG_S)
        assert result == ChunkResult(Outcome.FULL, Reason.DEADLINE)
        assert time.monotonic() - began_s < LONG_S / 2
        client.batch_put_session_revoke([name])
        assert medium.write([record], LONG_S) == [DONE]
        assert medium.write([record], LONG_S) == [ALREADY_THERE]
        assert medium.erase(root_of(key)) == 1


# Clients that do not do what they should.


class Broken:
    """A client that answers as it is told to."""

    def __init__(self, client: Any, **answers: Callable[..., Any]) -> None:
        self._client = client
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return self._answers.get(name) or getattr(self._client, name)


def medium_of(connection: Connection, prefix: str, timeout_s: float = 10.0) -> MooncakeMedium:
    from mooncake.store import ReplicateConfig

    return MooncakeMedium(connection, prefix, "mooncake://x", timeout_s, ReplicateConfig())


def test_a_client_that_stays_lost_is_replaced(pool: Pool) -> None:
    """Beside those who call: they fail meanwhile, and in time."""
    lost = Broken(pool.client(), batch_is_exist=lambda names: [-900] * len(names))
    clients = [lost]

    def connect() -> Any:
        return clients.pop() if clients else pool.client()

    medium = medium_of(Connection(connect, patience_s=0.3), "lost")
    give_up_s = time.monotonic() + 60.0
    failures = 0
    while True:
        assert time.monotonic() < give_up_s
        try:
            found = medium.exist([key_of(1)], LONG_S)
        except TierError:
            failures += 1
            time.sleep(0.05)
        else:
            assert found == [False]
            break
    assert failures >= 3
    medium.close()


def test_what_is_said_to_be_read_and_was_not(pool: Pool) -> None:
    """The memory still has the same record of an earlier read; nobody may be told so."""
    key = key_of(1)
    record = Record(key, b"\1" * HEADER_BYTES, buffer_of(SIZE), 0.0)
    client = Broken(pool.client())
    medium = medium_of(Connection(lambda: client), "unread")
    assert medium.write([record], LONG_S) == [DONE]
    (page,) = medium.read([Wanted(key, buffer_of(SIZE))], LONG_S)
    assert page == record.header
    client._answers["batch_get_into"] = lambda names, places, sizes: sizes
    (unread,) = medium.read([Wanted(key, buffer_of(SIZE))], LONG_S)
    assert unread == bytes(HEADER_BYTES)
    assert page == record.header, "what was returned is the caller's own"
    assert medium.erase(root_of(key)) == 1
    medium.close()


@pytest.mark.parametrize(("code", "error"), [(-900, True), (-901, True), (-800, False)])
def test_failures_of_the_master_and_of_nodes(pool: Pool, code: int, error: bool) -> None:
    """Without the master nothing is known of any record; a node has only its own."""

    def get(names: Any, places: Any, sizes: Any) -> list[int]:
        return [code] * len(names)

    client = Broken(
        pool.client(), batch_get_into=get, batch_put_from=lambda n, p, s, c: get(n, p, s)
    )
    medium = medium_of(Connection(lambda: client), "failing")
    record = Record(key_of(1), bytes(HEADER_BYTES), buffer_of(SIZE), 0.0)
    calls: list[Callable[[], Any]] = [
        lambda: medium.read([Wanted(key_of(1), buffer_of(SIZE))], LONG_S),
        lambda: medium.write([record], LONG_S),
    ]
    for call in calls:
        if error:
            with pytest.raises(TierError, match=f"does not answer: code={code}"):
                call()
        else:
            assert call() == [ChunkResult(Outcome.FAILED, Reason.IO_ERROR)]
    medium.close()


@pytest.mark.parametrize("code", [-900, -1])
def test_what_cannot_be_verified_is_not_called_written(pool: Pool, code: int) -> None:
    """A put says 0 also for a name that somebody else has; the question after it went wrong."""
    answers = [[0, 0], [1, code]]
    client = Broken(pool.client(), batch_is_exist=lambda names: answers.pop(0))
    medium = medium_of(Connection(lambda: client), "unverified")
    records = [Record(key_of(idx), bytes(HEADER_BYTES), buffer_of(SIZE), 0.0) for idx in range(2)]
    assert medium.write(records, LONG_S) == [DONE, ChunkResult(Outcome.FAILED, Reason.IO_ERROR)]
    assert medium.erase(root_of(key_of(0))) == 2
    medium.close()


def test_a_removal_that_failed_is_said(pool: Pool) -> None:
    client = Broken(pool.client(), batch_remove=lambda names, force: [0, -704, -714])
    medium = medium_of(Connection(lambda: client), "kept")
    with pytest.raises(TierError, match="code=-714"):
        medium.remove([key_of(idx) for idx in range(3)], LONG_S)
    medium.close()


def test_a_call_that_is_late_keeps_its_memory(pool: Pool) -> None:
    """It ends long after its caller has gone on, and writes into nobody's memory."""
    let_go = threading.Event()

    def get(names: Any, places: Any, sizes: Any) -> list[int]:
        let_go.wait(60.0)
        ctypes.memset(places[0], 0xFF, sizes[0])
        return list(sizes)

    client = Broken(pool.client(), batch_get_into=get)
    medium = medium_of(Connection(lambda: client), "late")
    record = Record(key_of(1), b"\1" * HEADER_BYTES, buffer_of(SIZE, b"a" * SIZE), 0.0)
    assert medium.write([record], LONG_S) == [DONE]
    target = buffer_of(SIZE, b"b" * SIZE)
    began_s = time.monotonic()
    with pytest.raises(TierError, match="no answer in time"):
        medium.read([Wanted(key_of(1), target)], 0.3)
    assert time.monotonic() - began_s < LONG_S / 2
    del client._answers["batch_get_into"]
    second = buffer_of(SIZE)
    (page,) = medium.read([Wanted(key_of(1), second)], LONG_S)
    for _ in range(4):  # nor does it take the place of others
        client._answers["batch_get_into"] = get
        with pytest.raises(TierError, match="no answer in time"):
            medium.read([Wanted(key_of(1), buffer_of(SIZE))], 0.1)
        del client._answers["batch_get_into"]
        (again,) = medium.read([Wanted(key_of(1), second)], LONG_S)
        assert again == page
    let_go.set()
    assert page == record.header
    assert bytes(second) == b"a" * SIZE
    assert bytes(target) == b"b" * SIZE
    assert medium.erase(root_of(key_of(1))) == 1
    medium.close()


def test_closing_does_not_wait_for_a_late_call(pool: Pool) -> None:
    let_go = threading.Event()
    client = Broken(pool.client(), batch_is_exist=lambda names: [let_go.wait(60.0)])
    medium = medium_of(Connection(lambda: client), "closing")
    with pytest.raises(TierError):
        medium.exist([key_of(1)], 0.2)
    began_s = time.monotonic()
    medium.close()
    assert time.monotonic() - began_s < LONG_S / 2
    with pytest.raises(TierError, match="closed"):
        medium.exist([key_of(1)], 1.0)
    let_go.set()


def test_a_client_that_cannot_be_made_is_tried_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def connect() -> Any:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise TierError("not yet")
        if len(tries) == 2:
            raise KeyError("a bug")
        return pool.client()

    connection = Connection(connect)
    medium = medium_of(connection, "again")
    with monkeypatch.context() as patch:
        patch.setattr(mooncake_client, "_AGAIN_S", LONG_S)
        with pytest.raises(TierError, match="not yet"):
            medium.check()
        with pytest.raises(TierError, match="not yet"):  # was tried just now
            medium.check()
    assert len(tries) == 1
    connection._again_at_s = 0.0
    give_up_s = time.monotonic() + 60.0
    while len(tries) < 3:
        assert time.monotonic() < give_up_s
        with contextlib.suppress(TierError):
            medium.check()
        time.sleep(0.1)
    medium.check()
    medium.close()


def test_a_process_that_has_used_it_ends_well(pool: Pool) -> None:
    """Also without closing anything."""
    for closing in ("medium.close()", ""):
        code = (
            "from stepwell.tiers.media.mooncake import open_medium\n"
            "from stepwell.tiers.media.urls import MediumUrl\n"
            "from stepwell.testing import key_of\n"
            f"medium = open_medium(MediumUrl.parse({pool.url!r}), 10.0)\n"
            "assert medium.exist([key_of(1)], 10.0) == [False]\n" + closing
        )
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
