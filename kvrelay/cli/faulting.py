"""Asks a running process of mock workers for its faults, and changes them. It must never wait long."""

from __future__ import annotations

import urllib.error
import urllib.request
from http import HTTPStatus

import msgspec

from kvrelay.deploy.mock.faults import Faults
from kvrelay.errors import Lost, Misconfigured, Refused

_WAIT_S = 5.0
_LONGEST_ANSWER_BYTES = 1 << 20


class Shown(msgspec.Struct, frozen=True):
    """A mock worker as its process shows it, with its faults."""

    name: str
    role: str
    url: str
    faults: Faults

    def given(self) -> dict[str, object]:
        """The faults that it has."""
        usual = msgspec.to_builtins(Faults())
        return {key: value for key, value in msgspec.to_builtins(self.faults).items() if value != usual[key]}


class _Problem(msgspec.Struct, frozen=True):
    error: str = ""


class Route:
    """The control route at a loopback ``port``."""

    def __init__(self, port: int, engine_key: str) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._headers = {"authorization": f"Bearer {engine_key}", "content-type": "application/json"}

    def __repr__(self) -> str:
        return f"<Route {self._url}>"

    def workers(self, name: str = "") -> list[Shown]:
        """All of them, or the one called ``name``. Raises ``Lost``, ``Refused``, ``Misconfigured``."""
        every = msgspec.json.decode(self._ask("GET", "/workers"), type=list[Shown])
        found = [each for each in every if name in ("", each.name)]
        if not found:
            raise Misconfigured(f"no mock worker is called {name}; there are {', '.join(each.name for each in every)}")
        return found

    def give(self, name: str, faults: Faults) -> Shown:
        """Replace the faults of ``name``. Raises ``Lost``, ``Refused``, ``Misconfigured``."""
        answer = self._ask("PUT", f"/workers/{name}/faults", msgspec.json.encode(faults))
        return msgspec.json.decode(answer, type=Shown)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        asked = urllib.request.Request(self._url + path, data=body, headers=self._headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=_WAIT_S) as response:
                answer: bytes = response.read(_LONGEST_ANSWER_BYTES)
                return answer
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                raise Refused(f"the mock workers at {self._url} have another key; give --key-file theirs") from error
            raise Misconfigured(_said(error.read(_LONGEST_ANSWER_BYTES)) or f"status {error.code}") from error
        except OSError as error:
            why = getattr(error, "reason", error)  # urllib wraps what the system said
            raise Lost(
                f"no mock workers answer at {self._url} ({getattr(why, 'strerror', None) or why}); "
                "give --port the one that they printed when they served"
            ) from error


def _said(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Problem).error
    except msgspec.DecodeError:
        return ""
