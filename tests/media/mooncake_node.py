"""A node of Mooncake: gives memory, and lives until it is killed."""

import sys
import time
from pathlib import Path

from mooncake.store import MooncakeDistributedStore

NODE_BYTES = 256 << 20


def main(master: str, host: str, ready: str, size: str = "") -> None:
    """Give memory to a master's pool, and say so in a file."""
    node = MooncakeDistributedStore()
    size_bytes = int(size or NODE_BYTES)
    code = node.setup(host, "P2PHANDSHAKE", size_bytes, 16 << 20, "tcp", "", master)
    if code:
        sys.exit(f"no node: code={code}")
    Path(ready).touch()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
