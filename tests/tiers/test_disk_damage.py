"""Damage of every kind on the disk tier's files: never a wrong byte, and never for ever."""

import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.core.keys import Key
from stepwell.core.record import HEADER_BYTES, pad_to_page
from stepwell.core.types import ChunkResult, Lookup, Outcome, Reason
from stepwell.testing import Driver, key_of, payload_of
from stepwell.tiers.index import ChunkIndex

from .conftest import DiskPlace

DONE = ChunkResult(Outcome.DONE)
KEYS = [key_of(f"c{idx}") for idx in range(4)]
BAD = KEYS[1]
LENGTHS = [8192, 5000]


def miss(reason: Reason) -> ChunkResult:
    return ChunkResult(Outcome.MISS, reason)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x01]))


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_full_directory(path: Path) -> None:
    replace_by_directory(path)
    (path / "file").write_bytes(bytes(3000))


def replace_by_link_to_a_good_record(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def replace_by_link_to_endless_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's address is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def replace_by_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_text(path: Path) -> None:
    path.write_text("not a record at all\n" * 1000)


def of_another_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = 2
    path.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], object], Reason]] = [
    *[
        (f"payload byte {at}", lambda path, at=at: flip(path, HEADER_BYTES + at), Reason.CHECKSUM)
        for at in (0, 2500, 4999)
    ],
    *[
        (f"header byte {at}", lambda path, at=at: flip(path, at), Reason.HEADER)
        for at in (0, 8, 12, 16, 56, 128, 4095)
    ],
    *[
        (f"cut to {size}", lambda path, size=size: os.truncate(path, size), Reason.TRUNCATED)
        for size in (0, 1, 512, 4095, 4096, 4097, 8192, 12287)
    ],
    ("zeros", replace_by_zeros, Reason.HEADER),
    ("text", replace_by_text, Reason.HEADER),
    ("another version", of_another_version, Reason.HEADER),
    ("directory", replace_by_directory, Reason.NOT_A_FILE),
    ("full directory", replace_by_full_directory, Reason.NOT_A_FILE),
    ("link to a good record", replace_by_link_to_a_good_record, Reason.NOT_A_FILE),
    ("dangling link", replace_by_dangling_link, Reason.NOT_A_FILE),
    ("link to /dev/zero", replace_by_link_to_endless_zeros, Reason.NOT_A_FILE),
    ("pipe", replace_by_pipe, Reason.NOT_A_FILE),
    ("socket", replace_by_socket, Reason.NOT_A_FILE),
]  # fmt: skip


def read_checked(driver: Driver, keys: list[bytes]) -> tuple[ChunkResult, ...]:
    """Read, and whatever is called DONE must be the right bytes."""
    result, contents = driver.read(keys)
    for key, chunk_result, content in zip(keys, result.results, contents, strict=True):
        if chunk_result.outcome is Outcome.DONE:
            assert content == payload_of(key, driver.payload_bytes)
    return result.results


def store_again(driver: Driver, place: DiskPlace) -> None:
    """What was bad is stored again, and everything is good."""
    driver.write(KEYS)
    assert read_checked(driver, KEYS) == (DONE,) * 4
    place.tier.drain(30)
    assert read_checked(place.open(payload_bytes=driver.payload_bytes), KEYS) == (DONE,) * 4


@pytest.mark.parametrize("restart", [False, True], ids=["while open", "between runs"])
@pytest.mark.parametrize(
    ("damage", "reason"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES]
)
def test_damage_is_a_counted_miss_that_heals(
    place: DiskPlace, damage: Callable[[Path], object], reason: Reason, restart: bool
) -> None:
    """The neighbours are served, the bad one is set aside under its reason and stored again."""
    for length in LENGTHS:
        driver = place.open(payload_bytes=length)
        driver.write(KEYS)
        if restart:
            place.close()
        damage(place.record(BAD))
        if restart:
            driver = place.open(payload_bytes=length)
        assert driver.present(KEYS) == [True] * 4, "nothing is opened before it is asked for"
        assert read_checked(driver, KEYS) == (DONE, miss(reason), DONE, DONE)
        assert driver.present(KEYS) == [True, False, True, True]
        assert place.reason("read_chunks", reason) == 1
        assert place.reason("quarantined_chunks", reason) == 1
        assert not os.path.lexists(place.record(BAD))
        assert len(os.listdir(place.path / "quarantine")) == 1
        assert read_checked(driver, [BAD]) == (miss(Reason.ABSENT),), "set aside once"
        for stray in place.record(BAD).parent.glob("*.elsewhere"):
            stray.unlink()
        place.check_books()
        store_again(driver, place)
        place.close()
        shutil.rmtree(place.path)


