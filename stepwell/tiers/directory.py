"""How the disk tier's directory is laid out, opened, scanned and kept to one owner.

::

    PATH/stepwell.json                      {"format": 1}: this directory is a Stepwell store
    PATH/LOCK                               held (flock) by the one process that writes
    PATH/roots/<root>/root.json             whose data lies here, in words
    PATH/roots/<root>/<xx>/<key>.kv         one record; xx = the key's first byte
    PATH/partial/                           records being written; emptied at start-up
    PATH/quarantine/                        what turned out wrong; the first to go
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stepwell.core.identity import Identity
from stepwell.core.keys import (
    ENGINE_KEY_MAX_BYTES,
    ROOT_BYTES,
    Key,
    Root,
    engine_key_of,
    make_key,
    root_of,
)
from stepwell.errors import ConfigError
from stepwell.tiers.files import entries, read_small_text, remove_tree, tree_bytes, write_whole

__all__ = ["FORMAT", "RECORD_SUFFIX", "Found", "StoreDirectory"]

FORMAT = 1
RECORD_SUFFIX = ".kv"
_MARKER = "stepwell.json"
_MARKER_TEXT = json.dumps({"format": FORMAT}) + "\n"
_HARMLESS = frozenset({"lost+found"})


@dataclass(frozen=True, slots=True)
class Found:
    """A record found by a scan, by its name alone.

    Attributes:
        key: from the names of its directories and file.
        path: absolute.
        size_bytes: as the file system says.
        used_at_s: when it was last read or written, seconds since the epoch (coarse).
    """

    key: Key
    path: str
    size_bytes: int
    used_at_s: float


class StoreDirectory:
    """Paths and directory work of one store; knows nothing of records' content.

    Threading: any thread; directory work is safe against itself because every file has a unique
    name until it is renamed into place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.roots = os.path.join(path, "roots")
        self.partial = os.path.join(path, "partial")
        self.quarantine = os.path.join(path, "quarantine")
        self._lock_fd = -1
        self._own_lock = threading.Lock()

    def open(self) -> None:
        """Create or adopt the directory and become its one owner.

        Raises:
            ConfigError: a file is in the way, it cannot be created or written, it holds other
                things, another format, or another process owns it.
        """
        try:
            os.makedirs(self.path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"path is a file, or leads through one; give a directory: path={self.path}"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"path cannot be created ({error.strerror}): path={self.path}"
            ) from error
        self._check_marker(create=True)
        try:
            self._take_lock()
            if os.path.isdir(self.partial):
                remove_tree(self.partial)
            for directory in (self.roots, self.partial, self.quarantine):
                os.makedirs(directory, exist_ok=True)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"path cannot be written ({error.strerror}): path={self.path}"
            ) from error

    def open_to_read(self) -> None:
        """Check that this is a store, without owning or changing it.

        Raises:
            ConfigError: missing, not a store, or another format.
        """
        if not os.path.isdir(self.path):
            what = "is a file" if os.path.exists(self.path) else "does not exist"
            raise ConfigError(f"path {what}; give the directory of a store: path={self.path}")
        self._check_marker(create=False)

    def close(self) -> None:
        """Give up ownership."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def owner(self) -> int | None:
        """Process id of whoever owns the store at present, None if nobody does."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(os.path.join(self.path, "LOCK"), flags)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(fd, 32).decode("ascii", "replace").strip()
            return int(text) if text.isdigit() else 0
        finally:
            os.close(fd)
        return None

    def record_path(self, key: Key) -> str:
        """Where the record of ``key`` lies."""
        name = engine_key_of(key).hex()
        return f"{self.roots}/{root_of(key).hex()}/{name[:2]}/{name}{RECORD_SUFFIX}"

    def partial_path(self) -> str:
        """A fresh name for a record that is being written."""
        return f"{self.partial}/{secrets.token_hex(16)}"

    def make_parents(self, record_path: str, identity: Identity | None) -> None:
        """Create what a record needs around it, also if somebody removed the whole store.

        Raises:
            OSError: from the system; nothing half-written is left.
        """
        os.makedirs(self.partial, exist_ok=True)
        os.makedirs(os.path.dirname(record_path), exist_ok=True)
        with self._own_lock:  # of several writers one takes the lock again
            if not self.owned():
                self._own_again()
        marker = os.path.join(self.path, _MARKER)
        if not os.path.exists(marker):
            write_whole(marker, self.partial_path(), _MARKER_TEXT)
        description = os.path.join(os.path.dirname(os.path.dirname(record_path)), "root.json")
        if identity is not None and _read_identity(description) != identity:
            write_whole(description, self.partial_path(), identity.to_json() + "\n")

    def _own_again(self) -> None:
        # Somebody removed LOCK, perhaps with the whole store; another process may own it now.
        self.close()
        try:
            self._take_lock()
        except ConfigError as error:
            raise OSError(errno.EBUSY, "the store has another owner now", str(self.path)) from error

    def prune(self, root: Root) -> None:
        """Remove a root that holds no records; whatever else lies there stays."""
        path = os.path.join(self.roots, root.hex())
        for bucket in entries(path):
            if bucket.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.rmdir(bucket.path)
        if [entry.name for entry in entries(path)] in ([], ["root.json"]):
            with contextlib.suppress(OSError):
                remove_tree(path)

    def set_aside(self, path: str, reason: str) -> str | None:
        """Move what lies at ``path`` to the quarantine; None if it is gone or cannot be moved."""
        name = os.path.basename(path).removesuffix(RECORD_SUFFIX)
        target = os.path.join(self.quarantine, f"{name}.{reason}.{secrets.token_hex(4)}")
        try:
            os.makedirs(self.quarantine, exist_ok=True)
            os.rename(path, target)
        except OSError:
            return None
        return target

    def scan(self) -> Iterator[Found]:
        """Every record, by its name; nothing is opened. Unreadable directories are passed over."""
        for root_name, root in self._roots():
            for bucket in entries(os.path.join(self.roots, root_name)):
                if not bucket.is_dir(follow_symlinks=False):
                    continue
                for entry in entries(bucket.path):
                    key = _key_from_name(root, entry.name)
                    if key is None:
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    regular = stat.S_ISREG(status.st_mode)
                    size_bytes = status.st_size if regular else tree_bytes(entry.path)
                    yield Found(key, entry.path, size_bytes, status.st_mtime)

    def identities(self) -> dict[Root, Identity | None]:
        """The roots that lie here, with their descriptions (None where one cannot be read)."""
        found: dict[Root, Identity | None] = {}
        for root_name, root in self._roots():
            identity = _read_identity(os.path.join(self.roots, root_name, "root.json"))
            found[root] = identity if identity is not None and identity.root == root else None
        return found

    def quarantined(self) -> list[tuple[str, int, float]]:
        """What is set aside, oldest first, as (path, bytes, seconds since the epoch)."""
        found = []
        for entry in entries(self.quarantine):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            found.append((entry.path, tree_bytes(entry.path), status.st_ctime))
        return sorted(found, key=lambda item: item[2])

    def _roots(self) -> Iterator[tuple[str, Root]]:
        for entry in entries(self.roots):
            raw = _from_hex(entry.name)
            if raw is not None and len(raw) == ROOT_BYTES:
                yield entry.name, Root(raw)

    def _check_marker(self, *, create: bool) -> None:
        marker = os.path.join(self.path, _MARKER)
        try:
            data = json.loads(read_small_text(marker))
        except FileNotFoundError:
            self._adopt_empty(marker, create=create)
        except OSError as error:
            raise ConfigError(
                f"path cannot be read ({error.strerror}): path={self.path}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{_MARKER} is damaged; remove it by hand if the directory is a "
                f"Stepwell store: path={self.path}"
            ) from error
        else:
            found = data.get("format") if isinstance(data, dict) else None
            if type(found) is not int or found != FORMAT:
                raise ConfigError(
                    f"the store was written by another version: path={self.path} "
                    f"format={found} known_format={FORMAT}"
                )

    def _adopt_empty(self, marker: str, *, create: bool) -> None:
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise ConfigError(
                f"path cannot be read ({error.strerror}): path={self.path}"
            ) from error
        others = [
            name
            for name in names
            # A process that was killed while it wrote the marker leaves a part of it.
            if name not in _HARMLESS and not name.startswith(f"{_MARKER}.")
        ]
        if not create:
            raise ConfigError(f"there is no Stepwell store here: path={self.path}")
        if others:
            raise ConfigError(
                f"path holds other things and no Stepwell store; give an empty or a new "
                f"directory: path={self.path} found={sorted(others)[0]}"
            )
        try:
            write_whole(marker, f"{marker}.{secrets.token_hex(4)}", _MARKER_TEXT)
        except OSError as error:
            raise ConfigError(
                f"path cannot be written ({error.strerror}): path={self.path}"
            ) from error

    def _take_lock(self) -> None:
        # Whoever asks for the owner holds a shared lock for a moment; do not mistake that for one.
        give_up_s = time.monotonic() + 0.3
        lock = os.path.join(self.path, "LOCK")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            self._lock_fd = os.open(lock, flags, 0o644)
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > give_up_s:
                    self._refuse_second_owner(error)
            else:
                if self.owned():
                    break
            self.close()  # it was removed meanwhile, or is held; look again
            time.sleep(0.01)
        with contextlib.suppress(OSError):  # a full disk: the owner is then "unknown"
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode("ascii"), 0)

    def owned(self) -> bool:
        """Whether the LOCK that lies there is the one that this process holds."""
        try:
            there = os.stat(os.path.join(self.path, "LOCK"), follow_symlinks=False)
            return os.path.samestat(there, os.fstat(self._lock_fd))
        except OSError:
            return False

    def _refuse_second_owner(self, error: BlockingIOError) -> NoReturn:
        text = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
        self.close()
        raise ConfigError(
            f"another process uses this store; give each engine its own path: "
            f"path={self.path} pid={text or 'unknown'}"
        ) from error


def _read_identity(path: str) -> Identity | None:
    try:
        identity = Identity.from_json(read_small_text(path))
        return identity if identity.root else None  # a root that can be computed at all
    except (OSError, ValueError):
        return None


def _from_hex(text: str) -> bytes | None:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    return raw if raw.hex() == text else None


def _key_from_name(root: Root, name: str) -> Key | None:
    if not name.endswith(RECORD_SUFFIX):
        return None
    raw = _from_hex(name.removesuffix(RECORD_SUFFIX))
    if raw is None or not 1 <= len(raw) <= ENGINE_KEY_MAX_BYTES:
        return None
    return make_key(root, raw)
