"""The roots that this process uses, with their descriptions."""

import threading

from stepwell.core.identity import Identity
from stepwell.core.keys import Root

__all__ = ["RootRegistry"]


class RootRegistry:
    """Descriptions by root, so that a tier can write them beside the records.

    Threading: any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._identities: dict[Root, Identity] = {}

    def add(self, identity: Identity) -> Root:
        """Remember an identity; returns its root."""
        root = identity.root
        with self._lock:
            self._identities.setdefault(root, identity)
        return root

    def get(self, root: Root) -> Identity | None:
        """The identity of a root, if this process uses it."""
        with self._lock:
            return self._identities.get(root)