@pytest.mark.parametrize("restart", [False, True], ids=["while open", "between runs"])
def test_swapped_records_are_both_misses(place: DiskPlace, restart: bool) -> None:
    driver = place.open()
    driver.write(KEYS)
    one, two, spare = place.record(KEYS[1]), place.record(KEYS[2]), place.path / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    driver = place.open() if restart else driver
    assert read_checked(driver, KEYS) == (DONE, miss(Reason.IDENTITY), miss(Reason.IDENTITY), DONE)
    assert place.reason("quarantined_chunks", Reason.IDENTITY) == 2
    place.check_books()
    store_again(driver, place)


def test_a_record_under_another_keys_name_is_not_served(place: DiskPlace) -> None:
    """Between two runs, a record was renamed: the name is believed until the record is read."""
    driver = place.open()
    driver.write(KEYS)
    other = key_of("other")
    place.close()
    place.record(other).parent.mkdir(exist_ok=True)
    place.record(BAD).rename(place.record(other))
    driver = place.open()
    assert driver.present([BAD, other]) == [False, True]
    assert read_checked(driver, [BAD, other]) == (miss(Reason.ABSENT), miss(Reason.IDENTITY))
    place.check_books()
    assert driver.write([other]) == (DONE,)
    store_again(driver, place)


def test_a_record_copied_to_another_root_is_not_served(place: DiskPlace) -> None:
    """The same engine key under another model's root: the header says whose it is."""
    driver = place.open()
    driver.write([*KEYS, key_of("c0", "other model")])
    foreign = key_of("c1", "other model")
    place.record(foreign).parent.mkdir(exist_ok=True)
    shutil.copy(place.record(BAD), place.record(foreign))
    driver = place.open()
    assert read_checked(driver, [foreign]) == (miss(Reason.IDENTITY),)
    assert read_checked(driver, KEYS) == (DONE,) * 4
    place.check_books()


def test_a_record_in_another_keys_folder_is_set_aside(place: DiskPlace) -> None:
    """A copy in the wrong folder was counted twice, and its space was never given back."""
    driver = place.open()
    driver.write(KEYS)
    place.close()
    strange = place.record(BAD).parent.parent / "zz" / place.record(BAD).name
    strange.parent.mkdir()
    shutil.copy(place.record(BAD), strange)
    driver = place.open()
    place.check_books()
    assert not strange.exists()
    assert read_checked(driver, KEYS) == (DONE,) * 4
    assert driver.tier.delete(KEYS) == 4
    place.check_books()


def test_a_record_that_was_removed_while_open_has_vanished(place: DiskPlace) -> None:
    driver = place.open()
    driver.write(KEYS)
    place.record(BAD).unlink()
    assert driver.tier.contains([BAD]) == [Lookup.HIT]
    assert read_checked(driver, KEYS) == (DONE, miss(Reason.VANISHED), DONE, DONE)
    assert driver.tier.contains([BAD]) == [Lookup.MISS]
    assert place.reason("read_chunks", Reason.VANISHED) == 1
    assert place.reason("quarantined_chunks", Reason.VANISHED) == 0, "there is nothing to set aside"
    place.check_books()
    store_again(driver, place)


def test_a_folder_that_is_a_file_now(place: DiskPlace) -> None:
    """Reads are misses; writes of that folder fail until it is mended, others go on."""
    driver = place.open()
    driver.write(KEYS)
    folder = place.record(BAD).parent
    shutil.rmtree(folder)
    folder.write_text("in the way")
    assert read_checked(driver, [BAD]) == (miss(Reason.VANISHED),)
    assert driver.write([BAD]) == (ChunkResult(Outcome.FAILED, Reason.IO_ERROR),)
    assert driver.write([key_of("another")]) == (DONE,)
    assert place.files("partial") == []
    folder.unlink()
    place.check_books()
    store_again(driver, place)


