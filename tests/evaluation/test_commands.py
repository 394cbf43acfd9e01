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
from stub_server import serve

from bridge_jax import ask, evaluate, warmstart
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import load_questions
from bridge_jax.errors import Outage, UserError
from bridge_jax.evaluation import ask_session, ask_view, command, run, store
from bridge_jax.evaluation.run import evaluate_sets, evaluation_engine, load_sets
from bridge_jax.models import hub
from bridge_jax.models.lora import init_lora
from bridge_jax.retrieval.corpus import Passage
from bridge_jax.retrieval.retriever import RetrievalFault, Retriever
from bridge_jax.rollout.episodes import RolloutEngine
from bridge_jax.rollout.generators import PolicyGenerator
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
    engine, config = evaluation_engine(assets), retriever_lora(taught.world.config, assets.encoder.module.config)
    assert engine.config.batch_groups == 4  # batch_groups x group_size
    lora = init_lora(jax.random.key(0), assets.encoder.params, config)
    first = evaluate_sets(assets, {"params": taught.params}, {"learnt": known}, engine=engine, progress=False)
    compiled = engine._sampler.compilations()
    again = evaluate_sets(assets, {"params": taught.params}, {"learnt": known}, engine=engine, retriever_lora=lora, progress=False)
    assert engine._sampler.compilations() == compiled
    assert again["predictions"] == first["predictions"] == {"learnt": result["predictions"]["learnt"]}


def test_an_outage_is_no_number(taught, monkeypatch):
    """Nobody's answer is not a wrong answer: one failed search, and a set has no figures."""
    search, calls = Retriever.search, []

    def failing(self, queries, k, lora=None):
        calls.append(len(queries))
        if len(calls) == 2:
            raise RetrievalFault("no answer from 10.0.0.1")
        return search(self, queries, k, lora=lora)

    monkeypatch.setattr(Retriever, "search", failing)
    sets = {"learnt": [trace.question for trace in taught.traces]}
    said = r"evaluating learnt: the search engine failed in \d of 3 questions \(.*no answer from 10.0.0.1.*\): no numbers"
    with pytest.raises(Outage, match=said):
        evaluate_sets(taught.world.assets, {"params": taught.params}, sets, progress=False)


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


def test_evaluate_is_killed_and_goes_on(taught, capsys, monkeypatch):
    """Killed while it answers, the same command answers the rest; finished, it shows what is there; changed, it is refused."""
    keep, left = store.Store.append, [2]

    def killed(self, name, record):
        keep(self, name, record)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(store.Store, "append", killed)
    flags = [*taught.flags, "--limit=4", "--name=killed"]
    assert evaluate.main(flags) == 130
    parts = taught.workdir / "eval" / "killed.parts"
    assert len((parts / "predictions.0of1.jsonl").read_text().splitlines()) == 2
    left[0] = 99
    assert evaluate.main([*flags, "--config.rollout.shown=1"]) == 2
    assert "limits.shown was 2, now 1" in capsys.readouterr().err
    assert evaluate.main(flags) == 0
    assert left[0] == 97  # the other two
    out = capsys.readouterr().out
    path = taught.workdir / "eval" / "killed.json"
    assert "killed.json" in out.replace("\n", "") and "towns" in out and "R@6" in out and not parts.exists()
    result = json.loads(path.read_text())
    assets, config = taught.world.assets, taught.world.config
    whole = evaluate_sets(assets, {"params": taught.params}, load_sets(config, limit=4), progress=False)
    timed = ("seconds", "latency")
    got = [{key: value for key, value in row.items() if key not in timed} for row in result["predictions"]["towns"]]
    assert got == json.loads(json.dumps(whole["predictions"]["towns"])) and all(
        row["latency"] > 0 for row in result["predictions"]["towns"]
    )
    assert result["datasets"]["towns"]["em"] == whole["datasets"]["towns"]["em"] and result["seconds"] > 0
    assert evaluate.main(flags) == 0 and left[0] == 97  # it is finished: nobody is asked again

    settings = result["settings"]
    weights = hub.weights_fingerprint(taught.workdir / "warmstart")
    assert settings["policy"]["weights"] == weights[:16] and settings["baseline"] is None
    assert settings["retriever"]["corpora"][0]["hash"] == assets.corpus.fingerprint[:16]
    assert (
        settings["retriever"]["candidates"] == 6
        and settings["retriever"]["encoders"][0]["max_length"] == config.retriever.max_length
    )
    assert settings["datasets"]["towns"]["n"] == 4 and settings["template"]["style"] == "brief" and settings["code"]["source"]
    assert settings["limits"]["shown"] == 2 and settings["decoding"] == {"temperature": 0.0}


