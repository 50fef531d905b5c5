"""Settings: few, each with a unit and a checked range; an unknown one names its neighbour.

Sizes and times are texts with a unit ("20GiB", "10s"), so that no number can be misread.
"""

import difflib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from stepwell.errors import ConfigError
from stepwell.policy.admission import ADMISSION_NAMES
from stepwell.policy.eviction import POLICY_NAMES

__all__ = [
    "NUMBERS",
    "Settings",
    "format_bytes",
    "parse_duration",
    "parse_path",
    "parse_size",
    "parse_target",
    "plural",
    "without_password",
]

_SIZE_UNITS = {
    "B": 1,
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_LEAST_BYTES = 1 << 20  # of most settings
_SIZE_LIMIT_BYTES = 1 << 63  # what a file system can say of itself
_TIME_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME_LIMIT_S = 24 * 3600.0
_TTL_LIMIT_S = 365 * 86400.0
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]\s]+):(?P<port>[0-9]{1,5})")
_NUMBER = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object, name: str, *, unit: str = "GiB") -> int:
    """Bytes from a text such as "20GiB", "1.5 TB" or "4096B".

    Args:
        value: what a person wrote.
        name: of the setting, for messages.
        unit: that is usual for it, for what messages suggest.

    Raises:
        ConfigError: no unit, an unknown unit, not a number, negative, or 8 EiB and more.
    """
    bare = isinstance(value, int | float) and not isinstance(value, bool)
    match = _NUMBER.fullmatch(value if isinstance(value, str) else f"{value}" if bare else "")
    if match is None:
        raise ConfigError(f'{name} is a size such as "20{unit}": {name}={value!r}')
    number, given = match.groups()
    if bare or not given:
        is_bytes = number.isdecimal() and _LEAST_BYTES <= float(number) < _SIZE_LIMIT_BYTES
        example = f"{number}B" if is_bytes else _with_unit(number, unit)
        raise ConfigError(f'{name} needs a unit: write "{example}" for example: {name}={value!r}')
    factor = _SIZE_UNITS.get(given.upper())
    if factor is None:
        short = given.upper().removesuffix("I")  # "200G", "200Gi"
        if short in ("K", "M", "G", "T"):
            meant = f'write "{_with_unit(number, f"{short}iB")}"'
        else:
            meant = "known are B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        raise ConfigError(f"{name} has an unknown unit; {meant}: {name}={value!r}")
    size = float(number) * factor
    if size < 0:
        raise ConfigError(f"{name} must not be negative: {name}={value!r}")
    if size >= _SIZE_LIMIT_BYTES:
        raise ConfigError(f"{name} is larger than anything there is: {name}={value!r}")
    return int(size)


def _with_unit(number: str, unit: str) -> str:
    """The number in a unit, if that is a size that is not refused as well; else an example."""
    factor = _SIZE_UNITS[unit.upper()]
    if min(_LEAST_BYTES, factor) <= float(number) * factor < _SIZE_LIMIT_BYTES:
        return f"{number}{unit}"
    return f"20{unit}"


def parse_duration(value: object, name: str, *, most_s: float = _TIME_LIMIT_S) -> float:
    """Seconds from a text such as "500ms", "10s", "2min", "1h" or "7d".

    Raises:
        ConfigError: no unit, an unknown unit, not a number, not above zero, or above ``most_s``.
    """
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None or match.group(2) not in _TIME_UNITS:
        raise ConfigError(
            f'{name} is a time with a unit (ms, s, min, h, d) such as "10s": {name}={value!r}'
        )
    seconds = float(match.group(1)) * _TIME_UNITS[match.group(2)]
    if not 0 < seconds <= most_s:
        most = f"{most_s / 3600:.0f}h" if most_s <= _TIME_LIMIT_S else f"{most_s / 86400:.0f}d"
        raise ConfigError(f"{name} is above zero and at most {most}: {name}={value!r}")
    return seconds


