"""Redis as a medium: the contract against a real server, and what is Redis' own."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis

from stepwell.clock import ManualClock
from stepwell.core.keys import Key, root_of
from stepwell.core.types import Chunk, ChunkResult, Direction, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.testing import Driver, SharedTierContract, buffer_of, key_of, payload_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.media.base import Record, Stats, Wanted
from stepwell.tiers.media.records import name_of
from stepwell.tiers.media.redis import RedisMedium, open_medium
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import DONE, NO_ROOM
from stepwell.tiers.shared import SharedTier

from .servers import READY_S, Server, answers_on, free_port, redis_server, run

ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
LONG_S = 30.0  # of a busy machine


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server, port = redis_server(tmp_path_factory.mktemp("redis"))
    with server:
        yield port


class TestRedis(SharedTierContract):
    """A server for all tests, a prefix for each."""

    @pytest.fixture(autouse=True)
    def _server(self, port: int) -> Iterator[None]:
        self.port = port
        self.client = redis.Redis(port=port)
        yield
        self.client.flushall()
        self.client.close()

    @property
    def prefix(self) -> str:
        return str(self.place).replace("/", "-")

    def make_medium(self) -> RedisMedium:
        url = MediumUrl("redis", host="127.0.0.1", port=self.port,
                        parameters={"prefix": self.prefix})  # fmt: skip
        return open_medium(url, LONG_S)

    def damage(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        name = ":".join((self.prefix, *name_of(key)))
        stored = self.client.get(name)
        assert isinstance(stored, bytes)
        self.client.set(name, change(stored))

    def count(self) -> int:
        return sum(1 for _ in self.client.scan_iter(f"{self.prefix}:*", 1000))


# What is Redis' own.


def url_of(port: int, **more: object) -> MediumUrl:
    return MediumUrl("redis", host="127.0.0.1", port=port, **more)  # type: ignore[arg-type]


def driver_of(medium: RedisMedium) -> Driver:
    return Driver(SharedTier(medium, TierContext(), name="redis"))


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[int]:
    server, port = redis_server(folder, *options)
    with server:
        yield port


def test_a_full_server_that_evicts_nothing_refuses(tmp_path: Path) -> None:
    """And what is there can be read; after there is room again it takes more."""
    with running(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as port:
        driver = driver_of(open_medium(url_of(port), LONG_S))
        keys = [key_of(idx) for idx in range(30)]
        results = driver.write(keys, 1 << 20)
        assert set(results) == {DONE, NO_ROOM}
        there = [key for key, result in zip(keys, results, strict=True) if result == DONE]
        assert driver.read(there, 1 << 20)[0].done
        stats = driver.tier.stats()  # type: ignore[attr-defined]
        assert stats.capacity_bytes == 8 << 20
        assert 4 << 20 < stats.used_bytes < 12 << 20
        driver.tier.delete(there)
        driver.tier.drain(LONG_S)  # type: ignore[attr-defined]
        assert driver.write(keys[-1:], 1 << 20) == (DONE,)
        driver.tier.close()


def test_a_full_server_evicts(tmp_path: Path) -> None:
    """What was used least recently, and a read of it is a miss."""
    options = ("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
    with running(tmp_path, *options) as port:
        driver = driver_of(open_medium(url_of(port), LONG_S))
        keys = [key_of(idx) for idx in range(30)]
        assert driver.write(keys, 1 << 20) == (DONE,) * 30
        results = driver.read(keys, 1 << 20)[0].results
        assert ABSENT in results
        assert DONE in results
        assert set(results) == {ABSENT, DONE}
        assert driver.write(keys, 1 << 20)[0].outcome is Outcome.DONE
        driver.tier.close()


def test_a_value_of_another_kind_is_wrong_and_removed(port: int) -> None:
    driver = driver_of(open_medium(url_of(port), LONG_S))
    client = redis.Redis(port=port)
    name = ":".join(("stepwell", *name_of(key_of("list"))))
    client.rpush(name, "x")
    wrong = ChunkResult(Outcome.MISS, Reason.HEADER)
    assert driver.read([key_of("list"), key_of("none")])[0].results == (wrong, ABSENT)
    assert driver.write([key_of("list")]) == (DONE,)
    client.flushall()
    driver.tier.close()


def test_a_time_to_live_is_the_servers(port: int) -> None:
    context = TierContext()
    driver = Driver(
        SharedTier(open_medium(url_of(port), LONG_S), context, name="redis", ttl_s=100.0)
    )
    driver.write([key_of("mortal")])
    client = redis.Redis(port=port)
    name = ":".join(("stepwell", *name_of(key_of("mortal"))))
    assert 90_000 < client.pttl(name) <= 100_000
    driver.tier.close()


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("", "", "Authentication required"),
        ("", "wr0ng-one", "invalid username-password pair"),
        ("nobody", "secret", "invalid username-password pair"),
        ("reader", "p4ssword", "no permissions"),
    ],
)
def test_a_server_that_refuses_us(tmp_path: Path, user: str, password: str, words: str) -> None:
    """One line that says what to give."""
    acl = tmp_path / "users.acl"
    acl.write_text(
        "user default on >secret ~* +@all\nuser reader on >p4ssword ~other:* +get +ping\n"
    )
    with running(tmp_path, "--aclfile", str(acl)) as port:
        good = open_medium(url_of(port, password="secret"), LONG_S)
        good.check()
        good.close()
        with pytest.raises(ConfigError) as refused:
            open_medium(url_of(port, user=user, password=password), LONG_S).check()
        message = str(refused.value)
        assert words in message
        assert "redis://user:password@host" in message
        assert "\n" not in message
        assert not password or password not in message


def test_a_password_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up when a connection is made, and missing there with a clear word."""
    with running(tmp_path, "--requirepass", "from env") as port:
        medium = open_medium(url_of(port, password="${STEPWELL_TEST_SECRET}"), LONG_S)
        with pytest.raises(ConfigError, match="no variable STEPWELL_TEST_SECRET"):
            medium.check()
        monkeypatch.setenv("STEPWELL_TEST_SECRET", "from env")
        medium.check()
        medium.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("redis:///0", "there is no host"),
        ("redis://h/zero", "number of a database"),
        ("redis://h?prefx=a", 'the nearest is "prefix"'),
        ("redis://h?cluster=yes", '"true" or "false"'),
        ("redis://h/1?cluster=true", "no numbered databases"),
        ("redis://h?ca_certs=/x", "rediss://"),
        ("rediss://h?verify=1", '"true" or "false"'),
        ("rediss://h?ca_certs=/nope", "no file that can be read"),
    ],
)
def test_a_wrong_url_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_medium(MediumUrl.parse(text), 1.0)
    assert words in str(refused.value)


