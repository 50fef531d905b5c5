"""Identity: what a KV cache depends on besides tokens, and the root digest over it.

An engine's key commits to tokens (and LoRA name, images, salt) but not to the model, its
weights, the dtype, the layout or the parallelism. The root does: it is the SHA-256 of a
canonical JSON text of all of them, so that data of another identity is simply not found.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepwell.core.keys import Root

__all__ = ["IDENTITY_VERSION", "Identity", "JsonValue"]

IDENTITY_VERSION = 1

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

_DOMAIN = b"stepwell-root\0"


def _canonical(value: object) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


@dataclass(frozen=True)
class Identity:
    """Who computed a KV cache and how it is laid out.

    Attributes:
        fields: everything that the bytes depend on; the root is a digest of these.
        labels: words for people (the model's name as given, ...); not part of the root.
    """

    fields: Mapping[str, JsonValue]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Root:
        """The 32-byte digest of ``fields`` and the identity's version."""
        text = _canonical({"identity_version": IDENTITY_VERSION, "fields": dict(self.fields)})
        return Root(hashlib.sha256(_DOMAIN + text.encode("ascii")).digest())

    def to_json(self) -> str:
        """The description that is stored once beside the root's records."""
        return json.dumps(
            {
                "identity_version": IDENTITY_VERSION,
                "fields": dict(self.fields),
                "labels": dict(self.labels),
            },
            indent=2,
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> "Identity":
        """Read a stored description back.

        Raises:
            ValueError: not such a description, or of another identity version.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply to be an identity description") from error
        if not isinstance(data, dict) or data.get("identity_version") != IDENTITY_VERSION:
            raise ValueError("not an identity description of this version")
        fields, labels = data.get("fields"), data.get("labels")
        if not isinstance(fields, dict) or not isinstance(labels, dict):
            raise ValueError("an identity description needs fields and labels")
        return cls(fields, {str(k): str(v) for k, v in labels.items()})

    def differences(self, other: "Identity") -> dict[str, tuple[JsonValue, JsonValue]]:
        """Which fields differ, as name -> (here, there); None stands for an absent field."""
        names = sorted(set(self.fields) | set(other.fields))
        return {
            name: (self.fields.get(name), other.fields.get(name))
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        }
