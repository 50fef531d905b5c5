"""NIXL: its plugins for files and for objects move the bytes, and nothing else.

A directory is that of `stepwell.tiers.media.fs`, and a bucket that of
`stepwell.tiers.media.objects`, record by record: what one kind has written another reads.
"""

import contextlib
import errno
import importlib
import importlib.util
import itertools
import logging
import mmap
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepwell.core.memory import aligned_memory
from stepwell.errors import ConfigError, in_one_line
from stepwell.tiers.media.base import Medium
from stepwell.tiers.media.fs import PARAMETERS, FsMedium, limits_of, path_of
from stepwell.tiers.media.kinds import INSTALL_NIXL, NIXL_PACKAGES
from stepwell.tiers.media.movers import Piece, TransferMover
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["Agent", "FileTransfers", "Plugin", "open_medium", "plugin_of"]

logger = logging.getLogger(__name__)

# The better first. Both hold on to a file from when a transfer begins. POSIX AIO, which NIXL has as
# well, knows a file by its number alone: the rest of a transfer that failed could go to another.
_APIS = {"uring": "use_uring", "aio": "use_aio"}
_NETWORKS = frozenset({"UCX", "LIBFABRIC", "GPUNETIO", "UCCL", "MOONCAKE"})  # not even to be loaded
_numbers = itertools.count()
_POLL_FIRST_S, _POLL_LONGEST_S = 5e-5, 1e-3
# Memory that a failed transfer may still write to is given up for good, so often at most.
_MAX_GIVEN_UP = 16


@dataclass(frozen=True)
class Plugin:
    """A plugin of NIXL that loads here.

    Attributes:
        name: as NIXL calls it.
        parameters: for its backend.
    """

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)


def open_medium(url: MediumUrl, timeout_s: float) -> Medium:
    """What a URL names: ``nixl+posix:///mnt/pool``, ``nixl+obj://bucket/prefix``.

    What follows the + is the name of a plugin, with - for _: of those that serve files the URL is
    that of a directory (`stepwell.tiers.media.fs`), of those that serve objects that of a
    bucket (`stepwell.tiers.media.nixl_objects`). ``posix`` has the parameter ``api`` as well:
    ``uring`` or ``aio``; without it the first of them that starts is taken.

    Args:
        url: see above.
        timeout_s: how long opening a directory, or one request to an object store may take.

    Raises:
        ConfigError: the URL is wrong, or the plugin is missing or does not load.
    """
    name = url.scheme.partition("+")[2].upper().replace("-", "_")
    plugin, memory_types = plugin_of(name, url.shown)
    if "OBJ" in memory_types:
        objects = importlib.import_module("stepwell.tiers.media.nixl_objects")
        medium: Medium = objects.open_bucket(url, timeout_s, plugin)
        return medium
    if "FILE" not in memory_types:
        raise ConfigError(
            f"this plugin of NIXL serves neither files nor objects: url={url.shown} plugin={name}"
        )
    url.check_parameters((*PARAMETERS, "api") if name == "POSIX" else PARAMETERS)
    path, limits = path_of(url), limits_of(url)
    if name == "POSIX":
        plugin = _posix(url)
    given_up: list[Agent] = []
    mover = TransferMover(
        "nixl", lambda size_bytes: FileTransfers(plugin, size_bytes, given_up), direct=True
    )
    return FsMedium(path, limits, timeout_s, mover)


def _posix(url: MediumUrl) -> Plugin:
    """The plugin for files with the system's interface that the URL names, or one that starts."""
    wanted = url.parameters.get("api", "")
    if wanted and wanted not in _APIS:
        raise ConfigError(f"api is one of {','.join(_APIS)}: url={url.shown} api={wanted!r}")
    refused: list[str] = []
    for api in [wanted] if wanted else _APIS:
        plugin = Plugin("POSIX", {_APIS[api]: "true"})
        try:
            Agent(plugin, aligned_memory(mmap.PAGESIZE))
        except ConfigError as error:
            refused.append(f"api={api} error={error}")
            continue
        if refused:
            logger.warning("NIXL by api=%s: url=%s refused: %s", api, url.shown, refused[0])
        return plugin
    raise ConfigError(
        f"the system does not let NIXL use this (io_uring is often forbidden to containers): "
        f"url={url.shown} {' '.join(refused)}"
    )


