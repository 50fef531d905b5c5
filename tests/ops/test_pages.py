"""The pages say what the code does: FORMAT.md's bytes, README's tables, TERMS.md's reasons."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from stepwell.core import record
from stepwell.core.identity import Identity
from stepwell.core.keys import Key, Root, fingerprint, make_key
from stepwell.core.types import Reason
from stepwell.metrics import DEFINITIONS, GAUGES
from stepwell.ops import words
from stepwell.ops.contents import ASIDE_REASONS
from stepwell.ops.findings import (
    BLOCKED,
    DESCRIPTION,
    JOURNAL,
    PADDING,
    STRAY,
    UNREADABLE,
)
from stepwell.policy.endurance import EnduranceState
from stepwell.settings import Settings, parse_duration, parse_size
from stepwell.tiers import frames
from stepwell.tiers.directory import FORMAT as DIRECTORY_FORMAT
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.frames import Kind
from stepwell.tiers.slots import BOOKKEEPING_BYTES, place_of

ROOT = Path(__file__).resolve().parents[2]
FORMAT = (ROOT / "docs" / "FORMAT.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TERMS = (ROOT / "docs" / "TERMS.md").read_text(encoding="utf-8")

EXAMPLE_KEY = make_key(Root(bytes(range(0x20))), bytes(range(0xA0, 0xC4)))
EXAMPLE_PAYLOAD = bytes(range(256)) * 20


def example_header() -> record.Header:
    return record.Header(
        EXAMPLE_KEY,
        len(EXAMPLE_PAYLOAD),
        record.payload_checksum(EXAMPLE_PAYLOAD),
        stored_at_us=1_767_225_600_000_000,
        end_token=128,
    )


EXAMPLE_S = 1_767_225_600


def example_row(key: Key, slot_idx: int, used_at_s: int) -> npt.NDArray[np.void]:
    row = np.zeros(1, frames.ENTRY)
    row[0] = (fingerprint(key), place_of(3, slot_idx), 0, 0, used_at_s, 0, 0)
    return row


def example_frames() -> list[bytes]:
    second = make_key(Root(bytes(range(0x20))), bytes(range(0xB0, 0xD4)))
    return [
        frames.encode_root(0, Root(bytes(range(0x20)))),
        frames.encode_wear(EnduranceState(3 << 30, EXAMPLE_S, -(1 << 20), EXAMPLE_S + 3600)),
        frames.encode_rows(Kind.SNAPSHOT, example_row(EXAMPLE_KEY, 5, EXAMPLE_S)),
        frames.encode_rows(Kind.PUT, example_row(second, 6, EXAMPLE_S + 60)),
        frames.encode_touch([place_of(3, 5)], EXAMPLE_S + 120),
        frames.encode_aside(place_of(3, 6), ASIDE_REASONS.index("checksum")),
        frames.encode_free([place_of(3, 7)]),
    ]


def section_of(page: str, heading: str) -> str:
    """What stands below a heading, up to the next one."""
    assert f"\n{heading}\n" in page, heading
    return re.split(r"^#", page.partition(f"\n{heading}\n")[2], flags=re.MULTILINE)[0]


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The table below a heading: first cell without its backticks -> the other cells."""
    section = section_of(page, heading)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip(" `"): [cell.strip(" `") for cell in row[1:]] for row in rows[1:]}


def dump_of(heading: str) -> bytes:
    """The bytes of the hexadecimal dump below a heading of FORMAT.md."""
    pattern = r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} +){16})\|(.{16})\|$"
    lines = re.findall(pattern, section_of(FORMAT, heading), re.MULTILINE)
    dump = b"".join(bytes.fromhex(text) for _, text, _ in lines)
    assert [int(offset, 16) for offset, _, _ in lines] == list(range(0, len(dump), 16))
    for offset, _, characters in lines:
        row = dump[int(offset, 16) :][:16]
        assert characters == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
    return dump


def places_of(table: str) -> list[tuple[str, slice]]:
    """A table of fields without gaps or overlaps: names and bytes."""
    fields = re.findall(r"^\| (\d+) \| (\d+) \| ([\w ]+) \|", table, re.MULTILINE)
    end = 0
    places = []
    for offset, size, name in fields:
        assert int(offset) == end, name
        end += int(size)
        places.append((name, slice(int(offset), end)))
    return places


