"""What a Mooncake URL says, and clients of its library that are set up accordingly."""

import importlib
import importlib.metadata
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.errors import ConfigError, TierError, in_one_line
from stepwell.tiers.media.mooncake_left import leave
from stepwell.tiers.media.mooncake_reach import answers, reachable
from stepwell.tiers.media.urls import MediumUrl, shown_address

__all__ = ["Target", "check_devices", "connect", "load_library", "may_close", "target_of"]

_PARAMETERS = (
    "devices", "ha", "host", "metadata", "more", "prefix", "protocol", "replicas", "tenant",
)  # fmt: skip
_MASTER_PORT = 50051
_ETCD_PORT = 2379
_WORD = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WORDS = re.compile(r"[A-Za-z0-9._,-]{1,256}")
_ADDRESS = re.compile(r"[A-Za-z0-9._-]+:[0-9]{1,5}")
# Other services of metadata are not built in, and the library ends the process.
_METADATA = re.compile(r"P2PHANDSHAKE|(http|https|etcd)://[^\s]+")
_MAX_REPLICAS = 16
_RDMA_DEVICES = Path("/sys/class/infiniband")
# For records on file systems, which the library reads into memory of its own.
_LIBRARY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL says.

    Attributes:
        addresses: of the master; with ``ha`` of etcd, which knows the master.
        host: this machine's address; "" for the one that it reaches the other side by.
        prefix: of all names.
    """

    addresses: tuple[tuple[str, int], ...]
    ha: bool
    metadata: str
    protocol: str
    devices: str
    tenant: str
    host: str
    prefix: str
    replicas: int

    @property
    def master(self) -> str:
        """As the library wants it."""
        listed = ";".join(shown_address(host, port) for host, port in self.addresses)
        return f"etcd://{listed}" if self.ha else listed


def _word(url: MediumUrl, name: str, default: str) -> str:
    text = url.parameters.get(name, default)
    if not _WORD.fullmatch(text):
        raise ConfigError(
            f"{name} is a word of letters, digits and ._- : url={url.shown} {name}={text!r}"
        )
    return text


def target_of(url: MediumUrl) -> Target:
    """What a URL says.

    Raises:
        ConfigError: something that makes no sense.
    """
    url.check_parameters(_PARAMETERS)
    if not url.host or url.path.strip("/"):
        raise ConfigError(
            f"the master's address is missing, or there is more than that; write "
            f"mooncake://10.0.0.5:{_MASTER_PORT}: url={url.shown}"
        )
    if url.user or url.password:
        raise ConfigError(f"Mooncake knows no users and passwords; leave them out: url={url.shown}")
    ha = url.parameters.get("ha", "")
    if ha not in ("", "etcd"):
        raise ConfigError(f'ha is "etcd", or is left out: url={url.shown} ha={ha!r}')
    addresses = [(url.host, url.port or (_ETCD_PORT if ha else _MASTER_PORT))]
    if more := url.parameters.get("more", ""):
        if not ha:
            raise ConfigError(
                f"more has further addresses of etcd; add ha=etcd: url={url.shown} more={more!r}"
            )
        for each in more.split(","):
            if not _ADDRESS.fullmatch(each):
                raise ConfigError(
                    f"more is such as etcd2:2379,etcd3:2379: url={url.shown} more={more!r}"
                )
            host, _, port = each.rpartition(":")
            addresses.append((host, int(port)))
    metadata = url.parameters.get("metadata", "P2PHANDSHAKE")
    if not _METADATA.fullmatch(metadata):
        raise ConfigError(
            f"metadata is P2PHANDSHAKE, http://host:port/metadata or etcd://host:port, the same "
            f"as the nodes have: url={url.shown} metadata={metadata!r}"
        )
    protocol = url.parameters.get("protocol", "tcp")
    return Target(
        tuple(addresses), bool(ha), metadata, protocol, _devices(url, protocol),
        _word(url, "tenant", "default"), _word(url, "host", "") if "host" in url.parameters else "",
        _word(url, "prefix", "stepwell"), _replicas(url),
    )  # fmt: skip


def _replicas(url: MediumUrl) -> int:
    text = url.parameters.get("replicas", "1")
    if not (text.isdecimal() and 1 <= int(text) <= _MAX_REPLICAS):
        raise ConfigError(
            f"replicas is a number from 1 to {_MAX_REPLICAS}: url={url.shown} replicas={text!r}"
        )
    return int(text)


def _devices(url: MediumUrl, protocol: str) -> str:
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f'protocol is "tcp" or "rdma": url={url.shown} protocol={protocol!r}')
    devices = url.parameters.get("devices", "")
    if devices and (protocol == "tcp" or not _WORDS.fullmatch(devices)):
        raise ConfigError(
            f"devices are such as mlx5_0,mlx5_1, and for protocol=rdma: url={url.shown} "
            f"devices={devices!r}"
        )
    return devices


def load_library(url: MediumUrl, timeout_s: float) -> Any:
    """Load the library; it looks at the environment then, and when clients are set up.

    Raises:
        ConfigError: it cannot be loaded.
    """
    patience_s = max(1, math.ceil(timeout_s))
    for name, value in {
        "MC_RPC_TIMEOUT_MS": patience_s * 1000,
        "MC_RPC_CONNECT_TIMEOUT_MS": patience_s * 1000,
        "MC_TCP_STATUS_TIMEOUT_SEC": patience_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": patience_s,  # a node that stops within a payload
        # Of clients that cannot be set up: they are tried again here.
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
        "MC_STORE_CLIENT_METRIC": 0,
        "MC_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, str(value))
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"the library of Mooncake cannot be loaded; it needs libibverbs1, libnuma1 and "
            f"libcurl4 of the system: url={url.shown} error={in_one_line(error)}"
        ) from error


def connect(library: Any, target: Target, timeout_s: float) -> Any:
    """A client that is set up.

    Raises:
        TierError: it cannot be.
    """
    try:
        check_devices(target)
    except ConfigError as error:
        raise TierError(str(error)) from error
    # Setting it up would wait for the master, with the interpreter's lock.
    host, port = reachable(target.addresses, target.ha, timeout_s)
    client = library.MooncakeDistributedStore()
    # Without a port the library finds one that is free, and keeps it: no two clients are the same.
    code = client.setup(
        target.host or _own_address(host, port), target.metadata, 0, _LIBRARY_BYTES,
        target.protocol, target.devices, target.master, tenant_id=target.tenant,
    )  # fmt: skip
    if code:
        if may_close(target, timeout_s):
            client.close()
        else:
            leave(client)
        raise TierError(
            f"Mooncake takes no client; is the master of the same version, {_version()}, and "
            f"metadata the same as its nodes have? master={target.master} "
            f"metadata={target.metadata} protocol={target.protocol} code={code}"
        )
    return client


def may_close(target: Target, timeout_s: float) -> bool:
    """Whether closing a client now is quick; else nobody runs while it waits for the master."""
    # With etcd it may wait half a minute, whoever answers.
    return not target.ha and answers(target.addresses, target.ha, timeout_s)


def check_devices(target: Target) -> None:
    """Whether this machine has them.

    Raises:
        ConfigError: it has not.
    """
    if target.protocol != "rdma":
        return
    there = sorted(os.listdir(_RDMA_DEVICES)) if _RDMA_DEVICES.is_dir() else []
    missing = sorted(set(filter(None, target.devices.split(","))) - set(there))
    if not there or missing:
        raise ConfigError(
            f"this machine has no such RDMA device; name one that it has, or write protocol=tcp: "
            f"devices={target.devices!r} there={','.join(there)!r}"
        )


def _own_address(host: str, port: int) -> str:
    """Of this machine, towards another; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def _version() -> str:
    for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