def plugin_of(name: str, shown: str) -> tuple[Plugin, Collection[str]]:
    """A plugin by its name, and the kinds of memory that it moves: "FILE", "OBJ" and others.

    Raises:
        ConfigError: there is none, it does not load, or it is one for networks.
    """
    if name in _NETWORKS:
        raise ConfigError(
            f"this plugin of NIXL is for networks, and is not loaded: url={shown} plugin={name}"
        )
    agent = _new_agent()
    memory_types = _memory_types(agent, name)
    if memory_types:
        return Plugin(name), memory_types
    known = agent.get_plugin_list()
    loads = [
        f"nixl+{each.lower().replace('_', '-')}"
        for each in known
        if each not in _NETWORKS and _memory_types(agent, each) & {"FILE", "OBJ"}
    ]
    what = "does not load here" if name in known else "is not there"
    raise ConfigError(f"NIXL's plugin {what}: url={shown} plugin={name} loadable={','.join(loads)}")


def _memory_types(agent: Any, plugin: str) -> set[str]:
    """What a plugin moves; nothing if it does not load."""
    try:
        _, found = agent.agent.getPluginParams(plugin)
    except _errors(agent):
        return set()
    return {each.removesuffix("_SEG") for each in found}


def _library() -> Any:
    """NIXL's Python module: the package has another name for each version of CUDA."""
    refused: list[str] = []
    for name in NIXL_PACKAGES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            library = importlib.import_module(name)
        except Exception as error:  # counted with those that were refused
            refused.append(f"{name}: {type(error).__name__}: {in_one_line(error)}")
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:  # it would tell of every agent, on stdout
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return library
    if refused:
        raise ConfigError(f"NIXL is installed and does not load: error={'; '.join(refused)}")
    raise ConfigError(f"NIXL is not installed; {INSTALL_NIXL}")


def _new_agent() -> Any:
    """An agent without backends: none of UCX, which would spin a core and listen everywhere."""
    library = _library()
    config = library.nixl_agent_config(
        enable_prog_thread=False, enable_listen_thread=False, backends=[]
    )
    return library.nixl_agent(f"stepwell-{os.getpid()}-{next(_numbers)}", config)


def _errors(agent: Any) -> tuple[type[Exception], ...]:
    """The exceptions of NIXL, which have no base class of their own."""
    bindings = importlib.import_module(type(agent.agent).__module__)
    return tuple(
        each
        for each in vars(bindings).values()
        if isinstance(each, type) and issubclass(each, Exception)
    )


@dataclass
class _Transfer:
    idxs: Sequence[int]
    registered: Any = None
    handle: Any = None
    state: str = "PROC"  # or DONE, ERR


class Agent:
    """An agent of NIXL with one backend, and memory that is registered with it.

    One thread at a time.

    Args:
        plugin: of the backend.
        memory: to move from and to.

    Raises:
        ConfigError: the backend does not start.
    """

    def __init__(self, plugin: Plugin, memory: memoryview) -> None:
        self.memory = memory
        self._address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self._only = [plugin.name]
        self._agent = _new_agent()
        self._errors = _errors(self._agent)
        try:
            self._agent.create_backend(plugin.name, dict(plugin.parameters))
            here = [(self._address, len(memory), 0, "")]
            self._agent.register_memory(here, "DRAM", backends=self._only)
        except self._errors as error:
            raise ConfigError(
                f"NIXL's plugin does not start: plugin={plugin.name} error={error}"
            ) from error

    def move(
        self,
        kind: str,
        ends: Sequence[tuple[int, str]],
        parts: Sequence[tuple[int, int]],
        *,
        write: bool,
        together: bool,
    ) -> list[bool]:
        """Move parts of the memory to or from the beginnings of files or objects.

        Args:
            kind: "FILE" or "OBJ".
            ends: of a file its descriptor, and ""; of an object any number, and its key.
            parts: offset and length in the memory, for each end.
            write: to them, or from them.
            together: in one transfer, of which no more is known than whether all were moved, and
                if not, not even that it is over; or in a transfer for each.

        Returns:
            For each whether it was moved.

        Raises:
            ValueError: an end is given twice.
        """
        if len(set(ends)) < len(ends):
            raise ValueError("an end is given twice, which NIXL does not survive")
        everything = range(len(ends))
        groups: list[Sequence[int]] = [everything] if together else [[idx] for idx in everything]
        transfers = [_Transfer(group) for group in groups]
        moved = [False] * len(ends)
        try:
            for transfer in transfers:
                idxs = transfer.idxs
                self._begin(
                    transfer, kind, [ends[idx] for idx in idxs], [parts[idx] for idx in idxs], write
                )
            self._wait(transfers)
        finally:
            for transfer in transfers:
                self._end(transfer)
        for transfer in transfers:
            for idx in transfer.idxs:
                moved[idx] = transfer.state == "DONE"
        return moved

    def _begin(
        self,
        transfer: _Transfer,
        kind: str,
        ends: Sequence[tuple[int, str]],
        parts: Sequence[tuple[int, int]],
        write: bool,
    ) -> None:
        agent = self._agent
        sizes = [size for _, size in parts]
        rows = [(0, size, *end) for size, end in zip(sizes, ends, strict=True)]
        try:
            transfer.registered = agent.register_memory(rows, kind, backends=self._only)
            here = [(self._address + offset, size, 0) for offset, size in parts]
            transfer.handle = agent.initialize_xfer(
                "WRITE" if write else "READ",
                agent.get_xfer_descs(here, "DRAM"),
                agent.get_xfer_descs([row[:3] for row in rows], kind),
                agent.name,
                backends=self._only,
            )
            transfer.state = agent.transfer(transfer.handle)
        except self._errors as error:
            self._failed(transfer, error)

    def _wait(self, transfers: Sequence[_Transfer]) -> None:
        pause_s = _POLL_FIRST_S
        waiting = [transfer for transfer in transfers if transfer.state == "PROC"]
        while waiting:
            for transfer in waiting:
                try:
                    transfer.state = self._agent.check_xfer_state(transfer.handle)
                except self._errors as error:
                    self._failed(transfer, error)
            waiting = [transfer for transfer in waiting if transfer.state == "PROC"]
            if waiting:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_LONGEST_S)

    def _failed(self, transfer: _Transfer, error: Exception) -> None:
        transfer.state = "ERR"
        logger.debug("a transfer failed: plugin=%s error=%s", self._only[0], error)

    def _end(self, transfer: _Transfer) -> None:
        with contextlib.suppress(*self._errors):
            if transfer.handle is not None:
                self._agent.release_xfer_handle(transfer.handle)
        with contextlib.suppress(*self._errors):
            if transfer.registered is not None:
                self._agent.deregister_memory(transfer.registered, backends=self._only)


