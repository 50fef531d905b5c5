"""Settings: few, each with a unit and a checked range; an unknown one names its neighbour.

Sizes and times are texts with a unit ("20GiB", "10s"), so that no number can be misread.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stepwell.errors import ConfigError

__all__ = ["Settings", "format_bytes", "parse_duration", "parse_path", "parse_size"]

_SIZE_UNITS = {
    "B": 1,
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_SIZE_LIMIT_BYTES = 1 << 63  # what a file system can say of itself
_TIME_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME_LIMIT_S = 24 * 3600.0
_NUMBER = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object, name: str) -> int:
    """Bytes from a text such as "20GiB", "1.5 TB" or "4096B".

    Raises:
        ConfigError: no unit, an unknown unit, not a number, negative, or 8 EiB and more.
    """
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ConfigError(
                f'{name} needs a unit: write "{value}B", or "20GiB" for example: {name}={value!r}'
            )
        raise ConfigError(f'{name} is a size such as "20GiB": {name}={value!r}')
    number, unit = match.groups()
    if not unit:
        raise ConfigError(f'{name} needs a unit: write "{number}GiB" for example: {name}={value!r}')
    factor = _SIZE_UNITS.get(unit.upper())
    if factor is None:
        raise ConfigError(
            f"{name} has an unknown unit; known are B, KiB, MiB, GiB, TiB, KB, MB, GB, TB: "
            f"{name}={value!r}"
        )
    size = float(number) * factor
    if size < 0:
        raise ConfigError(f"{name} must not be negative: {name}={value!r}")
    if size >= _SIZE_LIMIT_BYTES:
        raise ConfigError(f"{name} is larger than anything there is: {name}={value!r}")
    return int(size)


def parse_duration(value: object, name: str) -> float:
    """Seconds from a text such as "500ms", "10s", "2min" or "1h".

    Raises:
        ConfigError: no unit, an unknown unit, not a number, not above zero, or above 24h.
    """
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None or match.group(2) not in _TIME_UNITS:
        raise ConfigError(
            f'{name} is a time with a unit (ms, s, min, h) such as "10s": {name}={value!r}'
        )
    seconds = float(match.group(1)) * _TIME_UNITS[match.group(2)]
    if not 0 < seconds <= _TIME_LIMIT_S:
        raise ConfigError(f"{name} is above zero and at most 24h: {name}={value!r}")
    return seconds


def parse_path(value: object) -> Path:
    """The directory of the disk tier from "/dir" or "file:///dir".

    Raises:
        ConfigError: relative, another scheme, a host part, or not a text.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f'path is an absolute directory such as "/mnt/nvme/kv": path={value!r}')
    directory = value
    if "://" in value:
        try:
            url = urlsplit(value)
        except ValueError as error:
            raise ConfigError(f"path is no valid URL ({error}): path={value!r}") from error
        if url.scheme != "file":
            raise ConfigError(
                f'this version has one kind of path, a local directory: write "/dir" or '
                f'"file:///dir": path={value!r}'
            )
        if url.netloc:
            raise ConfigError(
                f"this names a host, {url.netloc!r}; three slashes begin a local directory: "
                f"write {'file:///' + url.netloc + url.path!r}: path={value!r}"
            )
        if url.query or url.fragment:
            raise ConfigError(f"a file:// path takes no parameters: path={value!r}")
        directory = unquote(url.path)
    if "\0" in directory:
        raise ConfigError(f"a path has no NUL byte: path={value!r}")
    if not directory.startswith("/"):
        example = os.path.abspath(directory)
        raise ConfigError(f"path must be absolute: write {example!r} for example: path={value!r}")
    return Path(os.path.normpath(directory))


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
        path: absolute directory of the disk tier; created if missing.
        capacity_bytes: what the disk tier may take, 1 MiB or more (text: "capacity").
        min_free_bytes: free space that is left on the file system (text: "min_free").
        host_capacity_bytes: DRAM of Stepwell's own host tier; 0 for none, the default, since
            inside one vLLM engine the primary is the host tier (text: "host_capacity").
        io_threads: threads that read and write, 1 to 256.
        inflight_writes_bytes: chunks of writes beyond this wait nowhere, they are refused
            (text: "inflight_writes").
        read_deadline_s: chunks that have not begun by then are misses (text: "read_deadline").
        write_deadline_s: the same for writes (text: "write_deadline").
        weights_id: takes the place of the fingerprint of the model's weights, for models whose
            files Stepwell cannot see; change it when the weights change.
        if_incompatible: what an engine does whose version Stepwell does not fit: "refuse" to
            start, or "start_without" Stepwell.
    """

    path: Path
    capacity_bytes: int
    min_free_bytes: int = 1 << 30
    host_capacity_bytes: int = 0
    io_threads: int = 8
    inflight_writes_bytes: int = 4 << 30
    read_deadline_s: float = 10.0
    write_deadline_s: float = 30.0
    weights_id: str = ""
    if_incompatible: str = "refuse"

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1 << 20:
            raise ConfigError(f"capacity is at least 1MiB: capacity={self.capacity_bytes}B")
        if not 1 <= self.io_threads <= 256:
            raise ConfigError(f"io_threads is 1 to 256: io_threads={self.io_threads}")
        if self.inflight_writes_bytes < 1 << 20:
            raise ConfigError(
                f"inflight_writes is at least 1MiB: inflight_writes={self.inflight_writes_bytes}B"
            )
        if self.if_incompatible not in ("refuse", "start_without"):
            raise ConfigError(
                'if_incompatible is "refuse" or "start_without": '
                f"if_incompatible={self.if_incompatible!r}"
            )

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The names that `parse` knows."""
        return tuple(_KEY_OF.get(field.name, field.name) for field in fields(cls))

    @classmethod
    def parse(cls, texts: Mapping[str, object]) -> "Settings":
        """Settings from what a person wrote.

        Args:
            texts: name -> text; `path` and `capacity` are needed.

        Raises:
            ConfigError: an unknown name (with the nearest known one), a missing one, a bad value.
        """
        known = cls.keys()
        for name in texts:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f'there is no setting {str(name)!r}; the nearest is "{near}": '
                    f"known={','.join(known)}"
                )
        for name in ("path", "capacity"):
            if name not in texts:
                raise ConfigError(f'the setting "{name}" is missing: given={",".join(texts)}')
        values: dict[str, object] = {}
        for field in fields(cls):
            name = _KEY_OF.get(field.name, field.name)
            if name in texts:
                values[field.name] = _parse_value(field.name, name, texts[name])
        return cls(**values)  # type: ignore[arg-type]


_KEY_OF = {
    "capacity_bytes": "capacity",
    "min_free_bytes": "min_free",
    "host_capacity_bytes": "host_capacity",
    "inflight_writes_bytes": "inflight_writes",
    "read_deadline_s": "read_deadline",
    "write_deadline_s": "write_deadline",
}


def _parse_value(field_name: str, name: str, value: object) -> object:
    if field_name == "path":
        return parse_path(value)
    if field_name.endswith("_bytes"):
        return parse_size(value, name)
    if field_name.endswith("_s"):
        return parse_duration(value, name)
    if field_name == "io_threads":
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"io_threads is a whole number: io_threads={value!r}")
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a text: {name}={value!r}")
    return value
