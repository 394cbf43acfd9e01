# %% [markdown]
# # Where does the credit go?
#
# @BADGE@
#
# A policy searched, the retriever returned 40 documents, three of them were shown, and an answer came out. Which document deserves the
# credit? BRIDGE asks the policy: how likely would it make the *gold* answer after reading each document, one at a time?
#
# $$p_d = \mathrm{softmax}_d(s_d/\tau) \qquad l_d = \log \pi_\theta(\text{gold answer} \mid \text{history}, d) \qquad
# w_d = \mathrm{softmax}_d(\log p_d + l_d)$$
#
# $p$ is what the retriever believes, $l$ is what the policy says, and $w$, the *responsibility*, is the posterior that the retriever is
# trained towards: $\partial L/\partial s_d = -(A + \gamma)(w_d - p_d)/\tau$. Here all three are drawn for one question, before and after
# training; and then for the case in which this credit cannot work.
# %%
# On a fresh Colab: fetches bridge_jax with the jax for the hardware that is there. Where it is installed, it does nothing.
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = "https://github.com/@REPOSITORY@"

if importlib.util.find_spec("bridge_jax") is None:
    chip = ",cuda12" if shutil.which("nvidia-smi") else ",tpu" if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*") else ""
    subprocess.run(["git", "clone", "-q", "--depth", "1", REPOSITORY, "bridge_jax_repo"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"./bridge_jax_repo[prepare,notebooks{chip}]"], check=True)
    importlib.invalidate_caches()

import bridge_jax

# configs/ and notebooks/ are beside the package in a checkout, and in the clone.
ROOT = next(p for p in (Path("bridge_jax_repo"), Path(bridge_jax.__file__).parents[1]) if (p / "configs").is_dir())
SMALL = os.environ.get("BRIDGE_JAX_NOTEBOOK") == "small"  # the size that the tests use

# %% [markdown]
# The run is the one of [01_bridge_in_ten_minutes](01_bridge_in_ten_minutes.ipynb). If it is not there yet, it is trained here (three minutes).

# %%
fields = {}
if SMALL:
    fields = {"train.steps": 1, "train.questions": 4, "grpo.minibatch_questions": 4, "grpo.microbatch": 16, "index.limit": 600}
    fields |= {"rollout.batch_groups": 4, "data.eval_limit": 2, "data.eval": "mini/one_hop", "train.log_rollouts_every": 1}

config = bridge_jax.load_config(ROOT / "configs" / "mini.py", fields)
workdir = bridge_jax.train_run(config, "runs/01")

wide = {"rollout.candidates": 20 if SMALL else 40}
before = bridge_jax.open_run(workdir, "start", fields=wide)
after = bridge_jax.open_run(workdir, "latest", fields=wide)
corpus = after.session.assets.corpus

# %% [markdown]
# ## p, l and w
#
# Scoring is a forward pass: no gradient goes through the policy. `Scorer` reads the history once and each document after it.

# %%
from bridge_jax.objectives.scoring import Scorer
from bridge_jax.training.credit_audit import posterior
from bridge_jax.training.credit_stage import scoring_config


def scorer_of(run):
    assets = run.session.assets
    return Scorer(assets.rollout_policy, assets.corpus, assets.tokenizer, scoring_config(run.config))


def credit(run, question):
    """-> the greedy rollout, and for each of its searches p, l, w, each [C]."""
    episode, scorer = run.ask(question.question, question.golds), scorer_of(run)
    likelihoods = scorer(run.session.policy_variables, [scorer.answer(episode, turn) for turn in episode.turns])
    found = []
    for turn, l in zip(episode.turns, likelihoods):
        p, w = posterior(turn.scores, l, run.config.credit.tau, turn.rows >= 0)
        found.append({"p": p, "l": l, "w": w})
    return episode, found


# %% [markdown]
# A question that the untrained retriever gets wrong: the gold passage is among the candidates of its first search, but not among the three
# that are shown.

# %%
from bridge_jax.data.qa import load_questions


def rank_of(turn, passage_id):
    """From 1; None when it is not among the candidates."""
    ids = [corpus[int(row)].id if row >= 0 else None for row in turn.rows]
    return ids.index(passage_id) + 1 if passage_id in ids else None


asked = load_questions("mini/one_hop", "test")[: 4 if SMALL else 60]
question = asked[0]
for candidate in asked:
    turns = before.ask(candidate.question).turns
    rank = rank_of(turns[0], candidate.gold_passage_ids[0]) if turns else None
    if rank is not None and rank > 3:
        question = candidate
        break
print(question.question, "->", question.golds[0])
if not SMALL:
    print("gold:", corpus[corpus.row_of(question.gold_passage_ids[0])].text)

# %%
import matplotlib.pyplot as plt
import numpy as np

SHOWN, HIDDEN, GOLD = "#2563eb", "#a8c1f5", "#d97706"


def draw(axes, turn, numbers, golds, title):
    """One bar a candidate, best score first: dark = shown to the policy, orange = gold."""
    ids = [corpus[int(row)].id if row >= 0 else None for row in turn.rows]
    colours = [GOLD if i in golds else SHOWN if rank < turn.shown else HIDDEN for rank, i in enumerate(ids)]
    for axis, (name, values) in zip(axes, numbers.items()):
        axis.bar(np.arange(1, len(values) + 1), np.where(np.isfinite(values), values, 0), color=colours)
        axis.set_ylabel(name, rotation=0, labelpad=14)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel("candidate, by score")