@pytest.mark.parametrize("what", ["everything", "contents", "roots", "partial", "quarantine"])
def test_directories_removed_while_open_are_made_again(place: DiskPlace, what: str) -> None:
    """Somebody cleans up below a running engine: misses, then it fills again."""
    driver = place.open()
    driver.write(KEYS)
    flip(place.record(BAD), 5000)
    if what == "everything":
        shutil.rmtree(place.path)
    elif what == "contents":
        for entry in place.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    else:
        shutil.rmtree(place.path / what)
    results = read_checked(driver, KEYS)
    assert results[1].outcome is Outcome.MISS
    if what in ("partial", "quarantine"):
        assert results == (DONE, miss(Reason.CHECKSUM), DONE, DONE)
    else:
        assert results == (miss(Reason.VANISHED),) * 4
    place.check_books()
    store_again(driver, place)


def test_directory_removed_between_runs_is_an_empty_store(place: DiskPlace) -> None:
    place.open().write(KEYS)
    place.close()
    shutil.rmtree(place.path)
    driver = place.open()
    assert driver.present(KEYS) == [False] * 4
    store_again(driver, place)


def test_padding_is_nobodys(place: DiskPlace) -> None:
    """A flipped byte behind the payload harms nobody, and is neither served nor a miss."""
    driver = place.open(payload_bytes=5000)
    driver.write(KEYS)
    path = place.record(BAD)
    assert path.stat().st_size == HEADER_BYTES + pad_to_page(5000)
    assert path.read_bytes()[HEADER_BYTES + 5000 :] == bytes(8192 - 5000)
    flip(path, HEADER_BYTES + 5000)
    flip(path, -1)
    assert read_checked(driver, KEYS) == (DONE,) * 4


def test_bytes_appended_to_a_record_do_no_harm(place: DiskPlace) -> None:
    driver = place.open()
    driver.write(KEYS)
    with open(place.record(BAD), "ab") as file:
        file.write(b"\xff" * 700)
    assert read_checked(driver, KEYS) == (DONE,) * 4
    driver = place.open()
    assert read_checked(driver, KEYS) == (DONE,) * 4
    place.check_books()


def test_expired_records_are_misses_and_leave(place: DiskPlace) -> None:
    """Expiry is no damage: nothing is set aside."""
    from stepwell.core.record import Header

    driver = place.open()
    driver.write(KEYS)
    path = place.record(BAD)
    content = path.read_bytes()
    old = Header.unpack(content)
    dying = Header(old.key, old.payload_bytes, old.checksum, old.stored_at_us,
                   old.stored_at_us + 5_000_000)  # fmt: skip
    path.write_bytes(dying.pack() + content[HEADER_BYTES:])
    assert read_checked(driver, KEYS) == (DONE,) * 4
    place.clock.advance(6.0)
    assert read_checked(driver, KEYS) == (DONE, miss(Reason.EXPIRED), DONE, DONE)
    assert not path.exists()
    assert os.listdir(place.path / "quarantine") == []
    place.check_books()
    store_again(driver, place)


def test_a_record_of_another_length_is_a_layout_miss(place: DiskPlace) -> None:
    """Whole and of the right key, but not what the engine has room for."""
    driver = place.open()
    driver.write([BAD], 8000)
    assert read_checked(driver, [BAD]) == (miss(Reason.LAYOUT),)
    place.check_books()
    store_again(driver, place)


def test_quarantine_counts_and_is_the_first_to_go(place: DiskPlace) -> None:
    """Damage never makes the store larger than its capacity, and good records stay."""
    driver = place.open(4)
    driver.write(KEYS)
    flip(place.record(BAD), 5000)
    read_checked(driver, KEYS)
    assert len(place.files("quarantine")) == 1
    assert driver.tier.used_bytes == place.lying_bytes() == 4 * (HEADER_BYTES + 8192)
    assert driver.write([key_of("new")]) == (DONE,)
    assert place.files("quarantine") == []
    assert driver.present([*KEYS, key_of("new")]) == [True, False, True, True, True]
    assert place.context.metrics.value("evicted_chunks") == 0
    place.check_books()