def test_the_example_of_a_header() -> None:
    dump = dump_of("### An example")
    page = example_header().pack()
    assert page[: len(dump)] == dump
    assert not any(page[len(dump) :])
    checksum = xxhash.xxh3_128(EXAMPLE_PAYLOAD).hexdigest()
    assert checksum in FORMAT


def test_the_example_of_a_place() -> None:
    slot_bytes = record.record_bytes(len(EXAMPLE_PAYLOAD))
    path = StoreDirectory(Path("/kv")).extent_path(3, slot_bytes)
    section = section_of(FORMAT, "### An example")
    assert f"`{path.removeprefix('/kv/')}`" in section
    assert f"byte {5 * slot_bytes} " in section
    assert f"0x{place_of(3, 5):016x}" in section


def test_the_example_of_a_root() -> None:
    fields = {"engine": "vllm", "model_dtype": "bfloat16", "quantization": None, "tp": 2}
    assert f"`{Identity(fields).root.hex()}`" in FORMAT


def test_the_table_of_offsets() -> None:
    fields = places_of(section_of(FORMAT, "### The header"))
    assert fields[-1][1].stop == record.HEADER_BYTES
    places = dict(fields)
    header = example_header()
    page = header.pack()
    assert page[places["magic"]] == record.MAGIC
    assert page[places["root"]] == EXAMPLE_KEY[:32]
    assert page[places["engine key"]].rstrip(b"\0") == EXAMPLE_KEY[32:]
    assert page[places["payload checksum"]] == header.checksum
    for name, value in (
        ("version", record.FORMAT_VERSION),
        ("codec", record.CODEC_RAW),
        ("engine key length", 36),
        ("payload length", len(EXAMPLE_PAYLOAD)),
        ("stored at", header.stored_at_us),
        ("expires at", 0),
        ("end token", 128),
    ):
        assert int.from_bytes(page[places[name]], "little") == value, name


def test_the_example_of_a_journal() -> None:
    """The dump, what each frame is said to be, and what a reader makes of all of them."""
    dump = dump_of("### An example of a journal")
    parts = example_frames()
    assert dump[16:] == b"".join(parts)
    section = section_of(FORMAT, "### An example of a journal")
    offset, expected = 16, {"0x00": "the header"}
    for frame in parts:
        expected[f"0x{offset:02x}"] = Kind(int.from_bytes(frame[:2], "little")).name
        offset += len(frame)
    said = rows_of(FORMAT, "### An example of a journal")
    assert {at: cells[0] for at, cells in said.items()} == expected
    image = frames.replay(dump)
    assert image.valid_bytes == len(dump)
    (row,) = image.rows.tolist()
    assert row == (fingerprint(EXAMPLE_KEY), place_of(3, 5), 0, 0, EXAMPLE_S + 120, 0, 0)
    assert f"{fingerprint(EXAMPLE_KEY):016x}" in section
    assert image.aside == {place_of(3, 6): 1}
    assert image.wear == EnduranceState(3 << 30, EXAMPLE_S, -(1 << 20), EXAMPLE_S + 3600)


def test_the_tables_of_a_journal() -> None:
    dump = dump_of("### An example of a journal")
    head = dict(places_of(section_of(FORMAT, "### The journal's header")))
    assert dump[head["magic"]] == frames.MAGIC
    assert int.from_bytes(dump[head["version"]], "little") == frames.VERSION
    assert f"{int.from_bytes(dump[head['CRC']], 'little'):08x}" in FORMAT
    text, _, entries = section_of(FORMAT, "### Frames").partition("An entry of SNAPSHOT and PUT")
    fields = dict(places_of(text))
    assert list(fields) == ["kind", "check", "count", "CRC"]
    columns = places_of(entries)
    assert [(each.start, each.stop - each.start) for _, each in columns] == [
        (frames.ENTRY.fields[name][1], frames.ENTRY.fields[name][0].itemsize)
        for name in frames.ENTRY.names
    ]
    kinds = re.findall(r"^\| (\d) \| ([A-Z]+) \| (\d+) \|", text, re.MULTILINE)
    assert [(int(number), name) for number, name, _ in kinds] == [
        (kind.value, kind.name) for kind in Kind
    ]
    sizes = {int(number): int(size) for number, _, size in kinds}
    for frame in example_frames():
        kind, count = (int.from_bytes(frame[fields[name]], "little") for name in ("kind", "count"))
        assert len(frame) == 12 + count * sizes[kind], Kind(kind).name


