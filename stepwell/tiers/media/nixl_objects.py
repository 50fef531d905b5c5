"""Objects whose bytes move through NIXL; all else is asked of the store directly.

NIXL's plugin writes whole objects, reads them, and can do no more: it does not list or remove, it
writes over what is there, and does not say why something failed. So whether a record is there is
asked of `stepwell.tiers.media.objects`, and what NIXL does not do is done there.
"""

import importlib
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stepwell.core.keys import Key, Root, make_key
from stepwell.core.memory import aligned_memory
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult
from stepwell.errors import ConfigError, TierError
from stepwell.tiers.media.base import Medium, Page, Record, Stats, Wanted
from stepwell.tiers.media.nixl import Agent, Plugin
from stepwell.tiers.media.records import arrived, lay_out, name_of, offsets_of
from stepwell.tiers.media.transfer_engines import TransferEngines
from stepwell.tiers.media.urls import MediumUrl
from stepwell.tiers.outcomes import ALREADY_THERE, DONE

__all__ = ["NixlObjects", "open_bucket"]

logger = logging.getLogger(__name__)

_CHECK_WITHIN_S = 10.0
_CHECK_TRIES = 4  # see `NixlObjects._get`: what is not sure for a 256th each time
_REQUESTS_AT_ONCE = 4  # of one call


def open_bucket(url: MediumUrl, timeout_s: float, plugin: Plugin) -> "NixlObjects":
    """The bucket that a URL names: ``nixl+obj://bucket/prefix``.

    Parameters and credentials are those of ``s3://`` (`stepwell.tiers.media.objects`).

    Args:
        url: see above.
        timeout_s: of one request.
        plugin: that moves objects.

    Raises:
        ConfigError: the URL is wrong.
    """
    if plugin.name != "OBJ":
        raise ConfigError(
            f"of NIXL's plugins for objects OBJ is used so far, and no other: url={url.shown}"
        )
    objects = importlib.import_module("stepwell.tiers.media.objects")
    direct: Medium = objects.open_medium(replace(url, scheme="s3"), timeout_s)
    parameters = {
        "bucket": url.host,
        "num_threads": str(_REQUESTS_AT_ONCE),
        "use_virtual_addressing": str(url.switch("virtual_hosted")).lower(),
        "req_checksum": "required",
        "resp_checksum": "required",
    }
    if "region" in url.parameters:
        parameters["region"] = url.parameters["region"]
    if "endpoint" in url.parameters:
        parameters["endpoint_override"] = url.parameters["endpoint"]
        parameters["scheme"] = url.parameters["endpoint"].partition("://")[0]
    return NixlObjects(direct, Plugin(plugin.name, parameters), url.path.strip("/"), url.shown)


class _Objects:
    """An agent and its memory. See `stepwell.tiers.media.transfer_engines.TransferEngine`."""

    def __init__(self, plugin: Plugin, size_bytes: int) -> None:
        self.memory = aligned_memory(size_bytes)
        self._agent = Agent(plugin, self.memory)

    def move(self, names: Sequence[str], sizes: Sequence[int], *, write: bool) -> list[bool]:
        """Move objects that lie one behind the other in memory; for each whether it was."""
        ends = list(enumerate(names))
        parts = list(zip(offsets_of(sizes), sizes, strict=True))
        # A transfer for each: one that fails is over, and the others are not touched by it.
        return self._agent.move("OBJ", ends, parts, write=write, together=False)

    def close(self) -> None:
        """See `stepwell.tiers.media.transfer_engines.TransferEngine.close`."""


