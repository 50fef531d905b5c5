"""The storage benchmark on a URL: what it moves, and that it leaves nothing behind."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from media.servers import redis_server

from stepwell import cli
from stepwell.bench import medium
from stepwell.bench.demo import _Demo
from stepwell.bench.medium import run_medium
from stepwell.bench.storage_options import StorageOptions
from stepwell.bench.storage_results import RAW, READ, TIER, WRITE
from stepwell.bench.stores import SharedStore
from stepwell.errors import ConfigError, DataError, TierError
from stepwell.testing import buffer_of, key_of
from stepwell.tiers.media.base import Record
from stepwell.tiers.media.kinds import open_medium
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.redis import RedisMedium
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import DONE

MIB = 1 << 20
SMALL = ("--size", "16MiB", "--chunk", "1MiB", "--jobs", "4", "--rounds", "2")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    server, port = redis_server(tmp_path)
    with server:
        yield port


def options(port: int, **changes: object) -> StorageOptions:
    values = {"chunks": ("1MiB",), "size": "8MiB", "jobs": 2, "rounds": 1}
    return StorageOptions(paths=(f"redis://127.0.0.1:{port}",), **{**values, **changes})  # type: ignore[arg-type]


def left(port: int) -> int:
    with redis.Redis(port=port) as client:
        count = client.dbsize()
        assert isinstance(count, int)
        return count


def test_the_command_as_json(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"redis://127.0.0.1:{port}"
    assert cli.main(["bench", "storage", "--path", url, *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert [row["op"] for row in report["rows"]] == [WRITE, READ]
    for row in report["rows"]:
        assert (row["chunk_bytes"], row["jobs"], row["num_jobs"]) == (MIB, 4, 4)
        assert (row["bytes"], row["rounds"]) == (16 * MIB, 2)
        assert row["ratio"] == row["tier_gbps"] / row["raw_gbps"]
        for name in (TIER, RAW):
            assert row[f"{name}_gbps"] == median(row["gbps_by_round"][name])
            assert len(row["gbps_by_round"][name]) == 2
        assert 0 < row["p50_s"] <= row["p99_s"]
        by_depth = {int(key): value for key, value in row["raw_gbps_by_depth"].items()}
        assert by_depth[row["raw_queue_depth"]] == max(by_depth.values())
    assert report["configuration"]["url"] == url
    assert report["configuration"]["kind"] == "redis"
    assert left(port) == 0


def test_the_command_as_text(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"redis://:secret@127.0.0.1:{port}"
    with redis.Redis(port=port) as client:
        client.config_set("requirepass", "secret")
    assert cli.main(["bench", "storage", "--path", url, *SMALL, "--chunk", "2MiB"]) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    configuration, table, legend, *_ = out.strip().split("\n\n")
    assert f"redis://127.0.0.1:{port} (redis)" in configuration
    assert "chunks of 2.0 MiB: 8 a round, 16.0 MiB, 2 in a job" in configuration
    assert "a round unreported and 2 rounds" in configuration
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["write", "read"] * 2
    assert legend.startswith("tier, raw")
    assert max(map(len, out.splitlines())) < 130


def test_what_is_read_is_compared(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client alone verifies nothing, and must not pass for fast with wrong bytes."""
    real = RedisMedium.read

    def wrong(self: RedisMedium, wanted, within_s):  # type: ignore[no-untyped-def]
        found = real(self, wanted, within_s)
        wanted[-1].payload[-1] ^= 1
        return found

    monkeypatch.setattr(RedisMedium, "read", wrong)
    with pytest.raises(DataError):
        run_medium(options(port))
    assert left(port) == 0


def test_a_server_without_room_is_said_to_be_so(port: int) -> None:
    with redis.Redis(port=port) as client:
        client.config_set("maxmemory", "6mb")
    with pytest.raises(TierError, match="room for twice --size"):
        run_medium(options(port))
    assert left(port) == 0


def test_chunks_of_others_are_left_alone(port: int) -> None:
    with redis.Redis(port=port) as client:
        client.set("stepwell:" + "0" * 64 + ":aa", b"x")
        client.set("else", b"y")
    run_medium(options(port))
    assert left(port) == 2