def parse_path(value: object) -> Path:
    """The directory of the disk tier from "/dir" or "file:///dir".

    Raises:
        ConfigError: relative, another scheme, a host part, or not a text.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f'path is an absolute directory such as "/mnt/nvme/kv": path={value!r}')
    shown = without_password(value)
    directory = value
    if "://" in value:
        try:
            url = urlsplit(value)
        except ValueError:  # its words may have a password in them
            raise ConfigError(f"path is no valid URL: path={shown!r}") from None
        if url.scheme != "file":
            raise ConfigError(
                f'a path is a local directory, "/dir" or "file:///dir"; storage of another kind '
                f'is given as "url": path={shown!r}'
            )
        if url.netloc:
            meant = "file:///dir" if "@" in value else "file:///" + url.netloc + url.path
            raise ConfigError(
                f"this names a host; three slashes begin a local directory: write {meant!r}: "
                f"path={shown!r}"
            )
        if url.query or url.fragment:
            raise ConfigError(f"a file:// path takes no parameters: path={shown!r}")
        directory = unquote(url.path)
    if "\0" in directory:
        raise ConfigError(f"a path has no NUL byte: path={shown!r}")
    if not directory.startswith("/"):
        example = os.path.abspath(os.path.expanduser(directory))
        home = ", and ~ is not expanded here" if directory.startswith("~") else ""
        raise ConfigError(
            f"path must be absolute{home}: write {example!r} for example: path={shown!r}"
        )
    return Path(os.path.normpath(directory))


def without_password(text: str) -> str:
    """A text that may be a URL, without what stands before its last @: for messages."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    before, at, after = rest.rpartition("@")
    is_path = not separator and "/" in before  # a directory may have an @
    return f"{scheme}{separator}...@{after}" if at and not is_path else text


def parse_target(text: str) -> tuple[str, int] | str:
    """Where to export to: (host, port), or an absolute path.

    Raises:
        ConfigError: neither.
    """
    if text.startswith("/"):
        return os.path.normpath(text)
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ConfigError(
            f'metrics is an address such as "127.0.0.1:9477" or an absolute path such as '
            f'"/run/stepwell.prom"; {_target_fault(text)}: metrics={text!r}'
        )
    return match["host"].strip("[]"), int(match["port"])


def _target_fault(text: str) -> str:
    """What is wrong with a target."""
    host, colon, port = text.rpartition(":")
    if "://" in text:
        return "it takes no scheme"
    if text.isdecimal() or (colon and not host):
        return "there is no host"
    if not colon or text.endswith("]"):
        return "there is no port"
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        return "the port is 1 to 65535"
    return "the host is a name, or an address, of IPv6 in brackets"


