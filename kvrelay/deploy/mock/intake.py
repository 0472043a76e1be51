"""Turns requests into sequences: tokens, page names, limits, the router's orders. It must never start anything."""

from __future__ import annotations

from kvrelay import identity
from kvrelay.deploy.mock.asked import COMPLETION_TOKENS, MAX_SEQUENCES, Body, plain_chat, prompts_of
from kvrelay.deploy.mock.author import state_of
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.errors import BadRequest, Malformed
from kvrelay.protocol.engine import Handoff
from kvrelay.router.tokens import Tokens
from kvrelay.types import Engine, PageName

_MAX_SALTS = 1024


class Intake:
    """Reads requests for all mock workers of one process, which serve one model."""

    def __init__(self, tokens: Tokens, engine: Engine, model: str) -> None:
        self._tokens = tokens
        self._engine = engine
        self._model = model
        self._roots: dict[str, PageName] = {}

    def __repr__(self) -> str:
        return f"<Intake of {self._model}>"

    async def completion_ids(self, body: Body) -> list[list[int]]:
        """Raises ``BadRequest``."""
        ids = [
            await self._tokens.encode(prompt, special=True) if isinstance(prompt, str) else prompt
            for prompt in prompts_of(body)
        ]
        if not ids or not all(ids):
            raise BadRequest("prompt has no tokens", param="prompt")
        return ids

    async def chat_ids(self, body: Body) -> list[int]:
        """Raises ``BadRequest``."""
        params = body.kv_transfer_params
        if params is not None and params.prompt_token_ids:
            return params.prompt_token_ids
        try:
            return await self._tokens.encode_chat(plain_chat(body))
        except Malformed as error:
            raise BadRequest(str(error), param="messages") from error

    async def sequences(self, body: Body, request_id: str, leg: Handoff | None, *, chat: bool) -> list[Sequence]:
        """One for each choice of each prompt. Raises ``BadRequest``."""
        self._check_model(body)
        prompts = [await self.chat_ids(body)] if chat else await self.completion_ids(body)
        if len(prompts) * body.choices > MAX_SEQUENCES:
            raise BadRequest(f"one request may ask for {MAX_SEQUENCES} answers")
        default = self._engine.max_model_len if chat else COMPLETION_TOKENS
        limit = default if body.limit_tokens is None else body.limit_tokens
        self._check_limit(limit, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens")
        return [
            self._sequence(f"{request_id}-{at}", ids, choice, body, limit, leg)
            for at, ids in enumerate(prompts)
            for choice in range(body.choices)
        ]

    def _check_model(self, body: Body) -> None:
        if body.model not in (None, self._model):
            raise BadRequest(f"The model `{body.model}` does not exist.", status=404, param="model")

    def _check_limit(self, tokens: int, param: str) -> None:
        """As vLLM: what a prompt leaves too little room for is cut, what no prompt leaves room for is refused."""
        if tokens < 1:
            raise BadRequest(f"{param} must be at least 1", param=param)
        longest = self._engine.max_model_len
        if tokens > longest:
            raise BadRequest(
                f"{param}={tokens} cannot be greater than max_model_len={longest}. Please request fewer output "
                f"tokens. (parameter={param}, value={tokens})",
                param=param,
            )

    def _sequence(self, id: str, ids: list[int], choice: int, body: Body, limit: int, leg: Handoff | None) -> Sequence:
        room = self._engine.max_model_len - len(ids)
        if room < 1:
            raise BadRequest(
                f"This model's maximum context length is {self._engine.max_model_len} tokens. "
                f"However, your request has {len(ids)} input tokens."
            )
        root, names = self._root(body.cache_salt or ""), list[PageName]()
        page_tokens = self._engine.fingerprint.format.page_tokens
        identity.extend_names(names, root, ids, page_tokens)
        rest = ids[len(names) * page_tokens :]
        return Sequence(
            id=id,
            tokens=list(ids),
            prompt_tokens=len(ids),
            root=root,
            names=names,
            tail=identity.page_name(names[-1] if names else root, identity.token_bytes(rest)) if rest else None,
            max_tokens=min(limit, room),
            min_tokens=body.min_tokens or 0,
            ignore_end=bool(body.ignore_eos),
            state=state_of(ids),
            choice=choice,
            leg=leg,
        )

    def _root(self, salt: str) -> PageName:
        if len(self._roots) >= _MAX_SALTS:
            self._roots.clear()
        if salt not in self._roots:
            self._roots[salt] = identity.root_name(self._engine.fingerprint, salt=salt)
        return self._roots[salt]