def test_nobody_answers() -> None:
    with pytest.raises(TierError, match="refused"):
        open_medium(url_of(free_port()), 1.0).check()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    run(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
        "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
        "-out", str(cert),
    )  # fmt: skip
    return cert, key


def test_over_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port = free_port()
    server = Server(
        ["redis-server", "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1",
         "--save", "", "--tls-cert-file", str(cert), "--tls-key-file", str(key),
         "--tls-auth-clients", "no", "--dir", str(tmp_path)],
        answers_on(port), tmp_path / "log",
    )  # fmt: skip
    with server:
        address = f"rediss://127.0.0.1:{port}"
        trusting = open_medium(MediumUrl.parse(f"{address}?ca_certs={cert}"), 5.0)
        driver = driver_of(trusting)
        assert driver.write([key_of(1)], 1 << 20) == (DONE,)
        assert driver.read([key_of(1)], 1 << 20)[0].done
        driver.tier.close()
        careless = open_medium(MediumUrl.parse(f"{address}?verify=false"), 5.0)
        careless.check()
        careless.close()
        with pytest.raises(TierError, match="certificate verify failed"):
            open_medium(MediumUrl.parse(address), 5.0).check()


def wait_until_in_order(ports: Sequence[int]) -> None:
    """Wait for every node of a cluster; one takes part later than it says that it agrees."""
    give_up_s = time.monotonic() + READY_S
    for port in ports:
        with redis.Redis(port=port) as client:
            while client.cluster("info")["cluster_state"] != "ok":
                assert time.monotonic() < give_up_s
                time.sleep(0.05)