def plural(count: int, word: str) -> str:
    """ "1 root", "2 roots"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def format_bytes(size: float) -> str:
    """A size for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one store. `Settings.parse` reads the texts that people write.

    Attributes:
        paths: absolute directories of the disk tier, one per drive; created if missing. Chunks
            are striped over them, and a drive that fails takes its own chunks along (text:
            "path" for one, or "paths").
        capacity_bytes: what the disk tier may take, in equal parts on all drives, 1 MiB or more
            (text: "capacity").
        url: storage that engines share, below the disk tier or in its place, such as
            "redis://host"; `stepwell tiers` lists the kinds. It may hold a password.
        min_free_bytes: free space that is left on each file system (text: "min_free").
        host_capacity_bytes: DRAM of Stepwell's own host tier; 0 for none, the default, since
            inside one vLLM engine the primary is the host tier (text: "host_capacity").
        io_threads: threads that read and write, per drive, 1 to 256.
        inflight_writes_bytes: chunks of writes beyond this wait nowhere, they are refused
            (text: "inflight_writes").
        read_deadline_s: chunks that have not begun by then are misses (text: "read_deadline").
        write_deadline_s: the same for writes (text: "write_deadline").
        eviction: who leaves when a tier is full, one of `stepwell.policy.eviction.POLICY_NAMES`.
        admission: what is written to the disk tier, one of
            `stepwell.policy.admission.ADMISSION_NAMES`.
        drive_writes_per_day: what may be written to each drive per day, in sizes of the drive;
            as this is used up, admission becomes stricter. 0, the default, for no limit.
        ttl_s: how long a chunk may be read after it was written; 0, the default, for ever (text:
            "ttl").
        write_mode: "through" to the disk tier at once, or "back" when the host tier needs room.
        promotion: when a chunk that a lower tier served is copied to the uppermost one: "always",
            "second-hit" or "never".
        read_when: "faster", when reading is expected to end sooner than computing, or "always",
            to compute as little as possible.
        min_read_tokens: a prefix that is shorter is computed rather than read.
        slow_after_s: an operation that takes longer is as bad as a failed one; a few of either
            and a drive is not asked for a while (text: "slow_after").
        metrics: where to export counters in Prometheus' text format: a loopback or other address
            such as "127.0.0.1:9477", or a file such as "/run/stepwell.prom"; empty, the default,
            for nowhere.
        weights_id: takes the place of the fingerprint of the model's weights, for models whose
            files Stepwell cannot see; change it when the weights change.
        if_incompatible: what an engine does whose version Stepwell does not fit: "refuse" to
            start, or "start_without" Stepwell.
    """

    paths: tuple[Path, ...] = ()
    capacity_bytes: int = 0
    url: str = field(default="", repr=False)
    min_free_bytes: int = 1 << 30
    host_capacity_bytes: int = 0
    io_threads: int = 8
    inflight_writes_bytes: int = 4 << 30
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    eviction: str = POLICY_NAMES[0]
    admission: str = "always"
    drive_writes_per_day: float = 0.0
    ttl_s: float = 0.0
    write_mode: str = "through"
    promotion: str = "always"
    read_when: str = "faster"
    min_read_tokens: int = 0
    slow_after_s: float = 2.0
    metrics: str = ""
    weights_id: str = ""
    if_incompatible: str = "refuse"

    def __post_init__(self) -> None:
        if not self.paths and not self.url:
            raise ConfigError("there is at least one path, or a url: paths=() url=''")
        _check_apart(self.paths)
        if self.paths and self.capacity_bytes < 1 << 20:
            raise ConfigError(f"capacity is at least 1MiB: capacity={self.capacity_bytes}B")
        if self.inflight_writes_bytes < 1 << 20:
            raise ConfigError(
                f"inflight_writes is at least 1MiB: inflight_writes={self.inflight_writes_bytes}B"
            )
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {least} to {most}: {name}={value}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} is {_one_of(choices)}: {name}={value!r}")
        if self.metrics:
            _check_outside(parse_target(self.metrics), self.paths)
        if self.write_mode == "back" and not self.host_capacity_bytes:
            raise ConfigError(
                'write_mode "back" keeps what is written in the host tier, and there is none: '
                'give "host_capacity": write_mode=back host_capacity=0'
            )

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The names that `parse` knows."""
        names = [_KEY_OF.get(each.name, each.name) for each in fields(cls)]
        return ("path", *names)

    @classmethod
    def parse(cls, texts: Mapping[str, object]) -> "Settings":
        """Settings from what a person wrote.

        Args:
            texts: name -> text; `path` or `paths`, with `capacity`, or `url` are needed. A `url` of
                the scheme file is another way to give paths.

        Raises:
            ConfigError: an unknown name (with a known one that is near), a missing one, a bad
                value.
        """
        known = cls.keys()
        for name in texts:
            if name not in known:
                near = difflib.get_close_matches(str(name).lower(), known, n=1)
                hint = f'; the nearest is "{near[0]}"' if near else ""
                raise ConfigError(
                    f"there is no setting {str(name)!r}{hint}: known={','.join(known)}"
                )
        texts = _without_file_url(texts)
        if "path" in texts and "paths" in texts:
            raise ConfigError(
                f'give "path" for one drive or "paths" for several, not both: '
                f"path={texts['path']!r} paths={texts['paths']!r}"
            )
        given = ",".join(texts)
        has_path = "path" in texts or "paths" in texts
        if not has_path and "url" not in texts:
            raise ConfigError(
                f'the setting "path" is missing, or "url" for what engines share: given={given}'
            )
        if has_path and "capacity" not in texts:
            raise ConfigError(f'the setting "capacity" is missing: given={given}')
        if "capacity" in texts and not has_path:
            raise ConfigError(
                f"capacity is of the disk tier, and there is no path; what a url may take is "
                f"given in the url, where its kind has such a limit: given={given}"
            )
        values: dict[str, object] = {}
        for each in fields(cls):
            name = _KEY_OF.get(each.name, each.name)
            if name in texts:
                values[each.name] = _parse_value(each.name, name, texts[name])
        if "path" in texts:
            values["paths"] = (parse_path(texts["path"]),)
        return cls(**values)  # type: ignore[arg-type]


