"""Damage of every kind on the disk tier's files: never a wrong byte, and never for ever."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, make_key
from stepwell.core.record import HEADER_BYTES, Header, record_bytes
from stepwell.core.types import Chunk, ChunkResult, Direction, Lookup, Outcome, Reason
from stepwell.errors import ConfigError
from stepwell.testing import Driver, buffer_of, key_of, payload_of
from stepwell.testing.stalling import stalled_calls
from stepwell.tiers import blockio, extents, ledger, table
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.disk import slot_cost_bytes
from stepwell.tiers.outcomes import ALREADY_THERE

from .conftest import DiskPlace, Slot, remove_at_once
from .faulty_os import FaultyOs

DONE = ChunkResult(Outcome.DONE)
KEYS = [key_of(f"c{idx}") for idx in range(4)]
BAD = KEYS[1]
LENGTHS = [8192, 5000]


def miss(reason: Reason) -> ChunkResult:
    return ChunkResult(Outcome.MISS, reason)


def reread(driver: Driver, keys: list[Key]) -> tuple[ChunkResult, ...]:
    """Read, and whatever is called DONE must be the right bytes."""
    result, contents = driver.read(keys)
    for key, chunk_result, content in zip(keys, result.results, contents, strict=True):
        if chunk_result.outcome is Outcome.DONE:
            assert content == payload_of(key, driver.payload_bytes)
    return result.results


def store_again(driver: Driver, place: DiskPlace) -> None:
    """What was bad is stored again, and everything is good, now and after a restart."""
    driver.write(KEYS)
    assert reread(driver, KEYS) == (DONE,) * 4
    for keep_journal in (True, False):
        place.close()
        if not keep_journal:
            place.journal.unlink()
        driver = place.open(payload_bytes=driver.payload_bytes)
        assert reread(driver, KEYS) == (DONE,) * 4


def of_another_version(slot: Slot) -> None:
    page = bytearray(slot.read()[:HEADER_BYTES])
    page[8] = 2
    slot.write(bytes(page))


def torn(pages: int) -> Callable[[Slot], None]:
    """A write of another record that got so far; the rest is the old one."""
    other = Header(key_of("other"), 8192, bytes(16), 1).pack() + b"\xaa" * 8192
    return lambda slot: slot.write(other[: pages * 4096])


DAMAGES: list[tuple[str, Callable[[Slot], object], Reason]] = [
    *[
        (f"payload byte {at}", lambda slot, at=at: slot.flip(HEADER_BYTES + at), Reason.CHECKSUM)
        for at in (0, 2500, 4999)
    ],
    *[
        (f"header byte {at}", lambda slot, at=at: slot.flip(at, 6), Reason.HEADER)
        for at in (0, 8, 10, 12, 16, 48, 56, 120, 128, 144, 152, 4095)
    ],
    ("zeros", lambda slot: slot.write(bytes(slot.slot_bytes)), Reason.HEADER),
    ("a page of zeros", lambda slot: slot.write(bytes(4096)), Reason.HEADER),
    ("a payload of zeros", lambda slot: slot.write(bytes(4096), 4096), Reason.CHECKSUM),
    ("text", lambda slot: slot.write(b"not a record at all\n" * 600), Reason.HEADER),
    ("another version", of_another_version, Reason.HEADER),
    ("written over by a header", torn(1), Reason.IDENTITY),
    ("written over by half a record", torn(2), Reason.IDENTITY),
    (
        "an old header before a new payload",
        lambda slot: slot.write(b"\xaa" * 100, 4096 + 4096),
        Reason.CHECKSUM,
    ),
]


@pytest.mark.parametrize("restart", ["while open", "between runs", "and no journal"])
@pytest.mark.parametrize(
    ("damage", "reason"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES]
)
def test_damage_is_a_counted_miss_that_heals(
    place: DiskPlace, damage: Callable[[Slot], object], reason: Reason, restart: str
) -> None:
    """The neighbours are served, the bad one is set aside under its reason and stored again."""
    for length in LENGTHS:
        driver = place.open(payload_bytes=length)
        driver.write(KEYS)
        slot = place.slot_of(BAD)
        if restart == "while open":
            damage(slot)
        else:
            place.close()
            damage(slot)
            if restart == "and no journal":
                place.journal.unlink()
            driver = place.open(payload_bytes=length)
        if restart == "and no journal" and reason is not Reason.CHECKSUM:
            # The headers are looked at: it is not there, or it is another's.
            assert driver.present(KEYS) == [True, False, True, True]
            assert reread(driver, KEYS) == (DONE, miss(Reason.ABSENT), DONE, DONE)
        else:
            assert driver.present(KEYS) == [True] * 4, "nothing is looked at before it is read"
            assert reread(driver, KEYS) == (DONE, miss(reason), DONE, DONE)
            assert driver.present(KEYS) == [True, False, True, True]
            assert place.reason("read_chunks", reason) == 1
            assert place.reason("quarantined_chunks", reason) == 1
            assert reread(driver, [BAD]) == (miss(Reason.ABSENT),), "set aside once"
            assert place.tier is not None
            assert place.tier._ledger.num_aside == 1
            assert place.tier.used_bytes == 4 * slot_cost_bytes(length)
        place.check_books()
        store_again(driver, place)
        place.close()
        shutil.rmtree(place.path)


def test_any_byte_of_a_header_and_of_a_payload(place: DiskPlace) -> None:
    """One chunk for each byte that is spoilt, the reserved ones too; all are set aside, and stored
    again in what other room there is and then in that of those that were set aside."""
    spots = [*range(168), 169, 2000, 4095, *range(4096, 12_288, 97), 12_287]
    keys = [key_of(f"spot {at}") for at in spots]
    driver = place.open(len(keys) + 40)
    driver.write(keys)
    slots = {header.key: slot for slot, header in place.slots()}
    for number, (key, at) in enumerate(zip(keys, spots, strict=True)):
        slots[key].flip(at, number % 8)
    reasons = [Reason.HEADER if at < HEADER_BYTES else Reason.CHECKSUM for at in spots]
    assert reread(driver, keys) == tuple(miss(reason) for reason in reasons)
    assert driver.present(keys) == [False] * len(keys)
    place.check_books()
    for _ in range(2):
        driver.write(keys)
    assert reread(driver, keys) == (DONE,) * len(keys)
    assert place.tier is not None
    assert place.tier._ledger.num_aside == 40, "as many as need not make room"
    place.check_books()


@pytest.mark.parametrize("restart", ["while open", "between runs", "and no journal"])
def test_swapped_records_are_both_misses(place: DiskPlace, restart: str) -> None:
    """Unless the headers are asked, which say what lies where now."""
    driver = place.open()
    driver.write(KEYS)
    one, two = place.slot_of(KEYS[1]), place.slot_of(KEYS[2])
    if restart != "while open":
        place.close()
    first, second = one.read(), two.read()
    one.write(second)
    two.write(first)
    if restart == "and no journal":
        place.journal.unlink()
    if restart != "while open":
        driver = place.open()
    if restart == "and no journal":
        assert reread(driver, KEYS) == (DONE,) * 4
    else:
        wrong = miss(Reason.IDENTITY)
        assert reread(driver, KEYS) == (DONE, wrong, wrong, DONE)
        assert place.reason("quarantined_chunks", Reason.IDENTITY) == 2
    place.check_books()
    store_again(driver, place)


def test_a_record_of_another_root_is_not_served(place: DiskPlace) -> None:
    """The same engine key under another model's root: the header says whose it is."""
    driver = place.open()
    foreign = key_of("c1", "other model")
    driver.write([*KEYS, foreign])
    place.slot_of(foreign).write(place.slot_of(BAD).read())
    assert reread(driver, [foreign]) == (miss(Reason.IDENTITY),)
    assert reread(driver, KEYS) == (DONE,) * 4
    place.check_books()


