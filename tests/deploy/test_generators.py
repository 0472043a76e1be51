"""Seeded generators of CPU engines: vLLM takes back what an unfinished prompt drew."""

from __future__ import annotations

import torch

from kvrelay.deploy.generators import RewindableGenerator


def draw(generator: torch.Generator) -> list[float]:
    numbers: list[float] = torch.empty(3).exponential_(generator=generator).tolist()
    return numbers


def test_numbers_of_an_unfinished_prompt_are_drawn_again() -> None:
    plain = torch.Generator(device="cpu")
    plain.manual_seed(7)
    expected = [draw(plain), draw(plain)]
    rewound = RewindableGenerator(device="cpu")
    rewound.manual_seed(7)
    for _chunk in range(2):
        draw(rewound)
        rewound.set_offset(rewound.get_offset() - 4)  # what vLLM does after a step that does not end the prompt
    assert [draw(rewound), draw(rewound)] == expected


def test_seeding_gives_back_the_generator() -> None:
    generator = RewindableGenerator(device="cpu")
    assert generator.manual_seed(1) is generator