class FileTransfers:
    """Records of one call to or from files, in one transfer.

    See `stepwell.tiers.media.movers.FileEngine`. Of a transfer that fails it is not known which of
    its records did, nor when the others are over: its agent and its memory are not used any more.
    Its records are moved by system calls then, which say of each what is wrong. When that has
    happened too often, there are no more transfers of several records.

    Args:
        plugin: to use.
        size_bytes: of the memory.
        given_up: agents that are not used any more, of all engines of one medium.
    """

    def __init__(self, plugin: Plugin, size_bytes: int, given_up: list[Agent]) -> None:
        self._plugin = plugin
        self._given_up = given_up
        self._agent: Agent | None = Agent(plugin, aligned_memory(size_bytes))

    @property
    def memory(self) -> memoryview:
        """See `stepwell.tiers.media.transfer_engines.TransferEngine`.

        There is none after an agent could not be made.
        """
        return memoryview(b"") if self._agent is None else self._agent.memory

    def move(self, pieces: Sequence[Piece], *, write: bool) -> list[int]:
        """See `stepwell.tiers.media.movers.FileEngine.move`."""
        if len(self._given_up) < _MAX_GIVEN_UP:
            return self._move(pieces, write=write)
        return [count for piece in pieces for count in self._move([piece], write=write)]

    def _move(self, pieces: Sequence[Piece], *, write: bool) -> list[int]:
        ends = [(piece.fd, "") for piece in pieces]
        parts = [(piece.offset, piece.size_bytes) for piece in pieces]
        former = self._agent
        if former is None:
            return [-errno.EIO] * len(pieces)
        if all(former.move("FILE", ends, parts, write=write, together=True)):
            return [piece.size_bytes for piece in pieces]
        self._agent = None
        logger.warning(
            "NIXL failed; by system calls: plugin=%s records=%d", self._plugin.name, len(pieces)
        )
        memory = former.memory
        if len(pieces) > 1:
            self._given_up.append(former)
            memory = aligned_memory(len(memory))
        self._agent = Agent(self._plugin, memory)
        source = former.memory if write else memory
        return [_by_system_call(piece, source, write=write) for piece in pieces]

    def close(self) -> None:
        """See `stepwell.tiers.media.transfer_engines.TransferEngine.close`."""


def _by_system_call(piece: Piece, memory: memoryview, *, write: bool) -> int:
    part = memory[piece.offset : piece.offset + piece.size_bytes]
    try:
        if not write:
            return os.preadv(piece.fd, [part], 0)
        done_bytes = 0
        while done_bytes < len(part):  # what is short does not say why
            more_bytes = os.pwritev(piece.fd, [part[done_bytes:]], done_bytes)
            if more_bytes == 0:
                return -errno.ENOSPC
            done_bytes += more_bytes
        return done_bytes
    except OSError as error:
        return -(error.errno or errno.EIO)