def test_a_good_record_in_two_slots(place: DiskPlace) -> None:
    """As headers may say after a journal was lost: one of them counts, and no slot is lost."""
    driver = place.open(8)
    driver.write([*KEYS, key_of("x")])
    place.close()
    place.slot_of(key_of("x")).write(place.slot_of(BAD).read())
    place.journal.unlink()
    driver = place.open(8)
    assert reread(driver, KEYS) == (DONE,) * 4
    place.check_books()
    assert driver.tier.delete(KEYS) == 4
    place.check_books()


@pytest.mark.parametrize("cut", ["nothing is left", "in a header", "in a payload", "between"])
@pytest.mark.parametrize("restart", [False, True], ids=["while open", "between runs"])
def test_an_extent_that_was_cut(place: DiskPlace, cut: str, restart: bool) -> None:
    """What lies before the cut is served; the space behind it is used again."""
    driver = place.open(4 * 4, num_threads=1)
    keys = [key_of(idx) for idx in range(4)]
    driver.write(keys)
    slot = place.slot_of(keys[2])
    assert slot.offset == 2 * slot.slot_bytes, "neighbours, in one extent"
    offsets = {
        "nothing is left": 0,
        "in a header": slot.offset + 100,
        "in a payload": slot.offset + 5000,
        "between": slot.offset,
    }
    if restart:
        place.close()
    os.truncate(slot.path, offsets[cut])
    num_left = offsets[cut] // slot.slot_bytes
    if restart:
        driver = place.open(4 * 4, num_threads=1)
        assert driver.present(keys) == [idx < num_left for idx in range(4)]
        lost = Reason.ABSENT
    else:
        lost = Reason.TRUNCATED
    expected = tuple(DONE if idx < num_left else miss(lost) for idx in range(4))
    assert reread(driver, keys) == expected
    assert driver.present(keys) == [idx < num_left for idx in range(4)]
    assert driver.write(keys)[3] == DONE
    assert reread(driver, keys) == (DONE,) * 4
    more = [key_of(f"more {idx}") for idx in range(32)]
    driver.write(more)
    driver.write(keys)
    assert reread(driver, keys) == (DONE,) * 4
    place.check_books(exact_sizes=restart)
    driver = place.open(4 * 4, num_threads=1)
    assert reread(driver, keys) == (DONE,) * 4
    place.check_books()


