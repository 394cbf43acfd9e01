"""Names, TFDS preparation, the embedded set."""

import collections
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_jax.data import embedded, qa, tfds_qa
from bridge_jax.data.qa import load_questions, read_file
from bridge_jax.errors import UserError

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).resolve().parents[2]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def row(i, **more):
    return {"id": str(i), "question": f"question {i}?", "golden_answers": [f"a{i}", "ü\u2028"][: 1 + i % 2]} | more


@pytest.mark.parametrize("name", ["flashrag.jsonl", "search_r1.parquet", "verl.parquet", "r1_searcher.jsonl"])
def test_tfds_gives_what_the_file_says(name, own_cache):
    """Through ArrayRecord and back: same rows, same order, and the second time from the cache alone."""
    path = FIXTURES / name
    expected = read_file(path, path.name.split(".")[0])
    first = load_questions(path)
    assert isinstance(first, tfds_qa.QuestionSet) and list(first) == expected
    [prepared] = (own_cache / "questions").iterdir()
    assert list(prepared.rglob("*.array_record*"))
    assert list(tfds_qa.open_questions(path, path.name.split(".")[0], read=None)) == expected  # `read` is not called again


def test_question_set_behaves_as_a_sequence(tmp_path):
    write(tmp_path / "q.jsonl", [row(i, metadata={"gold_ids": list(range(i))}) for i in range(7)])
    questions = load_questions(tmp_path / "q.jsonl")
    everything = list(questions)
    assert (
        len(questions) == 7
        and questions[-1] == everything[6]
        and questions[2:5] == everything[2:5]
        and questions[::-2] == everything[::-2]
    )
    assert [q.gold_passage_ids for q in everything] == [tuple(map(str, range(i))) for i in range(7)]  # none, one, many
    with pytest.raises(IndexError):
        questions[7]
    assert load_questions(tmp_path / "q.jsonl", limit=3) == everything[:3]
    assert len(load_questions(tmp_path / "q.jsonl", limit=30)) == 7
    with pytest.raises(UserError, match="limit=0"):
        load_questions(tmp_path / "q.jsonl", limit=0)


def test_a_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "q.jsonl"
    write(path, [row(0)])
    assert len(load_questions(path)) == 1
    write(path, [row(0), row(1)])
    assert len(load_questions(path)) == 2


def test_a_bad_file_leaves_no_cache_entry(tmp_path, own_cache):
    write(tmp_path / "q.jsonl", [row(0), row(0)])
    for _ in range(2):
        with pytest.raises(UserError, match="already"):
            load_questions(tmp_path / "q.jsonl")
    assert not list(own_cache.rglob("*"))


def test_a_damaged_cache_entry_is_named(tmp_path, own_cache):
    write(tmp_path / "q.jsonl", [row(0)])
    load_questions(tmp_path / "q.jsonl")
    next(own_cache.rglob("dataset_info.json")).unlink()
    with pytest.raises(UserError, match="delete that folder"):
        load_questions(tmp_path / "q.jsonl")