def test_shards_make_the_result_of_one(taught, capsys):
    flags = [*taught.flags, "--limit=5", "--baseline=rag", "--context-tokens=48"]
    assert evaluate.main([*flags, "--name=whole"]) == 0
    for number in (1, 0):
        assert evaluate.main([*flags, "--name=parted", f"--shard={number}/2"]) == 0
        assert ("others are not" in capsys.readouterr().out) == (number == 1)
    whole, parted = (json.loads((taught.workdir / "eval" / f"{name}.json").read_text()) for name in ("whole", "parted"))
    for result in (whole, parted):
        for row in result["predictions"]["towns"]:
            del row["seconds"], row["latency"]
    assert parted["predictions"] == whole["predictions"] and parted["settings"] == whole["settings"]
    assert [row["id"] for row in whole["predictions"]["towns"]] == [q.id for q in load_sets(taught.world.config, limit=5)["towns"]]
    row = whole["predictions"]["towns"][0]
    assert row["turns"][0]["query"] == row["question"] and row["searches"] == 1 and row["recall_by"] == "id"
    assert evaluate.main([*flags, "--name=parted", f"--against={taught.workdir / 'eval' / 'whole.json'}"]) == 0
    out = capsys.readouterr().out
    assert "minus" in out and "differ" not in out and "1.000" in out  # the same: p = 1


def test_baselines_on_our_engine_are_plain_greedy_decoding(taught):
    """PolicyGenerator against argmax over whole sequences, with its own stop strings, limits and a message that is too long."""
    assets, params = taught.world.assets, taught.params
    generator = PolicyGenerator(
        assets.policy, assets.tokenizer, assets.eos_ids, {"params": params}, width=4, prompt_tokens=96, chunk=8
    )
    messages = ["Think. Doc says", "Question: Where is Ravel Club?", "town " * 200, "So the", "I need to", "The club is based"]
    stops = ("</think>", "club")
    replies = generator.generate(messages, stops=stops, max_tokens=12)
    forward = jax.jit(lambda tokens: assets.policy.apply({"params": params}, tokens))
    for message, reply in zip(messages, replies, strict=True):
        ids = generator.encode(message)
        if len(ids) > 96:
            assert (reply.finish, reply.text, reply.tokens) == ("too_long", "", 0) and "limit 96" in reply.problem
            continue
        written, text, finish = [], "", "length"
        while len(written) < 12:
            padded = np.zeros((1, 112), np.int32)
            padded[0, : len(ids) + len(written)] = [*ids, *written]
            token = int(np.argmax(forward(padded)[0, len(ids) + len(written) - 1]))
            written.append(token)
            if token in assets.eos_ids:
                finish = "stop"
                break
            text = assets.tokenizer.decode(written)
            if any(stop in text for stop in stops):
                finish = "stop"
                break
        for stop in stops:
            if stop in text:
                text = text[: text.index(stop) + len(stop) * stop.startswith("</")]
        text = text.removeprefix(" ")
        assert (reply.text, reply.finish, reply.tokens, reply.prompt_tokens) == (text, finish, len(written), len(ids))
    assert len({reply.finish for reply in replies}) > 1


def test_fit_counts_the_tokenizers_tokens(taught):
    tok = taught.world.assets.tokenizer
    generator = PolicyGenerator(taught.world.assets.policy, tok, (), {}, width=1, prompt_tokens=8)
    documents = [f"Doc {n}(Title: x) the club is based in Oslo" for n in range(1, 4)]
    sizes = [len(tok(document)["input_ids"]) + 1 for document in documents]
    for budget, count in ((0, 3), (sum(sizes), 3), (sum(sizes) - 1, 2), (sum(sizes[:2]), 2), (sizes[0], 1), (4, 1)):
        text, shown = generator.fit(documents, budget)
        assert shown == count == len(text.split("\n")) and (not budget or len(tok(text)["input_ids"]) <= budget + 1)
    assert documents[0].startswith(generator.fit(documents, 5)[0]) and generator.fit([], 9) == ("", 0)


