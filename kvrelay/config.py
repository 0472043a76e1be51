"""One TOML becomes one frozen tree. Every key has a unit in its name, a range and a sentence."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.types import Codec, Role, Transport

Port = Annotated[int, Meta(ge=0, le=65535)]
"""A TCP port; 0 takes a free one."""
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Positive = Annotated[int, Meta(gt=0)]


BLOCK_MULTIPLE = 32
"""vLLM 0.32's CPU attention accepts no other block sizes."""
DEFAULT_BLOCK_TOKENS = 128
"""vLLM's own block size on CPU."""

_HOST_PORT = r"[^\s/@:]+:[0-9]{1,5}"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: an unknown key is an error."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which model is served."""

    path: Annotated[str, Meta(description="Folder of a Hugging Face model.")] = ""
    name: Annotated[str, Meta(description="Model id that clients use; the folder's name when empty.")] = ""
    dtype: Annotated[
        str, Meta(pattern="^(auto|bfloat16|float32)$", description="auto, bfloat16 or float32; weights and KV.")
    ] = "auto"


class RouterConfig(Section, frozen=True, kw_only=True):
    """The router: its ports, limits and timeouts."""

    host: Annotated[str, Meta(description="Address that clients reach; loopback unless told.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="OpenAI API port.")] = 8000
    control_host: Annotated[str, Meta(description="Address at which workers and stores register.")] = "127.0.0.1"
    control_port: Annotated[Port, Meta(description="Port at which workers and stores register.")] = 7080
    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="Router processes of this machine that share router.port, each with a control port of its own.",
        ),
    ] = 1
    api_keys: Annotated[
        tuple[str, ...], Meta(description="Accepted bearer tokens, as TENANT:KEY or KEY; none means open.")
    ] = ()
    max_body_bytes: Annotated[Positive, Meta(description="Longest request body.")] = 32 << 20
    upstream_connect_s: Annotated[Seconds, Meta(description="Longest wait for a worker to accept a connection.")] = 2.0
    convert_kv_dtype: Annotated[
        bool,
        Meta(
            description="Pair workers whose KV differs in type alone (float32, bfloat16), when no like pair is there; "
            "the decode worker converts, and answers are near those of one worker, not equal."
        ),
    ] = False
    transfer_wait_s: Annotated[
        Seconds, Meta(description="Longest silence of P before D is asked to compute the prompt itself.")
    ] = 120.0
    local_prefill: Annotated[
        str,
        Meta(
            pattern="^(auto|never)$",
            description="auto: D computes a prompt itself where that is predicted to cost less; never: where it must.",
        ),
    ] = "auto"
    kv_routing: Annotated[
        bool,
        Meta(
            description="false: requests are passed on as they are, to the worker with the least to do; nothing is "
            "tokenised, split or looked up."
        ),
    ] = True
    queue_s: Annotated[
        Seconds, Meta(description="Predicted wait at a P beyond which requests wait in the router, in fair order.")
    ] = 2.0
    hold_s: Annotated[
        float, Meta(ge=0, le=86400, description="Longest wait in the router before a 503; 0: nobody waits there.")
    ] = 30.0
    resume: Annotated[
        bool,
        Meta(description="A streamed answer whose decode worker dies, hangs or breaks off goes on from another one."),
    ] = True
    slo_ttft_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="A request whose first token is predicted later gets 503, once workers are measured; 0: none.",
        ),
    ] = 0.0
    slo_tpot_s: Annotated[
        float, Meta(ge=0, le=86400, description="The same for each token after the first; 0: none does.")
    ] = 0.0
    replicate_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Of the speed of links between stores, what second copies of running answers' pages may "
            "take, where only the node has them that writes; 0: there are none.",
        ),
    ] = 0.0
    index_pages: Annotated[
        Positive, Meta(description="Most page names that the router indexes, 120 bytes each; others count as misses.")
    ] = 1 << 20
    learned_file: Annotated[
        str,
        Meta(
            description="File in which learned timings outlive the router; when empty `kvrelay up` keeps them in its "
            "cache folder, unless its workers are simulated, and `kvrelay router` does not."
        ),
    ] = ""


