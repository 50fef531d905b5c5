"""What the system's error numbers say of a file system, where several say the same."""

import errno

__all__ = ["GONE", "NO_LINKS", "NO_ROOM_LEFT", "VANISHED"]

GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
"""A file that somebody else has just removed."""

VANISHED = GONE - {errno.ESTALE}
"""Of that, what says so for sure: an NFS server that is set up anew calls everything stale."""

NO_ROOM_LEFT = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A file system without room, or a user who may have no more."""

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""A file system without hard links, of one that was to be made."""