def test_an_endpoint_answers_with_our_retriever(taught, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "sk-secret")

    def answer(body):
        text = body["messages"][0]["content"]
        assert "Observation" not in body.get("stop", ())
        return (
            "Thought: so.\nAction: Finish[Oslo]"
            if "Observation: Doc 1(Title:" in text
            else "Thought: x\nAction: Search[Ravel Club]"
        )

    search, left = Retriever.search, [1]

    def failing(self, queries, k, lora=None):
        left[0] -= 1
        if left[0] == 0:
            raise RetrievalFault("the index is gone")
        return search(self, queries, k, lora)

    monkeypatch.setattr(Retriever, "search", failing)
    with serve(answer) as (stub, url):
        flags = [f"--config={taught.world.path}", f"--workdir={tmp_path}", "--limit=3", "--baseline=react", f"--endpoint={url}"]
        flags += ["--model=some/model", "--key-env=MY_KEY", "--price=1,2", "--concurrency=1"]
        assert evaluate.main(flags) == 2  # two questions at a time: the first two meet the outage
        assert "2 questions met an index that failed" in capsys.readouterr().err and not list((tmp_path / "eval").glob("*.json"))
        assert evaluate.main(flags) == 0
        assert len(stub.requests) == 6 and {headers["Authorization"] for headers in stub.headers} == {"Bearer sk-secret"}
        assert evaluate.main(flags) == 0 and len(stub.requests) == 6
    out = capsys.readouterr().out
    [path] = (tmp_path / "eval").glob("*.json")
    assert path.name == "some-model_towns_default_3_react.json" and "2 requests" in out and "2 cached" in out and "dollars" in out
    result = json.loads(path.read_text())
    assert "sk-secret" not in path.read_text() + out
    assert [row["prediction"] for row in result["predictions"]["towns"]] == ["Oslo"] * 3
    assert result["settings"]["endpoint"]["model"] == "some/model" and result["endpoint"]["requests"] == 2
    assert result["datasets"]["towns"]["searches"] == 1.0 and result["step"] is None


def test_a_dry_run_tries_everything_but_the_model(taught, capsys, monkeypatch, tmp_path):
    """No policy is opened; each question is searched for, answered with the best passage's title, stored, summed up; killed, it
    goes on."""
    monkeypatch.setattr(command, "open_session", lambda *given: pytest.fail("a model was opened"))
    config = f"--config={taught.world.path}"
    flags = [config, f"--workdir={tmp_path}", "--dry-run"]
    for number in (1, 0):
        assert evaluate.main([*flags, f"--shard={number}/2"]) == 0
    out = capsys.readouterr().out
    assert "this shard is done" in out and "no model: these are not results" in out
    [path] = (tmp_path / "eval").glob("*.json")
    result = json.loads(path.read_text())
    assert path.name.startswith("dry-run_towns") and result["settings"]["policy"] == {"model": "dry-run"}
    questions = list(load_questions(taught.world.config.data.eval[0]))
    assets = taught.world.assets
    best = assets.retriever.search([question.question for question in questions], 1).rows[:, 0]
    rows = result["predictions"]["towns"]
    assert [row["prediction"] for row in rows] == [assets.corpus[row].title for row in best]
    assert [row["id"] for row in rows] == [question.id for question in questions]
    assert all(row["status"] == "answered" and row["turns"][0]["query"] == row["question"] for row in rows)
    assert result["datasets"]["towns"]["n"] == len(questions) and result["datasets"]["towns"]["recall@3"] > 0
    assert evaluate.main([*flags, "--datasets=nowhere"]) == 2
    assert evaluate.main([*flags, "--config.index.folder=/nowhere"]) == 2 and "no index at /nowhere" in capsys.readouterr().err
    assert evaluate.main([*flags, "--endpoint=http://x/v1"]) == 2 and "--dry-run" in capsys.readouterr().err


