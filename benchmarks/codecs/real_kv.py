"""Real KV: SmolLM2 reads prose, and its cache becomes canonical pages and back. No store takes part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrelay.deploy.model import fetch
from kvrelay.types import PageFormat

Bytes = npt.NDArray[np.uint8]
ROOT = Path(__file__).resolve().parents[2]
PROSE = ("LICENSE", "README.md", "CONTRIBUTING.md", "docs/concepts.md", "docs/operate.md", "docs/troubleshoot.md")
PAGE_TOKENS = 32


class RealModel:
    """SmolLM2 on one core, through transformers: no engine decides about its cache."""

    def __init__(self, dtype: str) -> None:
        torch.set_num_threads(1)
        folder = fetch()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        config = self.model.config
        self.format = PageFormat(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            page_tokens=PAGE_TOKENS,
        )

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Runs of the repository's own prose, evenly spread over it; the same for the same documents."""
        text = "\n\n".join((ROOT / name).read_text() for name in PROSE)
        ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        step = (len(ids) - tokens) // count
        return [ids[number * step : number * step + tokens] for number in range(count)]

    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        """KV of prompts of one length: ``[prompt, layer, kv_head, K|V, token, head_dim]``."""
        with torch.inference_mode():
            cache = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1).past_key_values
        return torch.stack([torch.stack([layer.keys, layer.values], 2) for layer in cache.layers], 1)

    def logprobs(self, kv: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """``[prompt, token, vocabulary]``: of what follows each of ``tokens``, which themselves follow ``kv``."""
        return self._forward(_cache(kv), tokens).log_softmax(-1)

    def greedy(self, kv: torch.Tensor, last: torch.Tensor, count: int) -> torch.Tensor:
        """``[prompt, token]``: the ``count`` tokens that follow ``last`` (one a prompt), which follows ``kv``."""
        cache, tokens = _cache(kv), [last[:, None]]
        for _ in range(count):
            tokens.append(self._forward(cache, tokens[-1])[:, -1].argmax(-1, keepdim=True))
        return torch.cat(tokens[1:], 1)

    def _forward(self, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(tokens, past_key_values=cache, use_cache=True).logits
        return logits.float()


def _cache(kv: torch.Tensor) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for number in range(kv.shape[1]):
        cache.update(kv[:, number, :, 0].clone(), kv[:, number, :, 1].clone(), number)
    return cache


def pages_of(kv: torch.Tensor) -> Iterator[Bytes]:
    """Canonical pages of the KV of one prompt; the last one may be partial."""
    for start in range(0, kv.shape[3], PAGE_TOKENS):
        page = kv[:, :, :, start : start + PAGE_TOKENS].contiguous()
        yield page.view(torch.uint8).numpy().reshape(-1)


def kv_of(pages: list[Bytes], like: torch.Tensor) -> torch.Tensor:
    """``pages_of`` turned round: a tensor of the shape of ``like``."""
    parts = []
    for number, page in enumerate(pages):
        tokens = min(PAGE_TOKENS, like.shape[3] - number * PAGE_TOKENS)
        shape = (*like.shape[:3], tokens, like.shape[4])
        parts.append(torch.from_numpy(page.copy()).view(like.dtype).reshape(shape))
    return torch.cat(parts, dim=3)