def test_a_cluster(tmp_path: Path) -> None:
    """Three nodes; a batch goes to all of them."""
    with contextlib.ExitStack() as nodes:
        ports = []
        for idx in range(3):
            folder = tmp_path / str(idx)
            folder.mkdir()
            ports.append(
                nodes.enter_context(running(folder, "--cluster-enabled", "yes",
                                            "--cluster-port", str(free_port())))
            )  # fmt: skip
        addresses = [f"127.0.0.1:{port}" for port in ports]
        run("redis-cli", "--cluster", "create", *addresses, "--cluster-yes")
        wait_until_in_order(ports)
        driver = driver_of(open_medium(url_of(ports[0], parameters={"cluster": "true"}), 5.0))
        driver.tier.medium.check()  # type: ignore[attr-defined]
        keys = [key_of(idx) for idx in range(40)]
        assert driver.write(keys) == (DONE,) * 40
        counts = []
        for port in ports:
            with redis.Redis(port=port) as client:
                counts.append(client.dbsize())
        assert sum(counts) == 40
        assert all(counts)
        result, contents = driver.read([*keys, key_of("none")])
        assert result.results == (DONE,) * 40 + (ABSENT,)
        assert contents[:40] == [payload_of(key, 4096) for key in keys]
        assert driver.tier.stats().used_bytes > 0  # type: ignore[attr-defined]
        assert driver.tier.erase(root_of(keys[0])) == 40  # type: ignore[attr-defined]
        driver.tier.close()


# Servers that do not do what they should.


class Proxy:
    """Between a client and a server on loopback; hands on the answers as it is told to.

    Args:
        port: the server's.
        piece_bytes, pause_s: so much at a time of what the server says.
    """

    def __init__(self, port: int, piece_bytes: int, pause_s: float) -> None:
        self._server = port
        self._piece_bytes, self._pause_s = piece_bytes, pause_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                for source, target, slow in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._pump, args=(source, target, slow), daemon=True
                    ).start()

    def _pump(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError), source, target:
            while content := source.recv(1 << 16):
                size = self._piece_bytes if slow else len(content)
                for begin in range(0, len(content), size):
                    if slow and self._closed.wait(self._pause_s):
                        return
                    target.sendall(content[begin : begin + size])


@pytest.mark.parametrize("call", ["exist", "read", "write", "remove", "touch", "stats"])
def test_a_server_that_dribbles_is_given_up_in_time(port: int, call: str) -> None:
    """It was never silent for long, and held a thread for as long as it liked."""
    key = key_of("slowly")
    driver = driver_of(open_medium(url_of(port), LONG_S))
    driver.write([key])
    proxy = Proxy(port, 1, 0.05)
    medium = open_medium(url_of(proxy.port), LONG_S)
    arguments: dict[str, list[object]] = {
        "read": [Wanted(key, buffer_of(4096))],
        "write": [Record(key_of("new"), bytes(4096), buffer_of(4096), 0.0)],
    }
    asked = [] if call == "stats" else [arguments.get(call, [key] * 64)]
    began_s = time.monotonic()
    with pytest.raises(TierError):
        getattr(medium, call)(*asked, 0.5)
    assert time.monotonic() - began_s < LONG_S
    medium.close()
    proxy.close()
    driver.tier.close()


def test_a_value_of_any_length_is_not_taken_in(port: int) -> None:
    """Six values of 100 MiB took 700 MB of memory, to be found wrong."""
    driver = driver_of(open_medium(url_of(port), LONG_S))
    key = key_of("huge")
    with redis.Redis(port=port) as client:
        name = ":".join(("stepwell", *name_of(key)))
        client.setrange(name, (64 << 20) - 1, b"x")
        before = client.info("stats")["total_net_output_bytes"]
        (result,) = driver.read([key])[0].results
        after = client.info("stats")["total_net_output_bytes"]
    assert result.reason is Reason.HEADER
    assert after - before < 1 << 20
    driver.tier.close()


def test_a_copy_that_takes_no_writes_is_refused(tmp_path: Path) -> None:
    """It served reads until the first writes failed, and said nothing."""
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    with running(first) as primary, running(second, "--replicaof", f"127.0.0.1 {primary}") as copy:
        medium = open_medium(url_of(copy), LONG_S)
        with pytest.raises(ConfigError, match="takes no writes"):
            medium.check()
        medium.close()


def test_a_user_who_may_not_remove(tmp_path: Path) -> None:
    """What was deleted was served again half a second later."""
    acl = tmp_path / "users.acl"
    rights = "+get +getrange +set +exists +touch +ping"
    acl.write_text(f"user default on >secret ~* +@all\nuser some on >pw ~* {rights}\n")
    with running(tmp_path, "--aclfile", str(acl)) as port:
        medium = open_medium(url_of(port, user="some", password="pw"), LONG_S)
        with pytest.raises(ConfigError, match="no permissions"):
            medium.check()
        clock = ManualClock()
        tier = SharedTier(medium, TierContext(clock=clock), name="redis")
        driver = Driver(tier)
        driver.write([key_of(1)])
        assert tier.delete([key_of(1)]) == 1
        assert tier.drain(LONG_S)
        clock.advance(0.7)
        assert driver.present([key_of(1)]) == [False]
        assert driver.read([key_of(1)])[0].results == (ABSENT,)
        with pytest.raises(TierError, match="no permissions"):
            medium.remove([key_of(1)], LONG_S)
        driver.tier.close()


