"""Object stores as a medium: the contract against real servers, and what is their own."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import obstore
import pytest

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, root_of
from stepwell.core.record import HEADER_BYTES, Header, payload_checksum
from stepwell.core.types import Chunk, ChunkResult, Direction, Outcome, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.ops.shared import MediumReport, inspect_url
from stepwell.testing import Driver, SharedTierContract, buffer_of, key_of, payload_of
from stepwell.tiers.base import TierContext
from stepwell.tiers.media import objects
from stepwell.tiers.media.base import Record, Wanted
from stepwell.tiers.media.object_stores import open_store, words_of
from stepwell.tiers.media.objects import ObjectMedium, open_medium
from stepwell.tiers.media.records import name_of
from stepwell.tiers.media.roots import describe
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE
from stepwell.tiers.shared import SharedTier

from .between import Answer, Between
from .object_servers import KEY_ID, SECRET, Objects, moto, rclone, weed
from .servers import free_port

ABSENT = ChunkResult(Outcome.MISS, Reason.ABSENT)
TRUNCATED = ChunkResult(Outcome.MISS, Reason.TRUNCATED)
FAILED = ChunkResult(Outcome.FAILED, Reason.IO_ERROR)
SIZE = 4096
LARGE = 20 << 20  # of several parts, the last of them not whole
SMALL_RANGE = 8 << 20
LONG_S = 60.0  # of a busy machine

Instead = Callable[[str, Mapping[str, str]], Answer | None]

SERVERS: dict[str, Callable[[Path], Objects]] = {
    "moto": moto, "rclone": rclone, "weed": weed,
}  # fmt: skip


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the servers here; nobody asks the machine for its own, and all have their time."""
    monkeypatch.setattr(objects, "_CHECK_WITHIN_S", LONG_S)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Objects]]:
    """The servers, each started when it is first asked for."""
    started: dict[str, Objects] = {}

    def start(name: str) -> Objects:
        if name not in started:
            objects = SERVERS[name](tmp_path_factory.mktemp(name))
            started[name] = objects
            objects.server.start()
            objects.make_bucket()
        return started[name]

    try:
        yield start
    finally:
        for objects in started.values():
            objects.server.kill()


class Patient(ObjectMedium):
    """Gives a server that is slow on a busy machine its time, however little a test has left."""

    def exist(self, keys: Any, within_s: float) -> list[bool]:
        return super().exist(keys, max(within_s, 30.0))

    def read(self, wanted: Any, within_s: float) -> Any:
        return super().read(wanted, max(within_s, 30.0))

    def write(self, records: Any, within_s: float) -> Any:
        return super().write(records, max(within_s, 30.0))


class Contract(SharedTierContract):
    """A server for all tests, a prefix for each."""

    server = ""

    @pytest.fixture(autouse=True)
    def _server(self, running: Callable[[str], Objects], credentials: None) -> None:
        self.objects = running(self.server)

    @property
    def url(self) -> MediumUrl:
        return MediumUrl.parse(self.objects.url(str(self.place).replace("/", "-")))

    def make_medium(self) -> ObjectMedium:
        return Patient(open_store(self.url, 30.0), self.url.shown, self.url.scheme)

    def damage(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        store, name = open_store(self.url, 30.0), "/".join(name_of(key))
        stored = bytes(obstore.get(store, name).bytes())
        obstore.put(store, name, change(stored))

    def count(self) -> int:
        return sum(map(len, obstore.list(open_store(self.url, 30.0), chunk_size=1000)))


class TestMoto(Contract):
    """S3 as moto plays it."""

    server = "moto"


class TestRclone(Contract):
    """S3 as rclone serves a directory."""

    server = "rclone"


class TestWeed(Contract):
    """S3 on SeaweedFS."""

    server = "weed"


# What is their own. The server is moto, except where it must check what moto does not.


@pytest.fixture
def s3(running: Callable[[str], Objects]) -> Objects:
    return running("moto")


@pytest.fixture
def between(s3: Objects) -> Iterator[Between]:
    with Between(s3.port) as between:
        yield between


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path).replace("/", "-")