class TenantConfig(Section, frozen=True, kw_only=True):
    """One tenant of ``router.api_keys``, as ``[tenants.NAME]``: what it was promised, and its right among others."""

    share: Annotated[
        float, Meta(gt=0, le=1000, description="Of the prefill workers' time, relative to other tenants that wait.")
    ] = 1.0
    priority: Annotated[
        int,
        Meta(ge=-100, le=100, description="Higher ones are served first; a request may ask for less."),
    ] = 0
    slo_ttft_s: Annotated[
        Annotated[float, Meta(ge=0, le=86400)] | None, Meta(description="Instead of router.slo_ttft_s.")
    ] = None
    slo_tpot_s: Annotated[
        Annotated[float, Meta(ge=0, le=86400)] | None, Meta(description="Instead of router.slo_tpot_s.")
    ] = None


class StoreConfig(Section, frozen=True, kw_only=True):
    """The node's page store."""

    arena_bytes: Annotated[Positive, Meta(description="Most host memory for pages.")] = 2 << 30
    peer_host: Annotated[str, Meta(description="Address that other stores connect to.")] = "127.0.0.1"
    peer_port: Annotated[Port, Meta(description="Port that other stores connect to.")] = 0
    advertise: Annotated[
        str, Meta(pattern=rf"^({_HOST_PORT})?$", description="host:port told to others; the bound address when empty.")
    ] = ""
    peers: Annotated[
        tuple[Annotated[str, Meta(pattern=f"^{_HOST_PORT}$")], ...],
        Meta(description="host:port of stores that may be pushed to; empty: loopback only."),
    ] = ()
    codec: Annotated[
        str,
        Meta(
            pattern="^(auto|raw|lossless)$",
            description="How pages travel over TCP: auto packs them where the link is slower than the packing; raw and "
            "lossless say it.",
        ),
    ] = "auto"
    lossy_codec: Annotated[
        str,
        Meta(
            pattern="^(none|int8|fp8)$",
            description="Rounding that slow links may do to pages; equal in the whole cluster, it is part of their "
            "names.",
        ),
    ] = "none"
    page_lease_s: Annotated[
        Seconds, Meta(description="How long a prompt's partial last page is kept before it is first to be evicted.")
    ] = 30.0
    transports: Annotated[
        tuple[Transport, ...],
        Meta(description="Ways to carry pages to other stores, those that both sides can go and that pass their test."),
    ] = (Transport.SHM, Transport.NIXL, Transport.TCP)
    streams: Annotated[int, Meta(ge=1, le=16, description="TCP connections for pages to one other store.")] = 4
    stalled_push_s: Annotated[Seconds, Meta(description="A push that moves nothing for so long is given up.")] = 2.0

    @property
    def lossy(self) -> Codec | None:
        """``lossy_codec`` as page formats have it."""
        return None if self.lossy_codec == "none" else Codec(self.lossy_codec)


class WorkerConfig(Section, frozen=True, kw_only=True):
    """Settings of each vLLM worker."""

    role: Annotated[
        Role | None, Meta(description="prefill, decode or both, of one `kvrelay worker`; both when absent.")
    ] = None
    host: Annotated[str, Meta(description="Address that the engine listens at; loopback unless told.")] = "127.0.0.1"
    advertise: Annotated[
        str,
        Meta(
            pattern=rf"^({_HOST_PORT})?$",
            description="host:port at which routers reach the engine; the bound address when empty.",
        ),
    ] = ""
    cpus: Annotated[str, Meta(description="Cores to pin the engine to, e.g. 0 or 0-3; chosen when empty.")] = ""
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=64, description="Ranks (processes) that share each model; they split the engine's cores.")
    ] = 1
    kv_cache_bytes: Annotated[Positive, Meta(description="Memory for the engine's KV blocks, of each rank.")] = 1 << 30
    max_batched_tokens: Annotated[Positive, Meta(description="Token budget of one step: the prefill chunk.")] = 256
    shared_chunk_tokens: Annotated[
        int, Meta(ge=0, description="Most tokens of one prompt in a step that others could use too; 0: no such limit.")
    ] = 64
    max_model_len: Annotated[int, Meta(ge=0, description="Longest prompt + answer; 0: the model's own.")] = 0
    block_tokens: Annotated[int, Meta(ge=0, description="Engine block size in tokens; 0: the engine's own.")] = 0
    page_tokens: Annotated[Positive, Meta(description="Tokens of a page.")] = 32
    load_wait_s: Annotated[
        Seconds, Meta(description="A load without progress for so long is given up; the rest is recomputed.")
    ] = 2.0
    on_bad_page: Annotated[str, Meta(pattern="^(recompute|fail)$", description="recompute, or fail with a 5xx.")] = (
        "recompute"
    )
    start_wait_s: Annotated[Seconds, Meta(description="Longest start of an engine.")] = 600.0
    vllm_args: Annotated[
        tuple[str, ...],
        Meta(
            description="Flags of vLLM's own for the engine, each as --name or --name=value, alike on all workers of a "
            "model; only those that change neither KV nor how chats are rendered."
        ),
    ] = ()


