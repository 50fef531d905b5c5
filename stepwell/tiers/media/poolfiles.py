"""What lies in a pool beside its records: names, and small files read with care.

Layout, below the path::

    stepwell-pool.json            the marker (`stepwell.tiers.media.marker`)
    chunks/<root>/<aa>/<bb>/<key> records; 65,536 folders for each root
    temp/<member>-<number>        being written
    pool/members/<member>.json    what a member says of itself; that it changes is its pulse
    pool/recount                  of no length; since when what is charged may be too much
    pool/sweeps/<epoch>/          of whoever sweeps: its lease, its books, what it is evicting
    pool/sweeps/next-<member>/    what a member would begin to sweep with

Whoever can write to the directory may have put anything there: no link is followed below the path,
and what is no number of a sensible size is as good as missing.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from stepwell.tiers.errnos import GONE
from stepwell.tiers.files import opened_folder, remove_tree
from stepwell.tiers.media.books import Books, books_from, number, read_json, write_json
from stepwell.tiers.media.quota import Member

__all__ = ["PoolFiles"]

_LEASE = ".lease"
_BOOKS = "grants.json"
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_MEMBER = re.compile(r"[A-Za-z0-9._-]{1,200}")
_TRIES = 100


@dataclass(slots=True)
class PoolFiles:
    """Paths and small files of one pool.

    Threading: any thread; files appear whole, by rename. Errors: OSError from the system.

    Args:
        path: absolute.
    """

    path: Path
    chunks: str = field(init=False)
    temp: str = field(init=False)
    members: str = field(init=False)
    sweeps: str = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = f"{self.path}/chunks"
        self.temp = f"{self.path}/temp"
        self.members = f"{self.path}/pool/members"
        self.sweeps = f"{self.path}/pool/sweeps"

    # The pool as a whole.

    def make_folders(self) -> None:
        """Make what folders are missing of a pool that is there.

        Raises:
            NotADirectoryError: something else lies in the place of one, a link included.
            OSError: from the system.
        """
        for path in (self.chunks, self.temp, f"{self.path}/pool", self.members, self.sweeps):
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                continue
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, "no directory, or a link to one", path)

    def is_inside(self, path: str) -> bool:
        """Whether no folder from `chunks` to a record's path is a link, or missing."""
        folder = os.path.dirname(path)
        while len(folder) >= len(self.chunks):
            try:
                if not stat.S_ISDIR(os.lstat(folder).st_mode):
                    return False
            except OSError as error:
                if error.errno in GONE:
                    return False
                raise
            folder = os.path.dirname(folder)
        return True

    def ask_for_count(self) -> None:
        """Have whoever sweeps count the records anew: many are gone that it did not evict."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._recount, flags, 0o666)
        try:
            os.utime(fd)
        finally:
            os.close(fd)

    def count_asked_ns(self) -> int:
        """When that was asked for last, by the file system's clock, nanoseconds; 0 for never."""
        try:
            return os.lstat(self._recount).st_mtime_ns
        except OSError as error:
            if error.errno in GONE:
                return 0
            raise

    @property
    def _recount(self) -> str:
        return f"{self.path}/pool/recount"

    # Members.

    def read_members(self) -> dict[str, tuple[Member, int]]:
        """Every member by its name, and when its file was written, nanoseconds."""
        found = {}
        for name in os.listdir(self.members):
            member_id, dot, end = name.rpartition(".")
            if not dot or end != "json" or not _MEMBER.fullmatch(member_id):
                continue
            path = f"{self.members}/{name}"
            try:
                says = read_json(path)
                if says is None:
                    continue
                member = Member(
                    number(says, "written"),
                    number(says, "wanted"),
                    number(says, "refused"),
                    number(says, "capacity"),
                    says.get("left") is True,
                )
                found[member_id] = (member, os.lstat(path).st_mtime_ns)
            except ValueError:
                continue
            except OSError as error:
                if error.errno not in GONE:  # the next look shows it
                    raise
        return found

    def write_member(self, member_id: str, member: Member) -> int:
        """Say what a member says of itself; returns when that was, by the file system's clock."""
        says = {
            "written": member.written_bytes,
            "wanted": member.wanted_bytes,
            "refused": member.num_refused,
            "capacity": member.capacity_bytes,
            **({"left": True} if member.has_left else {}),
        }
        path = f"{self.members}/{member_id}.json"
        # Made among the sweeps, so that a client that caches directories looks at them anew.
        write_json(f"{self.sweeps}/part-{member_id}", path, says)
        return os.lstat(path).st_mtime_ns

    def pulse(self, member_id: str) -> int:
        """Be there, and say nothing new: also where the file system is full."""
        path = f"{self.members}/{member_id}.json"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o644)  # of no length it needs no room
        try:
            os.utime(fd)
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def remove_member(self, member_id: str) -> None:
        """Nothing is left of a member but what it wrote, and its part files in `temp`."""
        self.remove_prepared(member_id)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.members}/{member_id}.json")

    def remove_prepared(self, member_id: str) -> None:
        """Remove what a member would have begun to sweep with."""
        for name in (f"next-{member_id}/{member_id}{_LEASE}", f"part-{member_id}"):
            with contextlib.suppress(OSError):
                os.unlink(f"{self.sweeps}/{name}")
        with contextlib.suppress(OSError):
            os.rmdir(f"{self.sweeps}/next-{member_id}")

    # Sweeping.

    def sweep_folder(self, epoch: int) -> str:
        """Of whoever sweeps in an epoch."""
        return f"{self.sweeps}/{epoch}"

    def highest_epoch(self) -> int:
        """The one that counts; 0 if nobody has ever swept."""
        numbers = [int(name) for name in os.listdir(self.sweeps) if _NUMBER.fullmatch(name)]
        return max(numbers, default=0)

    def prepare(self, member_id: str) -> None:
        """Make what is moved into place by `begin`, so that taking over needs no room."""
        folder = f"{self.sweeps}/next-{member_id}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        os.close(os.open(f"{folder}/{member_id}{_LEASE}", flags, 0o644))

    def begin(self, member_id: str, epoch: int) -> bool:
        """Begin an epoch, which one alone can: a folder that is not empty is not replaced.

        Returns:
            False if somebody was faster.
        """
        folder = self.sweep_folder(epoch)
        os.utime(f"{self.sweeps}/next-{member_id}/{member_id}{_LEASE}", follow_symlinks=False)
        try:
            os.rename(f"{self.sweeps}/next-{member_id}", folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                return False
            raise
        if self.highest_epoch() != epoch:
            self.drop(folder)  # what it took for the highest no longer was
            return False
        return True

    def is_sweeping(self, member_id: str, epoch: int) -> bool:
        """Whether a member that began an epoch still is the one; in this pool, not in another."""
        try:
            os.lstat(self._lease(member_id, epoch))
        except OSError as error:
            if error.errno in GONE:
                return False
            raise
        return self.highest_epoch() == epoch

    def _lease(self, member_id: str, epoch: int) -> str:
        return f"{self.sweep_folder(epoch)}/{member_id}{_LEASE}"

    def lease_ns(self, epoch: int) -> int:
        """When the sweeper of an epoch was heard of last; 0 if it has resigned or never began."""
        member_id = self.sweeper_of(epoch)
        if not member_id:
            return 0
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            # Opened, for then a client asks the server, and does not say what it knew before.
            fd = os.open(self._lease(member_id, epoch), flags)
        except FileNotFoundError:
            return 0
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def renew(self, member_id: str, epoch: int) -> None:
        """Go on sweeping."""
        os.utime(self._lease(member_id, epoch), follow_symlinks=False)

    def resign(self, member_id: str, epoch: int) -> None:
        """Let another take over at once."""
        os.utime(self._lease(member_id, epoch), (0, 0), follow_symlinks=False)

    def sweeper_of(self, epoch: int) -> str:
        """The member that sweeps in an epoch; "" if there is none."""
        try:
            names = os.listdir(self.sweep_folder(epoch))
        except OSError as error:
            if error.errno in GONE:
                return ""
            raise
        found = sorted(name.removesuffix(_LEASE) for name in names if name.endswith(_LEASE))
        return next((name for name in found if _MEMBER.fullmatch(name)), "")

    def read_books(self, epoch: int) -> Books | None:
        """What the sweeper of an epoch has told; None if nothing, or nothing sensible."""
        try:
            return books_from(f"{self.sweep_folder(epoch)}/{_BOOKS}")
        except OSError as error:
            if error.errno in GONE:  # replaced just now; the next look finds what was told then
                return None
            raise

    def write_books(self, books: Books) -> None:
        """Tell; fails once there is a fence."""
        quota = books.quota
        says = {
            "epoch": books.epoch,
            "sweeper": books.sweeper,
            "told": books.told,
            "capacity": quota.capacity_bytes,
            "counted": quota.counted_bytes,
            "records": books.num_counted,
            "evicted": quota.evicted_bytes,
            "departed": quota.departed_bytes,
            "granted": quota.granted,
            "base": quota.base,
        }
        folder = self.sweep_folder(books.epoch)
        write_json(f"{folder}/part", f"{folder}/{_BOOKS}", says)

    # The fence.

    def fence(self, epoch: int) -> Books | None:
        """End every earlier epoch, so that nothing can be moved or told there any more.

        A sweeper that sleeps has nothing but its folder: it evicts by moving files there, and
        tells its books there. A client that caches names may go on to find a folder that was
        moved; so the fence is closed when the folder itself is gone, and not before. Books are
        taken out of it first, those that were told meanwhile as well.

        Returns:
            The last books that were told; None if there are none.

        Raises:
            OSError: the fence is not closed.
        """
        own = self.sweep_folder(epoch)
        for _ in range(_TRIES):
            names = [
                name
                for name in os.listdir(self.sweeps)
                if _NUMBER.fullmatch(name.partition(".")[0]) and int(name.partition(".")[0]) < epoch
            ]
            if not names:
                return self._inherited(own)
            for name in names:
                folder = f"{self.sweeps}/{name}"
                if _NUMBER.fullmatch(name):
                    aside = f"{folder}.fenced-{secrets.token_hex(4)}"
                    try:
                        os.rename(folder, aside)
                    except FileNotFoundError:
                        continue  # by somebody who does the same; the next look finds it
                    folder = aside
                self.drop(folder, own)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), self.sweeps)

    def drop(self, folder: str, heir: str = "") -> None:
        """Remove a sweeper's folder; its books go to the one that comes after it.

        Raises:
            OSError: it is still there.
        """
        for _ in range(_TRIES):
            try:
                with opened_folder(folder) as fd:
                    names = os.listdir(fd)
            except FileNotFoundError:
                return
            except NotADirectoryError:
                os.unlink(folder)  # a file or a link, and no sweeper's
                return
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    if heir and name.endswith(".json"):
                        os.rename(f"{folder}/{name}", f"{heir}/{secrets.token_hex(8)}.json")
                    else:
                        remove_tree(f"{folder}/{name}")
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise
            else:
                return
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), folder)

    def _inherited(self, own: str) -> Books | None:
        found = [books_from(f"{own}/{name}") for name in os.listdir(own) if name.endswith(".json")]
        # Of one epoch there may be several: one that sleeps tells into a folder that others empty.
        return max(
            (each for each in found if each),
            key=lambda each: (each.epoch, each.told),
            default=None,
        )

    def forget_inherited(self, epoch: int) -> None:
        """What was taken over has been told anew."""
        own = self.sweep_folder(epoch)
        for name in os.listdir(own):
            if name.endswith(".json") and name != _BOOKS:
                remove_tree(f"{own}/{name}")
