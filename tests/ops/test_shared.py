"""What storage that engines share holds, said without using it."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ops.stores import snapshot
from stepwell import cli
from stepwell.cli import main
from stepwell.core.identity import Identity
from stepwell.core.keys import Root, make_key, root_of
from stepwell.errors import ConfigError
from stepwell.ops import words
from stepwell.ops.shared import (
    MediumReport,
    PoolReport,
    inspect_pool,
    inspect_url,
)
from stepwell.ops.shared_report import shared_json, shared_text
from stepwell.testing import buffer_of, key_of
from stepwell.tiers.media import pool
from stepwell.tiers.media.base import Record, Stats
from stepwell.tiers.media.fs import FsMedium, open_medium
from stepwell.tiers.media.kinds import KINDS
from stepwell.tiers.media.roots import DESCRIPTION_BYTES, describe, description_key
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import DONE

LONG_S = 60.0  # of a busy machine
WRITTEN_BYTES = 5 * 12288 + DESCRIPTION_BYTES
IDENTITY = Identity({"dtype": "float32"}, {"model": "some-model"})


@pytest.fixture
def medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FsMedium]:
    monkeypatch.setattr(pool, "_WAIT_FOR_GRANT_S", LONG_S)
    url = MediumUrl.parse(f"fs://{tmp_path}/pool?capacity=8MiB&min_free=1MiB")
    medium = open_medium(url, LONG_S)
    medium.check()
    assert describe(medium, IDENTITY, time.time(), LONG_S)
    for root, count in (("one", 3), ("two", 2)):
        records = [
            Record(key_of(idx, root), bytes(4096), buffer_of(8192), 0.0) for idx in range(count)
        ]
        assert medium.write(records, LONG_S) == [DONE] * count
    yield medium
    medium.close()


def until_told(path: Path) -> PoolReport:
    """The books say what was granted a moment after it was."""
    ends_s = time.monotonic() + LONG_S
    while True:
        report = inspect_pool(path)
        if report.books is not None and report.members:
            (member,) = report.members.values()
            if member[0].written_bytes == WRITTEN_BYTES:
                return report
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def test_a_pool_in_use(tmp_path: Path, medium: FsMedium) -> None:
    report = until_told(tmp_path / "pool")
    assert (report.num_chunks, report.size_bytes) == (5, 5 * 12288)
    found = {root.root: (root.num_chunks, root.size_bytes) for root in report.roots}
    assert found == {
        root_of(key_of(0, "one")).hex(): (3, 3 * 12288),
        root_of(key_of(0, "two")).hex(): (2, 2 * 12288),
    }
    (name,) = report.members
    assert report.sweeper == name
    assert report.epoch == 1
    assert abs(report.now_s - report.heard_s) < 60
    assert report.books is not None
    assert report.books.quota.capacity_bytes == 8 << 20
    assert report.books.granted[name] >= WRITTEN_BYTES
    assert 0 < report.free_bytes <= report.total_bytes
    text = shared_text(report)
    for part in ("1 member", "5 chunks of 2 roots, 60.0 KiB", f"swept by {name}", "epoch 1",
                 "of 8.0 MiB are charged", "wrote 80.0 KiB", "chunks     3, 36.0 KiB"):  # fmt: skip
        assert part in text
    assert "takes" not in text


def test_looking_changes_nothing_and_joins_nobody(tmp_path: Path, medium: FsMedium) -> None:
    until_told(tmp_path / "pool")
    medium.close()
    (tmp_path / "pool/temp/left-1-ab-7").write_bytes(bytes(100))
    before = snapshot(tmp_path)
    report = inspect_pool(tmp_path / "pool")
    assert snapshot(tmp_path) == before
    assert [member.has_left for member, _ in report.members.values()] == [True]
    assert (report.num_temp, report.temp_bytes) == (1, 100)
    text = shared_text(report)
    assert "0 members" in text
    assert "which has left" in text
    assert "has left, and what it wrote is charged until it is counted" in text
    assert "unfinished: 1 file, 100 B" in text
    says = shared_json(report)
    assert says["sweeper_age_s"] is None
    assert says["partial"] == {"files": 1, "bytes": 100}


def test_a_root_in_words(tmp_path: Path, medium: FsMedium) -> None:
    """By its description, which is a record among the others; a damaged one is no error."""
    record = Record(make_key(IDENTITY.root, b"k"), bytes(4096), buffer_of(8192), 0.0)
    assert medium.write([record], LONG_S) == [DONE]
    report = inspect_pool(tmp_path / "pool")
    named = {root.root: root.identity for root in report.roots}
    assert named[IDENTITY.root.hex()] == IDENTITY
    assert len(named) == 3
    assert "model      some-model" in shared_text(report)
    (path,) = tmp_path.glob(f"pool/chunks/*/*/*/{IDENTITY.root.hex()}")
    altered = path.read_bytes().replace(b"some-model", b"evil-model")
    for content in (altered, b"", bytes(5), bytes(path.stat().st_size)):
        path.write_bytes(content)
        report = inspect_pool(tmp_path / "pool")
        assert {root.identity for root in report.roots} == {None}
        assert "whose      unknown" in shared_text(report)
    assert medium.exist([description_key(IDENTITY.root)], LONG_S) == [True]


def test_on_the_command_line(
    tmp_path: Path, medium: FsMedium, capsys: pytest.CaptureFixture[str]
) -> None:
    until_told(tmp_path / "pool")
    assert main(["inspect", f"fs://{tmp_path}/pool", "--json"]) == 0
    says = json.loads(capsys.readouterr().out)
    assert (says["kind"], says["chunks"], says["bytes"]) == ("fs", 5, 5 * 12288)
    assert says["capacity_bytes"] == 8 << 20
    assert says["charged_bytes"] >= WRITTEN_BYTES
    assert [root["chunks"] for root in says["roots"]] in ([3, 2], [2, 3])
    (member,) = says["members"]
    assert member["member"] == says["sweeper"]
    assert member["written_bytes"] == WRITTEN_BYTES
    assert main(["inspect", f"fs://{tmp_path}/pool?capacity=1GiB"]) == 0
    assert "5 chunks of 2 roots" in capsys.readouterr().out


def test_what_is_no_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        assert main(["inspect", f"fs://{tmp_path}/{name}"]) == 2
        assert "no pool lies there; is it mounted?" in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []
    with pytest.raises(ConfigError, match="three slashes"):
        inspect_url(MediumUrl.parse("fs://mnt/pool"))
    assert main(["inspect", "nfs://host/pool"]) == 2
    assert 'no kind of storage "nfs"' in capsys.readouterr().err


def test_a_pool_that_nobody_has_swept(tmp_path: Path, medium: FsMedium) -> None:
    medium.close()
    sweeps = tmp_path / "pool/pool/sweeps"
    for folder in sweeps.iterdir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    report = inspect_pool(tmp_path / "pool")
    assert report.epoch == 0
    assert "nobody has ever swept it" in shared_text(report)
    assert shared_json(report)["capacity_bytes"] is None
    (sweeps / "4").mkdir()
    os.utime(sweeps / "4")
    assert "told nothing so far" in shared_text(inspect_pool(tmp_path / "pool"))


def test_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    report = MediumReport("redis://host", "redis", Stats(None, 3 << 20, 8 << 20))
    assert shared_text(report) == (
        "redis://host: storage of the kind redis\nchunks: unknown; used: 3.0 MiB of 8.0 MiB\n"
        "roots: it cannot list them"
    )
    listed = replace(report, roots={Root(bytes(32)): None, IDENTITY.root: IDENTITY})
    text = shared_text(listed)
    assert "root " + "0" * 64 + "\n  whose      unknown" in text
    assert f"root {IDENTITY.root.hex()}\n  model      some-model" in text
    roots = shared_json(listed)["roots"]
    assert isinstance(roots, list)
    assert [root["model"] for root in roots] == [None, "some-model"]
    assert shared_json(report) == {
        "url": "redis://host",
        "kind": "redis",
        "chunks": None,
        "bytes": 3 << 20,
        "capacity_bytes": 8 << 20,
        "roots": None,
    }
    assert main(["inspect", "redis://127.0.0.1:1"]) == 2
    assert "stepwell: error:" in capsys.readouterr().err


def test_every_kind_that_is_a_directory_is_looked_through_and_named(
    tmp_path: Path, medium: FsMedium, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever moves its bytes, which nothing here needs."""
    schemes = {kind.name: kind.schemes[0] for kind in KINDS if kind.is_pool}
    assert schemes == {"fs": "fs", "nixl": "nixl+posix", "3fs": "3fs"}
    for name, scheme in schemes.items():
        assert main(["inspect", f"{scheme}://{tmp_path}/pool", "--json"]) == 0
        says = json.loads(capsys.readouterr().out)
        assert (says["kind"], says["chunks"]) == (name, 5)