def test_medrag_over_two_corpora(taught, capsys, monkeypatch, tmp_path):
    """Options before the model and not in the query; two corpora as one; MIRAGE's layout beside the result."""
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    rows = two_hop_world.passages()
    corpora = [two_hop_world.write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("a", rows[::2]), ("b", rows[1::2]))]
    options = {"A": "Oslo", "B": "Lyon"}
    entries = {
        f"00{n}": {"question": f"Where is {name}?", "options": options, "answer": "B"} for n, name in enumerate(("Ravel", "Dorset"))
    }
    benchmark = tmp_path / "benchmark.json"
    benchmark.write_text(json.dumps({"medmcqa": entries}))

    def answer(body):
        text = body["messages"][0]["content"]
        assert "A. Oslo\nB. Lyon" in text and text.count("\nDoc ") == (24 if "JSON" in text else 2)  # all there are, of 32
        return json.dumps({"step_by_step_thinking": "so", "answer_choice": "B" if "Dorset?" in text else "dunno"})

    with serve(answer) as (_, url):
        flags = [f"--config={taught.world.path}", f"--workdir={tmp_path / 'run'}", f"--datasets={benchmark}", "--baseline=medrag"]
        flags += [f"--endpoint={url}", "--model=m", "--limit=0", f"--corpora={corpora[0]},{corpora[1]}", "--name=x"]
        assert evaluate.main(flags) == 0
        assert evaluate.main([*flags[:-1], "--name=y", "--baseline=rag", "--corpora="]) == 0  # a corpus of one's own will do
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "eval" / "x.json").read_text())
    row = result["datasets"]["medmcqa"]
    assert (row["accuracy"], row["unparseable"], row["standard_error"]) == (0.5, 1, pytest.approx(0.25**0.5 / 2**0.5))
    assert "unparseable" in out and "35.4" in out
    assert [turn["query"] for rows in result["predictions"]["medmcqa"] for turn in rows["turns"]] == [
        "Where is Ravel?",
        "Where is Dorset?",
    ]
    found = result["settings"]["retriever"]
    assert [(one["name"], one["passages"]) for one in found["corpora"]] == [("a.jsonl", 12), ("b.jsonl", 12)]
    files = sorted((tmp_path / "run" / "eval" / "x.mirage" / "medmcqa" / "rag_32" / "m" / "a+b").glob("*/dev_*.json"))
    assert [file.name for file in files] == ["dev_000.json", "dev_001.json"]
    assert json.loads(json.loads(files[1].read_text())[0])["answer_choice"] == "B"


