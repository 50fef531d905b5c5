"""NIXL as a medium, on objects: the contract on real servers, and what NIXL does not tell."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult, Reason
from stepwell.errors import ConfigError, TierError
from stepwell.testing import SharedTierContract, buffer_of, key_of, payload_of
from stepwell.tiers.media import nixl_objects, objects
from stepwell.tiers.media.base import Medium, Record, Wanted
from stepwell.tiers.media.kinds import open_medium
from stepwell.tiers.media.object_stores import open_store
from stepwell.tiers.media.records import ABSENT, TRUNCATED, name_of
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE

from .object_servers import KEY_ID, SECRET, Objects, moto, weed
from .servers import free_port
from .sites import NO_NIXL

if importlib.util.find_spec("nixl_cu12") is None:
    pytest.skip(NO_NIXL, allow_module_level=True)

SIZE = 8192
LONG_S = 60.0
KEYS = [key_of(idx) for idx in range(6)]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for module in (nixl_objects, objects):
        monkeypatch.setattr(module, "_CHECK_WITHIN_S", LONG_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Objects]]:
    """The servers, each started when it is first asked for."""
    started: dict[str, Objects] = {}

    def start(name: str) -> Objects:
        if name not in started:
            objects = {"moto": moto, "weed": weed}[name](tmp_path_factory.mktemp(name))
            started[name] = objects
            objects.server.start()
            objects.make_bucket()
        return started[name]

    try:
        yield start
    finally:
        for objects in started.values():
            objects.server.kill()


def nixl_url(objects: Objects, prefix: str) -> str:
    return "nixl+obj" + objects.url(prefix).removeprefix("s3")


class Patient:
    """Gives a server that is slow on a busy machine its time, however little a test has left."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._medium, name)
        if name not in ("exist", "read", "write"):
            return found
        return lambda each, within_s: found(each, max(within_s, 30.0))


class ObjectContract(SharedTierContract):
    """A server for all tests, a prefix for each."""

    __test__ = False
    server = ""

    @pytest.fixture(autouse=True)
    def _server(self, running: Callable[[str], Objects], credentials: None) -> None:
        self.objects = running(self.server)

    @property
    def prefix(self) -> str:
        return str(self.place).replace("/", "-")

    @property
    def store(self) -> Any:
        return open_store(MediumUrl.parse(self.objects.url(self.prefix)), 30.0)

    def make_medium(self) -> Medium:
        url = MediumUrl.parse(nixl_url(self.objects, self.prefix))
        medium: Any = Patient(open_medium(url, 30.0))
        return medium  # type: ignore[no-any-return]

    def damage(self, key: Key, change: Callable[[bytes], bytes]) -> None:
        name = "/".join(name_of(key))
        obstore.put(self.store, name, change(bytes(obstore.get(self.store, name).bytes())))

    def count(self) -> int:
        return sum(map(len, obstore.list(self.store, chunk_size=1000)))


class TestMoto(ObjectContract):
    __test__ = True
    server = "moto"


class TestWeed(ObjectContract):
    """It checks signatures."""

    __test__ = True
    server = "weed"


# What is NIXL's own.


def records_of(keys: list[Key], size: int = SIZE) -> list[Record]:
    return [
        Record(key, bytes([idx + 1]) * HEADER_BYTES, memoryview(payload_of(key, size)), 0.0)
        for idx, key in enumerate(keys)
    ]


def wanted_of(keys: list[Key], size: int = SIZE) -> list[Wanted]:
    return [Wanted(key, buffer_of(size)) for key in keys]


def check_read(found: list[Any], wanted: list[Wanted], idxs: list[int]) -> None:
    """Those and no others were served, each with its own bytes."""
    for idx, (page, each) in enumerate(zip(found, wanted, strict=True)):
        if idx in idxs:
            assert page == bytes([idx + 1]) * HEADER_BYTES
            assert bytes(each.payload) == payload_of(each.key, len(each.payload))
        else:
            assert isinstance(page, ChunkResult)


