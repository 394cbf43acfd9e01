"""Greedy evaluation on data sets: the rollout engine of training, one sample a question, temperature 0.

Of several processes each answers its share of every set's questions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from bridge_jax import distributed, preemption
from bridge_jax.data import medical
from bridge_jax.data.corpora import SHIPPED
from bridge_jax.data.formats import canonical_name
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import Question, load_questions
from bridge_jax.errors import Outage, UserError
from bridge_jax.evaluation import aggregate
from bridge_jax.evaluation.aggregate import Outcome
from bridge_jax.retrieval.progress import track
from bridge_jax.rollout.episodes import Episode, RolloutEngine
from bridge_jax.training.assets import Assets

# Batches handed to the engine at once: a question that is finished leaves its place to the next one, and what is kept of episodes
# until they are scored (some 0.1 MB each) stays bounded.
BATCHES = 8


def evaluation_engine(assets: Assets, retriever=None) -> RolloutEngine:
    """The run's engine with as many questions in flight as training has rollouts. Keep it: it compiles once.

    retriever: another one than the run's, such as a fused one.
    """
    config = assets.engine.config
    wide = dataclasses.replace(config, batch_groups=config.batch_groups * assets.config.grpo.group_size)
    if retriever is not None:
        wide = dataclasses.replace(wide, question_separator="")  # what the run's own encoder wants, other ones do not know
    searched = retriever or assets.retriever
    return RolloutEngine(assets.rollout_policy, assets.tokenizer, assets.eos_ids, wide, searched, assets.engine.tool)


class Agent:
    """Who answers by the search protocol: a policy in the rollout engine, greedily.

    Like every answerer of this package it has `answer(questions, finished)`, which is given each `Outcome` as soon as it is known,
    `corpus` (None: it never searches), `k` (candidates of a search) and `block` (questions worth giving it at once).
    """

    def __init__(self, engine: RolloutEngine, policy_variables: dict, prompt: str, *, retriever_lora=None, seed: int = 0):
        self.engine, self.variables, self.prompt = engine, policy_variables, prompt
        self.retriever_lora, self.seed = retriever_lora, seed
        self.corpus, self.k = engine.retriever.corpus, engine.candidates
        self.block = BATCHES * engine.config.batch_groups

    def answer(
        self, questions: Sequence[Question], finished: Callable[[Outcome], None] | None = None, advance=lambda n: None
    ) -> list[Outcome]:
        told = None if finished is None else (lambda episode: finished(Outcome.of(episode)))
        episodes: list[Episode]
        episodes, _ = self.engine.run(
            self.variables,
            questions,
            prompts=[build_prompt(medical.asked(question), self.engine.tokenizer, self.prompt) for question in questions],
            group_size=1,
            key=jax.random.key(self.seed),
            temperature=0.0,
            retriever_lora=self.retriever_lora,
            advance=advance,
            finished=told,
        )
        return [Outcome.of(episode) for episode in episodes]


def evaluate_sets(
    assets: Assets,
    policy_variables: dict,
    sets: Mapping[str, Sequence[Question]],
    *,
    retriever_lora=None,
    seed: int = 0,
    progress: bool = True,
    engine: RolloutEngine | None = None,
) -> dict:
    """Answer every question greedily and score.

    Args:
      policy_variables: {"params": .. [, "lora": ..]}, published.
      sets: name -> questions.
      seed: of the bootstrap intervals (greedy decoding draws nothing).
      engine: from `evaluation_engine`, to be used again; None makes one.

    Returns:
      {"datasets": {name: metrics}, "averages": {"single_hop", "multi_hop", "overall"}, "predictions": {name: [record a
      question]}, "k", "seconds"}; the metrics are those of `aggregate.summarise`.

    Raises:
      Preempted: a SIGTERM that is listened for (`preemption`) broke it off.
      Outage: a search failed for good: nobody's answer must not become a number.
    """
    prompt = assets.config.rollout.prompt
    agent = Agent(engine or evaluation_engine(assets), policy_variables, prompt, retriever_lora=retriever_lora, seed=seed)
    began = time.monotonic()
    records: dict[str, list[dict]] = {}

    def answered(name: str, questions: Sequence[Question]) -> list[dict]:
        shown = progress and distributed.is_main()
        show = track(f"evaluating {name}", len(questions), "questions") if shown else contextlib.nullcontext(lambda n: None)
        rows = []
        with show as bar:

            def advance(done: int) -> None:
                preemption.check()
                bar(done)

            for at in range(0, len(questions), agent.block):
                outcomes = agent.answer(questions[at : at + agent.block], advance=advance)
                rows += [aggregate.record(outcome, agent.corpus, agent.k) for outcome in outcomes]
        return rows

    for name, questions in sets.items():
        mine = questions[distributed.index() :: distributed.count()]
        parts = distributed.share(lambda name=name, mine=mine: answered(name, mine))
        records[name] = [parts[i % len(parts)][i // len(parts)] for i in range(len(questions))]
        _refuse_outages(name, records[name])
    return aggregate.result(records, agent.k, seed) | {"seconds": time.monotonic() - began}


def _refuse_outages(name: str, records: Sequence[Mapping]) -> None:
    failed = [row for row in records if row["status"] == "environment_fault"]
    if failed:
        said = next((part["text"] for part in failed[0]["trace"] if part["kind"] == "fault"), "see the log")
        raise Outage(
            f"evaluating {name}: the search engine failed in {len(failed)} of {len(records)} questions ({said}): no numbers are "
            "made of them; the same command goes on from there"
        )


def load_sets(config, specs: Sequence[str] = (), split: str | None = None, limit: int | None = None) -> dict[str, list[Question]]:
    """The evaluation questions by data set; a file that holds several sets becomes several entries.

    Args:
      specs: () = `config.data.eval`; a bare name stands for that set's source in the config, or in the embedded corpus. Medical
        sets as `medical.load` has them, or by their bare names.
      split, limit: None = `config.data.eval_split`, `config.data.eval_limit`; limit 0 = all. The limit counts per source, and per
        set of a medical one.
    """
    split = config.data.eval_split if split is None else split
    limit = config.data.eval_limit if limit is None else limit
    sets: dict[str, list[Question]] = {}
    for spec in [_source(config, spec) for spec in specs] or config.data.eval:
        for name, questions in _sets_of(spec, split, limit).items():
            entry = spec if name in sets else name
            if entry in sets:
                raise UserError(f"data set {spec} is named twice; name each once")
            sets[entry] = questions
    return sets


def _sets_of(spec: str, split: str, limit: int) -> dict[str, list[Question]]:
    if medical.is_spec(spec):
        return medical.load(spec, limit or None)
    questions = load_questions(spec, split or None, limit=limit or None)
    names = dict.fromkeys(question.dataset for question in questions)
    return {name: [question for question in questions if question.dataset == name] for name in names}


def _source(config, name: str) -> str:
    if name in (*config.data.eval, *config.data.train):
        return name
    wanted = canonical_name(name)
    if wanted in medical.TASKS:
        return f"{medical.NAME}/{wanted}"
    for spec in (*config.data.eval, *config.data.train):
        if canonical_name(spec.split("/")[-1]) == wanted and spec.startswith(tuple(f"{corpus}/" for corpus in SHIPPED)):
            return spec
    shipped = SHIPPED.get(config.index.corpus)
    return f"{config.index.corpus}/{wanted}" if shipped and wanted in shipped.SETS else name