def test_a_user_who_may_not_write(tmp_path: Path) -> None:
    acl = tmp_path / "users.acl"
    acl.write_text("user default on >secret ~* +@all\nuser some on >pw ~* +@all -set\n")
    with running(tmp_path, "--aclfile", str(acl)) as port:
        medium = open_medium(url_of(port, user="some", password="pw"), LONG_S)
        with pytest.raises(ConfigError, match="no permissions"):
            medium.check()
        medium.close()


def test_a_server_that_keeps_silent_is_given_up_in_time(tmp_path: Path) -> None:
    """By the call's time, although the server may keep silent for longer in general."""
    server, port = redis_server(tmp_path)
    with server:
        medium = open_medium(url_of(port), 20.0)
        medium.check()
        server.pause()
        began_s = time.monotonic()
        with pytest.raises(TierError):
            medium.exist([key_of(1)], 0.5)
        assert time.monotonic() - began_s < LONG_S
        server.resume()
        assert medium.exist([key_of(1)], LONG_S) == [False]
        medium.close()


def test_a_cluster_that_is_none(tmp_path: Path) -> None:
    """Its client raises what is no error of Redis."""
    with running(tmp_path) as port:
        cluster = url_of(port, parameters={"cluster": "true"})
        for call in ("check", "stats"):
            with pytest.raises(TierError):
                getattr(open_medium(cluster, 1.0), call)(*([1.0] if call == "stats" else []))
    with pytest.raises(TierError):
        open_medium(cluster, 1.0).check()
    with pytest.raises(TierError):
        open_medium(cluster, 1.0).exist([key_of(1)], 1.0)


def test_more_threads_than_a_pool_has_connections_by_default(port: int) -> None:
    tier = SharedTier(
        open_medium(url_of(port), LONG_S), TierContext(), name="redis", num_threads=160
    )
    driver = Driver(tier)
    chunks = [[Chunk(key_of(f"t{idx}"), buffer_of(4096))] for idx in range(160)]
    with redis.Redis(port=port) as client:
        client.client_pause(200)
    jobs = [driver.submit(Direction.WRITE, each) for each in chunks]
    assert all(driver.wait(job_id).done for job_id in jobs)
    tier.close()


def test_after_its_end_no_connection_is_made(port: int) -> None:
    medium = open_medium(url_of(port), LONG_S)
    medium.check()
    medium.close()
    with pytest.raises(TierError, match="closed"):
        medium.exist([key_of(1)], 1.0)


def test_a_time_that_is_almost_zero_is_no_error(port: int) -> None:
    medium = open_medium(url_of(port), LONG_S)
    record = Record(key_of("soon"), bytes(4096), buffer_of(4096), 0.0001)
    assert medium.write([record], LONG_S) == [DONE]
    assert medium.exist([key_of("soon")], LONG_S) == [False]
    medium.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("cluster", ["false", "true"])
def test_a_server_that_dribbles_from_the_first_byte_on(
    port: int, scheme: str, cluster: str
) -> None:
    """No call of a cluster was ever bounded, nor was the handshake of TLS."""
    proxy = Proxy(port, 1, 0.3)
    parameters = {"cluster": cluster}
    medium = open_medium(MediumUrl(scheme, host="127.0.0.1", port=proxy.port,
                                   parameters=parameters), 60.0)  # fmt: skip
    began_s = time.monotonic()
    with pytest.raises(TierError):
        medium.exist([key_of(1)] * 200, 0.5)
    with pytest.raises(TierError):
        medium.stats(0.5)
    assert time.monotonic() - began_s < 30.0
    medium.close()
    proxy.close()


def test_who_may_not_ask_for_memory_sees_the_rest(tmp_path: Path) -> None:
    """As the error of a refused user says it needs no more than to read and write."""
    with running(tmp_path) as port:
        with redis.Redis(port=port) as client:
            client.acl_setuser("u", enabled=True, passwords=["+p"], keys=["stepwell:*"],
                               categories=["+@read", "+@write"], commands=["+scan"])  # fmt: skip
        medium = open_medium(url_of(port, user="u", password="p"), 5.0)
        medium.check()
        assert medium.stats(5.0) == Stats()
        medium.close()