class NixlObjects:
    """Records as objects. See `stepwell.tiers.media.base.Medium`.

    Of two engines that write the same record at the same moment the second writes over the first;
    both are right.

    Args:
        direct: the same records, without NIXL; this one's own from now on.
        plugin: with its parameters.
        prefix: of the names, without slashes around it; may be empty.
        shown: the URL, for messages.
    """

    def __init__(self, direct: Medium, plugin: Plugin, prefix: str, shown: str) -> None:
        self._direct = direct
        self._prefix = prefix
        self._shown = shown
        self._engines = TransferEngines("nixl", lambda size_bytes: _Objects(plugin, size_bytes))

    def check(self) -> None:
        """See `stepwell.tiers.media.base.Medium.check`: a record there and back, too."""
        self._direct.check()
        self._engines.try_to_make(_CHECK_WITHIN_S)
        key = make_key(Root(bytes(32)), b"check" + secrets.token_bytes(8))
        content = secrets.token_bytes(HEADER_BYTES + 1000)
        record = Record(key, content[:HEADER_BYTES], memoryview(content)[HEADER_BYTES:], 0.0)
        wanted = Wanted(key, memoryview(bytearray(1000)))
        try:
            written = self._put([record], _CHECK_WITHIN_S)
            pages: list[Page | None] = [None]
            for _ in range(_CHECK_TRIES):
                if written == [True] and pages == [None]:
                    pages = self._get([wanted], _CHECK_WITHIN_S)
        finally:
            self._direct.remove([key], _CHECK_WITHIN_S)
        if written != [True] or pages == [None]:
            raise TierError(f"NIXL moves nothing to and from the store: url={self._shown}")
        if pages != [record.header] or wanted.payload != record.payload:
            raise ConfigError(f"NIXL gives back what was not written: url={self._shown}")

    def exist(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `stepwell.tiers.media.base.Medium.exist`."""
        return self._direct.exist(keys, within_s)

    def read(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.read`."""
        give_up_s = time.monotonic() + within_s
        results: list[Page | ChunkResult | None] = list(self._get(wanted, within_s))
        left = [idx for idx, result in enumerate(results) if result is None]
        if left:  # what is not there, or too short, or cannot be had at all
            rest = [wanted[idx] for idx in left]
            found = self._direct.read(rest, give_up_s - time.monotonic())
            for idx, result in zip(left, found, strict=True):
                results[idx] = result
        return [result for result in results if result is not None]

    def write(self, records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.write`."""
        give_up_s = time.monotonic() + within_s
        there = self._direct.exist([record.key for record in records], within_s)
        results = [ALREADY_THERE] * len(records)
        new = [idx for idx, here in enumerate(there) if not here]
        moved = self._put([records[idx] for idx in new], give_up_s - time.monotonic())
        for idx in new:
            results[idx] = DONE
        left = [idx for idx, done in zip(new, moved, strict=True) if not done]
        if left:
            rest = [records[idx] for idx in left]
            written = self._direct.write(rest, give_up_s - time.monotonic())
            for idx, result in zip(left, written, strict=True):
                results[idx] = result
        return results

    def remove(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.remove`."""
        self._direct.remove(keys, within_s)

    def touch(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.touch`; there is no such order."""

    def erase(self, root: Root) -> int:
        """See `stepwell.tiers.media.base.Medium.erase`."""
        return self._direct.erase(root)

    def keys(self, root: Root) -> Iterator[Key] | None:
        """See `stepwell.tiers.media.base.Medium.keys`."""
        return self._direct.keys(root)

    def stats(self, within_s: float) -> Stats:
        """See `stepwell.tiers.media.base.Medium.stats`."""
        return self._direct.stats(within_s)

    def close(self) -> None:
        """See `stepwell.tiers.media.base.Medium.close`."""
        self._engines.close()
        self._direct.close()

    def _get(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | None]:
        """By NIXL: a page where a record has come, its payload in place; None where not for sure.

        Of 256 that have come one is among the latter.
        """
        names = [self._name(each.key) for each in wanted]
        sizes = [HEADER_BYTES + len(each.payload) for each in wanted]
        with self._engines.taken(sum(sizes), within_s) as taken:
            engine = taken.engine
            ends = [sum(sizes[: idx + 1]) - 1 for idx in range(len(sizes))]
            # NIXL calls it done when an object is shorter than what was asked for, and leaves the
            # rest of the memory as it was. What still ends in its mark may be such a one.
            marks = secrets.token_bytes(len(wanted))
            for end, mark in zip(ends, marks, strict=True):
                engine.memory[end] = mark
            moved = taken.run(lambda: engine.move(names, sizes, write=False))
            pages: list[Page | None] = []
            rows = zip(wanted, ends, sizes, marks, moved, strict=True)
            for each, end, size, mark, done in rows:
                memory = engine.memory[end + 1 - size : end + 1]
                came = done and memory[-1] != mark
                page = arrived(memory, size if came else 0, each.payload)
                pages.append(None if isinstance(page, ChunkResult) else page)
        self._log("read", moved)
        return pages

    def _put(self, records: Sequence[Record], within_s: float) -> list[bool]:
        """By NIXL: for each whether it was written."""
        if not records:
            return []
        names = [self._name(record.key) for record in records]
        sizes = [HEADER_BYTES + len(record.payload) for record in records]
        with self._engines.taken(sum(sizes), within_s) as taken:
            engine = taken.engine
            for record, offset, size in zip(records, offsets_of(sizes), sizes, strict=True):
                lay_out(engine.memory[offset : offset + size], record)
            moved = taken.run(lambda: engine.move(names, sizes, write=True))
        self._log("write", moved)
        return moved

    def _name(self, key: Key) -> str:
        return "/".join(([self._prefix] if self._prefix else []) + list(name_of(key)))

    def _log(self, what: str, moved: Sequence[bool]) -> None:
        if not all(moved):
            logger.warning(
                "NIXL did not do a %s; asking the store: url=%s records=%d",
                what, self._shown, moved.count(False),
            )  # fmt: skip
