"""Words everyone shares. Values only: nothing here reads a clock, a socket or a file."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple, NewType

import msgspec

PageName = NewType("PageName", bytes)
"""16 bytes that name the KV of one run of tokens; see ``identity``."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the KV dtypes that a page can hold."""

CLIENT_CLOSED = 499
"""Status of a request whose client went away; nobody receives it."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every frozen value: keyword-only fields, comparable, hashable."""


class Role(StrEnum):
    """What a worker is asked to do. A label in the router: any worker can play any role."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Codec(StrEnum):
    """How the bytes of pages travel over a link."""

    RAW = "raw"
    LOSSLESS = "lossless"
    INT8 = "int8"
    """Rounded, one scale for K or V of a KV head of a layer of a page."""
    FP8 = "fp8"
    """Rounded to e4m3, with the same scales."""


LOSSY = frozenset({Codec.INT8, Codec.FP8})
"""Codecs that change bytes."""


class Medium(StrEnum):
    """Where a page is kept, fastest first."""

    HBM = "hbm"
    """An engine's own KV cache, on any device."""
    MEMORY = "memory"
    """A node's store, in host memory."""
    DISK = "disk"
    OBJECT = "object"


class PageFormat(Value, frozen=True, kw_only=True):
    """Shape of a canonical page: ``[layer][kv_head][K|V][token][head_dim]``.

    A page of ``t`` tokens (``t <= page_tokens``) is stored compactly: each layer's segment holds, head after head,
    K of its ``t`` tokens and then V of them, at the start of that layer's fixed stride. Heads come first, so that
    those of one tensor-parallel rank are one run.
    """

    layers: int
    kv_heads: int
    """KV heads of the whole model, however many ranks share them."""
    head_dim: int
    dtype: str
    page_tokens: int
    lossy: Codec | None = None
    """INT8 or FP8: a link may have rounded the page so. It is then another page than the exact one, also by name."""

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def segment_bytes(self) -> int:
        """Stride of one layer inside a page, in bytes."""
        return self.page_tokens * self.token_layer_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page, all layers."""
        return self.layers * self.segment_bytes

    def pages_for(self, tokens: int) -> int:
        """How many pages ``tokens`` tokens need, the partial one included."""
        return -(-tokens // self.page_tokens)

    def tokens_of(self, index: int, total_tokens: int) -> int:
        """Valid tokens of page ``index`` of a prompt of ``total_tokens``."""
        return min(self.page_tokens, total_tokens - index * self.page_tokens)


class Shard(NamedTuple):
    """The run of KV heads that one of ``of`` writers of a page fills; ``of`` divides the format's ``kv_heads``."""

    number: int
    of: int

    def heads(self, kv_heads: int) -> slice:
        """Which of ``kv_heads`` heads."""
        share = kv_heads // self.of
        return slice(self.number * share, (self.number + 1) * share)


WHOLE = Shard(0, 1)
"""All heads: the page has one writer."""


class Fingerprint(Value, frozen=True, kw_only=True):
    """Everything about a worker that decides whether another may use its pages."""

    weights: str
    """Digest of the model folder's files (config, weights)."""
    weights_epoch: int
    """Counts in-place weight updates (``reset_cache``); pages of another epoch are misses."""
    format: PageFormat
    naming: int
    """Version of the page-naming scheme (``identity.NAMING_VERSION``)."""
    engine: str
    """Engine and version, e.g. ``vllm 0.32.0``."""
    speculative: str = ""
    """Speculative decoding setting; empty when off."""


class Engine(Value, frozen=True, kw_only=True):
    """What a started engine says of itself (written by the connector, read by the worker)."""

    fingerprint: Fingerprint
    kv_tokens: int
    """KV capacity of the engine, in tokens."""
    block_tokens: int
    max_model_len: int
    max_batched_tokens: int
    """Token budget of one step: the size of a prefill chunk."""
    shared_chunk_tokens: int = 0
    """Most tokens of one prompt in a step that others could use too; 0: one prompt may take the whole step."""
    tensor_parallel: int = 1
    """Ranks that share the model's heads."""
    device: str = ""
    """What it runs on, by its vendor's name; empty: unknown. Only the first predictions depend on it."""
    replays: bool = False
    """It can be made to begin an answer with given tokens (``connector.replay``)."""

    @property
    def lets_pass(self) -> bool:
        """Whether long prompts stand back for much shorter ones after a step (``connector.short_first``)."""
        return 0 < self.shared_chunk_tokens < self.max_batched_tokens

    @property
    def page_writers(self) -> int:
        """How many of the ranks write each page: where there are more ranks than KV heads, copies stay silent."""
        return min(self.tensor_parallel, self.fingerprint.format.kv_heads)


class WorkerInfo(Value, frozen=True, kw_only=True):
    """A worker as it registers with the router."""

    name: str
    incarnation: str
    role: Role
    url: str
    """Base URL of its OpenAI server, e.g. ``http://127.0.0.1:8101``."""
    model: str
    """Model id that clients use."""
    store: str
    """Name of its node's store."""
    engine: Engine


class Drain(Value, frozen=True, kw_only=True):
    """Whether a worker is to become empty. Of two orders the one with the higher ``number`` is newer; each router
    numbers its own from the highest that it knows on."""

    number: int = 0
    draining: bool = False


class StoreInfo(Value, frozen=True, kw_only=True):
    """A store as it registers with the router."""

    name: str
    incarnation: str
    address: str
    """``host:port`` at which other stores reach it."""
    capacity_bytes: int


class Stage(StrEnum):
    """Milestones of one hand-off, as the router hears of them."""

    STARTED = "started"
    """P's engine scheduled the request's first chunk."""
    LAST_CHUNK = "last_chunk"
    """P's engine scheduled the chunk that ends the prompt: time to dispatch D."""
    SENT = "sent"
    """P's node store has sent everything that D's lacked; never when they share one."""
    ARRIVED = "arrived"
    """Every page of the prompt is complete in D's node store."""
    LOADED = "loaded"
    """D's engine holds the pages in its own KV cache (or gave up on some of them)."""
    FAILED = "failed"
    """No more pages will come; what arrived is valid."""


class Transport(StrEnum):
    """How a transfer's pages came from P's node store to D's."""

    LOCAL = "local"
    """Nothing crossed a wire: one store serves both, or D's had every page."""
    TCP = "tcp"
    SHM = "shm"
    """Both stores are on one machine: the sender maps the receiver's arena and copies into it."""
    NIXL = "nixl"
    """One-sided writes into the receiver's arena: RDMA where there is a card for it."""


NIXL_MISSING = "NIXL is not installed here"
"""How a store's report of a path begins where only the optional package is missing."""


_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
"""What an arena's columns can be compared with: whether it is in range is seen there."""


class SlotRef(msgspec.Struct, frozen=True, array_like=True):
    """One slot of an arena at one moment of its life. Stale once the slot's generation moved on."""

    slot: _Int64
    generation: _Int64


PromptNames = Mapping[PageName, tuple[PageName, ...]]
"""Names of one prompt's pages, by the unsalted root (``identity.root_of``) of the workers that name them so. Workers of
unlike weights, dtypes or formats have unlike names for the same tokens."""


class RequestFacts(Value, frozen=True, kw_only=True):
    """What the brain needs to know of a request; never its text."""

    request_id: str
    model: str
    prompt_tokens: tuple[int, ...]
    """Length of each prompt of the request, in tokens."""
    max_tokens: int
    """Most tokens that D may write, all choices together."""
    page_names: tuple[PromptNames, ...]
    """Page names of each prompt; empty when the router cannot name them."""
