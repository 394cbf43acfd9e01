"""Every command without arguments, every path missing, every field out of range: one line, exit code 2, nothing written."""

import importlib
import math
import os
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from bridge_jax import config as configuration
from bridge_jax.errors import UserError

ROOT = Path(__file__).parent.parent
MINI = str(ROOT / "configs" / "mini.py")

# command -> what it asks for
NEEDS = {
    "bridge_jax.train": "--config, --workdir",
    "bridge_jax.warmstart": "--config, --workdir",
    "bridge_jax.evaluate": "--workdir",
    "bridge_jax.ask": "--workdir",
    "bridge_jax.report.__main__": "--workdir",
    "bridge_jax.judge": "--result, --endpoint",
    "bridge_jax.index": "--corpus, --out",
    "bridge_jax.serve": "--index",
    "bridge_jax.prepare.__main__": "--corpus, --questions, --out",
    "fit": "--config",
    "tpu": "command",
    "gpu": "command",
}

# Command lines with one path that leads nowhere; {} is an empty folder, and stands before that path. LONG: a name no disk takes.
NOWHERE = """
bridge_jax.train --config={}/no.py --workdir=run
bridge_jax.train --config=MINI --workdir={}/run --config.policy.model={}/no
bridge_jax.train --config=MINI --workdir={}/run --config.policy.warmstart={}/no
bridge_jax.train --config=MINI --workdir={}/run --config.data.weights=1 --config.data.train={}/no.jsonl
bridge_jax.train --config=MINI --workdir={}/run --config.data.eval={}/no.jsonl
bridge_jax.train --config=MINI --workdir={}/run --config.index.corpus={}/no.jsonl
bridge_jax.train --config=MINI --workdir={}/run --config.index.folder={}/no
bridge_jax.train --config=MINI --workdir={}/run --config.retriever.encoder={}/no
bridge_jax.train --config=MINI --workdir={}/run --config.reward.function={}/no.py:reward
bridge_jax.train --config=MINI --workdir={}/run --config.rollout.tool={}/no.py:tool
bridge_jax.train --config=MINI --workdir=ftp://{}/run
bridge_jax.warmstart --config={}/no.py --workdir=run
bridge_jax.warmstart --config=MINI --workdir={}/run --config.policy.model={}/no
bridge_jax.evaluate --workdir={}/no
bridge_jax.evaluate --workdir={}/no --config=MINI --datasets={}/no.jsonl
bridge_jax.evaluate --workdir={}/no --config=MINI --datasets=mini/one_hop
bridge_jax.ask --workdir={}/no who?
bridge_jax.ask --workdir={}/no --config=MINI who?
bridge_jax.report.__main__ --workdir={}/no
bridge_jax.report.__main__ --workdir={}
bridge_jax.judge --result={}/no.json --endpoint=http://127.0.0.1:9/v1 --model=m
bridge_jax.index --corpus={}/no.jsonl --encoder=mini-encoder --out={}/out
bridge_jax.index --corpus=mini --encoder={}/no --out={}/out
bridge_jax.index --corpus=mini --encoder=mini-encoder --max-length=32 --out={}/out --faiss={}/no --kind=exact
bridge_jax.index --corpus=mini --encoder=mini-encoder --max-length=32 --out={}/out --queries={}/no.jsonl
bridge_jax.index eval --index={}/no --corpus=mini --questions=mini/one_hop
bridge_jax.index eval --index={}/no --corpus=mini --questions={}/no.jsonl
bridge_jax.serve --index={}/no --corpus=mini --port=0
bridge_jax.serve --index={}/no --corpus={}/no.jsonl --port=0
bridge_jax.serve --index={}/no --corpus=mini --token-file={}/no --port=0
bridge_jax.prepare.__main__ --corpus={}/no --questions={}/no.csv --out={}/out
bridge_jax.prepare.__main__ --corpus={} --questions={}/no.csv --out={}/out
fit --config={}/no.py --target=v5p-8
bridge_jax.train --config={}/LONG.py --workdir=run
bridge_jax.train --config=MINI --workdir={}/LONG
bridge_jax.train --config=MINI --workdir={}/run --config.policy.model={}/LONG
bridge_jax.train --config=MINI --workdir={}/run --config.data.eval={}/LONG.jsonl
bridge_jax.train --config=MINI --workdir={}/run --config.index.corpus={}/LONG.jsonl
bridge_jax.evaluate --workdir={}/LONG
bridge_jax.ask --workdir={}/LONG who?
bridge_jax.report.__main__ --workdir={}/LONG
bridge_jax.index --corpus=mini --encoder=mini-encoder --max-length=32 --out={}/LONG
bridge_jax.prepare.__main__ --corpus={}/LONG --questions={}/no.csv --out={}/out
""".strip().splitlines()


def ended(name, words, capfd):
    """-> (exit code, what it said on stderr)"""
    command = importlib.import_module(name)
    capfd.readouterr()
    try:
        code = command.main(words)
    except SystemExit as exit_:
        code = exit_.code
    return code, capfd.readouterr().err


