"""Questions over a world, by set and split. Out-of-domain sets hold what no training question, trace or update has seen.

    one_hop          an aspect of an entity                                     "what is the employer of X ?"
    two_hop          an aspect of an entity that is an aspect of another        "what is the region of the birthplace of X ?"
    comparison       two entities: which is earlier, or whether they share      "do X and Y have the same hometown ?"
    one_hop_ood      other words: nouns and sentences that no training question has (the warm start knows them)
    two_hop_ood      chains of relations that are nowhere in training
    comparison_ood   comparisons of aspects that are never compared in training

A fact (entity, aspect), a chain (entity, relation, aspect) and a pair of entities belong to one split each, whatever the wording.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bridge_jax.data.mini.language import (
    ASPECT_QUESTIONS,
    ASPECTS,
    CHAIN_QUESTIONS,
    OLDER_QUESTIONS,
    SAME_QUESTIONS,
    STRANGE_QUESTIONS,
    TYPES,
    Aspect,
)
from bridge_jax.data.mini.world import Entity, World, aspect_of, passage_id

SPLITS = ("train", "validation", "test")
SIZES = {
    "one_hop": {"train": 4000, "validation": 400, "test": 600},
    "two_hop": {"train": 4000, "validation": 400, "test": 600},
    "comparison": {"train": 2000, "validation": 400, "test": 600},
    "one_hop_ood": {"validation": 400, "test": 600},
    "two_hop_ood": {"validation": 400, "test": 600},
    "comparison_ood": {"validation": 400, "test": 600},
}
SETS = tuple(SIZES)
MULTI_HOP = ("two_hop", "comparison", "two_hop_ood", "comparison_ood")

EARLIER = (("person", "birthyear"), ("company", "opening"))  # compared by year, in training and in the tests
SAME = (("person", "birthplace"), ("company", "headquarters"), ("city", "region"))
SAME_OOD = (("person", "employer"), ("person", "profession"), ("company", "industry"), ("city", "festival"))


@dataclass(frozen=True)
class MiniQuestion:
    """gold_passages in the order they are needed; hops: the (entity, aspect) of each."""

    question: str
    answer: str
    gold_passages: tuple[str, ...]
    hops: tuple[tuple[str, str], ...]
    form: str  # "one_hop", "two_hop", "earlier" or "same"


def chains(ood: bool) -> list[tuple[str, str, str]]:
    """(kind of the first entity, relation, aspect of its value): every third chain is kept out of training."""
    every = [
        (kind, relation.name, aspect.name)
        for kind in TYPES
        for relation in ASPECTS[kind]
        if relation.kind in TYPES
        for aspect in ASPECTS[relation.kind]
    ]
    return [chain for n, chain in enumerate(every) if (n % 3 == 2) == ood]


def questions(world: World, name: str, split: str, seed: int = 0) -> list[MiniQuestion]:
    """The questions of a set's split, always the same ones."""
    rng = random.Random(f"bridge_jax mini questions {seed} {name} {split}")
    return list(itertools.islice(_MAKERS[name](world, split, rng), SIZES[name][split]))


def _split_of(*key: str) -> str:
    """15 % test, 10 % validation, by hash."""
    value = int.from_bytes(hashlib.sha256("|".join(key).encode()).digest()[:4]) / 2**32
    return "test" if value < 0.15 else "validation" if value < 0.25 else "train"


def _one_hop(ood: bool):
    def make(world: World, split: str, rng: random.Random) -> Iterator[MiniQuestion]:
        facts = [
            (entity, aspect)
            for entity in world.entities.values()
            for aspect in ASPECTS[entity.kind]
            if _split_of(entity.id, aspect.name) == split
        ]
        rng.shuffle(facts)
        for entity, aspect in facts:
            yield one_hop_question(entity, aspect, rng, strange=ood)

    return make


def one_hop_question(entity: Entity, aspect: Aspect, rng: random.Random, strange: bool) -> MiniQuestion:
    form, nouns = (STRANGE_QUESTIONS, aspect.nouns[2:]) if strange else (ASPECT_QUESTIONS, aspect.usual_nouns)
    text = rng.choice(form).format(noun=rng.choice(nouns), x=entity.name)
    hop = (entity.id, aspect.name)
    return MiniQuestion(text, entity.values[aspect.name], (passage_id(*hop),), (hop,), "one_hop")


def _two_hop(ood: bool):
    def make(world: World, split: str, rng: random.Random) -> Iterator[MiniQuestion]:
        found = []
        for kind, relation, aspect in chains(ood):
            for entity in world.of_kind(kind):
                target = entity.links[relation]
                if target != entity.id and _split_of(entity.id, relation, aspect) == split:
                    found.append((entity, relation, world.entities[target], aspect))
        rng.shuffle(found)
        for entity, relation, target, aspect in found:
            yield two_hop_question(entity, aspect_of(entity.kind, relation), target, aspect_of(target.kind, aspect), rng)

    return make


def two_hop_question(entity: Entity, relation: Aspect, target: Entity, aspect: Aspect, rng: random.Random) -> MiniQuestion:
    nouns = {"noun1": rng.choice(relation.usual_nouns), "noun2": rng.choice(aspect.usual_nouns)}
    hops = ((entity.id, relation.name), (target.id, aspect.name))
    text = rng.choice(CHAIN_QUESTIONS).format(x=entity.name, **nouns)
    return MiniQuestion(text, target.values[aspect.name], tuple(passage_id(*hop) for hop in hops), hops, "two_hop")


def _comparison(ood: bool):
    def make(world: World, split: str, rng: random.Random) -> Iterator[MiniQuestion]:
        seen = set()
        same = SAME_OOD if ood else SAME
        for n in itertools.count():
            kind, name = same[n // 2 % len(same)] if ood or n % 2 else EARLIER[n // 2 % len(EARLIER)]
            form = "same" if ood or n % 2 else "earlier"
            entities = world.of_kind(kind)
            x = rng.choice(entities)
            if form == "same" and rng.random() < 0.5:
                entities = [e for e in entities if e.values[name] == x.values[name]]
            others = [e for e in entities if e.id != x.id and (form == "same" or e.values[name] != x.values[name])]
            if not others:
                continue
            y = rng.choice(others)
            key = (name, *sorted((x.id, y.id)))
            if key in seen or _split_of(*key) != split:
                continue
            seen.add(key)
            yield comparison_question(x, y, aspect_of(kind, name), form, rng)

    return make


def comparison_question(x: Entity, y: Entity, aspect: Aspect, form: str, rng: random.Random) -> MiniQuestion:
    a, b = x.values[aspect.name], y.values[aspect.name]
    if form == "earlier":
        text, answer = rng.choice(OLDER_QUESTIONS), (x if int(a) < int(b) else y).name
    else:
        text, answer = rng.choice(SAME_QUESTIONS), "yes" if a == b else "no"
    hops = ((x.id, aspect.name), (y.id, aspect.name))
    text = text.format(noun=rng.choice(aspect.usual_nouns), x=x.name, y=y.name)
    return MiniQuestion(text, answer, tuple(passage_id(*hop) for hop in hops), hops, form)


_MAKERS = {
    "one_hop": _one_hop(False),
    "two_hop": _two_hop(False),
    "comparison": _comparison(False),
    "one_hop_ood": _one_hop(True),
    "two_hop_ood": _two_hop(True),
    "comparison_ood": _comparison(True),
}
