"""What HTTP alone costs a router, by library: servers that answer a constant, and clients that ask a mock engine.

    python -m benchmarks.http_stacks

Processor time a request, and a chunk of a stream; no router is involved. See docs/decisions/0014-router-speed.md.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.routers import measure, mock
from benchmarks.routers.subject import Subject, line_of, process
from kvrelay.router.shortage import Shortage
from kvrelay.router.upstream import Upstream

SECONDS = 4.0
REQUESTS = 4_000
STREAMS = 40
CHUNKS = 200
_BODY = b'{"id":"cmpl-0123456789abcdef","object":"text_completion","choices":[{"text":" word"}]}'
_SERVERS = ("aiohttp asyncio", "aiohttp uvloop", "uvicorn uvloop", "protocol uvloop")


async def aiohttp_server() -> int:
    """A server as the router's; its port."""
    from aiohttp import web

    async def respond(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=_BODY, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/completions", respond)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port: int = runner.addresses[0][1]
    return port


async def uvicorn_server() -> int:
    """An application without a framework, parsed by httptools."""
    import uvicorn

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _BODY})

    config = uvicorn.Config(respond, port=0, http="httptools", lifespan="off", access_log=False, log_level="error")
    server = uvicorn.Server(config)
    asyncio.get_running_loop().create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


async def bare_protocol() -> int:
    """The floor: a mock engine."""
    (engine,), _ = await mock.serve(1, 0.0, None)
    return engine.port


STARTS: dict[str, Callable[[], Awaitable[int]]] = {
    "aiohttp": aiohttp_server,
    "uvicorn": uvicorn_server,
    "protocol": bare_protocol,
}


async def _serve(name: str) -> None:
    print(f"port {await STARTS[name]()}", flush=True)
    await asyncio.Event().wait()


async def server_us(name: str) -> float:
    """Microseconds of a server's process a request, 64 clients in a closed loop."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.http_stacks", *name.split()]
        async with process("server", command, Path(folder)) as child:
            port = int((await line_of(Path(folder) / "server.log", "port ")).split()[1])
            subject = Subject(port=port, model="m", pids={"router": [child.pid]})
            figures = await measure.throughput(subject, ["hello"], SECONDS)
            return 1e3 * float(figures["router_cpu_ms"])


async def clients_us(port: int, tick_port: int) -> dict[str, float]:
    """Microseconds of this process a request, and a chunk, of either client; mocks are in another process."""
    ours, theirs = (
        Upstream(connect_s=1.0, engine_key="k", shortage=Shortage(time.monotonic)),
        aiohttp.ClientSession(auto_decompress=False),
    )
    plain, stream = b'{"max_tokens":2}', b'{"max_tokens":%d,"stream":true}' % CHUNKS

    async def by_ours(at: int, body: bytes) -> None:
        async for _ in (await ours.post(f"http://127.0.0.1:{at}/v1/completions", body, request_id="r")).events():
            pass

    async def by_theirs(at: int, body: bytes) -> None:
        url = f"http://127.0.0.1:{at}/v1/completions"
        async with theirs.post(url, data=body, headers={"content-type": "application/json"}) as response:
            async for _ in response.content.iter_any():
                pass

    found = {}
    for name, ask in (("kvrelay", by_ours), ("aiohttp", by_theirs)):
        begin_s = time.process_time()
        for _ in range(REQUESTS):
            await ask(port, plain)
        found[f"{name} a request"] = 1e6 * (time.process_time() - begin_s) / REQUESTS
        begin_s = time.process_time()
        await asyncio.gather(*(ask(tick_port, stream) for _ in range(STREAMS)))
        found[f"{name} a chunk"] = 1e6 * (time.process_time() - begin_s) / (STREAMS * CHUNKS)
    await theirs.close()
    await ours.close()
    return found


async def main() -> None:
    for name in _SERVERS:
        print(f"server  {name:<20} {await server_us(name):6.1f} us a request", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.routers.mock", "1"]
        async with (
            process("quick", [*command, "0"], Path(folder)),
            process("ticking", [*command, "0.002"], Path(folder)),
        ):
            ports = [int((await line_of(Path(folder) / f"{name}.log", "["))[1:-1]) for name in ("quick", "ticking")]
            for name, microseconds in (await clients_us(*ports)).items():
                print(f"client  {name:<20} {microseconds:6.1f} us")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        runner = asyncio.run if sys.argv[2] == "asyncio" else uvloop.run
        runner(_serve(sys.argv[1]))
    else:
        uvloop.run(main())
