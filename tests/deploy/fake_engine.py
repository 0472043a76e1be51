"""A process that looks to its supervisor like vLLM with kvrelay's connector; started as ``fake_engine.py FLAGS``.

It answers /health, and every other path with what it was started with.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ENGINE_VARIABLE = "FAKE_ENGINE"
"""What its connector writes about the engine, as JSON."""


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    """Tells what the process was given."""

    def do_GET(self) -> None:
        text = json.dumps({"arguments": sys.argv[1:], "api_key": os.environ.get("VLLM_API_KEY")})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None: ...


def main() -> None:
    settings = json.loads(flag("--kv-transfer-config"))["kv_connector_extra_config"]["kvrelay"]
    Path(settings["engine_file"]).write_text(os.environ[ENGINE_VARIABLE])
    ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
