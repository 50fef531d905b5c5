"""The kinds of media by the schemes of their URLs, and opening one."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from stepwell.errors import ConfigError
from stepwell.tiers.media.base import Medium, Promises
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["INSTALL_NIXL", "KINDS", "NIXL_PACKAGES", "Kind", "kind_of", "open_medium"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of medium.

    Attributes:
        name: of the tier, in metrics and reports.
        schemes: of its URLs.
        example: of a URL.
        words: what it is, in a line.
        promises: see there.
        module: where its ``open_medium(url, timeout_s)`` is; "" for the disk tier, which is no
            medium.
        needs: the packages that it imports; of those with " or " between them, one.
        extra: of ours, which brings them.
        install: the command that does so; that for the extra if "".
        ways: how it may move bytes, each with the package that this takes: the first that can be
            imported is used.
        is_pool: whether it is a directory that `stepwell.tiers.media.fs` keeps.
    """

    name: str
    schemes: tuple[str, ...]
    example: str
    words: str
    promises: Promises
    module: str = ""
    needs: tuple[str, ...] = ()
    extra: str = ""
    install: str = ""
    ways: tuple[tuple[str, str], ...] = ()
    is_pool: bool = False

    @property
    def installed(self) -> bool:
        """Whether what it needs can be imported."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """Of what it needs, what cannot be imported."""
        return [need for need in self.needs if not any(map(_is_there, need.split(" or ")))]

    @property
    def install_command(self) -> str:
        """What brings it all."""
        return self.install or f"pip install 'stepwell[{self.extra}]'"

    @property
    def way(self) -> str:
        """How it moves bytes here; "" where there is but one way."""
        return next((words for needs, words in self.ways if not needs or _is_there(needs)), "")


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""NIXL's package has another name for each version of CUDA."""

_NIXL = " or ".join(NIXL_PACKAGES)

INSTALL_NIXL = "pip install --no-deps nixl-cu12"
"""It asks for torch with CUDA, which it does not need for this."""

_OBJECTS = "stepwell.tiers.media.objects"

KINDS: tuple[Kind, ...] = (
    Kind(
        "disk",
        ("file",),
        "file:///mnt/nvme/kv",
        "local drives, one directory each, of one engine; the same as --path",
        Promises(durable=True, shared=False, expires=False, evicts="stepwell"),
    ),
    Kind(
        "fs",
        ("fs",),
        "fs:///mnt/pool?capacity=10TiB",
        "a directory that several hosts have mounted: NFS, Lustre, an array, 3FS by FUSE",
        Promises(durable=True, shared=True, expires=True, evicts="stepwell"),
        "stepwell.tiers.media.fs",
        is_pool=True,
    ),
    Kind(
        "redis",
        ("redis", "rediss", "valkey"),
        "redis://user:password@host:6379/0",
        "Redis or Valkey, one server or a cluster; rediss:// over TLS",
        Promises(durable=False, shared=True, expires=True, evicts="server"),
        "stepwell.tiers.media.redis",
        ("redis",),
        "redis",
    ),
    Kind(
        "s3",
        ("s3",),
        "s3://bucket/prefix?region=eu-central-1",
        "S3, and with ?endpoint=https://host whatever speaks like it; a lifecycle rule empties it",
        Promises(durable=True, shared=True, expires=False, evicts="nobody"),
        _OBJECTS,
        ("obstore",),
        "s3",
    ),
    Kind(
        "gs",
        ("gs",),
        "gs://bucket/prefix",
        "Google Cloud Storage; a lifecycle rule of the bucket empties it",
        Promises(durable=True, shared=True, expires=False, evicts="nobody"),
        _OBJECTS,
        ("obstore",),
        "s3",
    ),
    Kind(
        "az",
        ("az",),
        "az://container/prefix?account=name",
        "Azure Blob Storage; a lifecycle rule of the account empties it",
        Promises(durable=True, shared=True, expires=False, evicts="nobody"),
        _OBJECTS,
        ("obstore",),
        "s3",
    ),
    Kind(
        "mooncake",
        ("mooncake",),
        "mooncake://master:50051",
        "Mooncake Store: memory of its nodes, over TCP or RDMA",
        Promises(durable=False, shared=True, expires=False, evicts="server"),
        "stepwell.tiers.media.mooncake",
        ("mooncake",),
        "mooncake",
    ),
    Kind(
        "nixl",
        ("nixl+posix", "nixl+*"),
        "nixl+posix:///mnt/pool?capacity=10TiB",
        "a directory as with fs://, its bytes moved by NIXL; * is another plugin for files",
        Promises(durable=True, shared=True, expires=True, evicts="stepwell"),
        "stepwell.tiers.media.nixl",
        (_NIXL,),
        "nixl",
        INSTALL_NIXL,
        is_pool=True,
    ),
    Kind(
        "nixl-obj",
        ("nixl+obj",),
        "nixl+obj://bucket/prefix?region=eu-central-1",
        "a bucket as with s3://, its bytes moved by NIXL",
        Promises(durable=True, shared=True, expires=False, evicts="nobody"),
        "stepwell.tiers.media.nixl",
        (_NIXL, "obstore"),
        "nixl-obj",
        f"pip install 'stepwell[s3]' && {INSTALL_NIXL}",
    ),
    Kind(
        "3fs",
        ("3fs",),
        "3fs:///3fs/stage/pool?capacity=10TiB",
        "a directory as with fs://, on 3FS: by USRBIO where hf3fs_fuse is installed, else by FUSE",
        Promises(durable=True, shared=True, expires=True, evicts="stepwell"),
        "stepwell.tiers.media.threefs",
        ways=(("hf3fs_fuse", "by USRBIO"), ("", "by FUSE")),
        is_pool=True,
    ),
)


def kind_of(url: MediumUrl) -> Kind:
    """The kind that a URL names.

    Raises:
        ConfigError: none does.
    """
    by_scheme = {scheme: kind for kind in KINDS for scheme in kind.schemes}
    family, plus, _ = url.scheme.partition("+")
    kind = by_scheme.get(url.scheme) or by_scheme.get(f"{family}{plus}*")
    if kind is None:
        known = list(by_scheme)
        near = difflib.get_close_matches(url.scheme, known, n=1)
        hint = f'; the nearest is "{near[0]}"' if near else ""
        raise ConfigError(
            f'there is no kind of storage "{url.scheme}"{hint}: url={url.shown} '
            f"known={','.join(known)}"
        )
    return kind


def open_medium(url: MediumUrl, timeout_s: float) -> Medium:
    """The medium that a URL names; nobody is asked yet.

    Args:
        url: of it.
        timeout_s: how long the other side may keep silent.

    Raises:
        ConfigError: something in the URL is wrong, or a package is missing.
    """
    kind = kind_of(url)
    if not kind.module:
        raise ConfigError(f"the disk tier is given by a path: url={url.shown}")
    if not kind.installed:
        raise ConfigError(
            f"{url.scheme}:// needs the package {' and '.join(kind.missing)}; install it with "
            f"{kind.install_command}: url={url.shown}"
        )
    opens: Callable[[MediumUrl, float], Medium] = importlib.import_module(kind.module).open_medium
    return opens(url, timeout_s)