def _without_file_url(texts: Mapping[str, object]) -> Mapping[str, object]:
    """``file:///dir?path=/more`` is the disk tier: its paths instead of the url."""
    url = texts.get("url")
    if not isinstance(url, str) or not url.startswith("file:"):
        return texts
    if "path" in texts or "paths" in texts:
        raise ConfigError(
            "a url of file:// is the disk tier, and its path is given as well: "
            f"url={without_password(url)!r}"
        )
    base, _, query = url.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    for name, _value in pairs:
        if name != "path":
            raise ConfigError(
                f'a file:// url has the parameter "path" and no other: '
                f"url={without_password(url)!r}"
            )
    paths = [base, *(path for _, path in pairs)]
    return {**{name: text for name, text in texts.items() if name != "url"}, "paths": paths}


NUMBERS = frozenset({"io_threads", "drive_writes_per_day", "min_read_tokens"})
"""Settings that are bare numbers; all others are texts, most of them with a unit."""

_KEY_OF = {
    "capacity_bytes": "capacity",
    "min_free_bytes": "min_free",
    "host_capacity_bytes": "host_capacity",
    "inflight_writes_bytes": "inflight_writes",
    "read_deadline_s": "read_deadline",
    "write_deadline_s": "write_deadline",
    "ttl_s": "ttl",
    "slow_after_s": "slow_after",
}
_RANGES: dict[str, tuple[float, float]] = {
    "io_threads": (1, 256),
    "drive_writes_per_day": (0, 1000),
    "min_read_tokens": (0, 1 << 30),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "eviction": POLICY_NAMES,
    "admission": ADMISSION_NAMES,
    "write_mode": ("through", "back"),
    "promotion": ("always", "second-hit", "never"),
    "read_when": ("faster", "always"),
    "if_incompatible": ("refuse", "start_without"),
}


def _check_apart(paths: Sequence[Path]) -> None:
    """Raises ConfigError if a path is another, or lies in it."""
    parts = sorted(path.parts[1:] for path in paths)  # without "/" or "//"
    # Whatever lies in a directory comes next to it, or next to something else that does.
    for outer, inner in itertools.pairwise(parts):
        if inner[: len(outer)] == outer:
            wrong = "is given twice" if inner == outer else "lies in another one"
            raise ConfigError(
                f"a path {wrong}; each drive has its own: paths={','.join(map(str, paths))}"
            )


def _check_outside(target: tuple[str, int] | str, paths: Sequence[Path]) -> None:
    """Raises ConfigError if a file to export to lies in the store: it might be the journal."""
    if not isinstance(target, str):
        return
    parts = Path(target).parts[1:]
    for path in paths:
        inside = path.parts[1:]
        if parts[: len(inside)] == inside:
            raise ConfigError(
                f"metrics lies in the store, and might overwrite a file of it; give one elsewhere: "
                f"metrics={target!r} path={path}"
            )


def _one_of(choices: Sequence[str]) -> str:
    quoted = [f'"{choice}"' for choice in choices]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _parse_value(field_name: str, name: str, value: object) -> object:
    if field_name == "paths":
        return _parse_paths(value)
    if field_name.endswith("_bytes"):
        return parse_size(value, name)
    if field_name == "ttl_s":
        return parse_duration(value, name, most_s=_TTL_LIMIT_S)
    if field_name.endswith("_s"):
        return parse_duration(value, name)
    if field_name in ("io_threads", "min_read_tokens"):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is a whole number: {name}={value!r}")
        return value
    if field_name == "drive_writes_per_day":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is a number such as 1 or 0.5: {name}={value!r}")
        return float(value)
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a text: {name}={value!r}")
    return value


def _parse_paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(
            f'paths is a list of directories such as ["/mnt/a/kv", "/mnt/b/kv"]: paths={value!r}'
        )
    return tuple(parse_path(each) for each in value)
