"""A replayed request writes what it is told, and no other request notices. vLLM's own batch updates drive it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

VOCABULARY = 10


def replay() -> Any:
    import torch

    from kvrelay.connector.replay import Replay

    model = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    return Replay(SimpleNamespace(model_config=model), torch.device("cpu"), False)


def params(*wanted: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(extra_args={"kvrelay_replay": list(wanted)} if wanted else None)


def update(*added: tuple[int, Any, list[int]], **more: Any) -> Any:
    from vllm.v1.sample.logits_processor import BatchUpdate

    rows = [(row, wanted, [1, 2], written) for row, wanted, written in added]
    return BatchUpdate(batch_size=4, removed=more.get("removed", ()), added=rows, moved=more.get("moved", ()))


def chosen(processor: Any, rows: int = 2) -> list[int]:
    """The greedy choice of each row, whose logits favour token 9."""
    import torch

    logits = torch.zeros(rows, VOCABULARY)
    logits[:, 9] = 5.0
    return [int(token) for token in processor.apply(logits).argmax(dim=-1)]


def test_tokens_are_forced_one_after_the_other_and_then_the_model_is_free() -> None:
    processor, written = replay(), list[int]()
    processor.update_state(update((1, params(4, 7), written)))
    for expected in (4, 7):
        assert chosen(processor) == [9, expected]
        written.append(expected)
        processor.update_state(None)
    assert chosen(processor) == [9, 9]


def test_a_request_that_moves_in_the_batch_takes_its_tokens_along() -> None:
    from vllm.v1.sample.logits_processor import MoveDirectionality

    processor = replay()
    processor.update_state(update((0, params(4), []), (1, params(), [])))
    processor.update_state(update(moved=((0, 1, MoveDirectionality.SWAP),)))
    assert chosen(processor) == [9, 4]
    processor.update_state(update(removed=(1,)))
    assert chosen(processor) == [9, 9]


def test_one_that_was_preempted_goes_on_where_it_was() -> None:
    processor = replay()
    processor.update_state(update((0, params(4, 7, 8), [4, 7])))
    assert chosen(processor)[0] == 8


@pytest.mark.parametrize("wanted", [("a",), (-1,), (True,), (1.5,)])
def test_what_are_no_tokens_is_the_askers_fault(wanted: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="kvrelay_replay must be a list of token ids"):
        type(replay()).validate_params(params(*wanted))


def test_a_token_beyond_the_vocabulary_harms_no_batch() -> None:
    processor = replay()
    processor.update_state(update((0, params(3, VOCABULARY), [])))
    assert chosen(processor) == [9, 9]
