"""A medium that stands still: calls that wait until they are let go."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def stalled_calls(module: Any, *names: str) -> Iterator[None]:
    """Within it, calls of these functions wait; at its end they go on."""
    released = threading.Event()

    def waiting(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            released.wait(30)
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(module, name, waiting(getattr(module, name)))
        try:
            yield
        finally:
            released.set()
