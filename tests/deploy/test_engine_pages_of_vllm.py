"""What the events of vLLM's own cache manager mean is what that manager then finds, to the block."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvrelay.deploy.engine_pages import EnginePages
from kvrelay.deploy.event_relay import Batch
from kvrelay.fleet.index import PageIndex
from kvrelay.fleet.page_log import PageLog
from kvrelay.identity import name_pages, root_name
from kvrelay.types import Engine
from tests.fleet.values import engine

pytestmark = pytest.mark.vllm

BLOCKS = 40


class Cache:
    """vLLM's cache of ``BLOCKS`` blocks without an engine around it, and an index of its events."""

    def __init__(self, block_tokens: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=BLOCKS + 1,  # one is vLLM's null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=512,
            scheduler_block_size=block_tokens,
            hash_block_size=block_tokens,
            enable_kv_cache_events=True,
        )
        self._hasher = get_request_block_hasher(block_tokens, sha256)
        self.block_tokens = block_tokens
        self.engine: Engine = msgspec.structs.replace(
            engine(), block_tokens=block_tokens, kv_tokens=BLOCKS * block_tokens
        )
        self.log, self.index = PageLog("i1"), PageIndex()
        self.pages = EnginePages(self.log, lambda: self.engine)
        self._told = self.log.follow(self.index.open("w", "i1", 0.0).after)
        self._requests = 0

    def begin(self, tokens: list[int], salt: str | None = None) -> tuple[Any, int]:
        """Schedule a whole prompt; the request, and its tokens that were cached."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._requests += 1
        request = Request(
            str(self._requests), tokens, SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=self._hasher
        )
        blocks, cached, *_ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(tokens) - cached, cached, blocks) is not None
        self.hear()
        return request, cached

    def end(self, request: Any) -> None:
        self.manager.free(request)
        self.hear()

    def hear(self) -> None:
        """What happened goes the way of an engine's batches."""
        events = self.manager.take_events()
        self.pages.take(msgspec.msgpack.decode(msgspec.msgpack.encode([0.0, events]), type=Batch).events)
        while (message := next(self._told)) is not None:
            assert self.index.take("w", "i1", message, 0.0) is None

    def expected(self, tokens: list[int], salt: str = "") -> int:
        """Tokens that the index says are cached, in whole pages; vLLM computes the last one in any case."""
        page_tokens = self.engine.fingerprint.format.page_tokens
        names = name_pages(root_name(self.engine.fingerprint, salt=salt), tokens, page_tokens)
        held = self.index.find(names).at("w") * page_tokens
        return self.whole(min(held, len(tokens) - 1))

    def whole(self, tokens: int) -> int:
        """``tokens`` in whole blocks and pages."""
        unit = max(self.block_tokens, self.engine.fingerprint.format.page_tokens)
        return tokens // unit * unit


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths."""
    dice = random.Random(seed)
    stems = [[dice.randrange(1000) for _ in range(80)] for _ in range(5)]
    ends = [[dice.randrange(1000) for _ in range(dice.randrange(1, 30))] for _ in range(count)]
    return [dice.choice(stems)[: dice.randrange(80)] + end for end in ends]


@pytest.mark.parametrize("block_tokens", [2, 4, 8, 16])
def test_every_hit_is_foretold_while_blocks_come_and_go_and_have_copies(block_tokens: int) -> None:
    cache, dice, hits = Cache(block_tokens), random.Random(block_tokens), 0
    running: list[Any] = []
    for prompt in prompts(400, seed=block_tokens):
        prompt = prompt[: 10 * block_tokens]
        expected = cache.expected(prompt)
        request, cached = cache.begin(prompt)
        assert cache.whole(cached) == expected
        hits += cached > 0
        running.append(request)
        while len(running) > 2 or (running and dice.random() < 0.5):
            cache.end(running.pop(dice.randrange(len(running))))
    assert hits > 50
    assert (cache.pages.unnamed, cache.pages.overflows) == (0, 0)
    for request in running:
        cache.end(request)
    assert cache.manager.reset_prefix_cache()
    cache.hear()
    assert len(cache.index) == 0


def test_tenants_with_a_salt_share_nothing() -> None:
    cache, prompt = Cache(4), list(range(30))
    for salt in ("a", "b"):
        assert cache.expected(prompt, salt) == 0
        request, cached = cache.begin(prompt, salt)
        assert cached == 0
        cache.end(request)
        assert cache.expected(prompt, salt) == 28
    assert cache.expected(prompt) == 0
