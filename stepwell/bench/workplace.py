"""Where a benchmark works, and that nothing of it is left whatever ends it."""

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.settings import format_bytes
from stepwell.tiers.media.fs import limits_of, path_of
from stepwell.tiers.media.kinds import kind_of
from stepwell.tiers.media.poolfiles import PoolFiles
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["check_folder", "check_pool", "signals_as_exceptions", "working_folders"]


def check_folder(path: Path) -> None:
    """Check that a directory to work in is there.

    Raises:
        ConfigError: it is not, or is something else.
    """
    if not path.is_dir():
        wrong = "this is no directory" if path.exists() else "the directory does not exist"
        raise ConfigError(f"{wrong}: path={path}")


def check_pool(url: MediumUrl, writes_bytes: int = 0) -> None:
    """Check that working in a shared directory makes nothing of others' leave.

    Args:
        url: of any kind; only of a shared directory there is anything to check.
        writes_bytes: that are written there, all in all.

    Raises:
        ConfigError: it would.
    """
    if not kind_of(url).is_pool:
        return
    path, limits = path_of(url), limits_of(url)
    files = PoolFiles(path)
    try:
        books = files.read_books(files.highest_epoch())
    except OSError:
        return  # there is none, or whoever opens it says what is wrong
    if books is None or not books.num_counted:
        return
    quota = books.quota
    if quota.capacity_bytes != limits.capacity_bytes:
        raise ConfigError(
            "there is a pool in use with another capacity, which is then that of all; give the "
            f"same: path={path} capacity={format_bytes(limits.capacity_bytes)} "
            f"there={format_bytes(quota.capacity_bytes)}"
        )
    if quota.room_bytes < writes_bytes:
        raise ConfigError(
            "what is there would make way for what is written; give a directory of its own, or "
            f"write less: path={path} room={format_bytes(max(0, quota.room_bytes))} "
            f"writes={format_bytes(writes_bytes)}"
        )


@contextlib.contextmanager
def working_folders(parents: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """A new folder in each of the directories, removed at the end whatever happens.

    Raises:
        KeyboardInterrupt: as it came, and saying what is left.
    """
    made: list[Path] = []
    try:
        with _removed_at_the_end(made):
            for parent in parents:
                made.append(Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir=parent)))
            yield tuple(made)
    except KeyboardInterrupt:
        left = [folder for folder in made if folder.exists()]
        where = ", ".join(map(str, left or parents))
        raise KeyboardInterrupt(f"; {'left' if left else 'nothing is left'} in {where}") from None


@contextlib.contextmanager
def _removed_at_the_end(made: Sequence[Path]) -> Iterator[None]:
    try:
        yield
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
    """Turn SIGTERM and SIGHUP into SystemExit, so that what was made or started is cleaned up.

    Raises:
        KeyboardInterrupt: as it came; with an argument, which is what is said of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(*(interrupt.args or ("",))) from None
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
