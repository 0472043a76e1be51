"""Forces the first tokens of an answer to be those that another engine wrote before it was lost.

A logits processor of vLLM's, in every engine of kvrelay's: whatever has a state over the output (grammars, penalties,
the generator of a seed, stop strings) gets there by the same steps as in the first life. It must never touch the logits
of a request that did not ask for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from kvrelay.protocol.engine import REPLAY_KEY

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class Replay(LogitsProcessor):
    """The requests of a batch that still replay: row, tokens to write, tokens written."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def __repr__(self) -> str:
        return f"<Replay of {len(self._rows)} requests>"

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError, which the API server answers with 400."""
        forced(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)
        over = [row for row, (wanted, written) in self._rows.items() if len(written) >= len(wanted)]
        for row in over:
            del self._rows[row]

    def _row(
        self, params: SamplingParams, prompt: list[int] | None, written: list[int]
    ) -> tuple[list[int], list[int]] | None:
        wanted = forced(params)
        # A token beyond the vocabulary would fail the whole batch; it cannot be of this model.
        return (wanted, written) if wanted and max(wanted) < self._vocabulary else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (wanted, written) in self._rows.items():
            if len(written) < len(wanted):
                logits[row].fill_(-torch.inf)
                logits[row, wanted[len(written)]] = 0.0
        return logits


def forced(params: SamplingParams) -> list[int]:
    """Tokens that a request is to begin with. Raises ValueError when they are none."""
    wanted = (params.extra_args or {}).get(REPLAY_KEY) or []
    if not isinstance(wanted, list) or not all(type(token) is int and token >= 0 for token in wanted):
        raise ValueError(f"vllm_xargs.{REPLAY_KEY} must be a list of token ids")
    return wanted