def test_numbers_of_the_format() -> None:
    assert FORMAT.startswith(f"# The format on storage, version {DIRECTORY_FORMAT}\n")
    assert f'{{"format": {DIRECTORY_FORMAT}}}' in FORMAT
    assert f" {BOOKKEEPING_BYTES} bytes more for each of their slots" in FORMAT
    said = re.search(r"\*\*Reasons\*\* of ASIDE: ([^.]+)\.", FORMAT)
    assert said is not None
    numbers = re.findall(r"(\d) `?(\w+)", said[1])
    assert [(int(number), reason) for number, reason in numbers] == list(enumerate(ASIDE_REASONS))


def golden_maker() -> ModuleType:
    path = ROOT / "tests" / "golden" / "make.py"
    spec = importlib.util.spec_from_file_location("golden_make", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = golden_maker()


@pytest.mark.parametrize("name", sorted(MAKER.JOURNALS))
def test_golden_journals_stay_readable(name: str) -> None:
    content = (ROOT / "tests" / "golden" / name).read_bytes()
    expected = MAKER.JOURNALS[name]
    image = frames.replay(content)
    assert image.valid_bytes == len(content)
    names = ["tag", "place", "root", "used_at_s", "expires_at_s"]
    assert image.rows[names].tolist() == expected["rows"]
    assert image.roots == expected["roots"]
    assert image.aside == expected["aside"]
    assert image.wear == EnduranceState(*expected["wear"])
    for length in range(16, len(content)):  # and so does all that an append left whole
        assert frames.replay(content[:length]).valid_bytes <= length


def test_every_golden_journal_is_compared() -> None:
    """And it is still what its maker, who knows nothing of this package, would write."""
    folder = ROOT / "tests" / "golden"
    assert sorted(path.name for path in folder.glob("*.bin")) == sorted(MAKER.JOURNALS)
    assert (folder / "journal-v1.bin").read_bytes() == MAKER.journal_of()


def test_the_table_of_settings() -> None:
    rows = rows_of(README, "## Settings")
    known = Settings.keys()
    assert list(rows) == list(known)
    settings = Settings.parse({"path": "/kv", "capacity": "1GiB"})
    for name, cells in rows.items():
        unit, default = cells[:2]
        if unit == "size" and default != "needed":
            assert parse_size(default, name) == getattr(settings, f"{name}_bytes"), name
        elif unit == "time":
            length_s = 0.0 if default == "none" else parse_duration(default, name)
            assert length_s == getattr(settings, f"{name}_s"), name
        elif unit == "number":
            assert float(default) == getattr(settings, name), name
        elif unit == "word":
            assert default == getattr(settings, name), name


def test_the_table_of_metrics() -> None:
    rows = rows_of(README, "## Metrics")
    expected = {f"vllm:stepwell_{each.name}": each.labels for each in (*DEFINITIONS, *GAUGES)}
    assert {name: tuple(re.findall(r"\w+", cells[0])) for name, cells in rows.items()} == expected


@pytest.mark.parametrize(
    "reason",
    [*filter(None, Reason), BLOCKED, DESCRIPTION, JOURNAL, PADDING, STRAY, UNREADABLE],
)
def test_reasons_are_explained(reason: str) -> None:
    assert f"`{reason}`" in TERMS


def test_every_reason_of_a_check_has_words() -> None:
    for reason in ("checksum", "header", "identity", "truncated", "layout", "not_a_file",
                   "io_error", BLOCKED, DESCRIPTION, JOURNAL, PADDING, STRAY,
                   UNREADABLE):  # fmt: skip
        assert words.reason_words(reason)


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken
