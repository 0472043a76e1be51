"""A fake vLLM that knows the answer to a prompt by heart, and goes on from wherever a prompt leaves off, as a greedy
engine does. It holds text back as vLLM's detokenizer does, by another way than the router."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from tests.router.fake_vllm import FakeVllm

END = 2
"""The end token."""


@dataclass
class Script:
    """What all workers of a test know, and how they fail."""

    tokenizer: Tokenizer
    text: str
    fault: str = "reset"
    """reset, eof, abort, error or hang."""
    after: int | None = None
    """Whoever begins an answer fails after so many tokens."""
    after_roles: int | None = None
    """Whoever begins a chat fails after it has told so many roles."""
    again_after: int | None = None
    """Whoever goes on with one fails after so many of its own."""
    again_text: str = ""
    """Another text that replays write, against their orders."""
    again_reasons: bool = False
    """Whoever goes on with one takes its text for reasoning."""
    again_joins: bool = False
    """Replays tell two tokens in an event."""
    reasons: int = 0
    reasons_after: int = 0
    """So many tokens of a chat are reasoning, after so many that are not. Where a tool has to be called, all are its
    arguments."""
    pause_s: float = 0.0
    """Between two tokens."""
    struck: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    """Prompts without a part of an answer."""

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.tokenizer.encode(self.text, add_special_tokens=False).ids
        return [*ids, END]

    def visible(self, count: int) -> str:
        """The text of the first ``count`` tokens, whole characters alone."""
        text: str = self.tokenizer.decode(self.ids[:count], skip_special_tokens=True)
        return text.rstrip("�")

    def written(self, prompt: list[int]) -> int:
        """How many tokens of the answer ``prompt`` ends with."""
        for known in self.prompts:
            if prompt[: len(known)] == known and prompt[len(known) :] == self.ids[: len(prompt) - len(known)]:
                return len(prompt) - len(known)
        self.prompts.append(prompt)
        return 0


@dataclass
class ScriptedVllm(FakeVllm):
    """Streams ``script``."""

    script: Script = None  # type: ignore[assignment]
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """Whoever is asked before it is set refuses, and sets it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first.set()

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not self.first.is_set():
            self.first.set()
            return web.Response(status=500)
        return await super()._answer(http, body)

    async def _stream(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        chat = "messages" in body
        prompts = self._prompts(body)
        choices = [(index, prompt) for index, prompt in enumerate(prompts * body.get("n", 1))]
        logs = {index: self.script.written(prompt) for index, prompt in choices}
        again = (body.get("vllm_xargs") or {}).get("kvrelay_replay")
        begins, open_choices, count = dict(logs), set(logs), 0
        resumed = any(begins.values()) or again is not None
        end = self.script.again_after if resumed else self.script.after
        if again is not None and self.script.again_text:
            self.script.text = self.script.again_text
        if chat:
            for index in logs:
                if index == self.script.after_roles and not resumed:
                    return await self._strike(http, response, body)
                role = {"index": index, "delta": {"role": "assistant", "content": ""}}
                await self._send(response, body, role, prompt_token_ids=self._told(body, prompts[0]))
        while open_choices:
            for index in sorted(open_choices):
                if count == end:
                    return await self._strike(http, response, body)
                joins = again is not None and self.script.again_joins and logs[index] + 2 < len(self.script.ids)
                step = 2 if joins else 1
                count += step
                logs[index] += step
                choice = self._choice_of(body, index, begins[index], logs[index], step)
                await self._send(response, body, choice)
                if choice["finish_reason"]:
                    open_choices.discard(index)
            await asyncio.sleep(self.script.pause_s)
        if count == end:
            return await self._strike(http, response, body)
        if (body.get("stream_options") or {}).get("include_usage"):
            written = sum(logs[index] - begins[index] for index in logs)
            usage = self._usage({"prompt": prompts[0]}, written)
            await response.write(b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _prompts(self, body: dict[str, Any]) -> list[list[int]]:
        params = body.get("kv_transfer_params") or {}
        prompt = params.get("prompt_token_ids") or body["prompt"]
        return prompt if isinstance(prompt[0], list) else [prompt]

    def _choice_of(self, body: dict[str, Any], index: int, begin: int, count: int, step: int = 1) -> dict[str, Any]:
        tokens = self.script.ids[count - step : count]
        finish, reason = self._finish(body, begin, count)
        text = self._text(body, count, finish) if begin == 0 else "(text of a worker that knows the rest alone)"
        before = self._text(body, count - step, None) if begin == 0 and count > step else ""
        delta = text[len(before) :] if begin == 0 else text
        said = {"delta": self._delta(body, count, delta)} if "messages" in body else {"text": delta}
        if begin and self.script.again_reasons:
            said = {"delta": {"reasoning": delta}}
        logprobs = self._logprobs(begin, count) if body.get("logprobs") else None
        choice: dict[str, Any] = {
            "index": index,
            **said,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": reason,
        }
        if "messages" not in body:
            prompt = self._prompts(body)[0] if count - begin == step else None
            choice["prompt_token_ids"] = self._told(body, prompt)
        return choice | {"token_ids": self._told(body, tokens)}

    def _told(self, body: dict[str, Any], ids: list[int] | None) -> list[int] | None:
        """To whoever asked for them."""
        return ids if body.get("return_token_ids") else None

    def _delta(self, body: dict[str, Any], count: int, text: str) -> dict[str, Any]:
        """What its parsers make of a text."""
        if body.get("tool_choice", "none") != "none":
            named = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": text}}
            return {"tool_calls": [{"index": 0, **(named if count == 1 else {"function": {"arguments": text}})}]}
        return (
            {"reasoning": text} if 0 < count - self.script.reasons_after <= self.script.reasons else {"content": text}
        )

    def _logprobs(self, begin: int, count: int) -> dict[str, Any]:
        """Of the newest token, which begins where the strings of those before it end, each decoded by itself."""
        strings: list[str] = [self.script.tokenizer.decode([token]) for token in self.script.ids[begin:count]]
        said = {"tokens": strings[-1:], "token_logprobs": [-0.5], "top_logprobs": [{strings[-1]: -0.5}]}
        return said | {"text_offset": [sum(map(len, strings[:-1]))]}

    def _finish(self, body: dict[str, Any], begin: int, count: int) -> tuple[str | None, str | None]:
        for stop in body.get("stop") or []:
            if stop in self.script.visible(count):
                return "stop", stop
        if self.script.ids[count - 1] == END:
            return "stop", None
        return ("length", None) if count - begin == body.get("max_tokens") else (None, None)

    def _text(self, body: dict[str, Any], count: int, finish: str | None) -> str:
        text, stops = self.script.visible(count), body.get("stop") or []
        held = max(map(len, stops)) - 1 if stops and finish is None else 0
        for stop in stops:
            text = text.split(stop)[0]
        return text[: len(text) - held] if held < len(text) else ("" if held else text)

    async def _send(
        self, response: web.StreamResponse, body: dict[str, Any], choice: dict[str, Any], **more: object
    ) -> None:
        event = {"id": f"x-{id(self)}", "created": 7, "model": self.model, "choices": [choice], **more}
        await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")

    async def _strike(
        self, http: web.Request, response: web.StreamResponse, body: dict[str, Any]
    ) -> web.StreamResponse:
        assert http.transport is not None
        self.script.struck += 1
        match self.script.fault:
            case "reset":
                http.transport.abort()
            case "hang":
                await asyncio.sleep(60)
            case "error":
                await response.write(b'data: {"error":{"message":"engine died","code":500}}\n\ndata: [DONE]\n\n')
            case "abort":
                said = {"delta": {"content": ""}} if "messages" in body else {"text": ""}
                await self._send(response, body, {"index": 0, **said, "finish_reason": "abort", "token_ids": []})
                await response.write(b"data: [DONE]\n\n")
        return response
