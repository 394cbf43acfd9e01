"""What a user can get wrong: one line on stderr that names the thing and the mend, exit code 2, nothing written or overwritten."""

import json
import resource
import shutil

import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file, save_file

from bridge_jax import config as configuration
from bridge_jax import index, train, warmstart
from bridge_jax.errors import UserError
from bridge_jax.training import session
from bridge_jax.training.workdir import exclusive, refuse_unusable


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    tiny_run.write_world(folder)
    return folder


@pytest.fixture
def world(pristine, tmp_path, monkeypatch):
    """A copy that a test may damage; the config names its own files."""
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "world"
    shutil.copytree(pristine, folder)
    tiny_run.write_config(folder)
    return folder


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def missing_folder(world):
    shutil.rmtree(world / "policy")


def hub_offline(world):
    tiny_run.write_config(world, policy__model="Qwen/Qwen2.5-0.5B-Instruct")


def other_architecture(world):
    edit_json(world / "policy" / "config.json", model_type="gpt2")


def other_encoder_architecture(world):
    edit_json(world / "encoder" / "config.json", model_type="t5")


def missing_tensor(world):
    path = world / "policy" / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if name != "model.norm.weight"}, path)


def extra_tensor(world):
    path = world / "policy" / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.surprise.weight": np.zeros(3, np.float32)}, path)


def corpus_without_id(world):
    add(world / "corpus.jsonl", {"contents": "text"})


def corpus_without_contents(world):
    add(world / "corpus.jsonl", {"id": "new"})


def duplicate_ids(world):
    add(world / "corpus.jsonl", {"id": "p3", "contents": "again"})


def add(path, row):
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def empty_questions(world):
    (world / "questions.jsonl").write_text("")


def question_without_golds(world):
    add(world / "questions.jsonl", {"id": "new", "question": "what ?", "golden_answers": []})


def no_warm_start(world):
    tiny_run.write_config(world, policy__warmstart="auto")


def no_index(world):
    tiny_run.write_config(world, index__folder=str(world / "nowhere"))


def unknown_dataset(world):
    tiny_run.write_config(world, data__train=("hotpotqua",))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing_folder, ("world/policy",)),
        (hub_offline, ("Qwen/Qwen2.5-0.5B-Instruct",)),
        (other_architecture, ("config.json", "gpt2")),
        (other_encoder_architecture, ("config.json", "t5")),
        (missing_tensor, ("model.norm.weight", "world/policy")),
        (extra_tensor, ("surprise", "model.safetensors")),
        (corpus_without_id, ("corpus.jsonl", "31", "id")),
        (corpus_without_contents, ("corpus.jsonl", "31", "contents")),
        (duplicate_ids, ("corpus.jsonl", "p3")),
        (empty_questions, ("questions.jsonl",)),
        (question_without_golds, ("questions.jsonl", "11", "golden_answers")),
        (no_warm_start, ("warmstart",)),
        (no_index, ("nowhere", "bridge_jax.index")),
        (unknown_dataset, ("hotpotqua",)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_train_refuses(world, damage, words, capsys, tmp_path):
    damage(world)
    assert train.main([f"--config={world / 'config.py'}", f"--workdir={tmp_path / 'run'}"]) == 2
    said = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error: ")]
    assert len(said) == 1
    assert all(word in said[0] for word in words), said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("claim", "written"), [(session.claim, "inputs.json"), (warmstart.claim, "warmstart_inputs.json")], ids=["train", "warmstart"]
)
@pytest.mark.parametrize(("file", "field"), [("corpus.jsonl", "index.corpus"), ("questions.jsonl", "data.train")])
def test_a_run_does_not_go_on_with_other_passages_or_questions(world, tmp_path, claim, written, file, field):
    config, workdir = configuration.load(world / "config.py"), tmp_path / "run"
    claim(config, workdir)
    claim(config, workdir)
    before = (workdir / written).read_bytes()
    whole = (world / file).read_text()
    (world / file).write_text(whole.replace("oslo", "lima", 1))
    for write in (False, True):
        with pytest.raises(UserError, match=rf"config\.{field}: {world / file} does not hold what it held") as caught:
            claim(config, workdir, write=write)
        assert "\n" not in str(caught.value) and (workdir / written).read_bytes() == before
    (world / file).write_text(whole)
    claim(config, workdir)
    (workdir / written).unlink()  # a run of before this was noted goes on with what there is
    (world / file).write_text(whole.replace("oslo", "lima", 1))
    claim(config, workdir)
    assert (workdir / written).exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(UserError, match=f"--workdir={folder}: the folder cannot be made"), exclusive(folder):
        pass


@pytest.mark.parametrize("command", [train, warmstart], ids=["train", "warmstart"])
def test_an_unusable_workdir_is_told_before_anything_is_loaded(tmp_path, capsys, monkeypatch, command):
    """The configuration names models and data that are not there: whoever looked for them would say so instead."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = tiny_run.write_config(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def refused(workdir, words):
        assert command.main([f"--config={config}", f"--workdir={workdir}"]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and said[0].startswith(f"error: {words}"), said

    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        refused(workdir, f"--workdir={workdir}: {tmp_path / 'file'} is a file: give a folder")
    refused("/proc/run", "--workdir=/proc/run: /proc cannot be written (")
    with exclusive(tmp_path / "busy"):
        refused(tmp_path / "busy", f"another process is at work in {tmp_path / 'busy'}")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))  # the first bytes fit, as on a disk that is nearly full
    try:
        new = tmp_path / "folder" / "new"
        refused(new, f"--workdir={new}: {tmp_path / 'folder'} cannot be written (File too large)")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    refuse_unusable(tmp_path / "folder" / "new")
    assert not list((tmp_path / "folder").iterdir())


def test_warmstart_refuses_questions_without_gold_passages(world, capsys, tmp_path):
    rows = [json.loads(line) for line in (world / "questions.jsonl").read_text().splitlines()]
    (world / "questions.jsonl").write_text("".join(json.dumps(row | {"metadata": {}}) + "\n" for row in rows))
    assert warmstart.main([f"--config={world / 'config.py'}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "gold passage" in capsys.readouterr().err


def test_index_of_another_corpus_or_encoder_is_refused(world, capsys, tmp_path):
    folder, corpus = tmp_path / "index", world / "corpus.jsonl"
    build = [f"--corpus={corpus}", f"--encoder={world / 'encoder'}", f"--out={folder}", "--kind=exact", "--max-length=32"]
    assert index.main(build) == 0
    tiny_run.write_config(world, index__folder=str(folder))
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    add(corpus, {"id": "new", "contents": "one more"})
    assert train.main([f"--config={world / 'config.py'}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "corpus" in capsys.readouterr().err
    assert index.main(build) == 2
    assert "corpus" in capsys.readouterr().err

    corpus.write_text("".join(f"{line}\n" for line in corpus.read_text().split("\n")[:30]))
    path = world / "encoder" / "model.safetensors"
    save_file({name: x + 0.01 for name, x in load_file(path).items()}, path)
    assert train.main([f"--config={world / 'config.py'}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "encoder" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