def test_a_record_is_not_counted_twice_while_it_is_set_aside(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment it was both leaving and in quarantine, and a full tier above its capacity."""
    seen: list[int] = []
    real = ChunkIndex.freed

    def look_and_free(index: ChunkIndex, key: Key) -> int:
        looking = threading.Thread(target=lambda: seen.append(place.tier.used_bytes))
        looking.start()
        looking.join(0.2)  # it may have to wait until both books agree
        return real(index, key)

    driver = place.open(4)
    driver.write(KEYS)
    flip(place.record(BAD), 5000)
    monkeypatch.setattr(ChunkIndex, "freed", look_and_free)
    read_checked(driver, KEYS)
    place.tier.drain(30)
    driver.wait_until(lambda: bool(seen), "a look at the sum while a record is set aside")
    assert seen == [4 * (HEADER_BYTES + 8192)]


def test_quarantine_of_an_earlier_run_is_counted(place: DiskPlace) -> None:
    driver = place.open(4)
    driver.write(KEYS)
    flip(place.record(BAD), 5000)
    read_checked(driver, KEYS)
    (place.path / "quarantine" / "by hand").mkdir()
    (place.path / "quarantine" / "by hand" / "note").write_bytes(bytes(100))
    driver = place.open(4)
    place.check_books()
    assert driver.tier.used_bytes <= 4 * (HEADER_BYTES + 8192), "the bound holds from the start"
    driver.write([key_of("new")])
    assert place.files("quarantine") == []
    place.check_books()


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "another identity"])
def test_a_damaged_description_costs_no_records(place: DiskPlace, damage: str) -> None:
    """root.json is for people: without it, records are served all the same."""
    from stepwell.core.identity import Identity
    from stepwell.core.keys import make_key
    from stepwell.tiers.directory import StoreDirectory

    identity = Identity({"model": "m", "block_tokens": 16}, {"name": "a model"})
    root = identity.root
    driver = place.open()
    place.context.registry.add(identity)
    keys = [make_key(root, bytes([idx])) for idx in range(4)]
    driver.write(keys)
    description = place.path / "roots" / root.hex() / "root.json"
    assert Identity.from_json(description.read_text()) == identity
    assert StoreDirectory(place.path).identities() == {root: identity}
    if damage == "missing":
        description.unlink()
    else:
        words = {"empty": "", "text": "{", "another identity": Identity({"model": "x"}).to_json()}
        description.write_text(words[damage])
    driver = place.open()
    assert StoreDirectory(place.path).identities() == {root: None}
    assert read_checked(driver, keys) == (DONE,) * 4
    place.context.registry.add(identity)
    driver.write([make_key(root, b"one more")])
    assert StoreDirectory(place.path).identities() == {root: identity}, "written anew"


def test_a_root_without_records_is_removed_at_start(place: DiskPlace) -> None:
    """Nothing is left of a model whose last chunk was evicted; foreign files there stay."""
    from stepwell.core.identity import Identity
    from stepwell.core.keys import make_key

    gone, kept = Identity({"model": "gone"}), Identity({"model": "kept"})
    driver = place.open()
    for identity in (gone, kept):
        place.context.registry.add(identity)
        driver.write([make_key(identity.root, b"k")])
    foreign = place.path / "roots" / gone.root.hex() / "notes.txt"
    driver.tier.delete([make_key(gone.root, b"k")])
    driver.tier.drain(30)
    foreign.write_text("mine")
    place.open()
    assert foreign.read_text() == "mine"
    foreign.unlink()
    place.open()
    assert os.listdir(place.path / "roots") == [kept.root.hex()]


def test_foreign_files_are_left_alone(place: DiskPlace) -> None:
    """What is no record is neither counted nor touched, wherever it lies."""
    driver = place.open(4)
    driver.write(KEYS)
    folder = place.record(BAD).parent
    foreign = [
        place.path / "README",
        place.path / "roots" / "notes",
        place.path / "roots" / ("A" * 64),
        folder.parent / "notes",
        folder / "notes",
        folder / "xyz.kv",
        folder / (place.record(BAD).stem.upper() + ".kv"),
        folder / (place.record(BAD).name + ".bak"),
    ]
    for path in foreign:
        path.write_text("mine")
    driver = place.open(4)
    assert driver.present(KEYS) == [True] * 4
    assert driver.tier.used_bytes == 4 * (HEADER_BYTES + 8192)
    driver.write([key_of(f"x{idx}") for idx in range(8)])
    place.open(4)
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)