class ClusterConfig(Section, frozen=True, kw_only=True):
    """What ``kvrelay up`` starts on this machine."""

    prefill: Annotated[int, Meta(ge=0, le=64, description="Prefill workers.")] = 1
    decode: Annotated[int, Meta(ge=0, le=64, description="Decode workers.")] = 1
    colocated: Annotated[int, Meta(ge=0, le=64, description="Workers that do both, without a split.")] = 0
    stores: Annotated[
        int,
        Meta(
            ge=1,
            le=2,
            description="1: all workers share a store; 2: P and D on two, as on two nodes, but shared memory joins "
            "them unless store.transports leaves shm out.",
        ),
    ] = 1
    heartbeat_s: Annotated[Seconds, Meta(description="Interval of heartbeats.")] = 0.5
    dead_after_s: Annotated[Seconds, Meta(description="Silence after which a peer counts as dead.")] = 2.0


class MockConfig(Section, frozen=True, kw_only=True):
    """Simulated workers and stores (`kvrelay up --mock`, `kvrelay mock-worker`): KV as of Llama 3 8B, no engine."""

    enabled: Annotated[bool, Meta(description="`kvrelay up` starts them instead of engines, in one process.")] = False

    device: Annotated[
        str,
        Meta(pattern="^(A100|H100|H200|B200|L40S|MI300X|cpu)$", description="Whose speed to pretend, one a worker."),
    ] = "H100"
    time_scale: Annotated[
        float,
        Meta(gt=0, le=1000, description="What is simulated takes so many times as long; 0.1: ten times as fast."),
    ] = 1.0
    kv_tokens: Annotated[Positive, Meta(description="KV cache of each worker.")] = 1 << 18
    store_tokens: Annotated[Positive, Meta(description="KV that each store has room for.")] = 1 << 21
    answer_tokens: Annotated[
        Positive, Meta(description="Mean length of answers that neither max_tokens nor ignore_eos decides.")
    ] = 200
    link_bytes_per_s: Annotated[
        float, Meta(gt=0, description="Bandwidth of the link into each store, from the others, in bytes a second.")
    ] = 25e9
    control_port: Annotated[Port, Meta(description="Loopback port where `kvrelay fault` reaches the workers.")] = 0


class Config(Section, frozen=True, kw_only=True):
    """The whole tree; a TOML file holds any part of it."""

    model: ModelConfig = ModelConfig()
    router: RouterConfig = RouterConfig()
    store: StoreConfig = StoreConfig()
    worker: WorkerConfig = WorkerConfig()
    cluster: ClusterConfig = ClusterConfig()
    mock: MockConfig = MockConfig()
    tenants: Annotated[dict[str, TenantConfig], Meta(max_length=10_000)] = msgspec.field(default_factory=dict)


class ConnectorConfig(Section, frozen=True, kw_only=True):
    """What a worker passes to its connector through vLLM's ``kv_connector_extra_config``."""

    worker: str
    incarnation: str
    store_socket: str
    """Path of the unix socket of this node's store."""
    key_file: str
    engine_file: str
    """Where the connector writes what the engine says of itself (``types.Engine`` as JSON)."""
    weights: str
    """Digest of the model folder."""
    page_tokens: int
    load_wait_s: float
    lossy: Codec | None = None
    """What slow links may do to the pages (``store.lossy_codec``)."""
