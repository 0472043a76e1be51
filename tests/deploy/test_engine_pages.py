"""What an engine's events mean in pages, event by event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.deploy.engine_pages import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EnginePages
from kvrelay.fleet.page_log import PageLog
from kvrelay.identity import name_pages, root_name
from kvrelay.types import Engine, PageName
from tests.fleet.values import engine

PAGE = 4
TOKENS = list(range(100, 200))


class Listener:
    """An engine's pages and what its routers know of them."""

    def __init__(self, block_tokens: int = 8, kv_tokens: int = 4096) -> None:
        self.engine: Engine = msgspec.structs.replace(engine(), block_tokens=block_tokens, kv_tokens=kv_tokens)
        self.log = PageLog("i1")
        self.pages = EnginePages(self.log, lambda: self.engine)
        self.block_tokens = block_tokens

    def store(
        self,
        hashes: list[BlockHash],
        parent: BlockHash | None = None,
        start: int = 0,
        **fields: Any,
    ) -> None:
        begin, size = start * self.block_tokens, self.block_tokens
        tokens = TOKENS[begin : begin + size * len(hashes)]
        event = BlockStored(hashes, parent, tokens, size, medium="GPU", group_idx=0)
        self.pages.take([msgspec.structs.replace(event, **fields)])

    def remove(self, *hashes: BlockHash) -> None:
        self.pages.take([BlockRemoved([block_hash], medium="GPU", group_idx=0) for block_hash in hashes])

    def names(self, tokens: int, salt: str = "") -> list[PageName]:
        return name_pages(root_name(self.engine.fingerprint, salt=salt), TOKENS[:tokens], PAGE)

    def known(self) -> set[PageName]:
        """As a router that joins now."""
        held: set[PageName] = set()
        for message in self.log.follow(-1):
            if message is None:
                break
            held.update(getattr(message, "names", ()))
        return held


def test_a_block_is_its_pages_and_the_next_one_goes_on_from_there() -> None:
    heard = Listener(block_tokens=8)
    heard.store([1, 2])
    heard.store([3], parent=2, start=2)
    assert heard.known() == set(heard.names(24))


def test_a_removed_copy_is_not_the_last_one() -> None:
    heard = Listener()
    heard.store([1])
    heard.store([1])
    heard.remove(1)
    assert heard.known() == set(heard.names(8))
    heard.remove(1)
    assert heard.known() == set()
    heard.remove(1, 7)
    assert heard.known() == set()


def test_pages_longer_than_a_block_are_there_while_all_their_blocks_are() -> None:
    heard = Listener(block_tokens=2)
    heard.store([1])
    assert heard.known() == set()
    heard.store([2, 3, 4], parent=1, start=1)
    assert heard.known() == set(heard.names(8))
    heard.remove(3)
    assert heard.known() == set(heard.names(4))
    heard.remove(1)
    assert heard.known() == set()


def test_two_pages_that_begin_in_one_block_both_need_it() -> None:
    heard = Listener(block_tokens=2)
    heard.store([1])
    heard.store([2], parent=1, start=1)
    heard.store([9], parent=1, token_ids=[7, 7])
    other = name_pages(root_name(heard.engine.fingerprint), [*TOKENS[:2], 7, 7], PAGE)
    assert heard.known() == {*heard.names(4), *other}
    heard.remove(1)
    assert heard.known() == set()


def test_a_page_that_two_unlike_blocks_begin_with_is_there_until_both_are_gone() -> None:
    heard = Listener(block_tokens=8)
    heard.store([1])
    heard.store([2], token_ids=[*TOKENS[:4], 7, 7, 7, 7])
    heard.remove(2)
    assert heard.known() == set(heard.names(8))
    heard.remove(1)
    assert heard.known() == set()


def test_what_follows_a_block_that_nobody_heard_of_has_no_name() -> None:
    heard = Listener()
    heard.store([2], parent=1, start=1)
    heard.store([3], parent=2, start=2)
    assert (heard.known(), heard.pages.unnamed) == (set(), 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": 1},
        {"lora_name": "adapter"},
        {"extra_keys": [("adapter", "salt")]},
        {"extra_keys": [(("image", 3),)]},
        {"extra_keys": [(["image", 3],)]},
        {"token_ids": []},
        {"token_ids": TOKENS[:7]},
    ],
)
def test_what_tokens_and_salt_alone_do_not_decide_has_no_name_nor_has_what_follows(fields: dict[str, Any]) -> None:
    heard = Listener()
    heard.store([1], **fields)
    heard.store([2], parent=1, start=1)
    assert (heard.known(), heard.pages.unnamed) == (set(), 2)


def test_an_extra_key_in_a_later_block_is_no_salt() -> None:
    heard = Listener()
    heard.store([1, 2], extra_keys=[None, ("digest",)])
    heard.store([3])
    heard.store([4], parent=3, start=1, extra_keys=[("digest",)])
    assert heard.known() == set(heard.names(8))


def test_a_tenants_salt_is_part_of_every_name() -> None:
    heard = Listener()
    heard.store([1, 2], extra_keys=[("tenant",), None])
    assert heard.known() == set(heard.names(16, salt="tenant"))
    assert heard.known().isdisjoint(heard.names(16))


@pytest.mark.parametrize("fields", [{"medium": "CPU", "token_ids": []}, {"medium": "STORAGE"}, {"group_idx": 1}])
def test_other_tiers_and_groups_are_not_the_engines_own_cache(fields: dict[str, Any]) -> None:
    heard = Listener()
    heard.store([1], **fields)
    assert (heard.known(), heard.pages.unnamed) == (set(), 0)
    heard.store([1])
    heard.pages.take([BlockRemoved([1], medium="CPU")])
    assert heard.known() == set(heard.names(8))


def test_after_a_reset_nothing_is_there_and_new_weights_give_new_names() -> None:
    heard = Listener()
    heard.store([1, 2])
    old = heard.known()
    heard.engine = msgspec.structs.replace(
        heard.engine, fingerprint=msgspec.structs.replace(heard.engine.fingerprint, weights_epoch=1)
    )
    heard.pages.take([AllBlocksCleared()])
    assert heard.known() == set()
    heard.store([1])
    assert heard.known() == set(heard.names(8))
    assert heard.known().isdisjoint(old)


def test_more_blocks_than_the_engine_has_are_a_mistake_and_all_are_forgotten() -> None:
    heard = Listener(block_tokens=8, kv_tokens=24)
    for number in range(3):
        heard.store([number])
    assert len(heard.known()) == 2
    heard.store([4])
    assert (heard.known(), heard.pages.overflows) == (set(), 1)
