"""One round of Agentic-R before the agent trains (METHOD 8): an encoder trained on what helped this agent, and its index.

    <workdir>/agentic_r/round_<n>/
      trajectories.jsonl   greedy episodes on training questions, with the retriever of the round before
      candidates.jsonl     a row a search: what it searched for, the candidates
      local.jsonl          its local scores, 0 to 100, by the judge (`relevance.py`)
      global.jsonl         per candidate: the answer of the episode that went on with it alone, and whether that is right
      pairs.jsonl          of the turns that teach: positives and negatives (`utility.py`)
      encoder_training/    metrics.jsonl, and the state while it trains
      retriever/           the encoder, a Hugging Face folder
      index/               the corpus by that encoder
      summary.json         counts and seconds of each

Each stage reads what the ones before wrote and goes on where it was killed. The agent's own steps are the loop's, in its
checkpoints.
The 20 episodes that go on from one history are a group of the rollout engine: their history is read once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from bridge_jax import distributed, preemption
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import Question
from bridge_jax.endpoint import Endpoint
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, as_path, delete_folder, is_remote, written_locally
from bridge_jax.mesh import batch_ways
from bridge_jax.models import e5
from bridge_jax.objectives import scoring
from bridge_jax.objectives.rewards import exact_match
from bridge_jax.rollout import protocol
from bridge_jax.rollout.environment import searched_text
from bridge_jax.rollout.episodes import Episode, Opening, RolloutConfig, RolloutEngine, Turn
from bridge_jax.rollout.generators import EndpointGenerator, PolicyGenerator
from bridge_jax.training import encoder_training, utility
from bridge_jax.training.assets import Assets, round_folder, separator, with_encoder
from bridge_jax.training.blocks import note, run_stage, summary
from bridge_jax.training.credit_stage import scoring_config
from bridge_jax.training.encoder_training import EncoderConfig, Pair
from bridge_jax.training.relevance import Candidates, Local, Relevance, by_likelihood, judged

log = logging.getLogger(__name__)

BLOCKS = 4  # a block of a stage has so many times what is under way at once
JUDGE_PROMPT = 4096  # tokens, where the policy itself is the judge
DROPPED = ("dropped_unread", "dropped_faults", "dropped_never_right", "dropped_low_local")
STAGES = ("trajectories", "candidates", "local", "global", "pairs", "encoder_training", "index")


def prepare(
    config: ConfigDict, workdir: AnyPath, number: int, assets: Assets, variables: dict, questions: Sequence[Question]
) -> tuple[Assets, dict[str, float]]:
    """All that comes before round `number`'s agent training -> (assets with the new retriever, metrics of the round).

    Args:
      assets: with the retriever of the round before. variables: the agent's, published. questions: of this round's trajectories.

    Raises:
      UserError: no turn teaches anything; the judge's endpoint failed; the training diverged.
      Preempted: SIGTERM; the same command goes on.
    """
    folder = round_folder(as_path(workdir), number)
    this = _Round(config, number, folder, assets, variables)
    if not distributed.on_main((folder / "retriever" / "config.json").exists):
        this.train(this.pairs(questions))
    began = time.monotonic()
    assets = with_encoder(assets, folder)
    if distributed.on_main(lambda: "index" not in summary(folder)):  # asked once: the main process may have noted it by now
        note(folder, "index", {"seconds": time.monotonic() - began, "passages": len(assets.corpus)})
    return assets, metrics_of(distributed.on_main(lambda: summary(folder)))


def metrics_of(found: dict[str, dict]) -> dict[str, float]:
    """A round's summary as metrics of its first step: `agentic/<stage>/*`, and `time/agentic/<stage>`."""
    metrics = {f"time/agentic/{name}": found[name]["seconds"] for name in STAGES}
    for name in STAGES:
        facts = {key: value for key, value in found[name].items() if key != "seconds" and isinstance(value, int | float)}
        metrics |= {f"agentic/{name}/{key}": value for key, value in facts.items()}
    return metrics


