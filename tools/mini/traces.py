"""Search traces over random worlds: what the mini policy is warm-started on. Rows are tokens with labels for the auxiliary losses.

A trace is an episode as the rollout engine would write it (the same prompt, the same observations token for token), written by
an ideal policy over an imperfect retriever: it answers what it has read, searches again when it has not, and says "unknown" at
the end.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from bridge_jax.data.mini.language import ASPECTS, NO_ANSWER, QUERIES, TYPES, VAGUE_QUERIES
from bridge_jax.data.mini.questions import (
    EARLIER,
    SAME,
    MiniQuestion,
    chains,
    comparison_question,
    one_hop_question,
    two_hop_question,
)
from bridge_jax.data.mini.world import Entity, World, aspect_of, make_world, passage_id

FIRST_SEED = 1000  # worlds of the warm start; world 0 is the one that experiments use
ASPECT_IDS = {(kind, aspect.name): n for n, (kind, aspect) in enumerate((k, a) for k in TYPES for a in ASPECTS[k])}


@dataclass
class Row:
    """One trace. aspect, relevant: labels at some tokens, -1 elsewhere. copied: generated names and answers."""

    tokens: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    aspect: list[int] = field(default_factory=list)
    relevant: list[int] = field(default_factory=list)

    def add(self, tokens, generated=False, aspect=None, relevant=None, at=(), copied=()):
        """Labels go to the positions `at` of `tokens` (negative: from the end). copied: token ids that count as copied."""
        n = len(self.tokens)
        self.tokens += tokens
        self.generated += [generated] * len(tokens)
        self.copied += [token in copied for token in tokens]
        self.aspect += [-1] * len(tokens)
        self.relevant += [-1] * len(tokens)
        for i in at:
            place = n + (i if i >= 0 else len(tokens) + i)
            if aspect is not None:
                self.aspect[place] = aspect
            if relevant is not None:
                self.relevant[place] = relevant


@dataclass(frozen=True)
class _Document:
    body: list[int]  # tokens behind the document's number
    key: tuple[str, str] | None  # (entity, aspect) it truly tells; None for a rumour
    aspect: int
    value_tokens: int


class TraceWriter:
    """Traces of one random world. mix: shares of (one_hop, two_hop, comparison). hit: how often the gold passage is forced in."""

    def __init__(self, tokenizer, seed: int, mix=(0.5, 0.33, 0.17), hit: float = 0.5):
        self.tok, self.mix, self.hit = tokenizer, mix, hit
        self.world: World = make_world(FIRST_SEED + seed)
        self.rng = random.Random(f"mini traces {seed}")
        self._chains = chains(ood=False)
        ids = tokenizer.convert_tokens_to_ids
        self._numbers = [ids(str(n)) for n in range(1, 4)]
        self._doc, self._open, self._close = ids("doc"), ids("<information>"), ids("</information>")
        self._index()

    def _index(self):
        entities = self.world.entities
        by_name = {entity.name: entity for entity in entities.values()}
        true = {passage_id(e.id, a.name): (e, a) for e in entities.values() for a in ASPECTS[e.kind]}
        heads = self._encode([f"(title: {p.title})" for p in self.world.passages])
        bodies = self._encode([p.text for p in self.world.passages])
        self.docs: dict[str, _Document] = {}
        self.rumours = defaultdict(list)
        self.relatives = defaultdict(list)  # (name word) -> entities
        for passage, head, body in zip(self.world.passages, heads, bodies):
            if passage.id in true:
                entity, aspect = true[passage.id]
                n = len(entity.values[aspect.name].split())
                self.docs[passage.id] = _Document(head + body, (entity.id, aspect.name), ASPECT_IDS[entity.kind, aspect.name], n)
            else:
                entity = by_name[passage.title]
                self.docs[passage.id] = _Document(head + body, None, -1, 1)
                self.rumours[entity.id].append(passage.id)
        for entity in entities.values():
            for word in entity.name.split():
                self.relatives[word].append(entity)
        self._by_kind = {kind: self.world.of_kind(kind) for kind in TYPES}

    def _encode(self, texts):
        return self.tok(texts, add_special_tokens=False)["input_ids"]

    def _ids(self, text: str) -> list[int]:
        return self.tok.encode(text, add_special_tokens=False)

    # ---- questions

    def question(self) -> MiniQuestion:
        form = self.rng.choices(("one_hop", "two_hop", "comparison"), self.mix)[0]
        rng, entities = self.rng, self.world.entities
        if form == "one_hop":
            entity = rng.choice(self._by_kind[rng.choice(TYPES)])
            return one_hop_question(entity, rng.choice(ASPECTS[entity.kind]), rng, strange=rng.random() < 0.25)
        if form == "two_hop":
            kind, relation, aspect = rng.choice(self._chains)
            entity = rng.choice(self._by_kind[kind])
            target = entities[entity.links[relation]]
            return two_hop_question(entity, aspect_of(kind, relation), target, aspect_of(target.kind, aspect), rng)
        earlier = rng.random() < 0.5
        kind, name = rng.choice(EARLIER if earlier else SAME)
        while True:
            x = rng.choice(self._by_kind[kind])
            others = self._by_kind[kind]
            if not earlier and rng.random() < 0.5:
                others = [e for e in others if e.values[name] == x.values[name]]
            y = rng.choice(others)
            if y.id != x.id and (not earlier or x.values[name] != y.values[name]):
                return comparison_question(x, y, aspect_of(kind, name), "earlier" if earlier else "same", rng)

    # ---- retrieval

    def retrieve(self, entity: Entity, name: str, vague: bool) -> list[str]:
        """Three passages for a query: the entity's own at random, or (`hit`) the gold one among good distractors."""
        rng, gold = self.rng, passage_id(entity.id, name)
        own = [passage_id(entity.id, a.name) for a in ASPECTS[entity.kind]] + self.rumours[entity.id]
        if vague or rng.random() >= self.hit:
            found = rng.sample(own, 3)
            if rng.random() < 0.1:
                found[rng.randrange(3)] = passage_id(self._relative(entity).id, name)
            return found
        kinds = rng.choice(("own", "own", "relatives", "both"))
        others: list[str] = []
        while len(others) < 2:
            relative = kinds == "relatives" or (kinds == "both" and rng.random() < 0.5)
            new = passage_id(self._relative(entity).id, name) if relative else rng.choice(own)
            if new != gold and new not in others:
                others.append(new)
        found = [gold, *others]
        rng.shuffle(found)
        return found

    def _relative(self, entity: Entity) -> Entity:
        """Another entity of the kind, mostly one that shares a name's word."""
        near = [e for word in entity.name.split() for e in self.relatives[word] if e.id != entity.id and e.kind == entity.kind]
        return self.rng.choice(
            near if near and self.rng.random() < 0.7 else [e for e in self._by_kind[entity.kind] if e.id != entity.id]
        )

    # ---- traces

    def trace(self) -> Row:
        question, rng, row = self.question(), self.rng, Row()
        entities = self.world.entities
        goal = [ASPECT_IDS[entities[e].kind, a] for e, a in question.hops]
        row.add(self._ids(f"question : {question.question}"), aspect=goal[-1], at=(-1,))
        searches, known, hop = 0, set(), 0
        while searches < 2:
            if question.form == "one_hop" or question.form == "two_hop":
                wanted = next((h for h in range(len(question.hops)) if question.hops[h] not in known), None)
            else:
                wanted = searches if searches < 2 else None
            if wanted is None:
                break
            hop = wanted
            entity, name = entities[question.hops[hop][0]], question.hops[hop][1]
            aspect = aspect_of(entity.kind, name)
            vague = rng.random() < 0.15
            query = rng.choice(VAGUE_QUERIES if vague else QUERIES).format(x=entity.name, noun=rng.choice(aspect.nouns))
            at = () if vague else (-1,)
            row.add(self._ids(f"<search> {query} </search>"), True, aspect=goal[hop], at=at, copied=self._ids(entity.name))
            self._observe(row, self.retrieve(entity, name, vague), question.hops, hop, known)
            searches += 1
        row.add(self._ids("<answer>"), True, aspect=goal[-1], at=(-1,))
        answer = self._ids(self._answer(question, known))
        row.add([*answer, *self._ids("</answer>")], True, copied=answer)
        return row

    def _answer(self, question: MiniQuestion, known: set) -> str:
        if all(hop in known for hop in question.hops):
            return question.answer
        if question.form == "same":
            return self.rng.choice(("yes", "no"))
        return NO_ANSWER

    def _observe(self, row: Row, found: list[str], hops, hop: int, known: set) -> None:
        row.add([self._open])
        for number, name in zip(self._numbers, found):
            document = self.docs[name]
            right = document.key == hops[hop]
            # A document ends with its value and a full stop; whether it answers can be known when the value is met.
            places = range(-1 - document.value_tokens, 0)
            row.add(
                [self._doc, number, *document.body],
                aspect=document.aspect if document.aspect >= 0 else None,
                relevant=int(right),
                at=places,
            )
            if document.key in hops:
                known.add(document.key)
        row.add([self._close])


@dataclass
class Batch:
    """[B, T] int32 arrays; `length` [B]."""

    tokens: np.ndarray
    generated: np.ndarray
    copied: np.ndarray
    aspect: np.ndarray
    relevant: np.ndarray


def batch_of(rows: list[Row], width: int) -> Batch:
    arrays = [np.full((len(rows), width), fill, np.int32) for fill in (0, 0, 0, -1, -1)]
    for b, row in enumerate(rows):
        for array, values in zip(arrays, (row.tokens, row.generated, row.copied, row.aspect, row.relevant)):
            array[b, : len(values)] = values
    valid = np.arange(width)[None] < np.asarray([len(row.tokens) for row in rows])[:, None]
    return Batch(arrays[0], arrays[1] * valid, *arrays[2:])
