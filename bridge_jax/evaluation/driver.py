"""The one loop of all baselines: for every question under way, one generation, one action, one search a round.

    driver = Driver(baseline_of("react"), generator, retriever, limits)
    driver.answer(questions, finished=keep)          # each Outcome as soon as it is known

Generations and searches of a round are batched over the questions; a finished question leaves its place to the next one. A reply
without an action uses up a search, so every question ends after at most `searches` + 1 turns, as in a rollout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bridge_jax.data import medical
from bridge_jax.data.formats import Question
from bridge_jax.data.medical import MedicalQuestion
from bridge_jax.data.prompts import fill
from bridge_jax.errors import UserError
from bridge_jax.evaluation.aggregate import Outcome
from bridge_jax.evaluation.baselines import Action, Baseline
from bridge_jax.retrieval.retriever import RetrievalFault
from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import Turn
from bridge_jax.rollout.generators import Generator, Reply

ENDED = {"length": "truncated", "too_long": "context_full", "refused": "environment_fault"}


@dataclass(frozen=True)
class Limits:
    """searches: of one question. shown, candidates: passages a search shows and logs. Tokens: new_tokens of one generation,
    context_tokens of what one search shows, passage_tokens of one passage (0: no limit of its own)."""

    searches: int
    shown: int
    candidates: int
    new_tokens: int
    context_tokens: int = 0
    passage_tokens: int = 0


@dataclass
class State:
    """One question under way."""

    question: Question
    left: int  # searches it may still make
    passages: list[str] = field(default_factory=list)  # gathered documents, as shown
    rows: set[int] = field(default_factory=set)  # of the corpus, gathered
    history: str = ""
    turns: list[Turn] = field(default_factory=list)
    trace: list[tuple[str, str]] = field(default_factory=list)
    status: str | None = None
    answer: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    outage: bool = False


class Driver:
    """Answers questions by a baseline. retriever: `search(queries, k, lora=None)` and `corpus`; None where nobody searches."""

    def __init__(self, baseline: Baseline, generator: Generator, retriever, limits: Limits, *, lora=None):
        self.baseline, self.generator, self.retriever, self.limits, self.lora = baseline, generator, retriever, limits, lora
        self.corpus = retriever.corpus if baseline.may_search else None
        self.k = min(limits.candidates, len(self.corpus)) if baseline.may_search else limits.candidates
        self.block = 64 * generator.width

    def answer(self, questions: Sequence[Question], finished: Callable[[Outcome], None] | None = None) -> list[Outcome]:
        """Outcomes in the order of the questions. Raises UserError for a question that the baseline is not made for."""
        baseline = self.baseline
        for question in questions if baseline.multiple_choice else ():
            if not isinstance(question, MedicalQuestion):
                raise UserError(f"--baseline={baseline.name} is for multiple choice, and '{question.dataset}' is not: leave it out")
        states = [State(question, self._searches()) for question in questions]
        waiting, live = deque(states), []
        while waiting or live:
            fresh = [waiting.popleft() for _ in range(min(self.generator.width - len(live), len(waiting)))]
            if baseline.opens:
                self._search({n: state.question.question for n, state in enumerate(fresh)}, fresh)
            live += fresh
            self._turn([state for state in live if state.status is None])
            for state in live if finished else ():
                if state.status is not None:
                    finished(self._outcome(state))
            live = [state for state in live if state.status is None]
        return [self._outcome(state) for state in states]

    def _searches(self) -> int:
        own = self.baseline.searches
        return self.limits.searches if own is None else own

    def _turn(self, states: list[State]) -> None:
        """One generation of each, and what it asks for."""
        if not states:
            return
        baseline = self.baseline
        replies = self._generate(states, [self._prompt(state) for state in states], baseline.stops)
        queries: dict[int, str] = {}
        for n, (state, reply) in enumerate(zip(states, replies, strict=True)):
            if reply.finish in ("too_long", "refused"):
                state.trace.append(("fault", reply.problem))
                state.status = ENDED[reply.finish]
                continue
            state.trace.append(("generated", reply.text))
            action = baseline.read(reply.text, state.left > 0)
            self._act(state, action, reply)
            if state.status is None and action.kind == "search":
                queries[n] = action.content
        self._search(queries, states)

    def _act(self, state: State, action: Action, reply: Reply) -> None:
        if action.kind == "answer":
            state.answer = action.content or None
            state.status = "answered" if state.answer else "no_answer"
        elif reply.finish == "length":
            state.status = "truncated"
        elif state.left <= 0:
            state.status = "no_answer"
        else:
            state.history += action.keep
            if action.kind == "think":
                state.left -= 1

    def _prompt(self, state: State) -> str:
        ending = self.baseline.going if state.left > 0 else self.baseline.last
        passages = "\n".join(state.passages)
        parts = {"question": medical.asked(state.question), "passages": passages, "history": state.history, "ending": ending}
        return fill(self.baseline.prompt, **parts)

    def _generate(self, states: Sequence[State], prompts: list[str], stops: tuple[str, str]) -> list[Reply]:
        replies = self.generator.generate(prompts, stops=stops, max_tokens=self.limits.new_tokens)
        for state, reply in zip(states, replies, strict=True):
            state.prompt_tokens += reply.prompt_tokens
            state.tokens += reply.tokens
            state.seconds += reply.seconds
        return replies

    def _search(self, queries: dict[int, str], states: Sequence[State]) -> None:
        """Search for all of them at once (position in `states` -> query), and put what was found where the baseline wants it."""
        if not queries:
            return
        began = time.monotonic()
        try:
            found = self.retriever.search(list(queries.values()), self.k, lora=self.lora)
        except RetrievalFault as fault:
            for n in queries:
                states[n].trace.append(("fault", str(fault)))
                states[n].status, states[n].outage = "environment_fault", True
            return
        seconds = time.monotonic() - began
        shown: dict[int, str] = {}
        for (n, query), scores, rows in zip(queries.items(), np.asarray(found.scores), np.asarray(found.rows), strict=True):
            state = states[n]
            state.left -= 1
            state.seconds += seconds
            shown[n], count = self._documents(state, rows)
            state.turns.append(Turn(query, 0, rows.astype(np.int32), scores.astype(np.float32), count, (0, 0)))
            state.trace.append(("information", shown[n]))
        if self.baseline.condense:
            shown = self._condensed(shown, queries, states)
        for n, text in shown.items():
            if self.baseline.found and states[n].status is None:
                states[n].history += fill(self.baseline.found, passages=text)

    def _documents(self, state: State, rows: np.ndarray) -> tuple[str, int]:
        """(the shown passages, how many of them were found by this search). Gathered ones are shown once, and numbered on."""
        limits, gathers = self.limits, not self.baseline.found
        best = [int(row) for row in rows[: self.baseline.shown or limits.shown] if row >= 0]
        new = [row for row in best if row not in state.rows] if gathers else best
        documents = [
            protocol.render_document(number, self.corpus[row])
            for number, row in enumerate(new, start=1 + (len(state.passages) if gathers else 0))
        ]
        if limits.passage_tokens:
            documents = [self.generator.fit([document], limits.passage_tokens)[0] for document in documents]
        text, count = self.generator.fit(documents, limits.context_tokens)
        if gathers:
            state.passages += text.split("\n") if text else []
            state.rows |= set(new[:count])
        return text, count + len(best) - len(new)

    def _condensed(self, shown: dict[int, str], queries: dict[int, str], states: Sequence[State]) -> dict[int, str]:
        """What the model makes of the passages. One that cannot be asked reads the passages themselves."""
        asked = [
            fill(
                self.baseline.condense,
                question=medical.asked(states[n].question),
                history=states[n].history,
                query=queries[n],
                passages=text,
            )
            for n, text in shown.items()
        ]
        replies = self._generate([states[n] for n in shown], asked, self.baseline.stops)
        condensed = {}
        for (n, text), reply in zip(shown.items(), replies, strict=True):
            written = " ".join(protocol.inert(reply.text).split())
            states[n].trace.append(("condensed", written))
            condensed[n] = written or text
        return condensed

    def _outcome(self, state: State) -> Outcome:
        return Outcome(
            question=state.question,
            turns=state.turns,
            status=state.status or "no_answer",
            answer=state.answer,
            trace=state.trace,
            prompt_tokens=state.prompt_tokens,
            generated_tokens=state.tokens,
            latency=state.seconds,
            may_search=self.baseline.may_search,
            outage=state.outage,
        )
