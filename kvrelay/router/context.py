"""Ready workers of one model, and how long a prompt with its answer may be there. It must never refuse what a worker
would take."""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.errors import BadRequest
from kvrelay.fleet.workers import Fleet
from kvrelay.router.prompts import BYTES_PER_TOKEN, Prompts
from kvrelay.router.request import ClientRequest
from kvrelay.types import WorkerInfo


class Ready(NamedTuple):
    """Workers of one model."""

    workers: list[WorkerInfo]
    """Each of them is the first in its turn."""
    context_tokens: int
    """Most tokens of a prompt and its answer, as far as any of them can write."""


class ReadyWorkers:
    """Ready workers by model, listed again only when a worker comes or goes: to look at all takes longer than the
    rest."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._usable: tuple[WorkerInfo, ...] = ()
        self._kept: dict[str, Ready] = {}
        self._turn = 0

    def __repr__(self) -> str:
        return f"<ReadyWorkers {len(self._usable)}>"

    def of(self, model: str, now: float) -> Ready:
        """Ready workers of ``model``, which may be none."""
        usable = self._fleet.workers.usable(now)
        if usable is not self._usable:
            self._usable, self._kept = usable, {}
        if model not in self._kept:
            self._kept[model] = _ready([worker for worker in usable if worker.model == model])
        workers, context_tokens = self._kept[model]
        self._turn += 1
        first = self._turn % max(1, len(workers))
        return Ready(workers[first:] + workers[:first], context_tokens)


def _ready(workers: list[WorkerInfo]) -> Ready:
    decodes = [worker for worker in workers if worker.role.decodes] or workers
    return Ready(workers, max((worker.engine.max_model_len for worker in decodes), default=0))


def demanded_tokens(request: ClientRequest, prompts: Prompts, context_tokens: int) -> int:
    """What a decode worker is to take: the longest prompt, and of an answer what the client says; of a chat that does
    not say, one token. Where nobody takes all of it, the answer ends with the context, as it does at one worker."""
    longest = max(prompts.lengths)
    if not prompts.ids:  # no token has less than a byte: these are surely enough
        longest = min(BYTES_PER_TOKEN * longest, context_tokens)
    room_tokens = request.room_tokens(longest, context_tokens, 1)
    return max(longest + room_tokens, request.max_tokens or 0)


def check_length(request: ClientRequest, prompts: Prompts, context_tokens: int) -> None:
    """Refuse what no worker takes, in vLLM's words. Raises ``BadRequest``."""
    if (asked := request.max_tokens or 0) > context_tokens:
        field = "max_tokens" if request.body.get("max_completion_tokens") is None else "max_completion_tokens"
        raise BadRequest(
            f"{field}={asked} cannot be greater than max_model_len={context_tokens}. Please request fewer output "
            f"tokens. (parameter={field}, value={asked})",
            param=field,
        )
    longest = max(map(len, prompts.ids), default=0)
    if longest > context_tokens:
        raise BadRequest(
            f"This model's maximum context length is {context_tokens} tokens. However, your prompt contains {longest} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={longest})",
            param="input_tokens",
        )