def test_a_preparation_that_dies_leaves_nothing(tmp_path, own_cache, monkeypatch):
    write(tmp_path / "q.jsonl", [row(0)])
    with monkeypatch.context() as patch:
        patch.setattr(tfds_qa.BridgeQa, "_generate_examples", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_questions(tmp_path / "q.jsonl")
    assert not list((own_cache / "questions").iterdir())
    assert len(load_questions(tmp_path / "q.jsonl")) == 1


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    write(tmp_path / "q.jsonl", [row(0)])
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set BRIDGE_JAX_CACHE"):
        load_questions(tmp_path / "q.jsonl")


def test_without_array_record_the_file_is_read_directly(monkeypatch, caplog, own_cache):
    real = qa.importlib.util.find_spec
    monkeypatch.setattr(qa.importlib.util, "find_spec", lambda name, *a: None if name == "array_record" else real(name, *a))
    direct = load_questions("embedded/hotpotqa", "validation")
    assert isinstance(direct, list) and len(caplog.records) == 1 and "array_record" in caplog.text
    monkeypatch.undo()
    os.environ["BRIDGE_JAX_CACHE"] = str(own_cache)
    assert list(load_questions("embedded/hotpotqa", "validation")) == direct


def test_no_tensorflow_at_run_time(tmp_path):
    """A `tensorflow` that is installed but must never be imported: preparing, reading and streaming in a fresh process."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('TensorFlow was imported')\n")
    program = (
        "import sys, importlib.util\n"
        "assert importlib.util.find_spec('tensorflow') is not None\n"
        "from bridge_jax.data.qa import load_questions\n"
        "from bridge_jax.data.stream import QuestionStream\n"
        "from bridge_jax.data import tfds_qa\n"
        "for _ in range(2):\n"
        "    questions = load_questions('embedded/musique', 'train')\n"
        "    assert isinstance(questions, tfds_qa.QuestionSet)\n"
        "print(len(questions), QuestionStream(questions, 4, 0).batch_at(3)[0].dataset)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'tensorflow']\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "106 musique\n" and done.stderr == ""


# ---- names -----------------------------------------------------------------------------------------------------------------------


def test_official_names_from_the_local_folder(tmp_path, monkeypatch):
    write(tmp_path / "hotpotqa" / "train.jsonl", [row(1)])
    write(tmp_path / "hotpotqa" / "test.jsonl", [row(2)])
    monkeypatch.setenv("BRIDGE_JAX_DATA", str(tmp_path))
    assert load_questions("hotpotqa", "train")[0].id == "1"
    assert load_questions("HotpotQA")[0].id == "2"  # no dev.jsonl here: the copy that names it test
    assert load_questions("hotpotqa", "train")[0].dataset == "hotpotqa"
    assert load_questions(tmp_path / "hotpotqa", "train")[0].dataset == "hotpotqa"
    with pytest.raises(UserError, match="several files"):
        load_questions(tmp_path / "hotpotqa")
    with pytest.raises(UserError, match="no split 'dev'"):
        load_questions(tmp_path / "hotpotqa", "dev")
    monkeypatch.delenv("BRIDGE_JAX_DATA")
    assert load_questions("hotpotqa", "train", data_dir=tmp_path)[0].id == "1"


def test_official_names_from_the_hub(tmp_path, monkeypatch):
    asked = []
    write(tmp_path / "test.jsonl", [row(1)])

    def fake(file):
        asked.append(file)
        return tmp_path / "test.jsonl"

    monkeypatch.setattr(qa, "_from_hub", fake)
    assert load_questions("nq")[0].dataset == "nq" and load_questions("2wiki", "train")[0].dataset == "2wikimultihopqa"
    assert asked == ["nq/test.jsonl", "2wikimultihopqa/train.jsonl"]
    with pytest.raises(UserError, match="no split 'dev'; its splits are test"):
        load_questions("popqa", "dev")


def test_unreachable_hub_is_one_line_with_the_mend(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", offline)
    monkeypatch.setenv("BRIDGE_JAX_DATA", str(tmp_path))
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda *a, **k: (_ for _ in ()).throw(huggingface_hub.errors.LocalEntryNotFoundError("x")),
    )
    with pytest.raises(UserError) as caught:
        load_questions("triviaqa", "train")
    message = str(caught.value)
    assert "'triviaqa' split 'train'" in message and "BRIDGE_JAX_DATA" in message and "\n" not in message


@pytest.mark.parametrize(
    "name, near", [("hotpotq", "hotpotqa"), ("embedded/hotpot", "embedded/hotpotqa"), ("bambogle", "bamboogle")]
)
def test_unknown_names_get_the_nearest(name, near):
    with pytest.raises(UserError, match=f"did you mean '{near}'"):
        load_questions(name)


# ---- the embedded set ------------------------------------------------------------------------------------------------------------


def test_embedded_corpus_and_questions_fit_together(own_cache):
    path = embedded.corpus_path()
    assert path == embedded.corpus_path() and own_cache in path.parents
    data = path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == embedded.MANIFEST["corpus_sha256"]
    passages = [json.loads(line) for line in data.split(b"\n")[:-1]]
    assert len(passages) == embedded.PASSAGES == 12_000
    row_of = {p["id"]: r for r, p in enumerate(passages)}
    assert len(row_of) == len(passages) == len({p["contents"] for p in passages})
    assert all(p["contents"].startswith('"') and '"\n' in p["contents"] for p in passages)
    rows = {name: [q for s in embedded.SPLITS for q in load_questions(f"embedded/{name}", s)] for name in embedded.SETS}
    gold = {name: {row_of[i] for q in questions for i in q.gold_passage_ids} for name, questions in rows.items()}
    assert gold["hotpotqa"] == set(range(embedded.GOLD_HOTPOTQA))
    assert set.union(*gold.values()) == set(range(embedded.GOLD))
    # The answer really is in the gold passages (yes/no questions apart): ids were not shifted.
    spans = [q for q in rows["hotpotqa"] if q.golds[0] not in ("yes", "no")]
    found = [q.golds[0] in "".join(passages[row_of[i]]["contents"] for i in q.gold_passage_ids) for q in spans]
    assert sum(found) / len(found) > 0.97


def test_embedded_splits_are_disjoint_and_as_documented():
    counts = {"hotpotqa": (350, 100, 100), "musique": (106, 40, 60), "2wikimultihopqa": (42, 30, 40)}
    seen = collections.Counter()
    for name, sizes in counts.items():
        splits = [load_questions(f"embedded/{name}", s) for s in embedded.SPLITS]
        assert tuple(map(len, splits)) == sizes
        assert all(q.dataset == name and q.gold_passage_ids for questions in splits for q in questions)
        seen.update(q.question for questions in splits for q in questions)
    assert max(seen.values()) == 1
    assert list(load_questions("embedded/hotpotqa")) == list(load_questions("embedded/hotpotqa", "test"))


def test_embedded_files_are_small_and_credited():
    folder = Path(embedded.__file__).parent
    assert sum(p.stat().st_size for p in folder.glob("*.gz")) <= 8_000_000
    text = (folder / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert all(
        word in text for word in ("HotpotQA", "MuSiQue", "2WikiMultihopQA", "Wikipedia", "CC BY-SA 4.0", "CC BY 4.0", "Apache-2.0")
    )


def test_damaged_corpus_in_the_cache_is_named():
    path = embedded.corpus_path()
    path.write_text("short")
    with pytest.raises(UserError, match="delete the folder"):
        embedded.corpus_path()


SOURCE = ROOT.parent / "shared" / "data" / "wiki_multihop"


@pytest.mark.skipif(not SOURCE.is_dir(), reason="the source of the embedded set is not beside this checkout")
def test_the_build_script_makes_the_shipped_files(tmp_path):
    import gzip

    subprocess.run([sys.executable, ROOT / "tools" / "build_embedded.py", SOURCE, tmp_path], check=True, capture_output=True)
    folder = Path(embedded.__file__).parent
    shipped = sorted(p.name for p in folder.glob("*.gz"))
    assert shipped == sorted(p.name for p in tmp_path.glob("*.gz"))
    for name in shipped:  # the content, not the bytes: zlib versions compress differently
        assert gzip.decompress((tmp_path / name).read_bytes()) == gzip.decompress((folder / name).read_bytes())
    assert (tmp_path / "manifest.json").read_text() == (folder / "manifest.json").read_text()