@pytest.fixture
def server(running: Callable[[str], Objects]) -> Objects:
    return running("moto")


@pytest.fixture
def medium(server: Objects, tmp_path: Path) -> Iterator[Medium]:
    medium = open_medium(MediumUrl.parse(nixl_url(server, tmp_path.name)), 30.0)
    medium.check()
    yield medium
    medium.close()


@pytest.fixture
def direct(server: Objects, tmp_path: Path) -> Iterator[Medium]:
    medium = open_medium(MediumUrl.parse(server.url(tmp_path.name)), 30.0)
    yield medium
    medium.close()


def name(key: Key) -> str:
    return "/".join(name_of(key))


@pytest.mark.parametrize("size", [64, 8192, 12288 + 5, 9 << 20])
def test_what_one_wrote_the_other_reads(medium: Medium, direct: Medium, size: int) -> None:
    """A bucket is the same, whichever way its bytes take."""
    for writer, reader, keys in ((medium, direct, KEYS[:2]), (direct, medium, KEYS[2:4])):
        assert writer.write(records_of(keys, size), LONG_S) == [DONE] * 2
        assert reader.write(records_of(keys, size), LONG_S) == [ALREADY_THERE] * 2
        wanted = wanted_of(keys, size)
        check_read(reader.read(wanted, LONG_S), wanted, [0, 1])


def test_bytes_do_move_through_nixl(
    medium: Medium, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asking the store directly is for what NIXL does not do, and else would hide that it fails."""
    direct: Any = medium._direct  # type: ignore[attr-defined]
    monkeypatch.setattr(direct, "write", None)
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    asked: list[Key] = []
    read = direct.read

    def note(wanted: list[Wanted], within_s: float) -> Any:
        asked.extend(each.key for each in wanted)
        return read(wanted, within_s)

    monkeypatch.setattr(direct, "read", note)
    for _ in range(20):
        wanted = wanted_of(KEYS)
        check_read(medium.read(wanted, LONG_S), wanted, [0, 1, 2, 3, 4, 5])
    assert len(asked) < 12, "one in 256 is expected"
    assert caplog.text == ""


def test_a_check_whose_record_is_not_sure(medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """One start in 256 failed: the record ended as what is put there to be written over."""
    counts: list[int] = []

    def token(count: int) -> bytes:
        counts.append(count)
        return b"\7" * count if counts.count(1) < 3 else b"\0" * count

    monkeypatch.setattr(nixl_objects.secrets, "token_bytes", token)
    medium.check()
    assert counts.count(1) == 3


def test_holes_and_short_objects_in_a_batch(
    medium: Medium, server: Objects, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NIXL reads what is too short without a word, and the rest of the memory is what was there."""
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    wanted = wanted_of(KEYS)
    check_read(medium.read(wanted, LONG_S), wanted, [0, 1, 2, 3, 4, 5])
    store = open_store(MediumUrl.parse(server.url(tmp_path.name)), 30.0)
    obstore.delete(store, name(KEYS[1]))
    for key, left in ((KEYS[0], 1), (KEYS[3], SIZE - 1), (KEYS[4], HEADER_BYTES + SIZE)):
        content = bytes(obstore.get(store, name(key)).bytes())
        obstore.put(store, name(key), content[: HEADER_BYTES + SIZE - left])
    for _ in range(5):
        wanted = wanted_of(KEYS)
        found = medium.read(wanted, LONG_S)
        check_read(found, wanted, [2, 5])
        assert found[1] == ABSENT
        assert found[4] == TRUNCATED
        assert {found[0].reason, found[3].reason} <= {Reason.TRUNCATED, Reason.HEADER}  # type: ignore[union-attr]
        assert [bytes(wanted[idx].payload) for idx in (0, 1, 3, 4)] == [bytes(SIZE)] * 4
    assert "asking the store" in caplog.text


def test_a_longer_object(medium: Medium, server: Objects, tmp_path: Path) -> None:
    """No more is read than was asked for; the header says what it is."""
    store = open_store(MediumUrl.parse(server.url(tmp_path.name)), 30.0)
    obstore.put(store, name(KEYS[0]), b"\1" * (HEADER_BYTES + 3 * SIZE))
    wanted = wanted_of(KEYS[:1])
    (page,) = medium.read(wanted, LONG_S)
    assert page == b"\1" * HEADER_BYTES or isinstance(page, ChunkResult)


def test_a_record_that_is_there_is_not_written_over(medium: Medium, direct: Medium) -> None:
    """The plugin itself would."""
    assert direct.write(records_of(KEYS[:1]), LONG_S) == [DONE]
    again = [Record(key, b"\7" * HEADER_BYTES, buffer_of(SIZE), 0.0) for key in KEYS[:3]]
    assert medium.write(again, LONG_S) == [ALREADY_THERE, DONE, DONE]
    wanted = wanted_of(KEYS[:1])
    check_read(direct.read(wanted, LONG_S), wanted, [0])


def test_no_records_at_all(medium: Medium) -> None:
    assert medium.read([], LONG_S) == []
    assert medium.write([], LONG_S) == []


# Servers that fail.


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Objects]:
    objects = moto(tmp_path)
    with objects.server:
        objects.make_bucket()
        yield objects