def test_a_slot_that_cannot_be_written_to_its_end_is_not_believed(place: DiskPlace) -> None:
    """A file that ends within its last slot: there is no record, whatever the header says."""
    driver = place.open(4)
    driver.write(KEYS)
    place.close()
    last = max(place.extents(), key=lambda extent: extent.extent_id)
    os.truncate(last.path, last.size_bytes - 1)
    place.journal.unlink()
    driver = place.open(4)
    assert sum(driver.present(KEYS)) == 3
    place.check_books()


@pytest.mark.parametrize("how", ["removed", "replaced by a directory", "replaced by zeros"])
def test_an_extent_that_goes_away_while_open(place: DiskPlace, how: str) -> None:
    """The open file is what counts; at the next start its records are gone."""
    driver = place.open(4, num_threads=1)
    driver.write(KEYS)
    for extent in place.extents():
        path = Path(extent.path)
        path.unlink()
        if how == "replaced by a directory":
            path.mkdir()
        elif how == "replaced by zeros":
            path.write_bytes(bytes(extent.size_bytes))
    assert reread(driver, KEYS) == (DONE,) * 4
    driver.tier.delete(KEYS[:1])
    for idx in range(4):
        driver.write([key_of(f"new {idx}")])
        reread(driver, KEYS)
    driver = place.open(4, num_threads=1)
    new = [key_of(f"new {idx}") for idx in range(4)]
    reread(driver, [*KEYS, *new])
    for _ in range(3):
        driver.write(KEYS)
    assert reread(driver, KEYS) == (DONE,) * 4
    place.check_books()