def medium_at(
    port: int, prefix: str, timeout_s: float = 20.0, bucket: str = "pool"
) -> ObjectMedium:
    url = f"s3://{bucket}/{prefix}?endpoint=http://127.0.0.1:{port}"
    return open_medium(MediumUrl.parse(url), timeout_s)


def store_at(port: int, prefix: str) -> Any:
    return open_store(MediumUrl.parse(f"s3://pool/{prefix}?endpoint=http://127.0.0.1:{port}"), 20.0)


def record_of(key: Key, size: int = SIZE, fill: int | None = None) -> Record:
    payload = payload_of(key, size) if fill is None else bytes([fill]) * size
    header = Header(key, size, payload_checksum(payload), 1)
    return Record(key, header.pack(), buffer_of(size, payload), 0.0)


def object_name(key: Key) -> str:
    return "/".join(name_of(key))


def read_one(medium: ObjectMedium, key: Key, size: int = SIZE) -> tuple[Any, bytes]:
    buffer = buffer_of(size)
    (found,) = medium.read([Wanted(key, buffer)], 30.0)
    return found, bytes(buffer)


def test_a_large_chunk_is_read_in_parts(between: Between, prefix: str) -> None:
    medium = medium_at(between.port, prefix)
    key = key_of("large")
    medium.check()
    between.seen.clear()
    assert medium.write([record_of(key, LARGE)], 30.0) == [DONE]
    assert [method for method, _ in between.seen] == ["PUT"], "once, and on one condition"
    between.seen.clear()
    found, content = read_one(medium, key, LARGE)
    assert bytes(found) == record_of(key, LARGE).header
    assert content == payload_of(key, LARGE)
    assert [method for method, _ in between.seen] == ["GET"] * 3
    assert medium.write([record_of(key, LARGE, fill=1)], 30.0) == [ALREADY_THERE]
    assert read_one(medium, key, LARGE)[1] == payload_of(key, LARGE)
    medium.close()


def test_a_very_large_chunk_is_written_in_parts(between: Between, prefix: str) -> None:
    medium = medium_at(between.port, prefix)
    key, size = key_of("very large"), 40 << 20
    medium.check()
    between.seen.clear()
    assert medium.write([record_of(key, size)], 60.0) == [DONE]
    methods = [method for method, _ in between.seen]
    assert (methods[0], methods.count("PUT"), methods.count("POST")) == ("HEAD", 3, 2)
    assert read_one(medium, key, size)[1] == payload_of(key, size)
    assert medium.write([record_of(key, size, fill=1)], 60.0) == [ALREADY_THERE]
    assert read_one(medium, key, size)[1] == payload_of(key, size)
    medium.close()


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("size", [LARGE, 40 << 20])
def test_large_chunks_on_every_server(
    running: Callable[[str], Objects], prefix: str, name: str, size: int
) -> None:
    """Also on one that gives no parts of an object, or writes over what is there."""
    medium = open_medium(MediumUrl.parse(running(name).url(prefix)), 60.0)
    key = key_of("large")
    assert medium.write([record_of(key, size)], 60.0) == [DONE]
    assert medium.write([record_of(key, size, fill=1)], 60.0) == [ALREADY_THERE]
    found, content = read_one(medium, key, size)
    assert found == record_of(key, size).header
    assert content == payload_of(key, size)
    medium.close()


def test_a_part_that_fails_leaves_no_record(between: Between, prefix: str) -> None:
    medium = medium_at(between.port, prefix)
    key, size = key_of("in part"), 40 << 20
    medium.check()
    left = [1]

    def once(method: str, headers: Mapping[str, str]) -> Answer | None:
        if method != "PUT" or not left[0]:
            return None
        left[0] -= 1
        return Answer(400)

    between.instead = once
    assert medium.write([record_of(key, size)], 60.0) == [FAILED]
    assert medium.exist([key], 30.0) == [False]
    assert medium.write([record_of(key, size)], 60.0) == [DONE]
    assert read_one(medium, key, size)[1] == payload_of(key, size)
    medium.close()


