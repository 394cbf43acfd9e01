"""What a rollout is: its settings, its turns, the finished episode, and the row that is still being written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bridge_jax.data.qa import Question
from bridge_jax.errors import UserError
from bridge_jax.rollout.limits import check_sampling

Status = Literal["answered", "no_answer", "truncated", "context_full", "environment_fault"]


@dataclass(frozen=True)
class RolloutConfig:
    """Lengths are in tokens.

    max_searches: executed searches a rollout may make; there are at most max_searches + 1 generations.
    shown / candidates: passages in an observation / passages logged for credit.
    max_new_tokens: of one generation; reaching it ends the rollout as "truncated".
    retry_invalid: an invalid action is answered as in Search-R1, and reaching max_new_tokens before the last generation is one.
    max_observation_tokens: of one observation, tags included. max_passage_tokens: show only the beginning of each passage (0: all).
    cut_inside: an observation that is too long ends inside a passage, not before it.
    max_response_tokens: everything after the prompt; what would not fit ends the rollout as "context_full".
    chunk: tokens decoded between two looks of the host. batch_groups: questions in flight.
    top_p, top_k: sample from the most likely tokens only (`drawing.draw_top`; 1 and 0: from all). The recorded log-probs stay those
    of the full softmax, which training recomputes: with these options its importance ratios are biased.
    min_new_tokens: of one generation; until then it can neither end its text nor complete a tag (see `sampler.Sampler`).
    overlap_search: search while the other rows decode one more chunk; for an index that is slow to answer (see `flight`).
    question_separator: what is searched for is the question, this, and the query ("": the query alone), for encoders trained so.
    """

    max_searches: int = 2
    shown: int = 3
    candidates: int = 40
    max_prompt_tokens: int = 512
    max_new_tokens: int = 256
    max_observation_tokens: int = 512
    max_passage_tokens: int = 0
    max_response_tokens: int = 2048
    chunk: int = 16
    batch_groups: int = 4
    top_p: float = 1.0
    top_k: int = 0
    min_new_tokens: int = 0
    overlap_search: bool = False
    retry_invalid: bool = False
    cut_inside: bool = False
    question_separator: str = ""

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool | str):
                continue
            least = 0 if name in ("max_searches", "max_passage_tokens", "top_p", "top_k", "min_new_tokens") else 1
            if value < least:
                raise UserError(f"rollout.{name} = {value}: must be at least {least}")
        check_sampling(self, "rollout.")
        if self.shown > self.candidates:
            raise UserError(f"rollout.shown = {self.shown} is above rollout.candidates = {self.candidates}; lower it")


@dataclass(frozen=True)
class Opening:
    """How the samples of a question begin in the middle of an episode, whose text so far is their prompt.

    generations: how many of the episode have ended, at least 1: they count towards max_searches. observations: for each sample, the
    tokens [O] int32 of the observation that comes next.
    """

    generations: int
    observations: Sequence[np.ndarray]


@dataclass
class Turn:
    """One executed search. tokens[:history] of its episode end with the </search> that asked for it."""

    query: str
    history: int
    rows: np.ndarray  # [C] int32 corpus rows, best first; -1 where the index found fewer
    scores: np.ndarray  # [C] float32
    shown: int  # passages in the observation
    observation: tuple[int, int]  # tokens[start:end]
    error: str | None = None  # why its passages could not be shown


@dataclass
class Episode:
    """One rollout. T = tokens after the prompt; `generated` tells the policy's own from the environment's."""

    question: Question
    group: int
    sample: int
    prompt: np.ndarray  # [P] int32
    tokens: np.ndarray  # [T] int32
    generated: np.ndarray  # [T] bool
    logps: np.ndarray  # [T] float32, 0 where not generated
    turns: list[Turn]
    status: Status
    answer: str | None
    trace: list[tuple[str, str]]  # ("generated" | "information" | "tool" | "corrective" | "fault", text) in order, for display
    seconds: float = 0.0  # between entering the batch and the end


@dataclass
class Row:
    """A rollout under way."""

    group: int
    sample: int
    prompt: np.ndarray
    status: Status | None = None
    answer: str | None = None
    generation: int = 0  # how many generations have ended
    start: int = 0  # where the current generation begins
    tokens: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    trace: list[tuple[str, str]] = field(default_factory=list)
    began: float | None = None  # when it entered the batch
    seconds: float = 0.0
    opening: np.ndarray | None = None  # an observation that it has, and that its cache has not: it begins with that

    def open(self, generations: int, observation: np.ndarray) -> None:
        """Begin behind `generations` generations, with an observation (`Opening`)."""
        self.generation, self.opening = generations, observation
        self.write(observation.tolist())
        self.start = len(self.tokens)

    def write(self, tokens: Sequence[int], logps: Sequence[float] | None = None) -> None:
        self.tokens.extend(tokens)
        self.generated.extend([logps is not None] * len(tokens))
        self.logps.extend([0.0] * len(tokens) if logps is None else logps)

    def end(self, status: Status) -> None:
        self.status = status
        self.seconds = 0.0 if self.began is None else time.monotonic() - self.began

    def episode(self, questions: Mapping[int, Question]) -> Episode:
        """The finished rollout; `questions` by their number in the step, which is the row's group."""
        assert self.status is not None
        return Episode(
            question=questions[self.group],
            group=self.group,
            sample=self.sample,
            prompt=self.prompt,
            tokens=np.asarray(self.tokens, np.int32),
            generated=np.asarray(self.generated, bool),
            logps=np.asarray(self.logps, np.float32),
            turns=self.turns,
            status=self.status,
            answer=self.answer,
            trace=self.trace,
            seconds=self.seconds,
        )
