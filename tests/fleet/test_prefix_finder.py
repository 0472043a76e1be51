"""What workers are offered of a prompt, and what a choice is told of that without a look at each."""

from __future__ import annotations

import math
import random

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.index import store_key
from kvrelay.fleet.prefix_finder import PrefixOffers
from kvrelay.fleet.underway import Work
from kvrelay.policy.cost import Hints, Kind
from kvrelay.types import Role
from tests.fleet.known import PAGE, ask, known_brain, member

STORES = ("s1", "s2", "s3")
SECOND_PAGE = 2 * PAGE


class Seen:
    """A fleet of two kinds of workers that hold, compute and are pushed parts of one prompt, whatever ``seed`` says."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        places = [(f"p{number}", self.dice.choice(STORES)) for number in range(6)]
        self.brain = known_brain(places[:4], [("d0", "s1"), ("d1", "s2"), ("d2", "s3")], shares=seed % 2 == 0)
        for name, store in places[4:]:
            self.brain.register_worker(member(name, Role.PREFILL, store, page_tokens=SECOND_PAGE), 0.0)
        self.tokens = self.dice.choice((3, 10, 81, 200))
        self.names = {
            root: names
            for page_tokens in (PAGE, SECOND_PAGE)
            for root, names in ask("r", (1, self.tokens), page_tokens=page_tokens).facts.page_names[0].items()
        }
        self._teach(self.brain)

    def _teach(self, brain: Brain) -> None:
        """Links differ, and bytes are on their way."""
        for source in STORES:
            for target in STORES:
                if source != target and self.dice.random() < 0.5:
                    move = brain.loads.links.move(source, target)
                    slower = self.dice.choice((0.2, 3.0))
                    brain.loads.links.learn(source, target, move.saw_moving(1 << 24, slower).saw_exposed(0, slower))
                    brain.loads.links.promise(source, target, self.dice.choice((0, 1 << 20)))

    def offers(self) -> tuple[PrefixOffers, Hints, int]:
        """To all who read, the hints of them, and how many they are."""
        brain, columns = self.brain, self.brain._chooser.topology("tiny", 0.0).prefill_columns
        holders = [*columns.names, *map(store_key, STORES)]
        depths = {
            root: {name: self.dice.randint(1, len(names)) for name in holders if self.dice.random() < 0.4}
            for root, names in self.names.items()
            if names
        }
        for number in range(self.dice.randrange(4)):
            self._begin(f"w{number}")
        candidates = brain.prefixes.finder.look(self.names, depths, 1.0, may_wait=True)
        found = brain.prefixes.finder.offers(columns, candidates, self.tokens, 1.0)
        return found, found.hints(), len(columns.names)

    def _begin(self, key: str) -> None:
        names = self.dice.choice([each for each in self.names.values() if each] or [()])
        if names:
            brought = names[: self.dice.randint(1, len(names))]
            self.brain.prefixes.underway.begin(
                Work(
                    key=key,
                    names=tuple(brought),
                    first=self.dice.randrange(len(brought)),
                    worker=self.dice.choice((None, "p0", "p5", "d0")),
                    stores=frozenset({store_key(self.dice.choice(STORES))}),
                    begin_s=self.dice.choice((0.0, 1.0, 2.0)),
                    seconds=self.dice.choice((0.1, 3.0)),
                )
            )


def test_no_worker_is_offered_more_or_sooner_than_the_hints_say() -> None:
    kinds = set()
    for seed in range(150):
        offers, hints, count = Seen(seed).offers()
        most = hints.most_tokens()
        for at in range(count):
            for source, tokens, seconds in offers[at]:
                kinds.add(source.kind)
                assert tokens <= most[at], (seed, at, source)
                soonest_s = [0.0] if tokens <= hints.at_hand[at] else []
                soonest_s += [
                    prefix.first_s + prefix.page_s * max(0, prefix.pages - 1 - hints.stored[at])
                    for prefix in hints.coming
                    if at in prefix.to and prefix.tokens >= tokens
                ]
                assert min(soonest_s, default=math.inf) <= seconds, (seed, at, source)
    assert kinds == set(Kind), "every kind of source was offered"