def test_evaluate_names_what_is_wrong(taught, tmp_path, capsys):
    config = f"--config={taught.world.path}"
    for arguments, named in (
        ([*taught.flags, "--datasets=nowhere"], "nowhere"),
        ([*taught.flags, "--limit=-1"], "--limit"),
        ([*taught.flags, "--baseline=ragg"], "--baseline=ragg"),
        ([*taught.flags, "--shard=2/2"], "--shard=2/2"),
        ([*taught.flags, "--endpoint=http://x/v1"], "--baseline"),
        ([*taught.flags, "--baseline=rag", "--endpoint=http://x/v1"], "--model"),
        ([*taught.flags, "--baseline=rag", "--endpoint=http://x/v1", "--model=m", "--price=3"], "--price=3"),
        ([*taught.flags, "--context-tokens=9"], "--context-tokens"),
        ([*taught.flags, "--name=../x"], "--name=../x"),
        ([*taught.flags, "--baseline=medrag"], "medrag"),
        ([*taught.flags, "--config.rollout.shwon=2"], "rollout.shown"),
        ([config, f"--workdir={tmp_path}"], "no checkpoint"),
        ([f"--workdir={tmp_path}"], "config.json"),
        (
            ["--workdir=gs://bucket/runs/a/"],
            "copy the run here, gcloud storage cp -r gs://bucket/runs/a/ runs/, and give --workdir=runs/a",
        ),
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


class Typed(io.StringIO):
    """A terminal's keyboard: `input` reads it."""

    def isatty(self):
        return True


def test_ask_keeps_a_session_in_a_pipe(taught, capsys, monkeypatch):
    first, second = (trace.question.question for trace in taught.traces[:2])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{first}\n\n{second}\n:quit\nnever\n"))
    assert ask.main([*taught.flags, "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [found["answer"] for found in answers] == [trace.answer for trace in taught.traces[:2]]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'who ' * 400}\n{first}\n"))
    assert ask.main([*taught.flags, "--json"]) == 2  # the first line is refused, the second answered
    found = capsys.readouterr()
    assert "error: " in found.err and "max_prompt_tokens" in found.err and len(found.out.splitlines()) == 1


def test_ask_keeps_a_session_in_a_terminal(taught, capsys, monkeypatch, tmp_path):
    trace = taught.traces[0]
    lines = [":docs", trace.question.question, ":docs 1", ":docs 3", ":json", ":temperature x", ":temperature 0.5", ":fly", ":help"]
    monkeypatch.setattr("sys.stdin", Typed("\n".join(lines) + "\n"))  # and then Ctrl-D
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(ask_session, "open_history", lambda: contextlib.nullcontext())  # readline belongs to real terminals
    assert ask.main(taught.flags) == 0
    found = capsys.readouterr()
    assert f"answer  {trace.answer}" in found.out and ":quit" in found.out
    passage = taught.world.assets.corpus[trace.turns[0].rows[0]]
    assert passage.text in " ".join(found.out.split()) and '"status": "answered"' in found.out
    errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
    for error, part in zip(
        errors, ("ask something first", "has 2 searches", "'x' is no number", ":fly is no command"), strict=True
    ):
        assert part in error


def test_ctrl_c_stops_an_answer_and_not_the_session(taught, capsys, monkeypatch):
    question = taught.traces[0].question.question
    monkeypatch.setattr("sys.stdin", Typed(f"{question}\n{question}\n"))
    monkeypatch.setattr(ask_session, "open_history", lambda: contextlib.nullcontext())
    call, calls = ask_view.Stream.__call__, []

    def interrupted(self, row):
        call(self, row)
        calls.append(row)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(ask_view.Stream, "__call__", interrupted)
    assert ask.main(taught.flags) == 0
    out = capsys.readouterr().out
    assert "stopped" in out and out.count("answer  ") == 1
    calls.clear()
    assert ask.main([*taught.flags, question]) == 130


def test_ask_streams_what_it_prints_at_the_end(taught):
    """However often the host looks, the same text appears, piece by piece, and is the same as that of the finished episode."""
    assets, question = taught.world.assets, taught.traces[0].question

    def rolled(engine):
        console = Console(width=120, file=io.StringIO())
        stream, pieces = ask_view.Stream(console, assets.corpus, 0.5, engine.decode), []

        def watch(row):
            stream(row)
            pieces.append(console.file.getvalue())

        prompts = [build_prompt(question, assets.tokenizer, "brief")]
        settings = {"prompts": prompts, "group_size": 1, "key": jax.random.key(0), "temperature": 0.0}
        [episode], _ = engine.run({"params": taught.params}, [question], watch=watch, **settings)
        stream.end(episode)
        text = console.file.getvalue()
        assert all(later.startswith(piece) for piece, later in zip(pieces, [*pieces[1:], text]))
        return len(set(pieces)), text, episode

    often = dataclasses.replace(assets.engine.config, chunk=2)
    few, text, episode = rolled(assets.engine)
    many, same, _ = rolled(RolloutEngine(assets.policy, assets.tokenizer, assets.eos_ids, often, assets.retriever))
    assert many > few + 3 and text == same
    console = Console(width=120, file=io.StringIO())
    ask_view.show(console, episode, assets.corpus, 0.5)
    assert console.file.getvalue() == f"question  {question.question}\n{text}"


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
    """Markup and a terminal's commands in every text from outside, a search that did not fit any more, texts of the environment."""
    import test_aggregate as made

    sly = "\x1b]52;c;cm0=\x07\x9b2J\u202e\b"
    corpus = [Passage(f"[/p]{n}{sly}", f"[bold]Title {n}[/bold]{sly}", f"text{sly}") for n in range(10)]
    late = dataclasses.replace(made.turn(1, 2, 3), shown=0, error="the observation did not fit into the context")
    odd = dataclasses.replace(made.episode(answer=None, status="context_full", turns=[made.turn(4, 5, 6), late]))
    odd.trace = [
        ("generated", f"<think> [red]{sly} </think><search> q </search>"),
        ("information", f"Doc [1]{sly}"),
        ("tool", "12 * 7 = [84]"),
        ("corrective", "Say [more]"),
        ("fault", f"index [down]{sly}"),
        ("generated", f"<search> q{sly}"),
    ]
    console = Console(width=160, file=io.StringIO())
    ask_view.show(console, odd, corpus, 1.0)
    ask_view.show(console, dataclasses.replace(odd, answer=f"a{sly}"), corpus, 1.0)
    ask_view.show_documents(console, odd.turns[0], corpus, 1.0)
    text = console.file.getvalue()
    assert not set(text) & set(sly) - set("]52;c;cm0=2J") and "\ufffd]52;c" in text
    for part in (
        "[/p]4\ufffd",
        "[bold]Title 4[/bold]",
        "[red]",
        "Doc [1]",
        "12 * 7 = [84]",
        "Say [more]",
        "index [down]",
        "did not fit",
        "no answer (context full)",
    ):
        assert part in text