@pytest.mark.parametrize("size", [SIZE, LARGE])
@pytest.mark.parametrize("left", [0, 100, HEADER_BYTES, HEADER_BYTES + 100, SMALL_RANGE + 7])
def test_a_cut_object_is_truncated(s3: Objects, prefix: str, size: int, left: int) -> None:
    medium, store = medium_at(s3.port, prefix), store_at(s3.port, prefix)
    key = key_of("cut")
    if left >= HEADER_BYTES + size:
        return
    medium.write([record_of(key, size)], 30.0)
    whole = bytes(obstore.get(store, object_name(key)).bytes())
    obstore.put(store, object_name(key), whole[:left])
    assert read_one(medium, key, size)[0] == TRUNCATED
    medium.close()


@pytest.mark.parametrize("size", [SIZE, LARGE])
def test_a_longer_object_is_wrong_and_not_taken_in(
    between: Between, prefix: str, size: int
) -> None:
    medium, store = medium_at(between.port, prefix), store_at(between.port, prefix)
    key = key_of("long")
    medium.write([record_of(key, size)], 30.0)
    whole = bytes(obstore.get(store, object_name(key)).bytes())
    obstore.put(store, object_name(key), whole + bytes(100))
    found, _ = read_one(medium, key, size)
    assert found == ChunkResult(Outcome.MISS, Reason.LAYOUT)
    medium.close()


@pytest.mark.parametrize("size", [SIZE, LARGE])
@pytest.mark.parametrize("claims_all", [True, False])
def test_an_answer_that_is_cut_on_its_way(
    between: Between, prefix: str, size: int, claims_all: bool
) -> None:
    """Whatever length it claims to have: no byte of it is used."""
    medium = medium_at(between.port, prefix)
    key = key_of("short")
    medium.write([record_of(key, size)], 30.0)

    def cut(method: str, answer: Answer) -> Answer:
        if method != "GET":
            return answer
        length = len(answer.body) if claims_all else None
        return answer.with_body(answer.body[:-100], length)

    between.change = cut
    found, _ = read_one(medium, key, size)
    assert found in (FAILED, TRUNCATED)
    between.change = lambda method, answer: answer
    assert read_one(medium, key, size)[1] == payload_of(key, size)
    medium.close()


def test_a_store_that_ignores_ranges(between: Between, prefix: str) -> None:
    """The first part of the object for each of the parts would be wrong bytes."""
    medium = medium_at(between.port, prefix)
    key = key_of("whole")
    medium.write([record_of(key, LARGE)], 30.0)  # it gave ranges until now
    store = store_at(between.port, prefix)
    whole = bytes(obstore.get(store, object_name(key)).bytes())

    def all_of_it(method: str, answer: Answer) -> Answer:
        if method != "GET":
            return answer
        headers = {name: value for name, value in answer.headers.items()
                   if name.lower() != "content-range"}  # fmt: skip
        return Answer(200, headers, whole)

    between.change = all_of_it
    assert read_one(medium, key, LARGE)[0] == FAILED
    medium.close()


def slow_down(times: int, methods: tuple[str, ...]) -> Instead:
    """503 for the first so many requests."""
    left = [times]
    lock = threading.Lock()

    def instead(method: str, headers: Mapping[str, str]) -> Answer | None:
        with lock:
            if method not in methods or not left[0]:
                return None
            left[0] -= 1
        body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
        return Answer(503, {"Content-Type": "application/xml"}, body)

    return instead


def test_a_throttled_request_is_tried_again(between: Between, prefix: str) -> None:
    medium = medium_at(between.port, prefix)
    key = key_of("throttled")
    medium.check()
    between.instead = slow_down(2, ("PUT",))
    assert medium.write([record_of(key)], 30.0) == [DONE]
    between.instead = slow_down(2, ("GET",))
    assert read_one(medium, key)[1] == payload_of(key, SIZE)
    between.instead = slow_down(2, ("HEAD",))
    assert medium.exist([key], 30.0) == [True]
    between.instead = slow_down(2, ("DELETE", "POST"))
    medium.remove([key], 30.0)
    assert medium.exist([key], 30.0) == [False]
    medium.close()


