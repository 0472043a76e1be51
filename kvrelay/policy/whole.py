"""Why a request stays whole: nobody reads its prompts before a worker does, and that one has all of it. The words are
labels of metrics and stand in timelines."""

from __future__ import annotations

from enum import StrEnum


class WholeReason(StrEnum):
    """Why a request is passed on unread: the length of its prompts is a guess."""

    OVER_LENGTH = "over_length"
    """It surely takes more tokens than any worker does, which says so faster than it is tokenised."""
    NO_KV_ROUTING = "no_kv_routing"
    """The router is told to be a plain proxy."""
    EMPTY_PROMPT = "empty_prompt"
    NO_RENDER = "no_render"
    """The router does not render it exactly as a worker does, and no worker renders."""
    MULTIMODAL = "multimodal"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    MANY_PROMPTS = "many_prompts"
    ECHO_LOGPROBS = "echo_logprobs"
    PROMPT_EMBEDS = "prompt_embeds"
    SUFFIX = "suffix"