@pytest.mark.parametrize(
    ("paths", "changes", "words"),
    [
        (("redis://h", "redis://i"), {}, "by itself"),
        (("/tmp", "redis://h"), {}, "by itself"),
        (("rediss2://h",), {}, "nearest"),
        (("redis://h",), {"jobs": 0}, "jobs must be at least 1"),
        (("redis://h",), {"size": "1MiB", "chunks": ("8MiB",)}, "size is at least"),
    ],
)
def test_bad_options(paths: tuple[str, ...], changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_medium(StorageOptions(paths=paths, **changes))  # type: ignore[arg-type]


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium, "_WITHIN_S", 1.0)
    with pytest.raises(TierError, match="redis check failed"):
        run_medium(StorageOptions(paths=("redis://127.0.0.1:1",), size="64MiB", chunks=("1MiB",)))


@pytest.mark.parametrize(
    ("url", "given", "env"),
    [
        ("redis://h", "redis://h", {}),
        ("redis://u:${X}@h", "redis://u:${X}@h", {}),
        ("redis://u:p%40w@h:1/2?prefix=ab", "redis://u:${STEPWELL_DEMO_PASSWORD}@h:1/2?prefix=ab",
         {"STEPWELL_DEMO_PASSWORD": "p@w"}),
        ("rediss://:pw@h", "rediss://:${STEPWELL_DEMO_PASSWORD}@h",
         {"STEPWELL_DEMO_PASSWORD": "pw"}),
    ],
)  # fmt: skip
def test_the_demos_engines_have_no_password_on_their_command_line(
    url: str, given: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("X", "pw")
    store = SharedStore(url)
    assert (store.url, store.env) == (given, env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert MediumUrl.parse(store.url).secret() == MediumUrl.parse(url).secret()


def test_what_the_demo_leaves_is_said(port: int) -> None:
    url = f"redis://127.0.0.1:{port}"
    assert SharedStore(url).erase() == f"Nothing of the demo's was found on {url}."
    assert "are left on redis://127.0.0.1:1:" in SharedStore("redis://127.0.0.1:1").erase()


def test_a_demo_that_fails_says_what_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    """It was known, and lost with the failure."""

    def fail(_: object) -> None:
        raise KeyboardInterrupt

    demo: Any = SimpleNamespace(
        _measure_all=fail, _progress=SimpleNamespace(phase=lambda words: None)
    )
    demo._erase = partial(_Demo._erase, demo)
    with pytest.raises(KeyboardInterrupt):
        _Demo._with_stores(demo, {}, SharedStore("redis://127.0.0.1:1"))
    assert "chunks are left on redis://127.0.0.1:1:" in caplog.text


def test_a_shared_directory_in_use_is_not_emptied(tmp_path: Path) -> None:
    """With a smaller capacity all that others had made way, and with too little room the most."""
    own = open_medium(MediumUrl.parse(f"fs://{tmp_path}/pool?capacity=64MiB&min_free=1MiB"), 10.0)
    own.check()
    record = Record(key_of(1), bytes(4096), buffer_of(4096), 0.0)
    assert own.write([record], 60.0) == [DONE]
    own.close()
    again = open_medium(MediumUrl.parse(f"fs://{tmp_path}/pool?capacity=64MiB&min_free=1MiB"), 10.0)
    again.check()  # which counts what is there
    files = PoolFiles(tmp_path / "pool")
    give_up_s = time.monotonic() + 60.0
    while not (books := files.read_books(files.highest_epoch())) or not books.num_counted:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    again.close()
    for capacity, size, words in (
        ("32MiB", "2MiB", "another capacity.*there=64.0 MiB"),
        ("64MiB", "16MiB", "a directory of its own.*writes="),
    ):
        options = StorageOptions(
            paths=(f"fs://{tmp_path}/pool?capacity={capacity}&min_free=1MiB",),
            chunks=("1MiB",), jobs=2, size=size, rounds=1,
        )  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            run_medium(options)
    assert again.exist([record.key], 10.0) == [True]
