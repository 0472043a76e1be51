"""What rounded KV does to the answers: logprobs of the next tokens with exact KV beside those with KV from a codec."""

from __future__ import annotations

import torch

from benchmarks.codecs.real_kv import PAGE_TOKENS, Bytes, RealModel, kv_of, pages_of
from kvrelay.store.codec import Run, decode, encode
from kvrelay.types import DTYPE_BYTES, Codec

PROMPTS = 24
PROMPT_TOKENS = 300
"""Not a whole number of pages, so that a partial one is among them."""
ANSWER_TOKENS = 32


def through(codec: Codec, page: Bytes, model: RealModel) -> Bytes:
    """``page`` as the other end of a link gets it."""
    tokens = len(page) // (model.format.layers * model.format.token_layer_bytes)
    run_bytes = tokens * model.format.head_dim * DTYPE_BYTES[model.format.dtype]
    payload = b"".join(encode(codec, [Run(page.data, run_bytes)], model.format.dtype))
    return decode(codec, memoryview(payload), len(page), model.format.dtype)


def measure_loss(model: RealModel, codecs: tuple[Codec, ...] = (Codec.INT8, Codec.FP8)) -> dict[str, dict[str, float]]:
    """Of each codec, over ``PROMPTS`` prompts of ``PROMPT_TOKENS`` tokens."""
    prompts = model.prompts(PROMPTS, PROMPT_TOKENS)
    kv = model.prefill([prompt[:-1] for prompt in prompts])
    assert kv.shape[4] % PAGE_TOKENS
    last = torch.tensor([prompt[-1] for prompt in prompts])
    answers = model.greedy(kv, last, ANSWER_TOKENS)
    asked = torch.cat([last[:, None], answers[:, :-1]], 1)
    exact = model.logprobs(kv, asked)
    return {codec.value: _loss(exact, model.logprobs(_decoded(codec, kv, model), asked), answers) for codec in codecs}


def _decoded(codec: Codec, kv: torch.Tensor, model: RealModel) -> torch.Tensor:
    return torch.stack([kv_of([through(codec, page, model) for page in pages_of(one)], one) for one in kv])


def _loss(exact: torch.Tensor, other: torch.Tensor, answers: torch.Tensor) -> dict[str, float]:
    """Differences of ``[prompt, token, vocabulary]`` logprobs, at the tokens of the greedy answers."""
    differences = (exact - other).gather(2, answers[:, :, None]).abs()
    same = exact.argmax(-1) == other.argmax(-1)
    return {
        "max_logprob_difference": round(float(differences.max()), 4),
        "mean_logprob_difference": round(float(differences.mean()), 5),
        "same_greedy_token": round(float(same.float().mean()), 4),
        # At the first other choice, and only there, greedy answers part.
        "same_greedy_answer": round(float(same.all(1).float().mean()), 4),
        "tokens": same.numel(),
        "prompts": len(same),
    }