def test_throttling_that_does_not_end_fails_in_time(
    between: Between, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    medium = medium_at(between.port, prefix)
    key = key_of("throttled")
    medium.write([record_of(key)], 30.0)
    between.instead = slow_down(10**6, ("PUT", "GET", "HEAD", "DELETE", "POST"))
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert read_one(medium, key)[0] == FAILED
        assert medium.write([record_of(key)], 30.0) == [FAILED]
    assert caplog.text.count("SlowDown: Reduce your request rate.") == 2
    with pytest.raises(TierError, match="503"):  # an answer to HEAD has no words
        medium.exist([key], 30.0)
    with pytest.raises(TierError, match="SlowDown"):
        medium.remove([key], 30.0)
    assert len(between.seen) < 40, "no storm of requests"
    assert time.monotonic() - began_s < LONG_S
    with pytest.raises(TierError, match="does not answer"):
        medium.check()
    medium.close()


@pytest.mark.parametrize("call", ["exist", "read", "write", "remove"])
def test_a_server_that_keeps_silent_is_given_up_in_time(
    between: Between, prefix: str, call: str
) -> None:
    """By the call's time, although a request may take longer; and the next call is served."""
    medium = medium_at(between.port, prefix)
    keys = [key_of(idx) for idx in range(64)]
    medium.write([record_of(key) for key in keys], 30.0)
    arguments: dict[str, list[Any]] = {
        "read": [Wanted(key, buffer_of(SIZE)) for key in keys],
        "write": [record_of(key) for key in keys],
    }
    between.gate.clear()
    before = len(between.seen)
    began_s = time.monotonic()
    with pytest.raises(TierError, match="in time"):
        getattr(medium, call)(arguments.get(call, keys), 0.3)
    assert time.monotonic() - began_s < LONG_S
    between.gate.set()
    assert medium.exist(keys[:1], 30.0) in ([True], [False])
    assert len(between.seen) - before <= 32 + 4, "what had not begun was given up"
    medium.close()


def test_a_server_that_keeps_silent_holds_no_thread_for_ever(between: Between, prefix: str) -> None:
    """Each request ends by itself, so that a server that is back is used again."""
    before = threading.enumerate()
    medium = medium_at(between.port, prefix, timeout_s=1.0)
    keys = [key_of(idx) for idx in range(100)]
    shut = between.gate
    shut.clear()
    for _ in range(3):
        with pytest.raises(TierError):
            medium.exist(keys, 0.2)
    begun = set(threading.enumerate()) - set(before)
    assert sum("stepwell-s3" in thread.name for thread in begun) <= 32
    between.gate = threading.Event()  # the other stays shut for what asked until now
    between.gate.set()
    give_up_s = time.monotonic() + LONG_S
    while True:
        try:
            assert medium.exist(keys[:1], LONG_S) == [False]
            break
        except TierError:
            assert time.monotonic() < give_up_s
    shut.set()
    medium.close()


@pytest.mark.parametrize("size", [SIZE, LARGE])
def test_what_comes_too_late_is_written_nowhere(between: Between, prefix: str, size: int) -> None:
    """The buffer is the caller's again, who has something else in it by then."""
    medium = medium_at(between.port, prefix)
    key = key_of("late")
    medium.write([record_of(key, size)], 30.0)
    between.gate.clear()
    buffer = buffer_of(size, bytes(size))
    with pytest.raises(TierError):
        medium.read([Wanted(key, buffer)], 0.3)
    between.gate.set()
    assert read_one(medium, key, size)[1] == payload_of(key, size)
    medium.close()  # nothing of the medium's runs any more
    for thread in threading.enumerate():
        if "stepwell-s3" in thread.name:
            thread.join(30.0)
    assert bytes(buffer) == bytes(size)


def test_what_is_written_is_a_copy(between: Between, prefix: str) -> None:
    """A request that was given up still sends; the buffer has something else in it by then."""
    medium = medium_at(between.port, prefix)
    medium.check()
    key = key_of("copied")
    record = record_of(key, LARGE)
    buffer: Any = record.payload
    between.listens.clear()
    between.num_begun, within_s = 0, 0.5
    while not between.num_begun:
        with pytest.raises(TierError):
            medium.write([record], within_s)
        within_s *= 2
    buffer[:] = bytes(LARGE)
    between.listens.set()
    give_up_s = time.monotonic() + 30.0
    while medium.exist([key], 30.0) == [False]:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    assert read_one(medium, key, LARGE)[1] == payload_of(key, LARGE)
    medium.close()


def test_a_server_that_dribbles_is_given_up_in_time(between: Between, prefix: str) -> None:
    medium = medium_at(between.port, prefix)
    key = key_of("slowly")
    assert medium.write([record_of(key)], 30.0) == [DONE]
    between.change = lambda method, answer: Answer(
        answer.status, answer.headers, answer.body, None, 1, 0.05
    )
    began_s = time.monotonic()
    with pytest.raises(TierError):
        medium.read([Wanted(key, buffer_of(SIZE))], 0.5)
    assert time.monotonic() - began_s < LONG_S
    medium.close()


def test_of_many_that_write_at_once_one_does(s3: Objects, prefix: str) -> None:
    media = [medium_at(s3.port, prefix) for _ in range(4)]
    key = key_of("raced")
    results: list[ChunkResult] = []
    start = threading.Barrier(4)

    def write(medium: ObjectMedium, fill: int) -> None:
        medium.check()
        start.wait(30)
        results.extend(medium.write([record_of(key, 1 << 20, fill)], 30.0))

    threads = [threading.Thread(target=write, args=(m, i)) for i, m in enumerate(media)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results, key=lambda each: each.reason) == [DONE] + [ALREADY_THERE] * 3
    content = read_one(media[0], key, 1 << 20)[1]
    assert len(set(content)) == 1
    for medium in media:
        medium.close()


def unconditional(method: str, headers: Mapping[str, str]) -> Answer | None:
    """What a store says that knows no conditions."""
    if any(name.lower() == "if-none-match" for name in headers):
        body = b"<Error><Code>NotImplemented</Code><Message>If-None-Match</Message></Error>"
        return Answer(501, {"Content-Type": "application/xml"}, body)
    return None


@pytest.mark.parametrize("checked", [True, False])
def test_a_store_that_knows_no_conditions(between: Between, prefix: str, checked: bool) -> None:
    """It says so once, and is asked what is there before anything is written."""
    medium = medium_at(between.port, prefix)
    between.instead = unconditional
    if checked:
        medium.check()
    key = key_of("plain")
    assert medium.write([record_of(key)], 30.0) == [DONE]
    asked = len(between.seen)
    assert medium.write([record_of(key, fill=1)], 30.0) == [ALREADY_THERE]
    assert read_one(medium, key)[1] == payload_of(key, SIZE)
    assert [method for method, _ in between.seen[asked:]] == ["HEAD", "GET"]
    medium.close()


def test_erase_takes_more_than_a_page(running: Callable[[str], Objects], prefix: str) -> None:
    """A list has a thousand names at most; another root, and another prefix, stay."""
    s3 = running("weed")
    medium, other = medium_at(s3.port, prefix), medium_at(s3.port, f"{prefix}-longer")
    store = store_at(s3.port, prefix)
    one, two = key_of(0, "one"), key_of(0, "two")
    for idx in range(1203):
        obstore.put(store, f"{name_of(one)[0]}/{idx:064x}", b"x")
    for medium_there in (medium, other):
        medium_there.write([record_of(one), record_of(two)], 30.0)
    assert medium.erase(root_of(one)) == 1204
    assert medium.exist([one, two], 30.0) == [False, True]
    assert other.exist([one, two], 30.0) == [True, True]
    assert medium.erase(root_of(one)) == 0
    medium.close()
    other.close()


def test_what_is_not_there_is_removed_without_an_error(between: Between, prefix: str) -> None:
    """S3 says nothing of it; Google and Azure say 404, and the others are still to be removed."""
    medium = medium_at(between.port, prefix)
    keys = [key_of(idx) for idx in range(5)]
    medium.write([record_of(key) for key in keys[1:]], 30.0)
    between.change = lambda method, answer: Answer(404) if method == "DELETE" else answer
    medium.remove(keys, 30.0)
    assert medium.exist(keys, 30.0) == [False] * 5
    medium.close()


def test_erase_where_several_are_not_removed_at_once(between: Between, prefix: str) -> None:
    medium = medium_at(between.port, prefix)
    keys = [key_of(idx, "one") for idx in range(40)]
    medium.write([record_of(key) for key in keys], 30.0)
    between.instead = lambda method, headers: Answer(501) if method == "POST" else None
    medium.remove(keys[:1], 30.0)
    medium.write([record_of(keys[0])], 30.0)
    assert medium.erase(root_of(keys[0])) == 40
    assert medium.exist(keys, 30.0) == [False] * 40
    medium.close()


# Those that refuse us: one line that says what to do.


def refusal(url: str) -> str:
    medium = open_medium(MediumUrl.parse(url), 20.0)
    with pytest.raises(ConfigError) as refused:
        medium.check()
    medium.close()
    message = str(refused.value)
    assert "\n" not in message
    assert SECRET not in message
    assert len(message) < 700
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3:///prefix", "there is no bucket; write s3://bucket"),
        ("gs://", "there is no bucket; write gs://bucket"),
        ("az:///x", "there is no container; write az://container"),
        ("s3://key:secret@bucket", "credentials are not given in the url"),
        ("s3://bucket:9000/x", "?endpoint=http://host:9000"),
        ("s3://bucket?endpoint=minio:9000", "such as https://minio:9000"),
        ("s3://bucket?endpoint=http://me:pw%40minio:9000", "without user or password"),
        ("s3://bucket?endpont=x", 'the nearest is "endpoint"'),
        ("s3://bucket?virtual_hosted=1", '"true" or "false"'),
        ("gs://bucket?region=x", "no parameter"),
        ("az://container?region=x", "no parameter"),
    ],
)
def test_a_wrong_url_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_medium(MediumUrl.parse(text), 1.0)
    assert words in str(refused.value)
    assert "pw" not in str(refused.value)
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize("name", SERVERS)
def test_a_bucket_that_does_not_exist(running: Callable[[str], Objects], name: str) -> None:
    url = running(name).url("x").replace("//pool/", "//no-such-pool/")
    assert "make it first" in refusal(url)


