"""How the disk tier's directory is laid out, opened and kept to one owner.

::

    PATH/stepwell.json                      {"format": 2}: this directory is a Stepwell store
    PATH/LOCK                               held (flock) by the one process that writes
    PATH/extents/<id>-<slot bytes>.kv       slots of one size, a record in each
    PATH/journal                            which slots hold records: a hint, made again if lost
    PATH/roots/<root>.json                  whose data lies here, in words
    PATH/partial/                           what is being made; emptied at start-up
    PATH/strays/                            what `stepwell check --fix` moved out of the way

PATH may be a link, which is its owner's choice. Below it no link is followed: one in the place of
a directory would lead to somebody else's files, to be listed, moved or removed with the store's.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stepwell.core.identity import Identity
from stepwell.core.keys import ROOT_BYTES, Root
from stepwell.core.record import PAGE_BYTES
from stepwell.errors import ConfigError
from stepwell.tiers.files import (
    Entry,
    empty_folder,
    entries,
    kind_of,
    list_folder,
    opened_folder,
    read_small_text,
    write_whole,
)
from stepwell.tiers.slots import LAST_EXTENT_ID

__all__ = ["EXTENT_SUFFIX", "FORMAT", "Fault", "FoundExtent", "StoreDirectory"]

FORMAT = 2
EXTENT_SUFFIX = ".kv"
_MARKER = "stepwell.json"
_LOCK = "LOCK"
_MARKER_TEXT = json.dumps({"format": FORMAT}) + "\n"
_HARMLESS = frozenset({"lost+found"})
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


@dataclass(frozen=True, slots=True)
class Fault:
    """What keeps an engine from starting with a directory.

    Attributes:
        path: of the culprit, absolute.
        detail: what is wrong with it, after its name: "is a link, and ...".
        in_the_way: whether something else lies in its place.
    """

    path: str
    detail: str
    in_the_way: bool


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
        self.strays = os.path.join(path, "strays")
        self.marker = os.path.join(path, _MARKER)
        self.journal = os.path.join(path, "journal")
        self.lock = os.path.join(path, _LOCK)
        self._lock_fd = -1
        self._lock_file: tuple[int, int] | None = None  # device and inode, while it is held

    def open(self) -> None:
        """Create or adopt the directory and become its one owner.

        Raises:
            ConfigError: a file is in the way, it cannot be created or written, it holds other
                things, another format, something in the place of what is the store's, or another
                process owns it.
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
        try:
            self._adopt_new()
            self._refuse(self.faults(), "written")
            self._take_lock()
            self.make_folders()
            empty_folder(self.partial)
            with opened_folder(self.extents):
                pass  # or its name would not be among what is said later
        except OSError as error:
            self.close()
            raise self._unusable("written", error) from error

    def make_folders(self) -> None:
        """Make the directories of a store and its marker, those that somebody removed.

        Raises:
            NotADirectoryError: something else lies in the place of one, which is named.
            OSError: from the system.
        """
        os.makedirs(self.path, exist_ok=True)
        for folder in (self.roots, self.extents, self.partial):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        if not os.path.lexists(self.marker):
            self.write_marker()  # or nobody would take for a store what is made here now

    def open_to_read(self) -> None:
        """Check that this is a sound store, without owning or changing it.

        Raises:
            ConfigError: missing, not a store, another format, or one that no engine would open.
        """
        self._refuse(self.faults(), "read")

    def faults(self) -> list[Fault]:
        """What an engine would not start with although this is a store; nothing is followed.

        Raises:
            ConfigError: missing, not a store, another format, or it cannot be read.
        """
        if not os.path.isdir(self.path):
            what = "is a file" if os.path.exists(self.path) else "does not exist"
            raise ConfigError(f"path {what}; give the directory of a store: path={self.path}")
        try:
            found = [self._marker_fault(), self._in_the_way(self.lock, stat.S_ISREG, "a file")]
            for folder in (self.roots, self.extents, self.partial, self.strays):
                found.append(self._in_the_way(folder, stat.S_ISDIR, "a directory"))
            return [fault for fault in found if fault is not None]
        except OSError as error:
            raise self._unusable("read", error) from error

    def set_aside(self, path: str) -> None:
        """Move something below this directory to the strays: of a link itself, and not its end.

        Args:
            path: as `faults`, `list_folder` and others gave it: in this directory, or in a
                directory in it.

        Raises:
            OSError: from the system; where it lies among what is no directory it is left there.
        """
        folder, name = os.path.split(path)
        aside = f"{name}.{secrets.token_hex(4)}"
        with self._opened() as store, contextlib.ExitStack() as stack:
            source = store
            if folder != str(self.path):
                source = stack.enter_context(opened_folder(os.path.basename(folder), store))
            if path == self.strays:
                os.rename(name, aside, src_dir_fd=store, dst_dir_fd=store)
                name = aside
            with contextlib.suppress(FileExistsError):
                os.mkdir("strays", dir_fd=store)
            strays = stack.enter_context(opened_folder("strays", store))
            os.rename(name, aside, src_dir_fd=source, dst_dir_fd=strays)

    def write_marker(self) -> None:
        """Say that this directory is a store.

        Raises:
            OSError: from the system.
        """
        with self._opened() as store:
            partial = f"{_MARKER}.{secrets.token_hex(4)}"
            write_whole(_MARKER, store, partial, store, _MARKER_TEXT)

    def close(self) -> None:
        """Give up ownership."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd, self._lock_file = -1, None

    def owner(self) -> int | None:
        """Process id of whoever owns the store at present, None if nobody does."""
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.lock, flags)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(fd, 4096).decode("utf-8", "replace").partition("\n")[0]
            return int(text) if text.isascii() and text.isdecimal() else 0
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
            lines = read_small_text(self.lock).splitlines()
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
            if match is None or int(match[2]) % PAGE_BYTES or int(match[1]) > LAST_EXTENT_ID:
                continue
            if entry.is_regular:
                found.append(
                    FoundExtent(int(match[1]), int(match[2]), entry.size_bytes, entry.path)
                )
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
        return max((each for each in ids if each <= LAST_EXTENT_ID), default=-1)

    def _extent_entries(self) -> list[Entry]:
        try:
            return list_folder(self.extents)
        except FileNotFoundError:
            return []

    def describe(self, root: Root, identity: Identity) -> None:
        """Write a root's description beside its records, unless it is there.

        Raises:
            OSError: from the system; nothing half-written is left.
        """
        name = f"{root.hex()}.json"
        with opened_folder(self.roots) as roots, opened_folder(self.partial) as partial:
            if _read_identity(name, roots) != identity:
                text = identity.to_json() + "\n"
                write_whole(name, roots, secrets.token_hex(16), partial, text)

    def forget(self, root: Root) -> None:
        """Remove the description of a root that holds no records.

        A directory with such a name is not the store's, and left alone.
        """
        with contextlib.suppress(OSError), opened_folder(self.roots) as roots:
            os.unlink(f"{root.hex()}.json", dir_fd=roots)

    def identities(self) -> dict[Root, Identity | None]:
        """The roots that are described here (None where a description cannot be read)."""
        found: dict[Root, Identity | None] = {}
        try:
            with opened_folder(self.roots) as roots:
                for entry in entries(self.roots):
                    raw = _from_hex(entry.name.removesuffix(".json"))
                    if raw is not None and len(raw) == ROOT_BYTES and entry.name.endswith(".json"):
                        identity = _read_identity(entry.name, roots)
                        fits = identity is not None and identity.root == raw
                        found[Root(raw)] = identity if fits else None
        except OSError:
            return found  # they are for people; a store without them works
        return found

    # What an engine starts with.

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        """This directory; a link to it is followed, for that was somebody's choice."""
        return opened_folder(os.path.join(self.path, "."))

    def _adopt_new(self) -> None:
        """Make a store of an empty directory.

        Raises:
            OSError: from the system.
        """
        # A process that was killed while it wrote the marker leaves a part of it.
        others = [
            name
            for name in os.listdir(self.path)
            if name not in _HARMLESS and not name.startswith(f"{_MARKER}.")
        ]
        if not others:
            self.write_marker()
        elif _MARKER not in others and not self._has_extents():
            raise ConfigError(
                f"path holds other things and no Stepwell store; give an empty or a new "
                f"directory: path={self.path} found={sorted(others)[0]}"
            )

    def _marker_fault(self) -> Fault | None:
        """What is wrong with the marker of a directory that has a store's extents.

        Raises:
            ConfigError: this is no store, or has another format.
            OSError: from the system.
        """
        fault = self._in_the_way(self.marker, stat.S_ISREG, "a file")
        if fault is None:
            try:
                self._check_format(json.loads(read_small_text(self.marker)))
            except FileNotFoundError:
                fault = Fault(
                    self.marker,
                    "is missing, without which there is no Stepwell store",
                    in_the_way=False,
                )
            except (ValueError, RecursionError):
                fault = Fault(self.marker, "is damaged", in_the_way=False)
        if fault is None or self._has_extents():
            return fault
        if not os.path.lexists(self.marker):
            raise ConfigError(
                f"there is no Stepwell store here, which an engine makes when it starts, with a "
                f"{_MARKER} in it: path={self.path}"
            )
        raise ConfigError(
            f"{_MARKER} {fault.detail}, and there are no extents here, so that nothing is lost: "
            f"give another path, or remove this directory: path={self.path}"
        )

    def _check_format(self, data: object) -> None:
        """Raises ConfigError for another format, ValueError for what says none."""
        found = data.get("format") if isinstance(data, dict) else None
        if type(found) is not int or found < 1:
            raise ValueError("no format")
        if found < FORMAT:
            raise ConfigError(
                f"the store was written by an earlier version of Stepwell, which kept a file "
                f"per record, and cannot be read; give another path, or remove it: "
                f"path={self.path} format={found} known_format={FORMAT}"
            )
        if found > FORMAT:
            raise ConfigError(
                f"the store was written by a later version of Stepwell; upgrade, or give another "
                f"path: path={self.path} "
                f"format={found} known_format={FORMAT}"
            )

    def _has_extents(self) -> bool:
        return any(_EXTENT_NAME.fullmatch(entry.name) for entry in entries(self.extents))

    def _in_the_way(self, path: str, is_it: Callable[[int], bool], kind: str) -> Fault | None:
        """What lies in the place of something that is to be of a kind, if it is of another."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        if is_it(mode):
            return None
        detail = f"is {kind_of(mode)}, where a store has {kind}"
        if stat.S_ISLNK(mode):
            detail += ", and is not followed"
        return Fault(path, detail, in_the_way=True)

    def _refuse(self, faults: Sequence[Fault], what: str) -> None:
        """Raises ConfigError for the first of them, with what to do."""
        for fault in faults:
            does = "moves it out of the way" if fault.in_the_way else "writes it again"
            raise ConfigError(
                f"path cannot be {what}: {os.path.basename(fault.path)} {fault.detail}; "
                f"`stepwell check --fix` {does}: path={self.path} at={fault.path}"
            )

    def _unusable(self, what: str, error: OSError) -> ConfigError:
        """Says that the path cannot be written, or read, and which file it was."""
        at = f" at={error.filename}" if error.filename not in (None, str(self.path)) else ""
        reason = error.strerror or error
        return ConfigError(f"path cannot be {what} ({reason}): path={self.path}{at}")

    def _take_lock(self) -> None:
        # Whoever asks for the owner holds a shared lock for a moment; do not mistake that for one.
        give_up_s = time.monotonic() + 0.3
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            self._lock_fd = os.open(self.lock, flags, 0o644)
            status = os.fstat(self._lock_fd)
            self._lock_file = (status.st_dev, status.st_ino)
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

    def has_lock(self) -> bool:
        """Whether a LOCK lies there, whoever holds it."""
        return os.path.lexists(os.path.join(self.path, "LOCK"))

    def owned(self) -> bool:
        """Whether the LOCK that lies there is the one that this process holds."""
        try:
            there = os.stat(self.lock, follow_symlinks=False)
            return (there.st_dev, there.st_ino) == self._lock_file
        except OSError:
            return False

    def _refuse_second_owner(self, error: BlockingIOError) -> NoReturn:
        text = os.pread(self._lock_fd, 4096, 0).decode("utf-8", "replace").partition("\n")[0]
        self.close()
        raise ConfigError(
            f"another process uses this store; give each engine its own path: "
            f"path={self.path} pid={text or 'unknown'}"
        ) from error


def _read_identity(name: str, folder: int) -> Identity | None:
    try:
        identity = Identity.from_json(read_small_text(name, folder))
        return identity if identity.root else None  # a root that can be computed at all
    except (OSError, ValueError):
        return None


def _from_hex(text: str) -> bytes | None:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    return raw if raw.hex() == text else None