def test_words_of_others_do_nothing_to_the_terminal() -> None:
    """Whoever can write to the storage chose them."""
    label = "a\x1b[2Jmodel\x07\nroot ff"
    text = words.root_text("ab", Identity({"model": "m"}, {"model": label}))
    assert "model      a\\x1b[2Jmodel\\x07\\nroot ff" in text


def test_erasing_a_root(
    tmp_path: Path, medium: FsMedium, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"fs://{tmp_path}/pool?capacity=8MiB"
    one, two = (root_of(key_of(0, name)).hex() for name in ("one", "two"))
    assert cli.main(["erase", url, one, "cd" * 32]) == 0
    assert capsys.readouterr().out == (
        f"root {one}: erased 3 chunks\nroot {'cd' * 32}: erased 0 chunks\n"
    )
    assert [root.root for root in inspect_pool(tmp_path / "pool").roots] == [two]
    for wrong in ("ab", one.upper(), "../" + one[3:]):
        assert cli.main(["erase", url, wrong]) == 2
        assert "64 hexadecimal digits" in capsys.readouterr().err
    (tmp_path / "else").mkdir()
    assert cli.main(["erase", f"fs://{tmp_path}/else?capacity=8MiB", two]) == 2
    assert "no pool lies there" in capsys.readouterr().err
    assert list((tmp_path / "else").iterdir()) == [], "erasing makes no pool"
    assert len(inspect_pool(tmp_path / "pool").members) == 1, "and joins none"
    assert cli.main(["erase", f"file://{tmp_path}/kv", two]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_a_pool_that_is_named_by_its_directory(
    tmp_path: Path, medium: FsMedium, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.main([command, f"{tmp_path}/pool"]) == 2
    assert f"named by a url: fs://{tmp_path}/pool" in capsys.readouterr().err
