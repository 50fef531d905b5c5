"""The tools act on a store's own files alone.

`stepwell check --fix` of a store whose `extents` was a link to a directory of the system listed
what lay there as strays and moved it away, and the machine was lost. The decoys here stand for it.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.stores import SLOT_BYTES, identity, keys_of, snapshot, write_store
from stepwell import cli
from stepwell.errors import ConfigError
from stepwell.ops.check import check_store
from stepwell.ops.findings import BLOCKED, MISSING, CheckReport, Remedy
from stepwell.ops.inspect import inspect_store
from stepwell.tiers.directory import StoreDirectory

FOLDERS = ["extents", "roots", "partial", "strays"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_store(tmp_path / "kv")
    return tmp_path / "kv"


@pytest.fixture
def decoy(tmp_path: Path) -> Iterator[Path]:
    """Somebody else's directory, which is the same at the end."""
    decoy = tmp_path / "decoy"
    (decoy / "below").mkdir(parents=True)
    names = ["notes", "below/more", f"{identity().root.hex()}.json", f"{'ab' * 32}.json"]
    for name in [*names, f"00000003-{SLOT_BYTES}.kv"]:
        (decoy / name).write_bytes(bytes(SLOT_BYTES + 5))
    before = snapshot(decoy)
    yield decoy
    assert snapshot(decoy) == before


def check(path: Path, *, fix: bool = False) -> CheckReport:
    return check_store(path, now_s=time.time(), fix=fix)


