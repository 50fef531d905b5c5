"""Identity: the same facts give the same root, other facts another; people can read it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.core.identity import Identity
from stepwell.core.registry import RootRegistry

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3)
    | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=8,
)  # fmt: skip
FIELDS = st.dictionaries(st.text(max_size=8), JSON, max_size=5)
EXAMPLE = {
    "engine": "vllm",
    "weights": "sha256:00ff",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "rope_scaling": None,
    "groups": [{"kind": "full", "layers": [0, 1]}, {"kind": "sliding", "window": 512}],
    "scale": 0.5,
    "name": "Großes Modell",
}


def test_the_root_of_an_example_never_changes() -> None:
    """With another value here, every store in the world would be lost at the update."""
    root = Identity(EXAMPLE).root
    assert root.hex() == "b7fa704cce5d6d5681ea550ccce815618b2aa259a120e22053f8ac74380849d1"


@given(FIELDS)
def test_the_order_of_fields_does_not_matter(fields: dict) -> None:
    shuffled = dict(reversed(list(fields.items())))
    assert Identity(shuffled).root == Identity(fields).root
    assert len(Identity(fields).root) == 32


@given(FIELDS, FIELDS)
def test_other_fields_have_another_root(one: dict, two: dict) -> None:
    # JSON is what is compared: to Python, 1, 1.0 and True are equal.
    same = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    assert (Identity(one).root == Identity(two).root) == same


@pytest.mark.parametrize(
    "change",
    [
        {"block_tokens": 32},
        {"block_tokens": "16"},
        {"block_tokens": 16.0},
        {"rope_scaling": "none"},
        {"groups": [EXAMPLE["groups"][1], EXAMPLE["groups"][0]]},
        {"new": None},
    ],
)
def test_every_difference_counts(change: dict) -> None:
    """Each field, its type, the order within a list, and whether it is there at all."""
    assert Identity({**EXAMPLE, **change}).root != Identity(EXAMPLE).root


def test_labels_are_for_people() -> None:
    plain, named = Identity(EXAMPLE), Identity(EXAMPLE, {"model": "/models/x"})
    assert plain.root == named.root


@given(FIELDS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_a_description_is_read_back_as_it_was(fields: dict, labels: dict) -> None:
    identity = Identity(fields, labels)
    again = Identity.from_json(identity.to_json())
    assert again == identity
    assert again.root == identity.root


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_cannot_say_has_no_root(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        _ = Identity({"x": number}).root


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"identity_version": 1}',
        '{"identity_version": 2, "fields": {}, "labels": {}}',
        '{"identity_version": 1, "fields": [], "labels": {}}',
        '{"identity_version": 1, "fields": {}, "labels": 1}',
    ],
)
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (JSON's own errors are among them)
        Identity.from_json(text)


def test_differences_are_named() -> None:
    """What `inspect` and `doctor` say in words."""
    one = Identity({"dtype": "bf16", "block_tokens": 16, "tp": 1})
    two = Identity({"dtype": "fp8", "block_tokens": 16, "groups": 2})
    assert one.differences(two) == {"dtype": ("bf16", "fp8"), "groups": (None, 2), "tp": (1, None)}
    assert one.differences(one) == {}


def test_the_registry_remembers_by_root() -> None:
    registry = RootRegistry()
    identity = Identity(EXAMPLE, {"model": "first"})
    root = registry.add(identity)
    assert root == identity.root
    assert registry.get(root) is identity
    registry.add(Identity(EXAMPLE, {"model": "second"}))
    assert registry.get(root) is identity
    assert registry.get(Identity({}).root) is None
