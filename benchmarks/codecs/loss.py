"""What rounded KV does to the answers: logprobs of the next tokens with exact KV beside those with KV from a codec."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks.codecs.real_kv import PAGE_TOKENS, Bytes, RealModel, kv_of, pages_of
from kvrelay.store.codec import Run, decode, encode
from kvrelay.types import DTYPE_BYTES, Codec

PROMPTS = 24
PROMPT_TOKENS = 500
"""Not a whole number of pages, so that a partial one is among them."""
ANSWER_TOKENS = 32


@dataclass
class Loss:
    """Differences of one codec, token by token."""

    differences: list[float] = field(default_factory=list)
    """Of the logprob of each token that exact KV gives."""
    same_choice: list[bool] = field(default_factory=list)
    """Whether the likeliest token stays the likeliest, those before it being the same."""
    same_answer: list[bool] = field(default_factory=list)
    """Whether all tokens of a whole greedy answer stay."""

    def row(self) -> dict[str, float]:
        return {
            "max_logprob_difference": round(max(self.differences), 4),
            "mean_logprob_difference": round(sum(self.differences) / len(self.differences), 5),
            "same_greedy_token": round(sum(self.same_choice) / len(self.same_choice), 4),
            "same_greedy_answer": round(sum(self.same_answer) / len(self.same_answer), 4),
            "tokens": len(self.differences),
            "prompts": len(self.same_answer),
        }


def through(codec: Codec, page: Bytes, model: RealModel) -> Bytes:
    """``page`` as the other end of a link gets it."""
    tokens = len(page) // (model.format.layers * model.format.token_layer_bytes)
    run_bytes = tokens * model.format.head_dim * DTYPE_BYTES[model.format.dtype]
    payload = b"".join(encode(codec, [Run(page.data, run_bytes)], model.format.dtype))
    return decode(codec, memoryview(payload), len(page), model.format.dtype)


def measure_loss(model: RealModel, codecs: tuple[Codec, ...] = (Codec.INT8, Codec.FP8)) -> dict[str, dict[str, float]]:
    """Of each codec, over ``PROMPTS`` prompts of ``PROMPT_TOKENS`` tokens."""
    losses = {codec: Loss() for codec in codecs}
    for prompt in model.prompts(PROMPTS, PROMPT_TOKENS):
        kv, last = model.prefill(prompt[:-1]), prompt[-1]
        assert kv.shape[3] % PAGE_TOKENS
        answer = model.greedy(kv, last, ANSWER_TOKENS)
        exact = model.logprobs(kv, [last, *answer[:-1]])
        for codec, loss in losses.items():
            decoded = kv_of([through(codec, page, model) for page in pages_of(kv)], kv)
            _compare(loss, exact, model.logprobs(decoded, [last, *answer[:-1]]), answer)
    return {codec.value: loss.row() for codec, loss in losses.items()}


def _compare(loss: Loss, exact: torch.Tensor, other: torch.Tensor, answer: list[int]) -> None:
    places = torch.arange(len(answer))
    loss.differences += (exact - other)[places, torch.tensor(answer)].abs().tolist()
    same = exact.argmax(-1) == other.argmax(-1)
    loss.same_choice += same.tolist()
    loss.same_answer.append(bool(same.all()))  # at the first other choice, and only there, greedy answers part
