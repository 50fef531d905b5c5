"""Where a benchmark works, and that nothing of it is left whatever ends it."""

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["signals_as_exceptions", "working_folders"]


@contextlib.contextmanager
def working_folders(parents: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """A new folder in each of the directories, removed at the end whatever happens."""
    made: list[Path] = []
    try:
        for parent in parents:
            made.append(Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir=parent)))
        yield tuple(made)
    finally:
        # People press Ctrl-C twice; the second must not leave gigabytes behind.
        interrupts = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, interrupts)
        try:
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that what was made or started is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
