"""The router's index: events applied, prompts looked up, bytes a page, and how long a router that starts late is blind.

    python -m benchmarks.index [--no-peer]

Seconds are CPU seconds of the whole process, so that other work on the machine counts as little as possible. Dynamo's
RadixTree (Rust) does the same beside it, in CPU seconds of its threads together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.peers import radix_tree
from benchmarks.peers.environment import peer_python
from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.feed import Feed
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.feed import Heartbeat, PageChange, PageEvents, PageSnapshot, RegisterStore
from kvrelay.protocol.frame import FrameReader, encode
from kvrelay.protocol.message import Message
from kvrelay.router.feed import FeedServer
from kvrelay.router.switchboard import Switchboard
from kvrelay.types import Medium, PageName, StoreInfo

DEPTH = 128
HOLDERS = 8
SMALL, LARGE = 1_024, 8_192
"""Chains of ``DEPTH`` pages: 131 thousand and a million pages."""
SINGLES = 100_000
LOOKUPS = 20_000
KEY = b"k" * 32
DYNAMO = ("ai-dynamo-runtime==1.6.1",)
RESULTS = Path(__file__).parent / "results" / "index.json"


def chains_of(count: int) -> list[list[PageName]]:
    dice = random.Random(1)
    return [[PageName(dice.randbytes(16)) for _ in range(DEPTH)] for _ in range(count)]


def frames(pieces: Sequence[list[PageName]]) -> list[bytes]:
    """Each piece as one event on the wire."""
    changes = ([PageChange(Medium.HBM, [], names)] for names in pieces)
    return [
        encode(PageEvents(incarnation="1", sequence=number + 1, changes=change))
        for number, change in enumerate(changes)
    ]


def read(frame: bytes) -> Message | None:
    """The message of one frame, its checksum verified."""
    reader = FrameReader()
    reader.feed(frame)
    return reader.next()


def ready(index: PageIndex, holder: str) -> None:
    """Let ``holder`` begin with an empty snapshot."""
    index.open(holder, "1", 0.0)
    empty = PageSnapshot(incarnation="1", sequence=0, part=0, last=True, medium=Medium.HBM, names=[])
    index.take(holder, "1", empty, 0.0)


def apply(index: PageIndex, holder: str, bodies: Sequence[bytes]) -> float:
    """Apply events as they come from the wire; seconds, decoding included."""
    begin = time.process_time()
    for body in bodies:
        message = read(body)
        assert isinstance(message, PageEvents)
        assert index.take(holder, "1", message, 0.0) is None
    return time.process_time() - begin


def applied_s(pieces: Sequence[list[PageName]]) -> float:
    """Seconds to apply events that were decoded before."""
    index, bodies = PageIndex(limit=2 << 20), frames(pieces)
    ready(index, "w")
    messages = [message for message in map(read, bodies) if isinstance(message, PageEvents)]
    begin = time.process_time()
    for message in messages:
        index.take("w", "1", message, 0.0)
    return time.process_time() - begin


def lookup(index: PageIndex, chains: list[list[PageName]]) -> float:
    """Lookups a second of names that were just made, the depth of every holder included."""
    dice = random.Random(2)
    asked = [[PageName(bytes(bytearray(name))) for name in dice.choice(chains)] for _ in range(LOOKUPS)]
    begin = time.process_time()
    for names in asked:
        assert index.find(names).leading()
    return LOOKUPS / (time.process_time() - begin)


def measure(chains: int) -> dict[str, float]:
    """Figures of an index of ``chains`` chains."""
    prompts = chains_of(chains)
    bodies = frames(prompts)
    index = PageIndex(limit=2 << 20)
    ready(index, "w0")
    before = radix_tree.rss_bytes()
    seconds = apply(index, "w0", bodies)
    found = {
        "blocks_per_s": chains * DEPTH / seconds,
        "bytes_per_page": (radix_tree.rss_bytes() - before) / (chains * DEPTH),
        "lookups_per_s_1": lookup(index, prompts),
    }
    for number in range(1, HOLDERS):
        ready(index, f"w{number}")
        apply(index, f"w{number}", bodies)
    found[f"lookups_per_s_{HOLDERS}"] = lookup(index, prompts)
    ready(index, "single")
    begin = time.process_time()
    index.drop("w0")
    found["drop_s"] = time.process_time() - begin
    dice = random.Random(3)
    loose = [[PageName(dice.randbytes(16))] for _ in range(SINGLES)]
    found["single_block_events_per_s"] = SINGLES / apply(index, "single", frames(loose))
    found["blocks_decoded_before_per_s"] = chains * DEPTH / applied_s(prompts)
    found["single_block_events_decoded_before_per_s"] = SINGLES / applied_s(loose)
    return found


async def rebuild_s(pages: int) -> float:
    """Seconds from the registration of a store with ``pages`` pages to their last one in a new router's index.

    Both ends share this process's core, so that a real router needs less.
    """
    log, dice = PageLog("1"), random.Random(4)
    log.store([PageName(dice.randbytes(16)) for _ in range(pages)], Medium.MEMORY)
    brain = Brain(dead_after_s=60.0, transfer_wait_s=60.0, index_pages=2 << 20)
    server = FeedServer(brain, time.monotonic, lambda commands: None, lambda worker: None, Switchboard())
    sock = bind_tcp("127.0.0.1", 0)
    listener = Listener(sock, KEY, receiver="router", purposes={"feed"}, serve=lambda link: _serve(server, link))
    feed = Feed(
        [f"127.0.0.1:{sock.getsockname()[1]}"],
        KEY,
        sender="s",
        registration=RegisterStore(store=StoreInfo(name="s", incarnation="1", address="s:1", capacity_bytes=1)),
        heartbeat=lambda: Heartbeat(name="s", incarnation="1", healthy=True),
        heartbeat_s=0.5,
        pages=log,
    )
    begin = time.process_time()
    tasks = [asyncio.create_task(listener.run()), asyncio.create_task(feed.run())]
    while brain.index.count(store_key("s")) < pages:
        await asyncio.sleep(0.005)
    seconds = time.process_time() - begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seconds


async def _serve(server: FeedServer, link: Channel) -> None:
    await server.serve(link)


def peer(chains: int) -> dict[str, float]:
    """The same figures of Dynamo's tree."""
    python = peer_python("dynamo", DYNAMO, print)
    sizes = map(str, (chains, DEPTH, HOLDERS, SINGLES, LOOKUPS))
    output = subprocess.run([python, radix_tree.__file__, *sizes], check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the router's index beside Dynamo's, and print one table.")
    parser.add_argument("--no-peer", action="store_true", help="leave Dynamo out, which would be installed first")
    options = parser.parse_args(arguments)
    results: dict[str, object] = {"machine": machine.describe(), "depth": DEPTH}
    for chains in (SMALL, LARGE):
        rows = {"kvrelay": measure(chains)}
        if not options.no_peer:
            rows["dynamo"] = peer(chains)
        results[f"{chains * DEPTH} pages"] = rows
        for key in rows["kvrelay"]:
            print(f"{chains * DEPTH:>9,} pages  {key:40}", *(f"{row.get(key, 0):14,.4g}" for row in rows.values()))
    results["rebuild_1048576_pages_s"] = asyncio.run(rebuild_s(1 << 20))
    print(f"a late router knows a store's 1,048,576 pages after {results['rebuild_1048576_pages_s']:.2f} s")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
