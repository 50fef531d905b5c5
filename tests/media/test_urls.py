"""URLs of media, and the kinds that they name."""

import tomllib
import traceback
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.ops.tiers import tiers_json, tiers_text
from stepwell.settings import Settings
from stepwell.tiers.media import kinds
from stepwell.tiers.media.kinds import KINDS, Kind, kind_of, open_medium
from stepwell.tiers.media.urls import MediumUrl


def chain(error: BaseException) -> str:
    """What whoever prints an error with all its causes prints."""
    return "".join(traceback.format_exception(error))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        kind_of(MediumUrl.parse(text))
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("redis://h", MediumUrl("redis", host="h")),
        ("REDIS://Host:7000/2", MediumUrl("redis", host="host", port=7000, path="/2")),
        ("redis://u:p%40ss@h", MediumUrl("redis", "u", "p@ss", "h")),
        ("redis://:p@[::1]:1", MediumUrl("redis", "", "p", "::1", 1)),
        ("s3://b/a%20b?x=1&y=a%26b", MediumUrl("s3", host="b", path="/a b",
                                               parameters={"x": "1", "y": "a&b"})),
        ("fs:///mnt/pool?z=", MediumUrl("fs", path="/mnt/pool", parameters={"z": ""})),
        ("nixl+posix:///p", MediumUrl("nixl+posix", path="/p")),
        ("3fs:///3fs/p", MediumUrl("3fs", path="/3fs/p")),
        ("3FS://h:1/p", MediumUrl("3fs", host="h", port=1, path="/p")),
    ],
)  # fmt: skip
def test_parts(text: str, url: MediumUrl) -> None:
    assert MediumUrl.parse(text) == url


def test_a_password_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no command line and no log of an engine has it."""
    url = MediumUrl.parse("redis://user:${STEPWELL_TEST_SECRET}@h")
    monkeypatch.setenv("STEPWELL_TEST_SECRET", "p@/ss")
    assert url.secret() == "p@/ss"
    assert MediumUrl.parse("redis://:%24plain@h").secret() == "$plain"
    assert MediumUrl.parse("redis://h").secret() == ""
    monkeypatch.delenv("STEPWELL_TEST_SECRET")
    with pytest.raises(ConfigError, match=r"no variable STEPWELL_TEST_SECRET.*redis://user@h$"):
        url.secret()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "named by a URL"),
        ("redis", "named by a URL"),
        ("/mnt/pool", "named by a URL"),
        ("redis:host", "named by a URL"),
        ("://host", "named by a URL"),
        ("a b://host", "named by a URL"),
        ("+x://host", "named by a URL"),
        ("redis://h:x", "no valid URL"),
        ("redis://h:70000", "no valid URL"),
        ("redis://[::1", "no valid URL"),
        ("redis://h#a", "%23"),
        ("redis://h:0", "no port 0"),
        ("redis://u:a/b@h", "%2F"),
        ("redis://h?a=1&a=2", "given twice"),
        ("rediss2://h", 'the nearest is "rediss"'),
        ("gopher://h", "known=file,fs,redis,rediss,valkey,s3,gs,az"),
    ],
)
def test_what_is_no_url(text: str, words: str) -> None:
    assert words in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "redis://u:s3cret@h:x", "redis://u:s3cret@h#x", "redis://u:s3cret@h?a=1&a=2",
        "nothing://u:s3cret@h", "u:s3cret@h", "redis://u:s3cret@[::1",
        "redis://u:s3cret/x@h", "redis://u:12/s3cret@h", "redis://u:x/s3cret@h:1/0",
        "redis://:s3cret?x@h", "redis://u:x?s3cret@h", "redis://h:1?s3cret@h", "redis://u:x#s3cret@h",
        "redis://h?password=s3cret#x", "redis://h?password=s3cret&a=1&a=2", "redis://:s3cret/x@h:1",
        "redis://u:a://s3cret@h:99999", "redis://u:s3cret@h:0", "redis://s3cret:x@h:y",
    ],
)  # fmt: skip
def test_no_message_shows_a_password(text: str) -> None:
    assert "s3cret" not in refusal(text)
    with pytest.raises(ConfigError) as refused:
        kind_of(MediumUrl.parse(text))
    assert "s3cret" not in chain(refused.value)


@pytest.mark.parametrize(
    "texts",
    [
        {"path": "redis://u:s3cret@h"}, {"path": "file://u:s3cret@h/x"},
        {"url": "file://u:s3cret@h/x"}, {"url": "file:///x?capacity=s3cret@h"},
        {"url": "file:///u:s3cret@h", "path": "/kv"},
    ],
)  # fmt: skip
def test_no_setting_shows_a_password(texts: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.parse({**texts, "capacity": "1GiB"})
    assert "s3cret" not in chain(refused.value)


def test_what_is_shown() -> None:
    url = MediumUrl.parse("redis://us%3Aer:pw@[::1]:7/a%20b?token=x")
    assert url.shown == "redis://us%3Aer@[::1]:7/a%20b"
    assert "pw" not in repr(url)


def test_a_parameter_that_is_not_known_names_its_neighbour() -> None:
    url = MediumUrl.parse("redis://h?prefx=a")
    with pytest.raises(ConfigError, match='no parameter "prefx"; the nearest is "prefix"'):
        url.check_parameters(("cluster", "prefix"))
    url.check_parameters(("prefx",))
    with pytest.raises(ConfigError, match="known=none"):
        url.check_parameters(())


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ("os or no_such_one", "no_such_one", "sys")
    missing = Kind("x", ("x",), "x://", "", KINDS[0].promises, "stepwell.none", needs, "ex")
    monkeypatch.setattr(kinds, "KINDS", (missing,))
    assert not missing.installed
    with pytest.raises(ConfigError, match=r"no_such_one; .* pip install 'stepwell\[ex\]'"):
        open_medium(MediumUrl.parse("x://host"), 1.0)


def test_nixl_is_ready_for_objects_with_obstore_only(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"nixl_cu13"}
    monkeypatch.setattr(kinds, "_is_there", lambda package: package in there)
    files, objects = (each for each in KINDS if each.name.startswith("nixl"))
    assert (files.installed, objects.installed) == (True, False)
    assert "(not installed: pip install 'stepwell[s3]' && pip install --no-deps nixl-cu12)" in (
        tiers_text()
    )
    with pytest.raises(ConfigError, match="needs the package obstore; "):
        open_medium(MediumUrl.parse("nixl+obj://bucket"), 1.0)
    there.add("obstore")
    assert objects.installed
    assert all(kind["install"] is None for kind in tiers_json()["kinds"] if kind["installed"])  # type: ignore[attr-defined]


def test_every_extra_that_is_named_exists() -> None:
    """And where there are no packages for a system, nothing of it fails there."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {kind.extra for kind in KINDS if kind.needs} <= set(extras)
    for kind in KINDS:
        for requirement in extras.get(kind.extra, ()):
            if requirement.startswith(("nixl", "mooncake")):
                assert requirement.endswith("; platform_system == 'Linux'")


def test_the_disk_tier_is_no_medium() -> None:
    with pytest.raises(ConfigError, match="given by a path"):
        open_medium(MediumUrl.parse("file:///mnt/kv"), 1.0)


def test_no_scheme_names_two_kinds() -> None:
    schemes = [scheme for kind in KINDS for scheme in kind.schemes]
    assert len(set(schemes)) == len(schemes)
    assert all(kind.example.startswith(f"{kind.schemes[0]}://") for kind in KINDS)
