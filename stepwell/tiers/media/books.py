"""What a sweeper tells of its books, and the small files of a pool, read with care."""

import errno
import json
import os
from dataclasses import dataclass

from stepwell.tiers.errnos import VANISHED
from stepwell.tiers.files import read_small_text
from stepwell.tiers.media.quota import Quota

__all__ = ["Books", "books_from", "number", "read_json", "write_json"]

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class Books:
    """What a sweeper has told of its books.

    Attributes:
        epoch: of the sweeper.
        sweeper: the member that it is.
        quota: see there.
        num_counted: records that the last count saw; None before the first.
        told: how often books were told in this epoch, this time included.
    """

    epoch: int
    sweeper: str
    quota: Quota
    num_counted: int | None = None
    told: int = 0

    @property
    def granted(self) -> dict[str, int]:
        """To each member, since it came."""
        return self.quota.granted


def books_from(path: str) -> Books | None:
    """Books as they were told; None if there are none, or nothing sensible.

    Raises:
        OSError: the file system fails; there may be some.
    """
    says = read_json(path)
    if says is None:
        return None
    try:
        granted, base = _numbers(says, "granted"), _numbers(says, "base")
        counted = None if says.get("counted") is None else number(says, "counted")
        records = None if says.get("records") is None else number(says, "records")
        quota = Quota(
            number(says, "capacity"),
            counted,
            number(says, "evicted"),
            number(says, "departed"),
            granted,
            {name: min(base.get(name, 0), most) for name, most in granted.items()},
        )
        sweeper = says.get("sweeper")
        return Books(
            number(says, "epoch"),
            sweeper if isinstance(sweeper, str) else "",
            quota,
            records,
            number(says, "told"),
        )
    except ValueError:
        return None


def number(says: dict[str, object], name: str) -> int:
    """A number of bytes, or of anything; 0 where it is not said.

    Raises:
        ValueError: it is none, or of no sensible size.
    """
    value = says.get(name, 0)
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"no number of bytes: {name}={value!r:.50}")
    return value


def _numbers(says: dict[str, object], name: str) -> dict[str, int]:
    found = says.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"no table: {name}={found!r:.50}")
    return {each: number(found, each) for each in found}


def write_json(part: str, path: str, says: object) -> None:
    """Write a file that appears whole, by rename.

    Raises:
        OSError: from the system.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(part, flags, 0o644), "w", encoding="ascii") as file:
        file.write(json.dumps(says, sort_keys=True))
    os.rename(part, path)


def read_json(path: str) -> dict[str, object] | None:
    """A JSON object; None if there is none.

    Raises:
        OSError: the file system fails; ESTALE as well, of a file that was replaced meanwhile.
    """
    try:
        says = json.loads(read_small_text(path))
    except OSError as error:
        if error.errno in VANISHED or error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR):
            return None  # not there, or no file
        raise
    except (ValueError, RecursionError):
        return None
    return says if isinstance(says, dict) else None
