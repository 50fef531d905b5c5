"""URLs of media: parsed strictly, and shown without their passwords."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from stepwell.errors import ConfigError
from stepwell.settings import without_password

__all__ = ["MediumUrl", "shown_address"]

_FROM_ENVIRONMENT = re.compile(r"\$\{(\w+)\}")
_SCHEME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*")


@dataclass(frozen=True, slots=True)
class MediumUrl:
    """A URL in its parts, each of them decoded.

    Attributes:
        scheme: lower case.
        user, password, host, path: "" where there is none; the path begins with a slash. A
            password of the form ``${NAME}`` stands for a variable, see `secret`.
        port: 0 where there is none.
        parameters: of the query.
    """

    scheme: str
    user: str = ""
    password: str = field(default="", repr=False)
    host: str = ""
    port: int = 0
    path: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "MediumUrl":
        """A URL from what a person wrote.

        Raises:
            ConfigError: it is none, or a parameter is given twice.
        """
        # Parameters may be meant to be secret, whether or not any of ours is.
        shown = re.split("[?#]", without_password(text))[0]
        scheme, separator, rest = text.partition("://")
        try:
            # Apart from the scheme, which for urlsplit must not begin with a digit.
            parts = urlsplit(f"//{rest}")
            port = parts.port
        except ValueError:
            # Its words may quote what it took for a port, and was a password; whoever prints the
            # whole chain would show it.
            raise ConfigError(
                f"this is no valid URL; in user and password / is written %2F, : %3A, @ %40, ? %3F "
                f"and # %23: url={shown!r}"
            ) from None
        if not separator or _SCHEME.fullmatch(scheme) is None:
            raise ConfigError(
                "a storage is named by a URL such as redis://127.0.0.1:6379; "
                f"`stepwell tiers` lists the kinds: url={shown!r}"
            )
        if (parts.netloc and "@" in parts.path + parts.query) or parts.fragment:
            raise ConfigError(
                f"in a user, password or path / is written %2F, ? %3F, # %23 and @ %40: "
                f"url={shown!r}"
            )
        if port == 0:
            raise ConfigError(f"there is no port 0: url={shown!r}")
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        parameters = dict(pairs)
        if len(parameters) < len(pairs):
            twice = next(name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1)
            raise ConfigError(f"a parameter is given twice: url={shown!r} {twice}=...")
        return cls(
            scheme.lower(),
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            parts.hostname or "",
            port or 0,
            unquote(parts.path),
            parameters,
        )

    def secret(self) -> str:
        """The password, taken from the environment where it is given as ``${NAME}``.

        That keeps it out of command lines and configurations. It is looked up when a connection
        is made, since a configuration may be written where there is no such variable.

        Raises:
            ConfigError: there is no such variable.
        """
        match = _FROM_ENVIRONMENT.fullmatch(self.password)
        if match is None:
            return self.password
        found = os.environ.get(match[1])
        if found is None:
            raise ConfigError(
                f"the environment has no variable {match[1]}, which the password is to be taken "
                f"from: url={self.shown}"
            )
        return found

    @property
    def shown(self) -> str:
        """The URL without password and parameters."""
        user = f"{quote(self.user)}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port else ""
        return f"{self.scheme}://{user}{host}{port}{quote(self.path)}"

    def check_parameters(self, known: Sequence[str]) -> None:
        """Raises ConfigError for a parameter that is not among the known ones."""
        for name in self.parameters:
            if name not in known:
                near = difflib.get_close_matches(name.lower(), known, n=1)
                hint = f'; the nearest is "{near[0]}"' if near else ""
                listed = ",".join(known) or "none"
                raise ConfigError(
                    f'{self.scheme}:// has no parameter "{name}"{hint}: url={self.shown} '
                    f"known={listed}"
                )

    def switch(self, name: str, *, default: bool = False) -> bool:
        """A parameter that is "true" or "false".

        Raises:
            ConfigError: neither.
        """
        text = self.parameters.get(name, "true" if default else "false")
        if text not in ("true", "false"):
            raise ConfigError(f'{name} is "true" or "false": url={self.shown} {name}={text!r}')
        return text == "true"


def shown_address(host: str, port: int) -> str:
    """``host:port``, also for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