figure, axes = plt.subplots(3, 2, figsize=(12, 5.5), sharex=True, sharey="row", layout="constrained")
for column, (name, run) in enumerate({"before training": before, "after": after}.items()):
    episode, found = credit(run, question)
    if found:
        draw(
            axes[:, column],
            episode.turns[0],
            found[0],
            question.gold_passage_ids,
            f"{name}: “{episode.turns[0].query}” → {episode.answer}",
        )
figure.legend(
    handles=[plt.Rectangle((0, 0), 1, 1, color=c) for c in (SHOWN, HIDDEN, GOLD)],
    labels=["shown", "not shown", "gold"],
    loc="outside upper right",
    ncols=3,
)
plt.show()

# %% [markdown]
# Left, before training: the retriever (`p`) prefers the nine documents about the right entity and does not know which. The policy does:
# `l`, the log-likelihood of the gold answer, is close to 0 under the gold passage (so short a bar that it can hardly be seen) and far below
# under every other one, though the passage was not among those that were shown. So `w` is a spike. The difference `w - p` is what the
# retriever learns from: this one up, those down.
#
# Right, after training: `p` has become what `w` asked for. The gold passage is first, it is shown, and the answer is right. The credit has
# nothing left to teach here.
#
# ## The first hop
#
# Now a question with two hops. To answer it one must first find *who* (or *what*) is meant, and the passage that says so does not hold the
# answer. What can `l` see there?

# %%
two_hop = load_questions("mini/two_hop", "test")[: 4 if SMALL else 80]
question, episode, found = two_hop[0], *credit(after, two_hop[0])
for candidate in two_hop:
    episode, found = credit(after, candidate)
    if len(found) == 2 and episode.answer == candidate.golds[0]:
        question = candidate
        break
print(question.question, "->", question.golds[0])
for passage_id in () if SMALL else question.gold_passage_ids:
    passage = corpus[corpus.row_of(passage_id)]
    print(f"  {passage.title}: {passage.text}")

# %%
figure, axes = plt.subplots(3, max(len(found), 1), figsize=(12, 5.5), squeeze=False, sharex=True, layout="constrained")
for number, (turn, numbers) in enumerate(zip(episode.turns, found)):
    gold = question.gold_passage_ids[number : number + 1]
    draw(axes[:, number], turn, numbers, gold, f"search {number + 1}: “{turn.query}”")
plt.show()

# %% [markdown]
# On the second search `l` points at the gold passage. On the first one it does not: the passage that is needed there names the right person,
# not the answer, and makes the answer *less* likely than most others do. `w` goes to whatever mentions something like it, and away from the
# gold passage. That is the **first-hop problem** of crediting by the answer. Only the outcome (the advantage) can teach the first hop, and
# it is zero in most groups.
#
# The option `credit.target = next_action` scores something else on such turns: the *next query* of a rollout that succeeded. The entity that
# it asks about is likely only under the passage that names it.

# %%
from bridge_jax.training.next_action import next_span

if len(found) == 2:
    scorer = scorer_of(after)
    span = next_span(episode, 0)
    [l_next] = scorer(after.session.policy_variables, [scorer.next_action(episode, episode.turns[0], span)])
    turn, tau = episode.turns[0], after.config.credit.tau
    p, w_next = posterior(turn.scores, l_next, tau, turn.rows >= 0)
    figure, axes = plt.subplots(2, 2, figsize=(12, 4), sharex=True, layout="constrained")
    gold = question.gold_passage_ids[:1]
    draw(axes[:, 0], turn, {"l": found[0]["l"], "w": found[0]["w"]}, gold, "search 1, by the answer")
    draw(
        axes[:, 1],
        turn,
        {"l'": l_next, "w'": w_next},
        gold,
        f"search 1, by the next action: {after.session.assets.tokenizer.decode(span).strip()}",
    )
    plt.show()

# %% [markdown]
# ## Is that one question, or the rule?
#
# For how many two-hop questions is the *likelihood* highest under the gold passage of that search? (`l` alone, without `p`: after training
# `p` is right by itself.) Counted over rollouts that searched twice and answered right.

# %%
from IPython.display import Markdown

hits = {"search 1, by the answer": [], "search 1, by the next action": [], "search 2, by the answer": []}
scorer = scorer_of(after)
for candidate in two_hop:
    episode, found = credit(after, candidate)
    if len(found) != 2 or episode.answer != candidate.golds[0] or (span := next_span(episode, 0)) is None:
        continue
    [l_next] = scorer(after.session.policy_variables, [scorer.next_action(episode, episode.turns[0], span)])
    for name, turn, l, gold in zip(
        hits, (episode.turns[0], episode.turns[0], episode.turns[1]), (found[0]["l"], l_next, found[1]["l"]), (0, 0, 1)
    ):
        rank = rank_of(turn, candidate.gold_passage_ids[gold])
        if rank is not None:
            hits[name].append(int(np.argmax(np.where(turn.rows >= 0, l, -np.inf))) + 1 == rank)
rows = ["| | searches | gold passage has the highest likelihood |", "|---|---|---|"]
rows += [f"| {name} | {len(found)} | {100 * np.mean(found):.0f} % |" for name, found in hits.items() if found]
Markdown("\n".join(rows))

# %% [markdown]
# `python -m bridge_jax.train --config=configs/mini.py --workdir=runs/next --config.credit.target=next_action` trains with it;
# `--config.credit.first_hop=mask` gives such turns no credit at all, which is the control. What either does to accuracy is measured in
# `docs/replication.md`. Every logged rollout of a run has these numbers for every candidate: `rollouts/step_*.jsonl`, or the browser in
# `report.html`.
