"""A store's directory: below it nothing is followed, and what is in the way is named.

Where one of the store's own directories was a link, the files behind it were somebody else's: they
were listed as strays of the store, moved into it, and what lay behind `partial` could be removed.
The decoys here are such files. Nothing may happen to them.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.core.identity import Identity
from stepwell.core.keys import Root
from stepwell.errors import ConfigError
from stepwell.tiers.directory import FORMAT, StoreDirectory
from stepwell.tiers.files import empty_folder, entries, list_folder, remove_tree, tree_bytes

FOLDERS = ["extents", "roots", "partial", "strays"]
WHOSE = Identity({"engine": "none"})


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """Somebody else's directory, with a file of each kind that a store might take for its own."""
    decoy = tmp_path / "decoy"
    (decoy / "below").mkdir(parents=True)
    for name in ("notes", "00000000-8192.kv", f"{WHOSE.root.hex()}.json", "below/more"):
        (decoy / name).write_text("mine")
    return decoy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store that nobody owns."""
    directory = StoreDirectory(tmp_path / "kv")
    directory.open()
    directory.close()
    return tmp_path / "kv"


def contents(path: Path) -> dict[str, str]:
    return {
        str(each.relative_to(path)): each.read_text() if each.is_file() else ""
        for each in path.rglob("*")
    }


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's address is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "a link": lambda p: p.symlink_to(p.parents[1] / "decoy"),
    "a link to itself": lambda p: p.symlink_to(p),
    "a dangling link": lambda p: p.symlink_to("nowhere"),
    "a file": lambda p: p.write_text("mine"),
    "a pipe": os.mkfifo,
    "a socket": bound_socket,
    "a directory": lambda p: p.mkdir(),
}
CASES = [
    (name, kind)
    for name in (*FOLDERS, "LOCK", "stepwell.json")
    for kind in IN_THE_WAY
    if kind != ("a directory" if name in FOLDERS else "a file")
]
"""What may lie in the place of what is the store's."""


def put(path: Path, name: str, kind: str) -> None:
    """Put something in the place of one of the store's files or directories."""
    ours = path / name
    if ours.is_dir():
        ours.rmdir()
    else:
        ours.unlink(missing_ok=True)
    IN_THE_WAY[kind](ours)