@pytest.mark.parametrize("what", ["everything", "contents", "extents", "partial", "journal"])
def test_directories_removed_while_open_are_made_again(place: DiskPlace, what: str) -> None:
    """Somebody cleans up below a running engine: misses at the worst, then it fills again."""
    driver = place.open()
    driver.write(KEYS)
    place.slot_of(BAD).flip(5000)
    place.check_books()
    if what == "everything":
        remove_at_once(place.path)
    elif what == "contents":
        for entry in list(place.path.iterdir()):
            remove_at_once(entry)
    else:
        remove_at_once(place.path / what)
    assert reread(driver, KEYS) == (DONE, miss(Reason.CHECKSUM), DONE, DONE), "they are open"
    more = [key_of(f"more {idx}") for idx in range(64)]
    for _ in range(2):
        assert {r.outcome for r in driver.write([*more, *KEYS])} <= {Outcome.DONE, Outcome.FULL}
    driver.write(KEYS)
    assert reread(driver, KEYS) == (DONE,) * 4
    if what == "extents":
        driver = place.open()  # what was removed is used until then
        driver.write(KEYS)
        assert reread(driver, KEYS) == (DONE,) * 4
    place.check_books()
    if what != "journal":
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
    slot = place.slot_of(BAD)
    assert slot.slot_bytes == record_bytes(5000)
    assert slot.read()[HEADER_BYTES + 5000 :] == bytes(8192 - 5000)
    slot.flip(HEADER_BYTES + 5000)
    slot.flip(slot.slot_bytes - 1)
    assert reread(driver, KEYS) == (DONE,) * 4


@pytest.mark.parametrize("extra", [1, 5000, 12_288, 30_000])
def test_bytes_behind_an_extent_do_no_harm(place: DiskPlace, extra: int) -> None:
    """They count: the capacity is kept from the start."""
    driver = place.open(8)
    keys = [key_of(idx) for idx in range(8)]
    driver.write(keys)
    last = place.extents()[-1]
    with open(last.path, "ab") as file:
        file.write(b"\xff" * extra)
    assert driver.read(keys)[0].done
    driver = place.open(8)
    present = [key for key, here in zip(keys, driver.present(keys), strict=True) if here]
    assert len(present) >= 4
    assert driver.read(present)[0].done
    driver.write(keys)
    place.check_books()


def test_expired_records_are_misses_and_leave(place: DiskPlace) -> None:
    """Expiry is no damage: nothing is set aside."""
    driver = place.open()
    driver.write(KEYS)
    slot = place.slot_of(BAD)
    old = Header.unpack(slot.read())
    dying = Header(old.key, old.payload_bytes, old.checksum, old.stored_at_us,
                   old.stored_at_us + 5_000_000)  # fmt: skip
    slot.write(dying.pack())
    assert reread(driver, KEYS) == (DONE,) * 4
    place.clock.advance(6.0)
    assert reread(driver, KEYS) == (DONE, miss(Reason.EXPIRED), DONE, DONE)
    assert driver.present([BAD]) == [False]
    assert place.context.metrics.value("quarantined_chunks") == 0
    place.check_books()
    assert place.tier is not None
    assert place.tier.used_bytes == 3 * slot_cost_bytes(driver.payload_bytes)
    store_again(driver, place)


def test_a_record_of_another_length_is_a_layout_miss(place: DiskPlace) -> None:
    """Whole and of the right key, but not what the engine has room for; in the same slot size,
    and in another one."""
    for length in (8000, 30_000):
        driver = place.open()
        driver.write([BAD], length)
        assert reread(driver, [BAD]) == (miss(Reason.LAYOUT),)
        place.check_books()
        store_again(driver, place)
        place.close()
        shutil.rmtree(place.path)


