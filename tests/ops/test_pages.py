"""The pages say what the code does: FORMAT.md's bytes, README's tables, TERMS.md's reasons."""

import re
from pathlib import Path

import pytest
import xxhash

from stepwell.core import record
from stepwell.core.identity import Identity
from stepwell.core.keys import Root, make_key
from stepwell.core.types import Reason
from stepwell.metrics import DEFINITIONS
from stepwell.ops import words
from stepwell.ops.check import DESCRIPTION, PADDING, STRAY, UNREADABLE
from stepwell.settings import Settings, parse_duration, parse_size
from stepwell.tiers.directory import StoreDirectory

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


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The table below a heading: first cell without its backticks -> the other cells."""
    section = page.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip(" `"): [cell.strip(" `") for cell in row[1:]] for row in rows[1:]}


def test_the_example_of_a_header() -> None:
    lines = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} +){16})\|(.{16})\|$", FORMAT, re.MULTILINE)
    dump = b"".join(bytes.fromhex(text) for _, text, _ in lines)
    assert [int(offset, 16) for offset, _, _ in lines] == list(range(0, len(dump), 16))
    page = example_header().pack()
    assert page[: len(dump)] == dump
    assert not any(page[len(dump) :])
    for offset, _, characters in lines:
        row = page[int(offset, 16) :][:16]
        assert characters == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
    checksum = xxhash.xxh3_128(EXAMPLE_PAYLOAD).hexdigest()
    assert checksum in FORMAT


def test_the_example_of_a_name() -> None:
    path = StoreDirectory(Path("/kv")).record_path(EXAMPLE_KEY)
    assert path.removeprefix("/kv/") in re.sub(r"/\n +", "/", FORMAT)


def test_the_example_of_a_root() -> None:
    fields = {"engine": "vllm", "model_dtype": "bfloat16", "quantization": None, "tp": 2}
    assert f"`{Identity(fields).root.hex()}`" in FORMAT


def test_the_table_of_offsets() -> None:
    fields = re.findall(r"^\| (\d+) \| (\d+) \| ([\w ]+) \|", FORMAT, re.MULTILINE)
    end = 0
    places = {}
    for offset, size, name in fields:
        assert int(offset) == end, name
        end += int(size)
        places[name] = slice(int(offset), end)
    assert end == record.HEADER_BYTES
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
            assert parse_duration(default, name) == getattr(settings, f"{name}_s"), name
    assert rows["io_threads"][1] == str(settings.io_threads)
    assert rows["if_incompatible"][1] == settings.if_incompatible


def test_the_table_of_metrics() -> None:
    rows = rows_of(README, "## Metrics")
    expected = {f"vllm:stepwell_{each.name}": each.labels for each in DEFINITIONS}
    expected["vllm:stepwell_used_bytes"] = ("tier",)
    assert {name: tuple(re.findall(r"\w+", cells[0])) for name, cells in rows.items()} == expected


@pytest.mark.parametrize(
    "reason", [*(each.value for each in Reason if each), DESCRIPTION, PADDING, STRAY, UNREADABLE]
)
def test_reasons_are_explained(reason: str) -> None:
    assert f"`{reason}`" in TERMS


def test_every_reason_of_a_check_has_words() -> None:
    for reason in ("checksum", "header", "identity", "truncated", "layout", "not_a_file",
                   "io_error", DESCRIPTION, PADDING, STRAY, UNREADABLE):  # fmt: skip
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
