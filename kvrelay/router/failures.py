"""Every failure as an HTTP answer in OpenAI's error shape. It must never show a client anything but a sentence
that says what to do next."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from kvrelay.errors import BadRequest, Failing, Harmful, KvrelayError, Lost, Malformed, Retry, Unasked
from kvrelay.policy.admit import RETRY_AFTER_S
from kvrelay.policy.loss import LossReason

_NOT_THE_CLIENTS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
"""401: the worker has another key than this router."""


class Rejected(KvrelayError):
    """A worker refused the request itself: its answer goes to the client as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"a worker refused the request with status {status}")
        self.status = status
        self.body = body


MAX_MESSAGE_CHARS = 300
"""Most characters of a failure's message that are kept in its request's timeline."""


def blames_client(status: int) -> bool:
    """Whether a worker's status says that the request is wrong, so that no other worker would take it."""
    return 400 <= status < 500 and status not in _NOT_THE_CLIENTS


def failure(status: int) -> Lost:
    """What a worker's status says that does not blame the client: an engine that dies answers what it had with 500."""
    failed = Failing if status == HTTPStatus.INTERNAL_SERVER_ERROR else Unasked
    return failed(f"a worker answered with status {status}")


def loss(error: KvrelayError) -> LossReason:
    """How a worker was lost."""
    match error:
        case Unasked():
            return LossReason.UNASKED
        case Failing() | Malformed():
            return LossReason.FAILED
        case _:
            return LossReason.RESET


def error_body(message: str, status: int, param: str | None = None) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


class _Sentence(msgspec.Struct, frozen=True):
    message: str


class _Told(msgspec.Struct, frozen=True):
    error: _Sentence


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Status, body and headers of a failed request."""

    status: int
    body: bytes
    headers: dict[str, str] = {}

    @property
    def message(self) -> str:
        """The sentence of it, or its beginning; empty when a worker answered in another shape."""
        try:
            return msgspec.json.decode(self.body, type=_Told).error.message[:MAX_MESSAGE_CHARS]
        except msgspec.DecodeError:
            return ""


def describe(error: KvrelayError) -> Failure:
    """The answer for ``error``."""
    match error:
        case Rejected():
            return Failure(status=error.status, body=error.body)
        case BadRequest(status=401):
            headers = {"www-authenticate": "Bearer"}
            return Failure(status=401, body=error_body(str(error), 401), headers=headers)
        case BadRequest():
            return Failure(status=error.status, body=error_body(str(error), error.status, error.param))
        case Retry():
            return _unavailable(str(error), error.after_s)
        case Lost():
            return _unavailable(f"{error}; retry", RETRY_AFTER_S)
        case Harmful():
            # OpenAI's clients send a 500 again by themselves, unless they are told not to.
            headers = {"x-should-retry": "false"}
            return Failure(status=500, body=error_body(str(error), 500), headers=headers)
        case _:
            return Failure(status=500, body=error_body(str(error), 500))


def unexpected() -> Failure:
    """What a client sees when the router itself is at fault."""
    message = "the router failed on this request; retry, and tell its operator if it happens again"
    return Failure(status=500, body=error_body(message, 500))


def _unavailable(message: str, after_s: float) -> Failure:
    headers = {"retry-after": str(max(1, round(after_s)))}
    return Failure(status=503, body=error_body(message, 503), headers=headers)
