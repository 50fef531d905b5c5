"""What lies in a medium, for people: a description of each root, a record among the others."""

import hashlib
import logging
from collections.abc import Sequence

from stepwell.core.identity import Identity
from stepwell.core.keys import Key, Root, engine_key_of, make_key
from stepwell.core.record import HEADER_BYTES, Header, payload_checksum, verify
from stepwell.core.types import ChunkResult, Outcome
from stepwell.errors import DataError
from stepwell.tiers.media.base import Medium, Page, Record, Wanted

__all__ = [
    "DESCRIPTIONS",
    "DESCRIPTION_BYTES",
    "describe",
    "described_roots",
    "description_key",
    "erase_root",
    "identity_in",
]

logger = logging.getLogger(__name__)

DESCRIPTIONS = Root(hashlib.sha256(b"stepwell descriptions of roots").digest())
"""The root of the records that describe roots."""

_PAYLOAD_BYTES = 16 << 10  # whoever reads a record knows how long it is
DESCRIPTION_BYTES = HEADER_BYTES + _PAYLOAD_BYTES
"""Of such a record."""

_READ_AT_ONCE = 64
_WITHIN_S = 10.0


def description_key(root: Root) -> Key:
    """The key of the record that describes a root."""
    return make_key(DESCRIPTIONS, root)


def describe(medium: Medium, identity: Identity, now_s: float, within_s: float) -> bool:
    """Write an identity beside its records, unless it is there; returns whether it is by now.

    Args:
        medium: to write to.
        identity: one whose description is longer than 16 KiB is left out.
        now_s: seconds since the epoch.
        within_s: how long that may take.

    Raises:
        TierError: the medium failed.
    """
    text = identity.to_json().encode()
    if len(text) > _PAYLOAD_BYTES:
        return True  # there will never be one
    key = description_key(identity.root)
    if medium.exist([key], within_s) == [True]:
        return True
    payload = memoryview(text.ljust(_PAYLOAD_BYTES))
    header = Header(key, len(payload), payload_checksum(payload), int(now_s * 1e6))
    (result,) = medium.write([Record(key, header.pack(), payload, 0.0)], within_s)
    return result.outcome is Outcome.DONE


def described_roots(medium: Medium) -> dict[Root, Identity | None] | None:
    """The roots that are described, and None for what is damaged; None if it cannot list.

    Raises:
        TierError: the medium failed.
    """
    listed = medium.keys(DESCRIPTIONS)
    if listed is None:
        return None
    keys = list(listed)
    found: dict[Root, Identity | None] = {}
    for start in range(0, len(keys), _READ_AT_ONCE):
        found |= _read(medium, keys[start : start + _READ_AT_ONCE])
    return found


def erase_root(medium: Medium, root: Root) -> int:
    """Remove all records of a root, and its description; returns how many records there were.

    Raises:
        TierError: the medium failed; some may be left.
    """
    count = medium.erase(root)
    medium.remove([description_key(root)], _WITHIN_S)
    return count


def identity_in(page: Page, payload: memoryview | bytes, key: Key) -> Identity | None:
    """What a record that was read describes; None, and a line in the log, if it is damaged.

    Args:
        page: its header.
        payload: what follows it, without padding.
        key: under which it was found.
    """
    try:
        verify(Header.unpack(page), payload, key, 0)  # it does not expire
        return Identity.from_json(bytes(payload).decode())
    except (DataError, ValueError) as error:
        logger.warning("a description is wrong: key=%s error=%s", key.hex(), error)
        return None


def _read(medium: Medium, keys: Sequence[Key]) -> dict[Root, Identity | None]:
    wanted = [Wanted(key, memoryview(bytearray(_PAYLOAD_BYTES))) for key in keys]
    found: dict[Root, Identity | None] = {}
    for each, page in zip(wanted, medium.read(wanted, _WITHIN_S), strict=True):
        root = Root(engine_key_of(each.key))
        found[root] = None
        if not isinstance(page, ChunkResult):
            found[root] = identity_in(page, each.payload, each.key)
    return found
