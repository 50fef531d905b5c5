"""The operating system, of which chosen calls fail."""

import builtins
import os
import threading
from typing import Any

import pytest

from stepwell.tiers import blockio, directory, drive, extents, files, journal

CALLS = tuple(
    "open preadv pwritev pread pwrite write read replace rename unlink makedirs rmdir statvfs "
    "listdir scandir posix_fallocate ftruncate lseek fstat stat file".split()
)
NEED_SPACE = tuple("open pwritev pwrite write replace rename makedirs posix_fallocate file".split())
"""Those that may say that there is no space."""


class FaultyOs:
    """The module `os`, whose N-th call (and, if it is to last, every later one) fails.

    ``file`` stands for Python's own `open`.

    Args:
        failing: number of the call, from 1; 0 for none.
        error: errno.
        lasting: whether the calls after it fail as well, until `heal`.
        only: names of the calls that are counted and fail.
    """

    def __init__(
        self, failing: int, error: int, lasting: bool, only: tuple[str, ...] = CALLS
    ) -> None:
        self.calls: list[str] = []
        self.healed = False
        self._failing = failing
        self._error = error
        self._lasting = lasting
        self._only = only
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._failing_call(name, real) if name in self._only else real

    def _failing_call(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                number = len(self.calls)
            hit = number >= self._failing if self._lasting else number == self._failing
            if self._failing and hit and not self.healed:
                raise OSError(self._error, os.strerror(self._error))
            return real(*args, **kwargs)

        return call

    def heal(self) -> None:
        """From now on nothing fails."""
        self.healed = True

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        """In the place of the one that the disk tier uses."""
        for module in (blockio, directory, drive, extents, files, journal):
            patch.setattr(module, "os", self)
            if "file" in self._only:
                opening = self._failing_call("file", builtins.open)
                patch.setattr(module, "open", opening, raising=False)
