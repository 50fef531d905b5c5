"""Keys: a root and an engine key, joined and taken apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.core.keys import Root, engine_key_of, make_key, root_of

ROOTS = st.binary(min_size=32, max_size=32).map(Root)
ENGINE_KEYS = st.binary(min_size=1, max_size=64)


@given(ROOTS, ENGINE_KEYS)
def test_a_key_comes_apart_into_what_it_was_made_of(root: Root, engine_key: bytes) -> None:
    key = make_key(root, engine_key)
    assert (root_of(key), engine_key_of(key)) == (root, engine_key)
    assert hash(key) == hash(bytes(key))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_root_has_32_bytes(length: int) -> None:
    with pytest.raises(ValueError, match=f"root_bytes={length}"):
        make_key(Root(bytes(length)), b"k")


@pytest.mark.parametrize("length", [0, 65, 1000])
def test_an_engine_key_has_1_to_64_bytes(length: int) -> None:
    with pytest.raises(ValueError, match=f"key_bytes={length}"):
        make_key(Root(bytes(32)), bytes(length))
