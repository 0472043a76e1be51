"""Put pages into a store and get them back, without vLLM.

Start a store first:

    (umask 077; openssl rand -hex 32 > key)
    .venv/bin/kvrelay store --socket /tmp/kvrelay.sock --key-file key

then run:  .venv/bin/python examples/store_client.py /tmp/kvrelay.sock key
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvrelay.deploy.key import read_key
from kvrelay.errors import KvrelayError
from kvrelay.identity import NAMING_VERSION, name_pages, root_name
from kvrelay.store.client import StoreClient
from kvrelay.types import Fingerprint, PageFormat

FORMAT = PageFormat(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=32)
MODEL = Fingerprint(weights="my-weights", weights_epoch=0, format=FORMAT, naming=NAMING_VERSION, engine="a script")


def main(socket_path: Path, key_file: Path) -> None:
    client = StoreClient(socket_path, read_key(key_file), owner=f"script/{os.getpid()}", format=FORMAT)
    client.start()
    if not client.wait_attached(timeout_s=5):
        sys.exit(f"no store: {client.problem}")

    tokens = list(range(70))  # three pages: 32 + 32 + 6 tokens
    names = name_pages(root_name(MODEL), tokens, FORMAT.page_tokens)
    lengths = [FORMAT.tokens_of(index, len(tokens)) for index in range(len(names))]
    payloads = [os.urandom(FORMAT.layers * length * FORMAT.token_layer_bytes) for length in lengths]

    client.put_many(list(zip(names, payloads, lengths, strict=True)))
    print("stored:", client.exists(names))
    print("intact:", client.get_many(names) == payloads)

    # A prompt that begins with the same 40 tokens finds the first page, and only that.
    other = name_pages(root_name(MODEL), tokens[:40], FORMAT.page_tokens)
    print("shared:", client.exists(other))
    print("counts:", {name: count for name, count in client.describe().items() if count})
    client.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except KvrelayError as error:
        sys.exit(f"error: {error}")
