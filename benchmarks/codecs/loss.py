"""What rounded KV does to the answers: logprobs of the next tokens with exact KV beside those with KV from a codec."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from benchmarks.codecs.real_kv import PAGE_TOKENS, Bytes, RealModel, kv_of, pages_of
from kvrelay.store.codec import Run, decode, encode
from kvrelay.types import DTYPE_BYTES, Codec, PageFormat

CODECS = (Codec.INT8, Codec.FP8)
PROMPTS = 20
PROMPT_TOKENS = 100
"""Not a whole number of pages, so that a partial one is among them."""
ANSWER_TOKENS = 16


def through(codec: Codec, page: Bytes, form: PageFormat) -> Bytes:
    """``page`` as the other end of a link gets it."""
    tokens = len(page) // (form.layers * form.token_layer_bytes)
    run_bytes = tokens * form.head_dim * DTYPE_BYTES[form.dtype]
    payload = b"".join(encode(codec, [Run(page.data, run_bytes)], form.dtype))
    return decode(codec, memoryview(payload), len(page), form.dtype)


def measure_loss(dtypes: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """By dtype of the pages and codec, over ``PROMPTS`` prompts of ``PROMPT_TOKENS`` tokens.

    All is computed in float32: what is seen is the codec, not the noise of bfloat16 arithmetic.
    """
    model = RealModel("float32")
    prompts = model.prompts(PROMPTS, PROMPT_TOKENS)
    kv = model.prefill([prompt[:-1] for prompt in prompts])
    assert kv.shape[4] % PAGE_TOKENS
    last = torch.tensor([prompt[-1] for prompt in prompts])
    answers = model.greedy(kv, last, ANSWER_TOKENS)
    asked = torch.cat([last[:, None], answers[:, :-1]], 1)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in dtypes:
        pages, form = kv.to(getattr(torch, dtype)), msgspec.structs.replace(model.format, dtype=dtype)
        exact = model.logprobs(pages.float(), asked)
        others = {codec: model.logprobs(_decoded(codec, pages, form).float(), asked) for codec in CODECS}
        rows[dtype] = {codec.value: _loss(exact, other, answers) for codec, other in others.items()}
    return rows


def _decoded(codec: Codec, kv: torch.Tensor, form: PageFormat) -> torch.Tensor:
    return torch.stack([kv_of([through(codec, page, form) for page in pages_of(one)], one) for one in kv])


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
