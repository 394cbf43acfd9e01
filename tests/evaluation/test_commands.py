"""evaluate_sets, `evaluate` and `ask` on a tiny run: a policy that has learnt some traces by heart, the real engine and index."""

import contextlib
import dataclasses
import io
import json

import jax
import numpy as np
import pytest
import two_hop_world
from rich.console import Console

from bridge_jax import ask, evaluate, warmstart
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import load_questions
from bridge_jax.errors import UserError
from bridge_jax.evaluation import ask_view, run
from bridge_jax.evaluation.run import evaluate_sets, evaluation_engine, load_sets
from bridge_jax.models.lora import init_lora
from bridge_jax.retrieval.corpus import Passage
from bridge_jax.training import sft
from bridge_jax.training.assets import retriever_lora
from bridge_jax.training.workdir import claim_workdir


@dataclasses.dataclass(frozen=True)
class Taught:
    world: two_hop_world.World
    workdir: object
    params: dict
    traces: list

    @property
    def flags(self):
        return [f"--config={self.world.path}", f"--workdir={self.workdir}", "--config.policy.warmstart=auto", "--checkpoint=start"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """<workdir>/warmstart is a policy that answers the questions of three traces and nothing else reliably."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIDGE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        world, workdir = two_hop_world.load(tmp_path_factory.mktemp("world")), tmp_path_factory.mktemp("run")
        traces, _ = warmstart.build_traces(world.assets, Console(quiet=True))
        chosen = [trace for trace in traces if all(turn.found for turn in trace.turns)][:3]
        config = sft.SFTConfig(epochs=1, batch=3, microbatch=3, lr=4e-3, weight_decay=0.0)
        trainer = sft.Trainer(world.assets.policy, config, 200)
        state, batches = trainer.start(world.assets.base_params), sft.microbatches(chosen, config, sft.trained_width(chosen))
        for _ in range(200):
            state, metrics = trainer.update(state, batches)
            if metrics["loss"] < 0.01:
                break
        warmstart.export(world.assets, state.params, workdir / "warmstart")
        yield Taught(world, workdir, state.params, chosen)


def test_evaluation_is_the_engines_greedy_rollout(taught, monkeypatch):
    assets = taught.world.assets
    questions = list(load_questions(taught.world.config.data.eval[0]))[:6]
    known = [trace.question for trace in taught.traces]
    sets = {"towns": questions, "learnt": known}
    result = evaluate_sets(assets, {"params": taught.params}, sets, progress=False)

    learnt = result["datasets"]["learnt"]
    assert (learnt["n"], learnt["em"], learnt["f1"], learnt["searches"]) == (3, 1.0, 1.0, 2.0)
    assert learnt["recall@3"] == learnt["recall@6"] == 1.0 and learnt["statuses"]["answered"] == 3 and result["k"] == 6
    assert learnt["generated_tokens"] == np.mean([trace.generated.sum() - 1 for trace in taught.traces])
    assert set(result["averages"]) == {"overall"}  # none of the multi-hop sets
    for row, trace in zip(result["predictions"]["learnt"], taught.traces, strict=True):
        assert (row["id"], row["prediction"], row["reason"]) == (trace.question.id, trace.answer, "correct")
        assert [turn["query"] for turn in row["turns"]] == [turn.query for turn in trace.turns]

    prompts = [build_prompt(question, assets.tokenizer, "brief") for question in questions]
    episodes, _ = assets.engine.run(
        {"params": taught.params}, questions, prompts=prompts, group_size=1, key=jax.random.key(9), temperature=0.0
    )
    assert [row["prediction"] for row in result["predictions"]["towns"]] == [episode.answer for episode in episodes]
    assert [row["status"] for row in result["predictions"]["towns"]] == [episode.status for episode in episodes]

    # the same records when no question takes the place of another, and the progress adds up to all of them
    told = []
    monkeypatch.setattr(run, "BATCHES", 1)
    monkeypatch.setattr(run, "track", lambda label, total, unit: contextlib.nullcontext(told.append))
    by_batches = evaluate_sets(assets, {"params": taught.params}, {"towns": questions})
    assert by_batches["predictions"] == {"towns": result["predictions"]["towns"]}
    assert sum(told) == len(questions) > 4
    monkeypatch.undo()

    # the engine is kept between evaluations; a fresh retriever LoRA is the base retriever
    engine, config = evaluation_engine(assets), retriever_lora(taught.world.config)
    assert engine.config.batch_groups == 4  # batch_groups x group_size
    lora = init_lora(jax.random.key(0), assets.encoder.params, config)
    first = evaluate_sets(assets, {"params": taught.params}, {"learnt": known}, engine=engine, progress=False)
    compiled = engine._sampler.compilations()
    again = evaluate_sets(assets, {"params": taught.params}, {"learnt": known}, engine=engine, retriever_lora=lora, progress=False)
    assert engine._sampler.compilations() == compiled
    assert again["predictions"] == first["predictions"] == {"learnt": result["predictions"]["learnt"]}


def test_load_sets(taught, tmp_path):
    config = taught.world.config
    assert [len(rows) for rows in load_sets(config).values()] == [12] and list(load_sets(config)) == ["towns"]
    assert len(load_sets(config, limit=5)["towns"]) == 5
    mixed = [
        {"question": f"Who {n}", "data_source": name, "reward_model": {"ground_truth": {"target": ["x"]}}}
        for n, name in enumerate(("nq", "hotpotqa", "nq"))
    ]
    path = two_hop_world.write_jsonl(tmp_path / "mixed.jsonl", mixed)
    sets = load_sets(config, (str(path),))
    assert {name: len(rows) for name, rows in sets.items()} == {"nq": 2, "hotpotqa": 1}
    with pytest.raises(UserError, match="twice"):
        load_sets(config, (str(path), str(path), str(path)))
    with pytest.raises(UserError, match="hotpotqaa"):
        load_sets(config, ("embedded/hotpotqaa",))
    plain = config.copy_and_resolve_references()
    plain.index.corpus = "embedded"
    assert list(load_sets(plain, ("2wiki", "musique"), split="test", limit=3)) == ["2wikimultihopqa", "musique"]


def test_evaluate_writes_a_new_file_each_time(taught, capsys):
    for number, name in enumerate(("step_000000_towns_default_4.json", "step_000000_towns_default_4_2.json")):
        assert evaluate.main([*taught.flags, "--limit=4"]) == 0
        out = capsys.readouterr().out
        files = sorted(path.name for path in (taught.workdir / "eval").iterdir())
        assert len(files) == number + 1 and name in files and name in out.replace("\n", "") and "towns" in out and "R@6" in out
    first, second = (json.loads((taught.workdir / "eval" / name).read_text()) for name in files)
    assert first["datasets"] == second["datasets"] and first["predictions"] == second["predictions"]
    assert (first["step"], first["limit"], first["checkpoint"], len(first["predictions"]["towns"])) == (0, 4, "start", 4)
    assert first["config"]["rollout.candidates"] == 6


def test_evaluate_names_what_is_wrong(taught, tmp_path, capsys):
    config = f"--config={taught.world.path}"
    for arguments, named in (
        ([*taught.flags, "--datasets=nowhere"], "nowhere"),
        ([*taught.flags, "--limit=-1"], "--limit"),
        ([*taught.flags, "--config.rollout.shwon=2"], "rollout.shown"),
        ([config, f"--workdir={tmp_path}"], "no checkpoint"),
        ([f"--workdir={tmp_path}"], "config.json"),
    ):
        assert evaluate.main(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and named in error
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["--help"])
    assert stop.value.code == 0 and "Examples" in capsys.readouterr().out


def test_the_workdirs_own_configuration_serves(taught, tmp_path):
    from bridge_jax import config as configuration
    from bridge_jax.evaluation import cli

    workdir = tmp_path / "run"
    config = configuration.load(taught.world.path, ["rollout.shown=1", "data.weights=(2.5,)", "policy.warmstart=auto"])
    claim_workdir(config, workdir)
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    cli.add_flags(parser)
    args, read = cli.parse(parser, [f"--workdir={workdir}", "--config.credit.tau=0.25"])
    assert args.workdir == workdir
    expected = configuration.flatten(config) | {"credit.tau": 0.25}
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in configuration.flatten(read).items()} == {
        k: tuple(v) if isinstance(v, list) else v for k, v in expected.items()
    }
    (workdir / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json"):
        cli.parse(parser, [f"--workdir={workdir}"])


def test_ask_shows_the_way_to_the_answer(taught, capsys):
    trace = taught.traces[0]
    assert ask.main([*taught.flags, trace.question.question]) == 0
    out = capsys.readouterr().out
    assert trace.question.question in " ".join(out.split()) and out.rstrip().endswith(f"answer  {trace.answer}")
    assert out.count("search: ") == 2 and out.count("shown to the policy") == 2
    for turn in trace.turns:
        assert f"search: {turn.query}" in out
        for row in turn.rows:
            passage = taught.world.assets.corpus[row]
            assert any(line.lstrip().startswith("*") and passage.title in line and passage.id in line for line in out.splitlines())


def test_ask_json(taught, capsys):
    trace = taught.traces[1]
    assert ask.main([*taught.flags, "--json", trace.question.question, "--config.credit.tau=0.5"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["answer"], got["status"], len(got["turns"])) == (trace.answer, "answered", 2)
    for turn, expected in zip(got["turns"], trace.turns, strict=True):
        documents = turn["documents"]
        assert [document["rank"] for document in documents] == [1, 2, 3, 4, 5, 6]
        assert [document["shown"] for document in documents] == [True] * 2 + [False] * 4
        scores = np.asarray([document["score"] for document in documents])
        vectors = taught.world.assets.retriever.search([expected.query], 6)
        np.testing.assert_allclose(scores, vectors.scores[0], atol=1e-5)
        np.testing.assert_allclose(
            [document["p"] for document in documents], np.exp(scores / 0.5) / np.exp(scores / 0.5).sum(), rtol=1e-5
        )


def test_ask_names_what_is_wrong(taught, tmp_path, capsys):
    for arguments, named in (
        ([*taught.flags, "  "], "question is empty"),
        ([*taught.flags, "--temperature=-1", "Who?"], "--temperature"),
        ([*taught.flags, "who " * 400], "max_prompt_tokens"),
        ([f"--config={taught.world.path}", f"--workdir={tmp_path}", "Who?"], "no checkpoint"),
    ):
        assert ask.main(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and named in error


def test_view_of_odd_episodes(taught):
    """Titles that look like markup, a search that did not fit any more, corrective and fault texts, no answer."""
    import test_aggregate as made

    corpus = [Passage(f"p{n}", f"[bold]Title {n}[/bold]", "text") for n in range(10)]
    late = dataclasses.replace(made.turn(1, 2, 3), shown=0, error="the observation did not fit into the context")
    odd = dataclasses.replace(made.episode(answer=None, status="context_full", turns=[made.turn(4, 5, 6), late]))
    odd.trace = [
        ("generated", "<think> [red] </think><search> q </search>"),
        ("information", "Doc [1]"),
        ("corrective", "Say [more]"),
        ("fault", "index [down]"),
        ("generated", "<search> q"),
    ]
    console = Console(width=120, file=io.StringIO())
    ask_view.show(console, odd, corpus, 1.0)
    text = console.file.getvalue()
    for part in (
        "[bold]Title 4[/bold]",
        "[red]",
        "Doc [1]",
        "Say [more]",
        "index [down]",
        "did not fit",
        "no answer (context full)",
    ):
        assert part in text