def link(path: Path, name: str, decoy: Path) -> None:
    """Put a link in the place of one of the store's directories, which lies beside it then."""
    if (path / name).exists():
        (path / name).rename(path.parent / f"was-{name}")
    (path / name).symlink_to(decoy)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_a_directorys_place(path: Path, decoy: Path, name: str) -> None:
    link(path, name, decoy)
    before = snapshot(path)
    report = check(path)
    assert snapshot(path) == before
    (bad,) = report.bad
    assert (bad.path, bad.reason, bad.remedy) == (str(path / name), BLOCKED, Remedy.MOVE)
    assert bad.detail == "is a link, where a store has a directory, and is not followed"
    assert bad.size_bytes == len(str(decoy))
    assert report.leftovers.num_files == report.strays.num_files == 0
    assert report.num_records == (0 if name == "extents" else 3)
    with pytest.raises(ConfigError, match=f"{name} is a link, .* is not followed; `stepwell check"):
        inspect_store(path, shm_dir=path.parent)

    fixed = check(path, fix=True)
    (bad,) = fixed.bad
    assert bad.fixed
    assert fixed.strays.num_files == 0, "it was not moved earlier"
    (stray,) = (path / "strays").iterdir()
    assert os.readlink(stray) == str(decoy)
    again = check(path)
    assert again.ok
    assert again.strays.size_bytes == len(str(decoy))
    assert inspect_store(path, shm_dir=path.parent).num_chunks == report.num_records


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("fix", [False, True])
def test_a_link_that_comes_after_the_look(
    path: Path, decoy: Path, name: str, fix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it seemed to be a directory a moment before."""
    (path / "extents" / "notes").write_text("a stray of the store's own")
    (path / "strays").mkdir()
    monkeypatch.setattr(StoreDirectory, "faults", lambda self: [])
    link(path, name, decoy)
    if fix and name != "strays":
        with pytest.raises(ConfigError, match=f"at={path / name}"):
            check(path, fix=True)
        return
    report = check(path, fix=fix)
    assert not any(each.fixed for each in report.bad)
    wrong = [each for each in report.bad if each.reason != MISSING]  # extents of its own: none
    assert all(each.path == str(path / "extents" / "notes") for each in wrong)


def test_a_link_that_comes_while_it_is_put_right(
    path: Path, decoy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found wrong in a directory is not then done to what another one has by that name."""
    for name in ("extents", "roots"):
        (path / name / "notes").write_text("a stray of the store's own")
    (path / "extents" / f"00000003-{SLOT_BYTES}.kv").write_bytes(bytes(SLOT_BYTES + 5))

    def replace(num_bytes: int) -> None:
        if not (path / "extents").is_symlink():
            link(path, "extents", decoy)
            link(path, "roots", decoy)

    report = check_store(path, now_s=time.time(), fix=True, on_record=replace)
    assert {each.remedy for each in report.bad} >= {Remedy.MOVE, Remedy.CUT}
    assert not any(each.fixed for each in report.bad)


def test_a_link_among_the_extents_is_moved_itself(path: Path, decoy: Path) -> None:
    (path / "extents" / "elsewhere").symlink_to(decoy)
    (path / "roots" / f"{'cd' * 32}.json").symlink_to(decoy)
    assert all(each.fixed for each in check(path, fix=True).bad)
    assert sorted(os.readlink(each) for each in (path / "strays").iterdir()) == [str(decoy)] * 2
    assert check(path).ok


def test_everything_in_the_way_at_once(path: Path, decoy: Path) -> None:
    for name in FOLDERS:
        link(path, name, decoy)
    (path / "LOCK").unlink()
    (path / "LOCK").mkdir()
    (path / "LOCK" / "notes").write_text("mine")
    report = check(path)
    assert {os.path.basename(each.path) for each in report.bad} == {"LOCK", *FOLDERS}
    assert {each.reason for each in report.bad} == {BLOCKED}
    assert all(each.fixed for each in check(path, fix=True).bad)
    assert len(list((path / "strays").iterdir())) == 5
    assert [each.read_text() for each in (path / "strays").glob("LOCK.*/notes")] == ["mine"]
    assert check(path).ok
    write_store(path)
    assert check(path).num_records == 3


def test_an_owner_is_left_alone(path: Path, decoy: Path) -> None:
    owner = StoreDirectory(path)
    owner.open()
    try:
        link(path, "partial", decoy)
        with pytest.raises(ConfigError, match="an engine uses this store"):
            check(path, fix=True)
        (bad,) = check(path).bad
        assert (bad.reason, (path / "partial").is_symlink()) == (BLOCKED, True)
    finally:
        owner.close()


def test_what_cannot_be_moved_away_is_said(
    path: Path, decoy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(path, "partial", decoy)

    def refuse(*names: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ConfigError, match="partial is a link"):
        check(path, fix=True)


@pytest.mark.parametrize("marker", [None, "{"])
def test_the_marker_is_written_again(path: Path, marker: str | None) -> None:
    (path / "stepwell.json").unlink()
    if marker is not None:
        (path / "stepwell.json").write_text(marker)
    report = check(path)
    (bad,) = report.bad
    assert (bad.reason, bad.remedy) == (BLOCKED, Remedy.WRITE)
    assert report.num_records == 3, "and everything was read"
    assert check(path, fix=True).bad[0].fixed
    assert check(path).ok
    assert [each.read_text() for each in (path / "strays").glob("*")] == [marker] * bool(marker)


# As a user meets it.


def test_the_command_line_says_what_to_do(
    path: Path, decoy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link(path, "partial", decoy)
    (path / "stepwell.json").write_text("{")
    assert cli.main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "blocked: 2 (no engine would start with it)" in out
    assert "  partial\n    is a link, where a store has a directory, and is not followed" in out
    assert "  stepwell.json\n    is damaged" in out
    assert f"it moves what is not the store's to {path}/strays" in out
    assert "--fix writes stepwell.json again, without which no engine" in out
    assert cli.main(["inspect", str(path)]) == 2
    assert "stepwell.json is damaged; `stepwell check --fix` writes" in capsys.readouterr().err
    assert cli.main(["check", str(path), "--fix"]) == 1
    out = capsys.readouterr().out
    assert f"1 moved to {path}/strays." in out
    assert "1 written again." in out
    assert cli.main(["check", str(path)]) == 0
    assert cli.main(["inspect", str(path)]) == 0


def test_records_are_read_without_a_marker_and_beside_what_is_in_the_way(path: Path) -> None:
    (path / "stepwell.json").unlink()
    (path / "partial").rmdir()
    (path / "partial").touch()
    report = check(path)
    assert report.num_records == len(keys_of(identity().root)) == 3
    assert [each.reason for each in report.bad] == [BLOCKED] * 2