def test_several_lengths_and_wrong_ones_in_one_job(place: DiskPlace) -> None:
    """Neighbours of the wrong length do not spoil those of the right one."""
    driver = place.open()
    keys = [key_of(idx) for idx in range(9)]
    driver.write(keys)
    place.slot_of(keys[4]).flip(5000)
    lengths = [8192, 8192, 4096, 8192, 8192, 8191, 8192, 30_000, 8192]
    chunks = [Chunk(key, buffer_of(length)) for key, length in zip(keys, lengths, strict=True)]
    result = driver.wait(driver.submit(Direction.READ, chunks))
    layout, checksum = miss(Reason.LAYOUT), miss(Reason.CHECKSUM)
    assert result.results == (DONE, DONE, layout, DONE, checksum, layout, DONE, layout, DONE)
    for chunk, answer in zip(chunks, result.results, strict=True):
        assert answer != DONE or bytes(chunk.buffer) == payload_of(chunk.key, 8192)
    place.check_books()


def test_what_was_set_aside_counts_and_is_the_first_to_go(place: DiskPlace) -> None:
    """Damage never makes the store larger than its capacity, and good records stay."""
    driver = place.open(4)
    driver.write(KEYS)
    place.slot_of(BAD).flip(5000)
    reread(driver, KEYS)
    assert place.tier is not None
    assert place.tier.used_bytes == 4 * slot_cost_bytes(driver.payload_bytes)
    assert driver.write([key_of("new")]) == (DONE,)
    assert driver.present([*KEYS, key_of("new")]) == [True, False, True, True, True]
    assert place.context.metrics.value("evicted_chunks") == 0
    place.check_books()


def test_what_was_set_aside_is_kept_for_a_look_over_a_restart(place: DiskPlace) -> None:
    driver = place.open(8)
    driver.write(KEYS)
    slot = place.slot_of(BAD)
    slot.flip(5000)
    content = slot.read()
    reread(driver, KEYS)
    driver = place.open(8)
    assert place.tier is not None
    assert place.tier._ledger.num_aside == 1
    driver.write([key_of(f"new {idx}") for idx in range(3)])
    assert slot.read() == content, "as long as there is other room"
    place.check_books()
    driver = place.open(8)
    driver.write([key_of(f"new {idx}") for idx in range(5)])
    assert place.tier._ledger.num_aside == 0
    assert driver.present([KEYS[0], *KEYS[2:]]) == [True] * 3
    place.check_books()


def test_the_same_place_again_and_again(place: DiskPlace) -> None:
    """A drive with one bad sector: every record that is put there is lost, and no other one; the
    key is never poisoned."""
    driver = place.open(4, num_threads=1)
    driver.write(KEYS)
    bad = place.slot_of(BAD)
    for idx in range(20):
        bad.flip(6000)
        key = key_of(f"r{idx}")
        reread(driver, KEYS)
        assert driver.write([key]) == (DONE,)
        results = reread(driver, [key])
        assert results in [(DONE,), (miss(Reason.CHECKSUM),)]
        driver.write(KEYS)
        place.check_books()
    assert sum(result == DONE for result in reread(driver, KEYS)) >= 3


def test_readers_of_the_same_wrong_record(place: DiskPlace) -> None:
    """It is set aside and counted once, whoever reads it at the same time."""
    driver = place.open(num_threads=8)
    driver.write(KEYS)
    place.slot_of(BAD).flip(5000)
    read_jobs = [
        driver.submit(Direction.READ, [Chunk(key, buffer_of(8192)) for key in KEYS])
        for _ in range(40)
    ]
    results = [driver.wait(job).results[1] for job in read_jobs]
    assert results.count(miss(Reason.CHECKSUM)) >= 1
    assert set(results) <= {miss(Reason.CHECKSUM), miss(Reason.ABSENT)}
    assert place.reason("quarantined_chunks", Reason.CHECKSUM) == 1
    place.check_books()
    store_again(driver, place)


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "another identity"])
def test_a_damaged_description_costs_no_records(place: DiskPlace, damage: str) -> None:
    """Descriptions are for people: without one, records are served all the same."""
    identity = Identity({"model": "m", "block_tokens": 16}, {"name": "a model"})
    root = identity.root
    driver = place.open()
    place.context.registry.add(identity)
    keys = [make_key(root, bytes([idx])) for idx in range(4)]
    driver.write(keys)
    description = place.path / "roots" / f"{root.hex()}.json"
    assert Identity.from_json(description.read_text()) == identity
    assert StoreDirectory(place.path).identities() == {root: identity}
    if damage == "missing":
        description.unlink()
    else:
        words = {"empty": "", "text": "{", "another identity": Identity({"model": "x"}).to_json()}
        description.write_text(words[damage])
    driver = place.open()
    found = {} if damage == "missing" else {root: None}
    assert StoreDirectory(place.path).identities() == found
    assert driver.read(keys)[0].done
    place.context.registry.add(identity)
    driver.write([make_key(root, b"one more")])
    assert StoreDirectory(place.path).identities() == {root: identity}, "written anew"


