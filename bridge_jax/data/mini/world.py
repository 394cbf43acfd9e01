"""The closed encyclopaedia: entities, their facts, and the passages that tell them. A world is a pure function of its seed."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from bridge_jax.data.mini.language import ASPECTS, PER_TYPE, RUMOUR, TYPES, VALUES, Aspect, name_pools

POPULAR = 60  # entities of a type that others refer to: references gather on few, so that "the same place" happens
RUMOURS = 0.05  # misleading passages, as a share of the facts


@dataclass(frozen=True)
class Entity:
    id: str  # "city-017"
    kind: str
    name: str
    values: dict[str, str]  # aspect -> what a passage says
    links: dict[str, str]  # aspect -> id of the entity that is its value


@dataclass(frozen=True)
class Passage:
    id: str
    title: str
    text: str


@dataclass(frozen=True)
class World:
    entities: dict[str, Entity]
    passages: tuple[Passage, ...]

    def of_kind(self, kind: str) -> list[Entity]:
        return [entity for entity in self.entities.values() if entity.kind == kind]


def passage_id(entity_id: str, aspect: str) -> str:
    return f"{entity_id}-{aspect}"


def aspect_of(kind: str, name: str) -> Aspect:
    return next(aspect for aspect in ASPECTS[kind] if aspect.name == name)


@functools.lru_cache(maxsize=2)
def make_world(seed: int = 0) -> World:
    """3 types x 430 entities x 9 aspects = 11,610 passages, and one misleading passage for every twentieth of them."""
    rng = random.Random(f"bridge_jax mini world {seed}")
    pools = name_pools()
    names = {kind: rng.sample([f"{a} {b}" for a in pools[kind][0] for b in pools[kind][1]], PER_TYPE) for kind in TYPES}
    ids = {kind: [f"{kind}-{n:03d}" for n in range(PER_TYPE)] for kind in TYPES}
    entities = {}
    for kind in TYPES:
        for n, entity in enumerate(ids[kind]):
            values, links = {}, {}
            for aspect in ASPECTS[kind]:
                if aspect.kind in TYPES:
                    target = rng.choice([i for i in range(POPULAR) if (aspect.kind, i) != (kind, n)])
                    values[aspect.name], links[aspect.name] = names[aspect.kind][target], ids[aspect.kind][target]
                else:
                    values[aspect.name] = rng.choice(VALUES[aspect.kind])
            entities[entity] = Entity(entity, kind, names[kind][n], values, links)
    passages = [
        Passage(passage_id(e.id, a.name), e.name, f"{rng.choice(a.tellings)} {e.values[a.name]} .")
        for e in entities.values()
        for a in ASPECTS[e.kind]
    ]
    for n in range(int(RUMOURS * len(passages))):
        entity = rng.choice(list(entities.values()))
        aspect = rng.choice(ASPECTS[entity.kind])
        false = rng.choice([v for v in _possible(aspect, names) if v not in (entity.values[aspect.name], entity.name)])
        text = RUMOUR.format(telling=rng.choice(aspect.tellings), value=false)
        passages.append(Passage(f"rumour-{n:03d}", entity.name, text))
    rng.shuffle(passages)
    return World(entities, tuple(passages))


def _possible(aspect: Aspect, names: dict[str, list[str]]) -> list[str]:
    return names[aspect.kind] if aspect.kind in TYPES else list(VALUES[aspect.kind])
