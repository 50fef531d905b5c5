"""How the disk tier's directory is laid out, opened and kept to one owner.

::

    PATH/stepwell.json                      {"format": 2}: this directory is a Stepwell store
    PATH/LOCK                               held (flock) by the one process that writes
    PATH/extents/<id>-<slot bytes>.kv       slots of one size, a record in each
    PATH/journal                            which slots hold records: a hint, made again if lost
    PATH/roots/<root>.json                  whose data lies here, in words
    PATH/partial/                           what is being made; emptied at start-up
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stepwell.core.identity import Identity
from stepwell.core.keys import ROOT_BYTES, Root
from stepwell.core.record import PAGE_BYTES
from stepwell.errors import ConfigError
from stepwell.tiers.files import entries, read_small_text, remove_tree, write_whole

__all__ = ["EXTENT_SUFFIX", "FORMAT", "FoundExtent", "StoreDirectory"]

FORMAT = 2
EXTENT_SUFFIX = ".kv"
_MARKER = "stepwell.json"
_MARKER_TEXT = json.dumps({"format": FORMAT}) + "\n"
_HARMLESS = frozenset({"lost+found"})
_LAST_EXTENT_ID = (1 << 31) - 1
_EXTENT_NAME = re.compile(r"([0-9]{8,10})-([1-9][0-9]{3,14})\.kv")


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """An extent found by its name.

    Attributes:
        extent_id: its number.
        slot_bytes: a multiple of 4096.
        size_bytes: as the file system says.
        path: absolute.
    """

    extent_id: int
    slot_bytes: int
    size_bytes: int
    path: str


class StoreDirectory:
    """Paths and directory work of one store; knows nothing of records' content.

    Threading: any thread; directory work is safe against itself because every file has a unique
    name until it is renamed into place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.roots = os.path.join(path, "roots")
        self.extents = os.path.join(path, "extents")
        self.partial = os.path.join(path, "partial")
        self.journal = os.path.join(path, "journal")
        self._lock_fd = -1

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
            self.make_folders()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"path cannot be written ({error.strerror}): path={self.path}"
            ) from error

    def make_folders(self) -> None:
        """Make the directories of a store, those that somebody removed.

        Raises:
            OSError: from the system.
        """
        for directory in (self.roots, self.extents, self.partial):
            os.makedirs(directory, exist_ok=True)

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
            text = os.read(fd, 4096).decode("utf-8", "replace").partition("\n")[0]
            return int(text) if text.isdigit() else 0
        finally:
            os.close(fd)
        return None

    def note_metrics(self, target: str) -> None:
        """Note beside the owner's process id where it exports its counters."""
        with contextlib.suppress(OSError, ValueError):  # a full disk: nobody is told
            text = f"{os.getpid()}\n" + (f"metrics {target}\n" if target else "")
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, text.encode("utf-8"), 0)

    def metrics_target(self) -> str:
        """Where the present owner exports its counters; empty if nowhere, or nobody owns it."""
        if self.owner() is None:
            return ""
        try:
            lines = read_small_text(os.path.join(self.path, "LOCK")).splitlines()
        except (OSError, ValueError):
            return ""
        words = next((line for line in lines[1:] if line.startswith("metrics ")), "")
        return words.removeprefix("metrics ")

    def extent_path(self, extent_id: int, slot_bytes: int) -> str:
        """Where an extent lies."""
        return f"{self.extents}/{extent_id:08d}-{slot_bytes}{EXTENT_SUFFIX}"

    def partial_path(self) -> str:
        """A fresh name for something that is being made."""
        return f"{self.partial}/{secrets.token_hex(16)}"

    def find_extents(self) -> list[FoundExtent]:
        """The extents that lie here, by their names; anything else is passed over.

        Of two with one number the first by name counts, and a name with needless zeros is none.

        Raises:
            OSError: they cannot be listed, so that nobody takes a full store for an empty one.
        """
        found = []
        for entry in self._extent_entries():
            match = _EXTENT_NAME.fullmatch(entry.name)
            if match is None or int(match[2]) % PAGE_BYTES or int(match[1]) > _LAST_EXTENT_ID:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(FoundExtent(int(match[1]), int(match[2]), status.st_size, entry.path))
        usable: dict[int, FoundExtent] = {}
        for extent in sorted(found, key=lambda each: each.path):
            if extent.path == self.extent_path(extent.extent_id, extent.slot_bytes):
                usable.setdefault(extent.extent_id, extent)
        return [usable[extent_id] for extent_id in sorted(usable)]

    def last_extent_id(self) -> int:
        """The highest number that anything among the extents is named after; -1 if none is.

        Raises:
            OSError: they cannot be listed.
        """
        matches = (_EXTENT_NAME.fullmatch(entry.name) for entry in self._extent_entries())
        ids = (int(match[1]) for match in matches if match is not None)
        return max((each for each in ids if each < _LAST_EXTENT_ID), default=-1)

    def _extent_entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.extents) as found:
                return list(found)
        except FileNotFoundError:
            return []

    def describe(self, root: Root, identity: Identity) -> None:
        """Write a root's description beside its records, unless it is there.

        Raises:
            OSError: from the system; nothing half-written is left.
        """
        path = os.path.join(self.roots, f"{root.hex()}.json")
        if _read_identity(path) != identity:
            write_whole(path, self.partial_path(), identity.to_json() + "\n")

    def forget(self, root: Root) -> None:
        """Remove the description of a root that holds no records."""
        with contextlib.suppress(OSError):
            remove_tree(os.path.join(self.roots, f"{root.hex()}.json"))

    def identities(self) -> dict[Root, Identity | None]:
        """The roots that are described here (None where a description cannot be read)."""
        found: dict[Root, Identity | None] = {}
        for entry in entries(self.roots):
            raw = _from_hex(entry.name.removesuffix(".json"))
            if raw is not None and len(raw) == ROOT_BYTES and entry.name.endswith(".json"):
                root = Root(raw)
                identity = _read_identity(entry.path)
                found[root] = identity if identity is not None and identity.root == root else None
        return found

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
            if type(found) is int and 0 < found < FORMAT:
                raise ConfigError(
                    f"the store was written by an earlier version of Stepwell, which kept a file "
                    f"per record, and cannot be read; give another path, or remove it: "
                    f"path={self.path} format={found} known_format={FORMAT}"
                )
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
        text = os.pread(self._lock_fd, 4096, 0).decode("utf-8", "replace").partition("\n")[0]
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
