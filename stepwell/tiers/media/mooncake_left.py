"""Clients of Mooncake's library that could not be closed: so many, and no more.

Each holds 64 MiB of the library's and some threads. Were one forgotten, its end would close it,
and hold up the interpreter.
"""

import logging
import threading
from typing import Any

from stepwell.errors import TierError

__all__ = ["check_room", "leave", "left", "take_back"]

logger = logging.getLogger(__name__)

_MAX_LEFT = 8

_lock = threading.Lock()
_left: list[Any] = []


def check_room() -> None:
    """To be asked before a client is made.

    Raises:
        TierError: so many are left that there may be no further one.
    """
    with _lock:
        count = len(_left)
    if count >= _MAX_LEFT:
        raise TierError(
            f"no further client of Mooncake is made, since so many could not be closed; if that "
            f"stays so, start this process again: left={count}"
        )


def leave(what: Any) -> None:
    """Keep it, and say so."""
    with _lock:
        _left.append(what)
        count = len(_left)
    logger.warning(
        "a client of Mooncake is not closed, and keeps 64 MiB: left=%d most=%d", count, _MAX_LEFT
    )


def left() -> tuple[Any, ...]:
    """All of them, the oldest first."""
    with _lock:
        return tuple(_left)


def take_back(what: Any) -> None:
    """It is closed after all."""
    with _lock:
        _left[:] = [each for each in _left if each is not what]