@pytest.fixture(autouse=True)
def dialled(tmp_path, monkeypatch):
    """A cache of one's own, and no network -> the hosts that were tried, of which there are none.

    They are noted besides being refused: a command may well catch the error.
    """
    monkeypatch.setenv("BRIDGE_JAX_CACHE", os.environ.get("BRIDGE_JAX_CACHE", str(tmp_path.parent / "wrong-use-cache")))
    tried, look_up = [], socket.getaddrinfo

    def refuse(*words, **_):
        tried.append(words)
        raise OSError("no network in this test")

    def own_names(host, *words, **named):  # a server asks for the address that it listens at
        return (look_up if host in ("127.0.0.1", "localhost") else refuse)(host, *words, **named)

    monkeypatch.setattr(socket, "getaddrinfo", own_names)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    yield tried
    assert not tried


def test_the_network_is_watched(dialled):
    for url in ("http://127.0.0.1:9", "https://huggingface.co/api/models"):
        with pytest.raises(OSError, match="no network"):
            urllib.request.urlopen(url)
    with socket.socket() as own, pytest.raises(OSError, match="no network"):
        own.connect(("127.0.0.1", 9))
    assert len(dialled) == 3
    dialled.clear()


@pytest.mark.parametrize("name", NEEDS)
def test_a_command_without_arguments(name, capfd):
    code, said = ended(name, [], capfd)
    assert code == 2 and NEEDS[name] in said.splitlines()[-1] and "Traceback" not in said, said
    code, said = ended(name, ["--no-such-flag"], capfd)
    assert code == 2 and "Traceback" not in said, said


@pytest.mark.parametrize("line", NOWHERE)
def test_a_path_that_leads_nowhere(line, tmp_path, capfd):
    """It is named, in the last line, and nothing is left behind."""
    name, *words = line.replace("MINI", MINI).replace("LONG", "x" * 300).replace("{}", str(tmp_path)).split()
    code, said = ended(name, words, capfd)
    last = said.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and str(tmp_path) in last and "Traceback" not in said, said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "bridge_jax.train --config=MINI --workdir=",
        "bridge_jax.evaluate --config=MINI --workdir=",
        "bridge_jax.report.__main__ --workdir=",
        "bridge_jax.index --corpus=mini --encoder=mini-encoder --max-length=32 --out=",
    ],
)
def test_a_folder_without_a_name(line, tmp_path, capfd, monkeypatch):
    """As a variable that is not set leaves it: not the folder one stands in."""
    monkeypatch.chdir(tmp_path)
    name, *words = line.replace("MINI", str(Path(MINI).absolute())).split()
    code, said = ended(name, words, capfd)
    assert code == 2 and said.splitlines()[-1] == "error: a folder or file was given as '': write . for the folder you are in"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["def reward(:\n", "x = 1\0\n"])
def test_a_reward_that_python_cannot_read(text, tmp_path, capfd):
    path = tmp_path / "own.py"
    path.write_text(text)
    words = [f"--config={MINI}", f"--workdir={tmp_path / 'run'}", f"--config.reward.function={path}:reward"]
    code, said = ended("bridge_jax.train", words, capfd)
    assert code == 2 and "Traceback" not in said
    assert said.splitlines()[-1].startswith("error: config.reward.function=") and str(path) in said.splitlines()[-1]


def test_a_host_that_is_no_name(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: host.encode("idna"))  # as it begins, without a network
    code, said = ended("bridge_jax.serve", [f"--index={tmp_path}", "--corpus=mini", f"--host={'x' * 70}", "--port=0"], capfd)
    assert code == 2 and said.startswith("error: --host xxx") and "cannot listen there" in said and "Traceback" not in said


def wrong_values(name, default):
    """Texts that the field must refuse."""
    if name in configuration._CHOICES:
        return ["no_such_choice", ""]
    if isinstance(default, bool):
        return ["2", "maybe", "nan"]
    if isinstance(default, int | float):
        least = configuration._AT_LEAST.get(name, 0)
        texts = [str(least - 1), "words", "", "[1]", "nan", "inf", "-inf"]
        if name in configuration._AT_MOST:
            texts.append(str(configuration._AT_MOST[name] + 1))
        return texts + (["0"] if least > 0 else [])
    return ["[1, 2]"] if isinstance(default, tuple) and default else []


def test_every_field_out_of_range_is_named():
    fields = configuration.flatten(configuration.default())
    texts = {name: wrong_values(name, default) for name, default in fields.items()}
    numbers = [name for name, value in fields.items() if isinstance(value, int | float)]
    assert len(numbers) > 90 and all(texts[name] for name in (*numbers, *configuration._CHOICES))
    for name, wrong in texts.items():
        for text in wrong:
            with pytest.raises(UserError) as caught:
                configuration.load(MINI, [f"{name}={text}"])
            said = str(caught.value)
            assert f"config.{name}=" in said and "\n" not in said, f"{name}={text}: {said}"


def test_the_largest_values_are_taken():
    for name, most in configuration._AT_MOST.items():
        assert configuration.flatten(configuration.load(MINI, [f"{name}={most}"]))[name] == most
    assert math.isclose(sys.float_info.max, configuration.load(MINI, [f"grpo.lr={sys.float_info.max}"]).grpo.lr)