class _Round:
    """What the stages of a round share."""

    def __init__(self, config: ConfigDict, number: int, folder: AnyPath, assets: Assets, variables: dict):
        self.config, self.number, self.folder, self.assets, self.variables = config, number, folder, assets, variables
        self.rows = config.rollout.batch_groups * config.grpo.group_size  # episodes under way at once
        self.candidates = min(config.agentic.candidates, len(assets.corpus))

    def pairs(self, questions: Sequence[Question]) -> list[dict]:
        """The rows of pairs.jsonl, by way of the stages before."""
        stage = self._stage
        trajectories = stage("trajectories", list(enumerate(questions)), BLOCKS * self.rows, self._trajectories())
        candidates = stage("candidates", trajectories, 1 << 20, self._candidates)
        turns = [(row, trajectories[row["trajectory"]]) for row in candidates]
        groups = max(1, self.rows // max(1, self.candidates))
        local = stage("local", turns, BLOCKS * groups, self._local())
        self._say_unread(local)
        reached = stage("global", turns, BLOCKS * groups, self._global(groups))
        pairs = stage("pairs", list(zip(candidates, local, reached, strict=True)), 1 << 20, self._pairs)
        if not pairs:
            raise UserError(_nothing_learnt(self.folder, distributed.on_main(lambda: summary(self.folder))))
        return pairs

    def _say_unread(self, local: Sequence[dict]) -> None:
        said = [text for row in local for text in row.get("unread", ())]
        if said and distributed.is_main():
            facts = summary(self.folder)["local"]
            log.warning(
                "agentic_r: %d of the judge's %d replies hold no scores that can be read (the first one: %r): %d of %d searches "
                "are dropped; %s has all of them",
                *(len(said), facts["lists"], said[0], facts["unread"], facts["rows"], self.folder / "local.jsonl"),
            )

    def _stage(self, name: str, items: Sequence, block: int, work) -> list[dict]:
        return run_stage(self.folder, name, items, block, work)

    # ---- the stages: each gives a function from a block of items to its rows and counts -----------------------------------------

    def _trajectories(self):
        config, tokenizer = self.config, self.assets.tokenizer
        engine = self._engine(self.rows, candidates=self.candidates)

        def play(items):
            questions = [question for _, question in items]
            prompts = [build_prompt(question, tokenizer, config.rollout.prompt) for question in questions]
            episodes = self._play(engine, questions, prompts, 1)
            return [_trajectory_row(number, episode) for (number, _), episode in zip(items, episodes, strict=True)]

        def work(items):
            rows = _spread(play, items)
            searches, right = sum(len(row["turns"]) for row in rows), sum(row["em"] for row in rows)
            faults = sum(row["status"] == "environment_fault" for row in rows)
            return rows, Counter(searches=searches, right=right, faults=faults)

        return work

    def _candidates(self, trajectories):
        rows = []
        for trajectory in trajectories:
            for turn in trajectory["turns"] if trajectory["status"] != "environment_fault" else ():
                found = [(row, score) for row, score in zip(turn["rows"], turn["scores"]) if row >= 0]
                if turn["error"] or len(found) < 2:
                    continue
                rows.append(
                    {
                        "trajectory": trajectory["trajectory"],
                        "query": turn["query"],
                        "searched": searched_text(trajectory["question"], turn["query"], separator(self.assets.encoder)),
                        "history": turn["history"],
                        "generations": turn["generations"],
                        "rows": [row for row, _ in found],
                        "scores": [score for _, score in found],
                        "ids": [self.assets.corpus[row].id for row, _ in found],
                    }
                )
        return rows, Counter()

    def _local(self):
        relevance, everywhere = self._relevance()

        def work(turns):
            asked = [_to_judge(*turn) for turn in turns]
            found = _spread(relevance, asked) if everywhere else distributed.on_main(lambda: relevance(asked))
            counts = Counter(
                judge_calls=sum(one.calls for one in found),
                judge_prompt_tokens=sum(one.prompt_tokens for one in found),
                judge_tokens=sum(one.tokens for one in found),
                lists=sum(one.lists for one in found),
                unread_lists=sum(len(one.unread) for one in found),
                unread=sum(one.scores is None for one in found),
            )
            return [_local_row(one) for one in found], counts

        return work

    def _relevance(self) -> tuple[Relevance, bool]:
        """How passages are judged, and whether every process does a share of it (an endpoint is asked by one)."""
        config, assets = self.config, self.assets
        if config.agentic.judge == "likelihood":
            log.info("agentic_r: without a judge local relevance is the policy's own likelihood of the gold answer")
            scorer = scoring.Scorer(assets.rollout_policy, assets.corpus, assets.tokenizer, scoring_config(config))
            return by_likelihood(scorer, self.variables, preemption.check), True
        if config.agentic.judge == "policy":
            log.info("agentic_r: the policy itself judges local relevance")
            parts = assets.rollout_policy, assets.tokenizer, assets.eos_ids, self.variables
            generator = PolicyGenerator(*parts, width=config.rollout.batch_groups, prompt_tokens=JUDGE_PROMPT)
            return judged(generator, assets.corpus), True
        cache = None if is_remote(self.folder) else self.folder / "judge.requests.jsonl"
        key = os.environ.get("OPENAI_API_KEY")
        endpoint = Endpoint(config.agentic.judge, config.agentic.judge_model, key=key, cache=cache)
        log.info("agentic_r: local relevance is judged by %s at %s", endpoint.model, endpoint.url)
        return judged(EndpointGenerator(endpoint), assets.corpus), False

    def _global(self, groups: int):
        """Every episode goes on with each candidate alone; a list shorter than the longest is filled up with its first."""
        engine = self._engine(groups)
        render = protocol.render_observation
        c = engine.config
        limits = c.max_observation_tokens, c.max_passage_tokens, c.cut_inside

        def play(turns):
            observations = [
                [render([self.assets.corpus[row]], self.assets.tokenizer, *limits).tokens for row in candidate["rows"]]
                for candidate, _ in turns
            ]
            openings = [
                Opening(candidate["generations"], [*seen, *seen[:1] * (self.candidates - len(seen))])
                for (candidate, _), seen in zip(turns, observations, strict=True)
            ]
            histories = [
                np.asarray([*trajectory["prompt"], *trajectory["tokens"][: candidate["history"]]], np.int32)
                for candidate, trajectory in turns
            ]
            questions = [_question(trajectory) for _, trajectory in turns]
            episodes = self._play(engine, questions, histories, self.candidates, openings=openings)
            rows = []
            for n, (candidate, trajectory) in enumerate(turns):
                went_on = episodes[n * self.candidates :][: len(candidate["rows"])]
                failed = any(episode.status == "environment_fault" for episode in went_on)
                em = [int(exact_match(episode.answer, trajectory["golds"])) for episode in went_on]
                rows.append({"em": None if failed else em, "answers": [episode.answer for episode in went_on]})
            return rows

        def work(turns):
            rows = _spread(play, turns)
            completions = sum(len(row["answers"]) for row in rows)
            return rows, Counter(completions=completions, right=sum(sum(row["em"] or ()) for row in rows))

        return work

    def _pairs(self, turns):
        c, rows = self.config.agentic, []
        counts = Counter(dict.fromkeys((*DROPPED, "positives"), 0))
        for candidate, local, reached in turns:
            if local["scores"] is None:
                counts["dropped_unread"] += 1
            elif reached["em"] is None:
                counts["dropped_faults"] += 1
            elif (chosen := utility.choose(reached["em"], local["scores"], c.min_local, c.positives, c.negatives)) is None:
                counts["dropped_low_local" if max(reached["em"]) else "dropped_never_right"] += 1
            else:
                counts["positives"] += len(chosen.positives)
                places = {"positives": chosen.positives, "negatives": chosen.negatives}
                rows.append(
                    {"query": candidate["searched"], "trajectory": candidate["trajectory"]}
                    | {name: [candidate["rows"][at] for at in found] for name, found in places.items()}
                    | {f"{name[:-1]}_ids": [candidate["ids"][at] for at in found] for name, found in places.items()}
                )
        return rows, counts

    # ---- training ---------------------------------------------------------------------------------------------------------------

    def train(self, rows: Sequence[dict]) -> None:
        """The encoder on pairs.jsonl, from the encoder of the round before -> retriever/."""
        c, tower = self.config.agentic, self.assets.tower
        pairs = [
            Pair(row["query"], positive, tuple(row["negatives"]), tuple(row["positives"]))
            for row in rows
            for positive in row["positives"]
        ]
        settings = EncoderConfig(
            epochs=c.epochs, batch=c.batch, microbatch=c.microbatch, lr=c.lr, temperature=c.temperature, seed=self.config.train.seed
        )
        folder = self.folder / "encoder_training"
        params, facts = encoder_training.train(tower, self.assets.corpus, pairs, settings, folder, preemption.check_together)
        note(self.folder, "encoder_training", facts | {"pairs": len(pairs)})
        _save(self.folder / "retriever", dataclasses.replace(tower, params=params))
        distributed.on_main(lambda: delete_folder(folder / "state"))

    # ---- what plays ------------------------------------------------------------------------------------------------------------

    def _engine(self, groups: int, **changes) -> RolloutEngine:
        """The run's engine with Agentic-R's number of searches; a prompt may be an episode's whole beginning."""
        assets, config = self.assets, self.assets.engine.config
        ways = batch_ways(assets.rollout_mesh)
        wide: RolloutConfig = dataclasses.replace(
            config,
            max_searches=self.config.agentic.max_searches,
            max_prompt_tokens=config.max_prompt_tokens + config.max_response_tokens,
            batch_groups=-(-groups // ways) * ways,
            **changes,
        )
        return RolloutEngine(assets.rollout_policy, assets.tokenizer, assets.eos_ids, wide, assets.retriever)

    def _play(self, engine: RolloutEngine, questions, prompts, group_size: int, **settings) -> list[Episode]:
        return engine.play(
            self.variables,
            questions,
            prompts=prompts,
            group_size=group_size,
            key=jax.random.key(0),  # greedy: nothing is drawn
            temperature=0.0,
            advance=lambda done: preemption.check(),
            **settings,
        ).episodes


def _spread(work: Callable[[Sequence], list], items: Sequence) -> list:
    """`work` on all items, each process a share of them -> all results, in order, in every process."""
    count = distributed.count()
    parts = distributed.share(lambda: work(items[distributed.index() :: count]))
    return [parts[i % count][i // count] for i in range(len(items))]


def _trajectory_row(number: int, episode: Episode) -> dict:
    question = episode.question
    begins = episode.generated & ~np.concatenate([[False], episode.generated[:-1]])
    return {
        "trajectory": number,
        **{"id": question.id, "dataset": question.dataset, "question": question.question, "golds": list(question.golds)},
        **{"status": episode.status, "answer": episode.answer, "em": int(exact_match(episode.answer, question.golds))},
        "trace": [{"kind": kind, "text": text} for kind, text in episode.trace],
        "turns": [
            {
                "query": turn.query,
                "error": turn.error,
                "shown": turn.shown,
                "history": turn.history,
                "generations": int(begins[: turn.history].sum()),
                "rows": turn.rows.tolist(),
                "scores": turn.scores.tolist(),
            }
            for turn in episode.turns
        ],
        "prompt": episode.prompt.tolist(),
        "tokens": episode.tokens.tolist(),
    }


def _local_row(found: Local) -> dict:
    unread = {"unread": list(found.unread)} if found.unread else {}
    return {"scores": found.scores, "sub_answer": found.hint} | unread


def _nothing_learnt(folder: AnyPath, found: dict[str, dict]) -> str:
    """Why a round has no pairs, and what to do about the most frequent reason."""
    counts = {name: found["pairs"][name] for name in DROPPED if found["pairs"].get(name)}  # without a search nothing was counted
    mends = {
        "dropped_unread": f"take a judge that gives scores ({folder / 'local.jsonl'} has what this one said)",
        "dropped_faults": "see to the search engine",
        "dropped_never_right": "begin with a better agent (a warm start), or raise config.agentic.questions",
        "dropped_low_local": "lower config.agentic.min_local, or take a judge (config.agentic.judge)",
    }
    mend = mends[max(counts, key=counts.get)] if counts else "let the agent learn to search first (a warm start)"
    return (
        f"{folder}: none of {found['candidates']['rows']} searches teaches the retriever anything ({counts or 'no search'}): "
        f"{mend}, in another --workdir"
    )


def _question(trajectory: dict) -> Question:
    return Question(trajectory["id"], trajectory["question"], tuple(trajectory["golds"]), (), trajectory["dataset"])


def _to_judge(candidate: dict, trajectory: dict) -> Candidates:
    """A turn for the judge: what it reads is the text before the search; the episode and turn are those that scoring asks for."""
    tokens = np.asarray(trajectory["tokens"][: candidate["history"]], np.int32)
    episode = Episode(
        question=_question(trajectory), group=0, sample=0, prompt=np.asarray(trajectory["prompt"], np.int32), tokens=tokens,
        generated=np.ones(len(tokens), bool), logps=np.zeros(len(tokens), np.float32), turns=[], status="truncated", answer=None,
        trace=[],
    )  # fmt: skip
    rows, scores = np.asarray(candidate["rows"], np.int32), np.asarray(candidate["scores"], np.float32)
    turn = Turn(candidate["query"], len(tokens), rows, scores, 0, (len(tokens), len(tokens)))
    before = [piece["text"].strip() for piece in trajectory["trace"][: 2 * (candidate["generations"] - 1)]]
    return Candidates(episode, turn, "\n".join(before))


def _save(folder: AnyPath, encoder: e5.Encoder) -> None:
    """Whole or not there. With several processes all must call it."""
    if is_remote(folder):
        with written_locally(folder) as scratch:
            e5.save(scratch, encoder)
        return
    fresh = folder.with_name(f"{folder.name}.tmp")
    distributed.on_main(lambda: delete_folder(fresh))
    e5.save(fresh, encoder)
    distributed.on_main(lambda: fresh.rename(folder))
