"""Which pages the blocks of one vLLM engine hold, from the events that it publishes. Token ids end here.

It must never name a block whose prefix it does not know, and never take a removed copy for the last one: vLLM keeps
equal blocks side by side and reports each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvrelay.fleet.page_log import PageLog
from kvrelay.identity import page_name, root_name, token_bytes
from kvrelay.types import Engine, Fingerprint, Medium, PageName

BlockHash = int | bytes
"""vLLM's own; means something inside one engine only."""
_OWN_CACHE = (None, "GPU")
"""``medium`` of the engine's own KV cache, on any device; others are tiers of other connectors."""


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that follow one another were filled, or are loaded."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """One copy of each of these blocks is gone."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache was reset."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Block:
    """One block, however many copies of it there are."""

    __slots__ = ("begins", "copies", "names", "needs", "rest", "tail")

    def __init__(self, names: list[PageName], tail: PageName, rest: bytes, needs: list[Block]) -> None:
        self.copies = 0
        self.names = names
        """Pages that end in it. Prompts that part inside a block have unlike blocks with the same first pages."""
        self.begins: set[PageName] = set()
        """Pages that begin in it and end in a later one: where pages are longer than blocks."""
        self.tail = tail
        """The last whole page up to its end, or the root."""
        self.rest = rest
        """Packed tokens after ``tail``."""
        self.needs = needs
        """Blocks in which its first page begins."""


class EnginePages:
    """Blocks by vLLM's hashes, and what they mean to routers."""

    def __init__(self, log: PageLog, engine: Callable[[], Engine]) -> None:
        self.unnamed = 0
        """Blocks that have no name: of adapters or images, or their prefix is unknown."""
        self.overflows = 0
        """How often there were more blocks than the engine can hold, so that events must have been wrong."""
        self._log = log
        self._engine = engine
        self._blocks: dict[BlockHash, Block] = {}
        self._ends: dict[PageName, int] = {}
        """In how many blocks each page ends."""

    def __repr__(self) -> str:
        return f"<EnginePages {len(self._blocks)} blocks, {self.unnamed} unnamed>"

    def take(self, events: Sequence[KvEvent]) -> None:
        """What happened in one step of the engine."""
        engine = self._engine()
        for event in events:
            match event:
                case BlockStored() if event.medium in _OWN_CACHE and not event.group_idx:
                    self._stored(event, engine.fingerprint)
                case BlockRemoved() if event.medium in _OWN_CACHE and not event.group_idx:
                    self._removed(event.block_hashes)
                case AllBlocksCleared():
                    self.forget()
                case _:
                    pass
        if len(self._blocks) > engine.kv_tokens // engine.block_tokens:
            self.overflows += 1
            self.forget()

    def forget(self) -> None:
        """Events were missed, or the cache was reset: nothing is known to be there."""
        self._blocks.clear()
        self._ends.clear()
        self._log.clear(Medium.HBM)

    def _stored(self, event: BlockStored, fingerprint: Fingerprint) -> None:
        previous = self._prefix(event, fingerprint)
        size, hashes = event.block_size, event.block_hashes
        if previous is None or len(event.token_ids) != size * len(hashes):
            self.unnamed += len(hashes)
            return
        packed, page_bytes = token_bytes(event.token_ids), 4 * fingerprint.format.page_tokens
        for index, block_hash in enumerate(hashes):
            block = self._blocks.get(block_hash)
            if block is None:
                block = _extend(previous, packed[4 * size * index : 4 * size * (index + 1)], page_bytes)
                self._blocks[block_hash] = block
                for name in block.names:
                    self._ends[name] = self._ends.get(name, 0) + 1
            block.copies += 1
            if all(needed.copies for needed in block.needs):
                self._log.store(block.names, Medium.HBM)
            previous = block

    def _prefix(self, event: BlockStored, fingerprint: Fingerprint) -> Block | None:
        """What comes before the event's blocks; None when that cannot be named."""
        keys = event.extra_keys or [None]
        if event.lora_id is not None or event.lora_name is not None or any(keys[1:]):
            return None
        if event.parent_block_hash is not None:
            return None if keys[0] else self._blocks.get(event.parent_block_hash)
        match keys[0] or ():
            case ():
                return Block([], root_name(fingerprint), b"", [])
            case (str(salt),):  # salts come without a tag, and only with a prompt's first block
                return Block([], root_name(fingerprint, salt=salt), b"", [])
            case _:
                return None

    def _removed(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                del self._blocks[block_hash]
                self._forget_pages(block)

    def _forget_pages(self, block: Block) -> None:
        gone = list(block.begins)
        for needed in block.needs:
            needed.begins.difference_update(block.names)
        for name in block.names:
            self._ends[name] -= 1
            if not self._ends[name]:
                del self._ends[name]
                gone.append(name)
        self._log.remove(gone, Medium.HBM)


def _extend(previous: Block, tokens: bytes, page_bytes: int) -> Block:
    """The block after ``previous``. The first page that ends in it may have begun in blocks before it."""
    needs = [*previous.needs, previous] if previous.rest else []
    rest, name, names = previous.rest + tokens, previous.tail, list[PageName]()
    while len(rest) >= page_bytes:
        name = page_name(name, rest[:page_bytes])
        rest = rest[page_bytes:]
        names.append(name)
    for block in needs if names else []:
        block.begins.add(names[0])
    return Block(names, name, rest, needs)
