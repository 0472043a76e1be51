"""Whether a request's answer could go on elsewhere, and what would be asked for then. No I/O happens here."""

from __future__ import annotations

import msgspec

from kvrelay.fleet.flight import Ask, DecodeOrder, Rest
from kvrelay.fleet.journal import Journal
from kvrelay.policy.recover import Manner, manner
from kvrelay.router.defaults import Defaults
from kvrelay.router.joined import Joined
from kvrelay.router.legs import replay_body, rest_body
from kvrelay.router.naming import Naming
from kvrelay.router.request import ClientRequest, Kind
from kvrelay.router.rest import StopRules
from kvrelay.types import PromptNames, RequestFacts

_HARMLESS: dict[str, tuple[object, ...]] = {
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "include_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "bad_words": ([],),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "return_prompt_text": (False,),
}
"""Values that say what is meant without them, too. Null is one for every field; of a field that nobody knows, 0 and
false may mean as much as any other value."""


def set_fields(request: ClientRequest, defaults: Defaults) -> set[str]:
    """Fields that make a difference, those of the body and those that the model's workers take as ``defaults``."""
    body = defaults.fields | {key: value for key, value in request.body.items() if value is not None}
    fields = {key for key, value in body.items() if not _is_harmless(key, value)}
    if body.get("skip_special_tokens") is False and body.get("spaces_between_special_tokens") is False:
        fields.add("spaces_between_special_tokens")
    if body.get("tools") and "tool_choice" not in body:
        fields.add("tool_choice")  # then the model chooses: its words are read by a parser from the first one on
    return fields


def _is_harmless(key: str, value: object) -> bool:
    # By type as well: to Python 1 is True, and 0 is False.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _HARMLESS.get(key, ()))


def manner_of(request: ClientRequest, defaults: Defaults, *, has_ids: bool, replays: bool = False) -> Manner:
    """How the answer goes on when its D is lost. ``has_ids``: the prompt's token ids are known.

    ``replays``: workers can be made to write given tokens.
    """
    if not request.stream:
        return Manner.RESTART
    return manner(set_fields(request, defaults), replays=replays) if has_ids else Manner.FAIL


def stop_rules(request: ClientRequest) -> StopRules:
    """Where the client wants its answers to end."""
    stop, least = request.body.get("stop"), request.body.get("min_tokens")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return StopRules(
        stops=tuple(each for each in stops if isinstance(each, str) and each),
        included=request.has("include_stop_str_in_output"),
        min_tokens=least if isinstance(least, int) else 0,
    )


class Remains:
    """What is left to write of one request's answer."""

    def __init__(
        self,
        request: ClientRequest,
        ask: Ask,
        prompts: list[list[int]],
        limits: list[int],
        naming: Naming,
        manner: Manner = Manner.CONTINUE,
        *,
        replays: bool = False,
    ) -> None:
        """``limits``: most tokens of each prompt's answers. ``manner`` is that of the request's fields; ``replays``:
        workers can be made to write given tokens."""
        self.request = request
        self._manner = manner
        self._replays = replays
        self.prompts = prompts
        self.rules = stop_rules(request)
        self._ask = ask
        self._naming = naming
        self._written = naming.growing()
        self.limits = limits
        self.journal = Journal(len(prompts), request.choices, self.limits)

    def __repr__(self) -> str:
        return f"<Remains of {self.journal!r}>"

    @property
    def manner(self) -> Manner:
        """What has said more than text is read by a parser that has to see all of it; so it may be before anything is
        said."""
        has_state = not self.journal.is_plain or not self.journal.tokens
        return Manner.REPLAY if self._replays and has_state else self._manner

    @property
    def wants_usage(self) -> bool:
        options = self.request.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def wants_running_usage(self) -> bool:
        options = self.request.body.get("stream_options")
        return self.wants_usage and isinstance(options, dict) and bool(options.get("continuous_usage_stats"))

    def room_tokens(self, index: int) -> int:
        """Most tokens that choice ``index`` may still write."""
        choice = self.journal.choices[index]
        return self.limits[choice.prompt] - len(choice.ids)

    @property
    def can_go_on(self) -> bool:
        """What was sent is known well enough."""
        return self.journal.is_exact and (self.manner is Manner.REPLAY or self.journal.is_plain)

    @property
    def is_open(self) -> bool:
        """Something is left to write, and another worker could."""
        return bool(self.journal.open) and self.can_go_on

    def rest_of(self, index: int) -> list[int]:
        """What the next worker is asked for choice ``index``: a replay begins with the prompt alone."""
        choice = self.journal.choices[index]
        prompt = self.prompts[choice.prompt]
        return prompt if self.manner is Manner.REPLAY else [*prompt, *choice.ids]

    def written(self) -> tuple[PromptNames, int]:
        """Names of the full pages of the first choice's prompt and answer so far, and the tokens of both.

        Asked for again and again: what was named before is not even read.
        """
        ids = Joined(self.prompts[0], self.journal.choices[0].ids)
        return self._written.of(ids), len(ids)

    def rest(self, indices: list[int]) -> Rest:
        """What is left to write of these choices."""
        longest = max((len(self.journal.choices[index].ids) for index in indices), default=0)
        return Rest(
            ask=self._rest_asked(indices),
            tokens=self.journal.tokens,
            manner=self.manner,
            replay_tokens=longest if self.manner is Manner.REPLAY else 0,
        )

    def _rest_asked(self, indices: list[int]) -> Ask | None:
        """As a request; None without any, or where the limit leaves no room for it."""
        if not indices or min(map(self.room_tokens, indices)) < 1:
            return None
        ids = [self.rest_of(index) for index in indices]
        before = self._ask.facts
        facts = RequestFacts(
            request_id=before.request_id,
            model=before.model,
            prompt_tokens=tuple(map(len, ids)),
            max_tokens=len(indices) * max(self.limits)
            if self.manner is Manner.REPLAY
            else sum(map(self.room_tokens, indices)),
            page_names=self._naming.of(ids),
        )
        needs = max(self._known_tokens(index) for index in indices) + 1
        return msgspec.structs.replace(
            self._ask,
            facts=facts,
            sequences=len(indices),
            local_reason="",
            context_tokens=max(self._ask.context_tokens, needs),
        )

    def _known_tokens(self, index: int) -> int:
        choice = self.journal.choices[index]
        return len(self.prompts[choice.prompt]) + len(choice.ids)

    def body(self, index: int, order: DecodeOrder, salt: str) -> bytes:
        """What the next worker is sent for choice ``index``."""
        choice, asked = self.journal.choices[index], self.rest_of(index)
        if self.manner is Manner.REPLAY:
            number = index % self.request.choices
            return replay_body(self.request, order, asked, salt, written=list(choice.ids), choice=number)
        # What the first worker would have written a shorter one may not even be asked for.
        room_tokens = min(self.room_tokens(index), order.context_tokens - len(asked))
        return rest_body(self.request, order, asked, salt, written=len(choice.ids), room_tokens=room_tokens)

    def usage(self, cached_tokens: int | None) -> dict[str, object]:
        """OpenAI's usage of the whole answer."""
        prompt, written = sum(map(len, self.prompts)), self.journal.tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + written,
            "completion_tokens": written,
            "prompt_tokens_details": {"cached_tokens": min(cached_tokens or 0, prompt)},
        }

    @property
    def object(self) -> str:
        """What OpenAI calls an event."""
        return "chat.completion.chunk" if self.request.kind is Kind.CHAT else "text_completion"
