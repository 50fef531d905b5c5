"""The record: what is packed is unpacked, what is damaged is found, what is old stays readable."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.core.keys import Root, engine_key_of, make_key, root_of
from stepwell.core.record import (
    HEADER_BYTES,
    Header,
    pad_to_page,
    payload_checksum,
    record_bytes,
    verify,
)
from stepwell.core.types import Reason
from stepwell.errors import DataError

GOLDEN = Path(__file__).parent.parent / "golden"
U64 = st.integers(0, (1 << 64) - 1)
HEADERS = st.builds(
    Header,
    key=st.builds(
        make_key,
        st.binary(min_size=32, max_size=32).map(Root),
        st.binary(min_size=1, max_size=64),
    ),
    payload_bytes=U64,
    checksum=st.binary(min_size=16, max_size=16),
    stored_at_us=U64,
    expires_at_us=U64,
    end_token=U64,
)


def golden_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = golden_maker()


def a_header(**changes: object) -> Header:
    key = make_key(Root(bytes(range(32))), b"some engine key")
    values = {
        "key": key, "payload_bytes": 7, "checksum": payload_checksum(b"payload"),
        "stored_at_us": 5, "expires_at_us": 0, "end_token": 16, **changes,
    }  # fmt: skip
    return Header(**values)  # type: ignore[arg-type]


@given(HEADERS)
def test_a_header_is_read_back_as_it_was(header: Header) -> None:
    page = header.pack()
    assert len(page) == HEADER_BYTES
    assert Header.unpack(page) == header
    assert Header.unpack(memoryview(page + b"payload")) == header


@given(HEADERS, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_of_any_header_is_found(header: Header, bit: int) -> None:
    page = bytearray(header.pack())
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataError) as caught:
        Header.unpack(page)
    assert caught.value.reason == Reason.HEADER


def test_every_single_flipped_bit_of_a_header_is_found() -> None:
    page = bytearray(a_header().pack())
    for bit in range(len(page) * 8):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError):
            Header.unpack(page)
        page[bit // 8] ^= 1 << bit % 8
    assert Header.unpack(page) == a_header()


@pytest.mark.parametrize("length", [0, 1, 100, 4095])
def test_a_header_that_is_cut_short(length: int) -> None:
    with pytest.raises(DataError) as caught:
        Header.unpack(a_header().pack()[:length])
    assert caught.value.reason == Reason.TRUNCATED


@pytest.mark.parametrize("page", [bytes(4096), b"\xff" * 4096, b"STEPWELL" + bytes(4088)])
def test_pages_of_something_else(page: bytes) -> None:
    with pytest.raises(DataError) as caught:
        Header.unpack(page)
    assert caught.value.reason == Reason.HEADER


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, b"\x02\x00"), (8, b"\x00\x00"), (10, b"\x01\x00"), (48, b"\x00\x00"), (48, b"\x41\x00"),
     (48, b"\xff\xff")],
)  # fmt: skip
def test_fields_out_of_range_are_refused_even_with_a_good_crc(offset: int, value: bytes) -> None:
    """Another version or codec, no key, a key that is too long: written by whoever knows CRCs."""
    import struct
    import zlib

    page = bytearray(a_header().pack())
    page[offset : offset + len(value)] = value
    page[12:16] = bytes(4)
    struct.pack_into("<I", page, 12, zlib.crc32(page))
    with pytest.raises(DataError) as caught:
        Header.unpack(page)
    assert caught.value.reason == Reason.HEADER


@pytest.mark.parametrize("name", sorted(MAKER.GOLDEN))
def test_golden_records_stay_readable(name: str) -> None:
    """Version 1 as it was first written: every field is read, and packing gives the same bytes."""
    content = (GOLDEN / name).read_bytes()
    engine_key, length, stored_at_us, expires_at_us, end_token = MAKER.GOLDEN[name]
    header = Header.unpack(content)
    payload = content[HEADER_BYTES : HEADER_BYTES + length]
    assert root_of(header.key) == MAKER.ROOT
    assert engine_key_of(header.key) == engine_key
    assert header.payload_bytes == length
    assert header.checksum == payload_checksum(payload)
    assert header.stored_at_us == stored_at_us
    assert header.expires_at_us == expires_at_us
    assert header.end_token == end_token
    assert header.codec == 0
    assert payload == bytes(idx % 251 for idx in range(length))
    assert content[HEADER_BYTES + length :] == bytes(-length % 4096)
    assert len(content) == record_bytes(length)
    assert header.pack() == content[:HEADER_BYTES]
    verify(header, payload, header.key, stored_at_us)


def test_every_golden_file_is_compared() -> None:
    """And each is still what its maker, who knows nothing of this package, would write."""
    assert sorted(p.name for p in GOLDEN.glob("*.kv")) == sorted(MAKER.GOLDEN)
    for name, fields in MAKER.GOLDEN.items():
        assert (GOLDEN / name).read_bytes() == MAKER.record_of(*fields)


def test_golden_checksum_and_digest() -> None:
    """xxh3-128 in big-endian order, as its specification writes it."""
    assert payload_checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert payload_checksum(memoryview(b"abc")) == payload_checksum(b"abc")


@pytest.mark.parametrize(
    ("length", "padded"), [(0, 0), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192)]
)
def test_padding(length: int, padded: int) -> None:
    assert pad_to_page(length) == padded
    assert record_bytes(length) == 4096 + padded


def test_verify_accepts_what_was_asked_for() -> None:
    header = a_header()
    verify(header, b"payload", header.key, 10)
    verify(a_header(expires_at_us=11), memoryview(b"payload"), header.key, 10)


@pytest.mark.parametrize(
    ("header", "payload", "reason"),
    [
        (a_header(key=make_key(Root(bytes(range(32))), b"another")), b"payload", Reason.IDENTITY),
        (a_header(key=make_key(Root(bytes(32)), b"some engine key")), b"payload", Reason.IDENTITY),
        (a_header(), b"payloa", Reason.LAYOUT),
        (a_header(payload_bytes=8), b"payload", Reason.LAYOUT),
        (a_header(expires_at_us=10), b"payload", Reason.EXPIRED),
        (a_header(), b"Payload", Reason.CHECKSUM),
        (a_header(checksum=bytes(16)), b"payload", Reason.CHECKSUM),
    ],
)
def test_verify_says_what_is_wrong(header: Header, payload: bytes, reason: Reason) -> None:
    with pytest.raises(DataError) as caught:
        verify(header, payload, a_header().key, 10)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_of_the_payload_is_found(payload: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    header = a_header(payload_bytes=len(payload), checksum=payload_checksum(payload))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataError) as caught:
        verify(header, bytes(damaged), header.key, 0)
    assert caught.value.reason == Reason.CHECKSUM