def test_a_root_without_records_is_removed_at_start(place: DiskPlace) -> None:
    """Nothing is left of a model whose last chunk has left; foreign files there stay."""
    gone, kept = Identity({"model": "gone"}), Identity({"model": "kept"})
    driver = place.open()
    for identity in (gone, kept):
        place.context.registry.add(identity)
        driver.write([make_key(identity.root, b"k")])
    assert set(StoreDirectory(place.path).identities()) == {gone.root, kept.root}
    driver.tier.delete([make_key(gone.root, b"k")])
    foreign = place.path / "roots" / "notes.txt"
    foreign.write_text("mine")
    place.open()
    assert foreign.read_text() == "mine"
    foreign.unlink()
    place.open()
    assert os.listdir(place.path / "roots") == [f"{kept.root.hex()}.json"]


def test_foreign_files_are_left_alone(place: DiskPlace) -> None:
    """What is none of ours is neither counted nor touched, wherever it lies."""
    driver = place.open(4)
    driver.write(KEYS)
    foreign = [
        place.path / "README",
        place.path / "roots" / "notes",
        place.path / "roots" / ("A" * 64),
        place.path / "roots" / f"{'A' * 64}.json",
        place.path / "roots" / f"{'ab' * 31}.json",
        place.path / "extents" / "notes",
        place.path / "extents" / "xyz.kv",
        place.path / "extents" / "00000000-12288.kv.bak",
    ]
    for path in foreign:
        path.write_text("mine")
    driver = place.open(4)
    assert driver.present(KEYS) == [True] * 4
    assert place.tier is not None
    assert place.tier.used_bytes == 4 * slot_cost_bytes(driver.payload_bytes)
    driver.write([key_of(f"x{idx}") for idx in range(8)])
    place.open(4)
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)


