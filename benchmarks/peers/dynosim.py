"""Dynamo's simulator (Rust) on the trace of ``benchmarks.reuse``; run by it, in an environment of its own.

    python dynosim.py TRACE WORKERS BLOCKS BLOCK_TOKENS ROUTER

prints one line of JSON; ROUTER is ``round_robin`` or ``kv_router``. It opens no socket.
"""

from __future__ import annotations

import importlib
import json
import sys

PACKAGES = ("ai-dynamo-runtime==1.4.2",)


def main() -> None:
    core = importlib.import_module("dynamo._core")
    trace, workers, blocks, block_tokens, router = sys.argv[1:]
    report = core.run_mocker_trace_replay(
        [trace],
        extra_engine_args=core.MockEngineArgs.from_json(
            json.dumps({"num_gpu_blocks": int(blocks), "block_size": int(block_tokens)})
        ),
        num_workers=int(workers),
        router_mode=router,
        trace_block_size=int(block_tokens),
    )
    found = {
        "requests": report["completed_requests"],
        "refused": report["num_requests"] - report["completed_requests"],
        "reuse": round(report["prefix_cache_reused_ratio"], 4),
        "ttft_mean_ms": round(report["mean_ttft_ms"], 1),
        "ttft_p99_ms": round(report["p99_ttft_ms"], 1),
        "e2e_mean_ms": round(report["mean_e2e_latency_ms"], 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