@pytest.mark.parametrize("name", ["rclone", "weed"])
def test_a_wrong_secret(
    running: Callable[[str], Objects], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = running(name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng-one")
    message = refusal(objects.url("x"))
    assert "the store refuses us" in message
    assert "wr0ng-one" not in message
    assert "AWS_SECRET_ACCESS_KEY" in message


def test_an_unknown_user(
    running: Callable[[str], Objects], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "the store refuses us" in refusal(running("weed").url("x"))


def test_a_user_who_may_not_write(
    running: Callable[[str], Objects], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    message = refusal(running("weed").url("x"))
    assert "AccessDenied" in message
    assert "may get, put, delete and list" in message


def test_looking_at_a_bucket_writes_nothing(
    running: Callable[[str], Objects], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bucket holds can be looked at by a user who may only read."""
    url = MediumUrl.parse(running("weed").url("looked-at"))
    identity = Identity({"model": "some"})
    writer = open_medium(url, 30.0)
    assert describe(writer, identity, 1.0, 30.0)
    writer.close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    report = inspect_url(url)
    assert isinstance(report, MediumReport)
    assert report.roots == {identity.root: identity}


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken"])
def test_credentials_that_have_expired(between: Between, prefix: str, code: str) -> None:
    """S3 says so with a status that is said of much else."""
    body = f"<Error><Code>{code}</Code><Message>The provided token has expired.</Message></Error>"
    between.instead = lambda method, headers: Answer(400, {}, body.encode())
    message = refusal(f"s3://pool/{prefix}?endpoint=http://127.0.0.1:{between.port}")
    assert f"{code}: The provided token has expired." in message
    assert "AWS_SESSION_TOKEN" in message


def test_a_bucket_of_another_region(between: Between, prefix: str) -> None:
    between.instead = lambda method, headers: Answer(301)
    message = refusal(f"s3://pool/{prefix}?endpoint=http://127.0.0.1:{between.port}")
    assert "?region=" in message


def test_a_user_who_may_not_list(between: Between, prefix: str) -> None:
    """S3 says 403 of what is not there, which would be a failure of every lookup."""
    between.change = lambda method, answer: (
        Answer(403) if method == "HEAD" and answer.status == 404 else answer
    )
    message = refusal(f"s3://pool/{prefix}?endpoint=http://127.0.0.1:{between.port}")
    assert "list there" in message


def test_no_credentials_at_all(s3: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a machine that has none to give."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    began_s = time.monotonic()
    message = refusal(s3.url("x"))
    assert "there are no credentials" in message
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in message
    assert time.monotonic() - began_s < LONG_S / 2


def test_half_of_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_medium(MediumUrl.parse("s3://bucket"), 1.0)


def test_nobody_answers() -> None:
    began_s = time.monotonic()
    medium = medium_at(free_port(), "x", timeout_s=2.0)
    with pytest.raises(TierError, match="does not answer"):
        medium.check()
    with pytest.raises(TierError):
        medium.exist([key_of(1)], 5.0)
    medium.close()
    assert time.monotonic() - began_s < LONG_S


def test_a_server_that_hangs_when_an_engine_starts(
    between: Between, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the time of a request, and not of the removal that follows: it is not waited for."""
    medium = medium_at(between.port, prefix, timeout_s=1.0)
    over = threading.Event()
    monkeypatch.setattr(medium, "_delete", lambda name: over.wait(2 * LONG_S))
    between.gate.clear()
    with pytest.raises(TierError, match="does not answer"):  # and not: did not, in time
        medium.check()
    over.set()
    medium.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Error performing GET http://h/x in 1ms - Server said: 503 Slow\n\nDebug source: x",
         "Server said: 503 Slow"),
        ("cannot reach https://h/x?sig=s3cret&a=b now", "cannot reach https://h/x now"),
        ("- <Error>\n<Code>A</Code><StringToSign>s3cret</StringToSign></Error>", "A"),
        ("", "OSError"),
    ],
)  # fmt: skip
def test_errors_are_short_and_tell_no_secret(text: str, words: str) -> None:
    assert words_of(OSError(text)) == words


def test_after_its_end_nothing_is_asked(s3: Objects, prefix: str) -> None:
    medium = medium_at(s3.port, prefix)
    medium.check()
    medium.close()
    with pytest.raises(TierError, match="closed"):
        medium.exist([key_of(1)], 1.0)


def test_a_time_to_live_is_in_the_record(s3: Objects, prefix: str) -> None:
    """The store removes nothing by itself; what has expired is a miss all the same."""
    context = TierContext()
    tier = SharedTier(medium_at(s3.port, prefix), context, name="s3", ttl_s=100.0)
    driver = Driver(tier)
    driver.write([key_of("mortal")])
    chunk = Chunk(key_of("mortal"), buffer_of(SIZE))
    (result,) = driver.wait(driver.submit(Direction.READ, [chunk])).results
    assert 90 < result.expires_at_s - time.time() <= 100
    tier.close()


def test_what_was_given_up_is_erased_as_well(between: Between, prefix: str) -> None:
    """An interrupted benchmark left the objects whose writes nobody waited for any more."""
    medium = medium_at(between.port, prefix)
    medium.check()
    keys = [key_of(idx) for idx in range(8)]
    between.listens.clear()
    with pytest.raises(TierError):
        medium.write([record_of(key) for key in keys], 0.5)
    opener = threading.Timer(1.0, between.listens.set)
    opener.start()
    medium.erase(root_of(keys[0]))
    opener.join()
    assert medium.exist(keys, 30.0) == [False] * 8
    medium.close()