def test_two_keys_of_one_fingerprint(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is a miss for as long as the other is there, and never the other's bytes."""
    real = ledger.fingerprint
    for module in (ledger, table):
        monkeypatch.setattr(
            module, "fingerprint", lambda key: 5 if key in (KEYS[0], BAD) else real(key)
        )
    driver = place.open()
    driver.write(KEYS[:1])
    assert driver.tier.contains([BAD]) == [Lookup.HIT], "a hint"
    assert reread(driver, [BAD]) == (miss(Reason.IDENTITY),)
    assert driver.write([BAD]) == (DONE,)
    assert reread(driver, [BAD]) == (DONE,)
    assert reread(driver, KEYS[:1]) == (miss(Reason.IDENTITY),)
    place.check_books()


# What somebody removes of a store that is in use.


def inodes(place: DiskPlace) -> dict[str, int]:
    return {extent.path: os.stat(extent.path).st_ino for extent in place.extents()}


def test_a_lock_that_was_removed_is_taken_again_and_all_is_kept(place: DiskPlace) -> None:
    """Nobody else can have owned the store since, and yet it was begun anew."""
    driver = place.open(16)
    assert place.tier is not None
    place.tier.note_metrics("127.0.0.1:9477")
    driver.write(KEYS)
    before = inodes(place)
    directory = StoreDirectory(place.path)
    (place.path / "LOCK").unlink()
    assert directory.owner() is None
    assert reread(driver, KEYS) == (DONE,) * 4
    new = [key_of("new")]
    assert driver.write(new) == (DONE,)
    assert directory.owner() == os.getpid()
    assert directory.metrics_target() == "127.0.0.1:9477"
    assert reread(driver, [*KEYS, *new]) == (DONE,) * 5
    assert inodes(place).items() >= before.items()
    with pytest.raises(ConfigError, match="another process"):
        StoreDirectory(place.path).open()
    place.check_books()
    driver = place.open(16)
    assert reread(driver, [*KEYS, *new]) == (DONE,) * 5
    place.check_books()


def test_a_lock_that_was_replaced_begins_the_store_anew(place: DiskPlace) -> None:
    """Somebody put it there, and may have owned what lies beside it."""
    driver = place.open(64)
    assert place.tier is not None
    place.tier.note_metrics("127.0.0.1:9477")
    driver.write(KEYS)
    lock = place.path / "LOCK"
    shutil.copy(lock, place.path / "LOCK.copy")
    (place.path / "LOCK.copy").replace(lock)
    new = [key_of(f"new {idx}") for idx in range(16)]
    assert driver.write(new) == (DONE,) * 16
    assert driver.present(KEYS) == [False] * 4
    directory = StoreDirectory(place.path)
    assert directory.owner() == os.getpid()
    assert directory.metrics_target() == "127.0.0.1:9477"
    assert reread(driver, new) == (DONE,) * 16
    place.check_books()
    driver = place.open(64)
    assert reread(driver, new) == (DONE,) * 16
    assert driver.present(KEYS) == [False] * 4


@pytest.mark.parametrize("num_removed", [1, 2, 3])
def test_extents_that_were_removed_are_missed_within_a_second(
    place: DiskPlace, num_removed: int
) -> None:
    """Chunks went on being written to files without a name: hits for as long as the process
    lived, gone with it, and what they took of the capacity and the drive with them."""
    driver = place.open(64, num_threads=2)
    keys = [key_of(idx) for idx in range(48)]
    assert driver.write(keys) == (DONE,) * 48
    assert len(place.extents()) == 3
    path_of = {header.key: str(slot.path) for slot, header in place.slots()}
    removed = [extent.path for extent in place.extents()[:num_removed]]
    for path in removed:
        os.unlink(path)
    place.clock.advance(1.0)
    assert driver.write([key_of("first")]) == (DONE,)
    stays = [path_of[key] not in removed for key in keys]
    assert driver.present(keys) == stays
    left = [key for key, here in zip(keys, stays, strict=True) if here]
    assert not left or set(reread(driver, left)) == {DONE}
    place.check_books()
    assert place.tier is not None
    cost_bytes = slot_cost_bytes(driver.payload_bytes)
    assert place.tier.used_bytes == (len(left) + 1) * cost_bytes
    more = [key_of(f"more {idx}") for idx in range(64 - len(left) - 1)]
    assert driver.write(more) == (DONE,) * len(more)
    every = [*left, key_of("first"), *more]
    assert driver.present(every) == [True] * 64, "the capacity is whole again"
    assert place.context.metrics.value("evicted_chunks") == 0
    place.check_books()
    driver = place.open(64)
    assert reread(driver, every) == (DONE,) * 64
    assert driver.present(keys) == stays
    place.check_books()


def test_a_write_that_misses_an_extent_has_its_room(place: DiskPlace) -> None:
    """Nothing else has to leave for it, although the store was full."""
    driver = place.open(64, num_threads=1)
    keys = [key_of(idx) for idx in range(64)]
    driver.write(keys)
    path_of = {header.key: str(slot.path) for slot, header in place.slots()}
    removed = place.extents()[2].path
    os.unlink(removed)
    place.clock.advance(1.0)
    assert driver.write([key_of(f"new {idx}") for idx in range(16)]) == (DONE,) * 16
    assert driver.present(keys) == [path_of[key] != removed for key in keys]
    assert place.context.metrics.value("evicted_chunks") == 0
    place.check_books()


def test_extents_are_not_looked_for_at_every_write(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = place.open(64, num_threads=1)
    driver.write(KEYS)
    assert place.tier is not None
    looks = []
    real = place.tier._drive.files.lost
    monkeypatch.setattr(place.tier._drive.files, "lost", lambda: looks.append(1) or real())
    for idx in range(40):
        place.clock.advance(0.1)
        driver.write([key_of(f"n{idx}")])
    assert 3 <= len(looks) <= 5


def test_extents_that_are_removed_while_they_are_read(place: DiskPlace) -> None:
    """The read ends well, and then the space is given back."""
    driver = place.open(16, num_threads=2)
    driver.write(KEYS)
    place.clock.advance(1.0)
    with stalled_calls(blockio, "read_run"):
        chunks = [Chunk(key, buffer_of(driver.payload_bytes)) for key in KEYS]
        job_id = driver.submit(Direction.READ, chunks)
        assert place.tier is not None
        driver.wait_until(
            lambda: [each for each, _ in place.tier.under_way] == [job_id], "a read under way"
        )
        for extent in place.extents():
            os.unlink(extent.path)
        assert driver.write([key_of("new")]) == (DONE,)
        assert driver.present(KEYS) == [False] * 4
    assert driver.wait(job_id).done
    for chunk in chunks:
        assert bytes(chunk.buffer) == payload_of(chunk.key, driver.payload_bytes)
    new = [key_of(f"new {idx}") for idx in range(16)]
    driver.wait_until(
        lambda: set(driver.write(new)) <= {DONE, ALREADY_THERE} and all(driver.present(new)),
        "the whole capacity",
    )
    place.check_books()


def test_an_extent_is_dropped_just_when_they_are_looked_for(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread looked whether extents were removed while another closed one, to make room for
    another slot size: the write failed as by a bug of ours."""
    driver = place.open(8, num_threads=2)
    keys = [key_of(idx) for idx in range(8)]
    driver.write(keys)
    driver.tier.delete(keys)
    assert place.tier is not None
    assert place.tier.drain(30)
    place.clock.advance(1.0)
    looking, go_on = threading.Event(), threading.Event()
    looked: list[int] = []

    class SlowOs:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def fstat(self, fd: int) -> os.stat_result:
            looked.append(fd)
            if len(looked) == 2:  # the first one's number is that of a new file by then
                looking.set()
                go_on.wait(30)
            return os.fstat(fd)

    monkeypatch.setattr(extents, "os", SlowOs())
    chunks = driver.write_chunks({KEYS[0]: payload_of(KEYS[0], driver.payload_bytes)})
    first = driver.submit(Direction.WRITE, chunks)
    assert looking.wait(30)
    try:
        assert driver.write([key_of("large")], 40_000) == (DONE,)
    finally:
        go_on.set()
    assert driver.wait(first).results == (DONE,)
    assert place.context.metrics.value("write_chunks", reason="internal") == 0
    place.check_books()


def test_a_look_for_extents_that_fails_is_the_drives_failure(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was logged as one that nobody had foreseen."""
    driver = place.open(16, num_threads=1)
    driver.write(KEYS)
    place.clock.advance(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(extents, "os", FaultyOs(1, errno.EIO, False, ("fstat",)))
        (result,) = driver.write([key_of("a")])
    assert result.reason is not Reason.INTERNAL
    assert driver.write([key_of("b")]) == (DONE,)
    place.check_books()


def test_what_was_set_aside_elsewhere_stays_when_an_extent_is_removed(place: DiskPlace) -> None:
    driver = place.open(64, num_threads=1)
    keys = [key_of(idx) for idx in range(32)]
    driver.write(keys)
    assert place.tier is not None
    slots = {header.key: slot for slot, header in place.slots()}
    paths = sorted({str(slot.path) for slot in slots.values()})
    assert len(paths) == 2
    here = [key for key in keys if str(slots[key].path) == paths[0]]
    slots[here[0]].flip(HEADER_BYTES)
    assert reread(driver, here[:1]) == (miss(Reason.CHECKSUM),)
    os.unlink(paths[1])
    place.clock.advance(1.0)
    driver.write([key_of("new")])
    assert place.tier._ledger.num_aside == 1, "kept for a look until room is needed"
    place.check_books()