def open_files(path: Path) -> list[str]:
    """What this process has open there; other threads of it have files of their own."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(each for each in found if each.startswith(str(path)))


def refused(do: Callable[[], object], path: Path) -> str:
    files = open_files(path)
    with pytest.raises(ConfigError) as caught:
        do()
    assert open_files(path) == files
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_is_in_the_way_is_refused_by_name(
    path: Path, decoy: Path, name: str, kind: str
) -> None:
    (path / "extents" / "00000007-8192.kv").touch()
    if name == "extents":
        (path / "extents" / "00000007-8192.kv").unlink()
    put(path, name, kind)
    before = contents(decoy), sorted(os.listdir(path))
    directory = StoreDirectory(path)
    for do in (directory.open, directory.open_to_read):
        message = refused(do, path)
        assert f"{name} is {kind.split(' to ')[0].replace('dangling ', '')}" in message
        assert "`stepwell check --fix` " in message
        assert f"path={path} at={path / name}" in message
    assert directory.owner() is None
    assert (contents(decoy), sorted(os.listdir(path))) == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_that_comes_after_the_look_is_not_followed(
    path: Path, decoy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(path, name, "a link")
    before = contents(decoy)
    directory = StoreDirectory(path)
    monkeypatch.setattr(StoreDirectory, "faults", lambda self: [])
    if name == "strays":  # of which an engine makes no use
        directory.open()
    else:
        assert f"at={path / name}" in refused(directory.open, path)
    directory.close()
    for do in (
        directory.find_extents,
        directory.last_extent_id,
        lambda: directory.describe(WHOSE.root, WHOSE),
        lambda: directory.forget(WHOSE.root),
        lambda: directory.set_aside(str(path / name / "notes")),
        lambda: directory.set_aside(str(path / "extents" / "notes")),
        lambda: empty_folder(str(path / name)),
    ):
        try:
            assert do() in ([], -1, None)
        except OSError:
            continue
    assert directory.identities() == {}
    assert entries(str(path / name)) == []
    with pytest.raises(NotADirectoryError):
        list_folder(str(path / name))
    assert contents(decoy) == before


def test_a_link_to_the_store_is_somebodys_choice(path: Path) -> None:
    link = path.parent / "link"
    link.symlink_to(path)
    (path / "partial" / "left").touch()
    (path / "extents" / "notes").write_text("mine")
    directory = StoreDirectory(link)
    directory.open()
    try:
        directory.describe(WHOSE.root, WHOSE)
        assert directory.identities() == {WHOSE.root: WHOSE}
        directory.set_aside(f"{directory.extents}/notes")
    finally:
        directory.close()
    assert os.listdir(path / "partial") == []
    (stray,) = (path / "strays").iterdir()
    assert stray.read_text() == "mine"
    assert link.is_symlink()


def test_links_in_what_is_emptied_are_removed_themselves(path: Path, decoy: Path) -> None:
    before = contents(decoy)
    (path / "partial" / "link").symlink_to(decoy)
    (path / "partial" / "deep" / "er").mkdir(parents=True)
    (path / "partial" / "deep" / "link").symlink_to(decoy)
    (path / "partial" / "deep" / "er" / "link").symlink_to(decoy)
    assert tree_bytes(str(path / "partial")) < 1000 + 3 * len(str(decoy))
    directory = StoreDirectory(path)
    directory.open()
    directory.close()
    assert os.listdir(path / "partial") == []
    assert contents(decoy) == before


def test_a_directory_that_is_named_like_a_description_is_not_removed(path: Path) -> None:
    """It was, with all that lay in it, when the engine started."""
    theirs = path / "roots" / f"{'ab' * 32}.json"
    theirs.mkdir()
    (theirs / "notes").write_text("mine")
    StoreDirectory(path).forget(Root(bytes.fromhex("ab" * 32)))
    assert (theirs / "notes").read_text() == "mine"


@pytest.mark.parametrize("name", FOLDERS)
def test_setting_aside_takes_the_link(path: Path, decoy: Path, name: str) -> None:
    put(path, name, "a link")
    before = contents(decoy)
    directory = StoreDirectory(path)
    (fault,) = directory.faults()
    directory.set_aside(fault.path)
    (stray,) = (path / "strays").iterdir()
    assert stray.is_symlink()
    assert stray.name.startswith(f"{name}.")
    assert contents(decoy) == before
    assert directory.faults() == []
    directory.open()
    directory.close()


def test_sizes_and_removal_follow_nothing(tmp_path: Path, decoy: Path) -> None:
    before = contents(decoy)
    (tmp_path / "link").symlink_to(decoy)
    assert tree_bytes(str(tmp_path / "link")) == len(str(decoy))
    assert tree_bytes(str(decoy)) == 16
    remove_tree(str(tmp_path / "link"))
    assert not os.path.lexists(tmp_path / "link")
    remove_tree(str(tmp_path / "none"))
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "link").symlink_to(decoy)
    remove_tree(str(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()
    assert contents(decoy) == before


# The marker.


@pytest.mark.parametrize("marker", [None, "", "{", "\0" * 14, "[]", "{}", '{"format": "2"}'])
def test_the_advice_about_a_marker_works(path: Path, marker: str | None) -> None:
    """It said to remove a damaged marker by hand. Without one, "path holds other things"."""
    (path / "extents" / "00000000-8192.kv").write_bytes(bytes(8192))
    (path / "stepwell.json").unlink()
    if marker is not None:
        (path / "stepwell.json").write_text(marker)
    directory = StoreDirectory(path)
    for do in (directory.open, directory.open_to_read):
        message = refused(do, path)
        assert "`stepwell check --fix` writes it again" in message
        assert f"stepwell.json is {'missing' if marker is None else 'damaged'}" in message
    directory.write_marker()
    assert (path / "stepwell.json").read_text() == f'{{"format": {FORMAT}}}\n'
    directory.open()
    directory.close()
    assert len(directory.find_extents()) == 1


def test_a_damaged_marker_without_extents(path: Path) -> None:
    (path / "stepwell.json").write_text("{")
    message = refused(StoreDirectory(path).open, path)
    assert "stepwell.json is damaged, and there are no extents here" in message
    assert "give another path, or remove this directory" in message
    assert "nothing is lost" in message


@pytest.mark.parametrize("name", ["notes", "extents/notes", "roots/00000000-8192.kv"])
def test_a_directory_without_extents_is_no_store(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "theirs"
    (theirs / name).parent.mkdir(parents=True)
    (theirs / name).touch()
    assert "path holds other things" in refused(StoreDirectory(theirs).open, tmp_path)
    assert "there is no Stepwell store here" in refused(
        StoreDirectory(theirs).open_to_read, tmp_path
    )


def test_extents_behind_a_link_make_no_store(tmp_path: Path, decoy: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "extents").symlink_to(decoy)
    assert "path holds other things" in refused(StoreDirectory(tmp_path / "theirs").open, tmp_path)
    assert "no Stepwell store here" in refused(
        StoreDirectory(tmp_path / "theirs").open_to_read, tmp_path
    )


def test_what_cannot_be_written_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "roots").rmdir()
    really_make = os.mkdir

    def make(name: str, mode: int = 0o777, **options: int) -> None:
        if name == str(path / "roots"):
            raise PermissionError(13, "Permission denied", name)
        really_make(name, mode, **options)

    monkeypatch.setattr(os, "mkdir", make)
    message = refused(StoreDirectory(path).open, path)
    assert f"cannot be written (Permission denied): path={path} at={path}/roots" in message
