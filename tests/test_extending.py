"""docs/extending.md: its code blocks are run as they stand there, and do what the text says. And `import bridge_jax` is light."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bridge_jax
from bridge_jax.errors import UserError
from bridge_jax.objectives.rewards import exact_match, f1
from bridge_jax.plugins import load_function

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The blocks that begin with a file's name, as these files."""
    folder = tmp_path_factory.mktemp("extending")
    for block in BLOCKS:
        if named := re.match(r"# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    sys.path.insert(0, str(ROOT / "tests" / "training"))
    import tiny_run

    sys.path.pop(0)
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_world(folder)  # as other tests have it: their programs serve here, too
    return folder


def test_each_is_under_twenty_lines():
    lines = {re.match(r"# (\w+\.py)", block)[1]: block for block in BLOCKS if block.startswith("# my_")}
    assert set(lines) == {"my_rewards.py", "my_tools.py", "my_retrievers.py"}
    for block in lines.values():
        assert len([line for line in block.splitlines() if line.strip() and not line.startswith("#")]) < 20


def test_the_reward(folder):
    thrifty = load_function(f"{folder}/my_rewards.py:thrifty", "reward.function")

    def episode(answer, searches):
        return SimpleNamespace(answer=answer, turns=[None] * searches, question=SimpleNamespace(golds=("New York",)))

    assert thrifty(episode("new york", 2)) == pytest.approx(0.8)
    assert thrifty(episode("York", 1)) == pytest.approx(0.2 * 2 / 3)
    assert thrifty(episode(None, 0)) == 0.0


def test_the_tool(folder):
    calculator = load_function(f"{folder}/my_tools.py:calculator", "rollout.tool")
    assert calculator("12 * (3 + 4)") == "12 * (3 + 4) = 84"
    assert [calculator(text) for text in ("who wrote hamlet ?", "1 / 0", "__import__('os')", "'a' * 9", "hamlet")] == [None] * 5


def test_the_retriever(folder):
    from bridge_jax.retrieval.retriever import RetrievalResult

    without_stubs = load_function(f"{folder}/my_retrievers.py:without_stubs", "index.function")
    corpus = [SimpleNamespace(text=text) for text in ("a b", "one two three four five", "c", "six seven eight nine ten")]
    rows, scores = np.asarray([[0, 1, 2, 3]], np.int32), np.asarray([[0.9, 0.8, 0.7, 0.6]], np.float32)
    own = SimpleNamespace(index="vectors", search=lambda queries, k, lora=None: RetrievalResult(None, scores[:, :k], rows[:, :k]))
    found = without_stubs(corpus, lambda: own).search(["q"], 4)
    assert found.rows.tolist() == [[1, 3, 0, 2]]
    np.testing.assert_allclose(found.scores, [[0.8, 0.6, 0.9, 0.7]])


def test_a_run_with_a_reward_and_a_retriever_from_python(folder, world, tmp_path, monkeypatch, capsys):
    """One BRIDGE step: every logged reward is the one of `my_rewards`. Then the run is opened and asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    fields = {
        "reward.function": f"{folder}/my_rewards.py:thrifty",
        "index.function": f"{folder}/my_retrievers.py:without_stubs",
        "train.steps": 1,
    }
    assert bridge_jax.train_run(bridge_jax.load_config(world / "config.py", fields), "runs/mine") == Path("runs/mine")
    rows = [json.loads(line) for line in (tmp_path / "runs/mine/rollouts/step_000001.jsonl").read_text().splitlines()]
    for row in rows:
        right = exact_match(row["answer"], row["golds"])
        assert row["reward"] == pytest.approx(1 - 0.1 * len(row["turns"]) if right else 0.2 * f1(row["answer"], row["golds"]))
    assert len({row["reward"] for row in rows}) > 1
    run = bridge_jax.open_run("runs/mine", "latest")
    assert type(run.session.assets.retriever).__name__ == "WithoutStubs"
    episode = run.ask("where was ada born ?")
    run.show(episode)
    assert "where was ada born" in capsys.readouterr().out and len(episode.tokens)


def test_the_library_block_is_the_library():
    [block] = [block for block in BLOCKS if block.startswith("import bridge_jax\n")]
    compile(block, "extending.md", "exec")
    assert set(re.findall(r"bridge_jax\.(\w+)\(", block)) == set(bridge_jax.__all__)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "must be module:function"),
        ("no_such_module:f", "cannot be imported"),
        ("no/such.py:f", "cannot be imported"),
        ("json:dump_it", "no function 'dump_it'; it has"),
    ],
)
def test_a_name_that_is_no_function_is_told(name, words):
    with pytest.raises(UserError, match=r"config\.reward\.function=") as caught:
        load_function(name, "reward.function")
    assert words in str(caught.value)


def test_a_reward_that_is_no_number_is_told():
    from bridge_jax.training.episode_metrics import judge

    question = SimpleNamespace(id="q7", golds=("a",))
    episode = SimpleNamespace(answer="a", status="answered", question=question, turns=[])
    for bad in (None, "much", float("nan")):
        with pytest.raises(UserError, match="for question 'q7'; it must"):
            judge([episode], "em", lambda episode, bad=bad: bad)
    fault = SimpleNamespace(answer=None, status="environment_fault", question=question, turns=[])
    (score,), (reason,) = judge([fault], "em", lambda episode: 1.0)
    assert (score, reason) == (0.0, "environment fault")


def test_a_retriever_without_vectors_cannot_be_trained(world, monkeypatch, tmp_path):
    from bridge_jax.training.search import open_corpus, open_retriever

    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, corpus):\n        self.corpus = corpus\n"
        "    def search(self, queries, k, lora=None): ...\n\n\n"
        "def mine(corpus, open_own):\n    return Mine(corpus)\n"
    )
    fields = {"index.function": f"{tmp_path}/mine.py:mine"}
    config = bridge_jax.load_config(world / "config.py", fields)
    with pytest.raises(UserError, match=r"has no index; method bridge needs search, corpus, index"):
        open_retriever(config, None, open_corpus(config), None)
    frozen = bridge_jax.load_config(world / "config.py", fields | {"method.name": "vt_search"})
    assert type(open_retriever(frozen, None, open_corpus(frozen), None)).__name__ == "Mine"


def test_importing_the_package_is_light():
    code = (
        "import sys; import bridge_jax; dir(bridge_jax); bridge_jax.load_config; "
        "print([m for m in ('jax', 'transformers', 'numpy', 'flax', 'tensorflow', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bridge_jax.nothing