def test_a_server_that_hangs_is_left_alone(own: Objects) -> None:
    """NIXL goes on for a minute; its memory is nobody else's until then."""
    medium = open_medium(MediumUrl.parse(nixl_url(own, "hang")), LONG_S)
    medium.check()
    assert medium.write(records_of(KEYS), LONG_S) == [DONE] * 6
    own.server.pause()
    late = wanted_of(KEYS)
    began_s = time.monotonic()
    with pytest.raises(TierError, match="in time"):
        medium.read(late, 0.5)
    with pytest.raises(TierError):
        medium.write(records_of([key_of("new")]), 0.5)
    assert time.monotonic() - began_s < LONG_S
    own.server.resume()
    wanted = wanted_of(KEYS)
    check_read(medium.read(wanted, LONG_S), wanted, [0, 1, 2, 3, 4, 5])
    assert [bytes(each.payload) for each in late] == [bytes(SIZE)] * 6
    medium.close()


def test_a_server_that_is_gone(own: Objects) -> None:
    medium = open_medium(MediumUrl.parse(nixl_url(own, "gone")), 10.0)
    medium.check()
    assert medium.write(records_of(KEYS[:2]), LONG_S) == [DONE] * 2
    own.server.kill()
    with pytest.raises(TierError):
        medium.read(wanted_of(KEYS[:2]), 1.0)
    with pytest.raises(TierError):
        medium.write(records_of([key_of("new")]), 5.0)
    with pytest.raises(TierError):
        medium.check()
    medium.close()


# What is refused.


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nixl+obj:///pool", "no bucket"),
        ("nixl+obj://pool?capacity=1GiB", 'no parameter "capacity"'),
        ("nixl+azure-blob://pool", "OBJ is used so far"),
        ("nixl+obj://pool?endpoint=nowhere", "endpoint is such as"),
    ],
)
def test_a_wrong_url(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_medium(MediumUrl.parse(url), 1.0)


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "obstore" else find(name)
    )
    with pytest.raises(ConfigError, match=r"stepwell\[s3\]"):
        open_medium(MediumUrl.parse("nixl+obj://pool"), 1.0)


def test_a_bucket_that_there_is_not(server: Objects) -> None:
    url = f"nixl+obj://no-such-bucket?endpoint=http://127.0.0.1:{server.port}"
    medium = open_medium(MediumUrl.parse(url), LONG_S)
    with pytest.raises(ConfigError, match="bucket"):
        medium.check()
    medium.close()


def test_a_server_that_is_not_there() -> None:
    url = f"nixl+obj://pool?endpoint=http://127.0.0.1:{free_port()}"
    medium = open_medium(MediumUrl.parse(url), 1.0)
    with pytest.raises(TierError):
        medium.check()
    medium.close()
