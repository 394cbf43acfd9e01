"""A run's folder in a bucket: its whole life, its lock, and what is fetched from one."""

import json
import threading
import time
from pathlib import Path

import fsspec
import pytest
from etils import epath
from object_store import ObjectStore

from bridge_jax import config as configuration
from bridge_jax import files
from bridge_jax.errors import UserError
from bridge_jax.report import __main__ as report
from bridge_jax.training import bucket_lock
from bridge_jax.training.metrics import RunLog, _run_id, read_metrics
from bridge_jax.training.workdir import claim_workdir, exclusive, written_field

CONFIG = configuration.load(Path(__file__).parents[2] / "configs/mini.py")
RUN = "gs://bucket/runs/a"


@pytest.fixture
def bucket(monkeypatch):
    store = ObjectStore()
    store.install(monkeypatch)
    real = files.importlib.util.find_spec
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: "here" if name == "gcsfs" else real(name))
    for name, seconds in (("BEAT", 0.05), ("SILENT", 0.3), ("SETTLE", 0.02)):
        monkeypatch.setattr(bucket_lock, name, seconds)
    return store


def test_the_whole_life_of_a_run(bucket, capsys):
    with exclusive(RUN):
        claim_workdir(CONFIG, RUN)
        log = RunLog(RUN, start=0)
        for step in range(1, 6):
            log.write({"step": step, "reward/mean": 0.1 * step})
            log.write_rollouts(step, [{"step": step, "text": "line\u2028separator ü"}])
        for step, em in ((0, 0.25), (5, 0.5)):
            row = {"n": 4, "em": em, "em_low": em, "em_high": em, "f1": em, "recall@3": None, "searches": 1.5}
            result = {"step": step, "datasets": {"a": row}, "averages": {"overall": row}}
            files.write_text(files.as_path(RUN) / f"eval/step_{step:06d}.json", json.dumps(result))
    assert f"{RUN}/.lock" not in bucket.objects

    with exclusive(RUN):  # again, from the checkpoint of step 3
        claim_workdir(CONFIG, RUN)
        assert written_field(RUN, "train.seed", None) == CONFIG.train.seed
        log = RunLog(RUN, start=3)
        assert [row["step"] for row in read_metrics(log.path)] == [1, 2, 3]
        log.write({"step": 4, "reward/mean": float("nan")})
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(f"{RUN}/metrics.jsonl")][-1] == (4, None)
    rollouts = sorted(name for name in bucket.objects if "/rollouts/" in name)
    assert rollouts == [f"{RUN}/rollouts/step_{step:06d}.jsonl" for step in (1, 2, 3)]
    assert json.loads(bucket.objects[rollouts[0]])["text"] == "line\u2028separator ü"

    with pytest.raises(UserError, match=r"gs://bucket/runs/a belongs to another configuration \(train\.seed was"):
        other = configuration.load(Path(__file__).parents[2] / "configs/mini.py", ["train.seed=99"])
        claim_workdir(other, RUN)
    assert report.main([f"--workdir={RUN}"]) == 0
    assert capsys.readouterr().out.strip() == f"{RUN}/report.html"
    assert b"Before and after 5 steps" in bucket.objects[f"{RUN}/report.html"]
    assert _run_id(files.as_path(RUN)) == _run_id(files.as_path(RUN)) != ""
    assert all(name.startswith(RUN) for name in bucket.objects)


def test_a_living_owner_keeps_the_lock(bucket):
    with exclusive(RUN):
        with pytest.raises(UserError, match="another process is at work in gs://bucket/runs/a"), exclusive(RUN):
            pytest.fail("both hold it")
        assert f"{RUN}/.lock" in bucket.objects


def test_a_dead_owner_loses_it_and_a_late_one_is_told(bucket, caplog):
    (files.as_path(RUN) / ".lock").write_text(json.dumps({"host": "gone", "pid": 1, "id": "x", "count": 7}))
    began = time.monotonic()
    with exclusive(RUN):
        assert time.monotonic() - began >= bucket_lock.SILENT
        assert "no sign of life of process 1 of gone" in caplog.text
        (files.as_path(RUN) / ".lock").write_text(json.dumps({"host": "thief", "pid": 2, "id": "y", "count": 0}))
        time.sleep(4 * bucket_lock.BEAT)
    assert "process 2 of thief took the lock over" in caplog.text
    assert json.loads(bucket.objects[f"{RUN}/.lock"])["host"] == "thief"  # not ours to delete


def test_one_of_two_that_start_at_once_gets_it(bucket):
    results, together = [], threading.Barrier(2)

    def work():
        together.wait()
        try:
            with exclusive(RUN):
                results.append("held")
                time.sleep(0.3)
        except UserError:
            results.append("refused")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["held", "refused"]


def test_what_a_bucket_refuses_is_one_line(bucket, monkeypatch):
    def refuse(*_):
        raise PermissionError("401, anonymous caller does not have storage.objects.create access")

    monkeypatch.setattr(bucket, "open", refuse)
    with pytest.raises(UserError, match=r"gs://bucket/runs/a cannot be written \(PermissionError: 401"), exclusive(RUN):
        pass
    monkeypatch.setattr(bucket, "exists", refuse)
    with pytest.raises(UserError, match=r"gs://bucket/runs/a cannot be reached \(PermissionError: 401"):
        claim_workdir(CONFIG, RUN)


def test_paths():
    assert files.as_path("runs/a") == Path("runs/a") and type(files.as_path("runs/a")) is type(Path())
    assert not files.is_remote(Path("/a/b"))
    for text in ("s3://bucket/a", "http://x/y"):
        with pytest.raises(UserError, match="only folders of this machine and gs://bucket/folder"):
            files.as_path(text)


def test_a_bucket_without_its_library_is_one_line(monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gs://bucket/a needs gcsfs: pip install 'bridge-jax\[gcs\]'"):
        files.as_path("gs://bucket/a")


def test_paths_in_a_bucket(bucket):
    path = files.as_path("gs://bucket/a")
    assert isinstance(path, epath.Path) and str(path / "b") == "gs://bucket/a/b" and files.is_remote(path)
    assert str(files.as_path(Path("gs://bucket/a"))) == "gs://bucket/a"  # pathlib has made gs:/bucket/a of it
    assert files.as_path(path) == path
    assert fsspec.config.conf["gcs"]["use_listings_cache"] is False  # it would cut off what another process made longer
    with pytest.raises(UserError, match="names no bucket"):
        files.as_path("gs://")


def test_a_folder_is_fetched_once_and_again_when_it_changes(bucket, tmp_path):
    bucket.objects |= {"gs://bucket/index/manifest.json": b"{}", "gs://bucket/index/scann/a.npy": b"12345"}
    folder = files.local_copy("gs://bucket/index", tmp_path)
    assert (folder / "manifest.json").read_bytes() == b"{}" and (folder / "scann/a.npy").read_bytes() == b"12345"
    bucket.objects["gs://bucket/index/manifest.json"] = b"[]"  # of the same size and time: taken for the same
    assert files.local_copy("gs://bucket/index", tmp_path) == folder and (folder / "manifest.json").read_bytes() == b"{}"
    for change in (1_700_000_000, 1_700_000_007):  # long before this machine's clock, which does not count
        bucket.objects["gs://bucket/index/manifest.json"] = text = b"%02d" % (change % 100)
        bucket.times["gs://bucket/index/manifest.json"] = change
        assert (files.local_copy("gs://bucket/index", tmp_path) / "manifest.json").read_bytes() == text
    bucket.objects["gs://bucket/index/scann/a.npy"] = b"123456"
    assert (files.local_copy("gs://bucket/index", tmp_path) / "scann/a.npy").read_bytes() == b"123456"
    bucket.objects["gs://bucket/wiki.jsonl"] = b"{}\n"
    assert files.local_copy("gs://bucket/wiki.jsonl", tmp_path).read_bytes() == b"{}\n"
    assert files.local_copy(tmp_path, tmp_path / "cache") == tmp_path
    with pytest.raises(UserError, match="nothing is there"):
        files.local_copy("gs://bucket/none", tmp_path)
    files.upload(folder, files.as_path("gs://bucket/copy"))
    assert bucket.objects["gs://bucket/copy/scann/a.npy"] == b"123456"


def test_a_library_that_knows_folders_alone_writes_to_a_bucket(bucket, tmp_path):
    target = files.as_path("gs://bucket/policy")
    with files.written_locally(target) as folder:
        for name in ("config.json", "model.safetensors", "sub/a"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(name)
    assert not folder.exists()
    assert bucket.writes[-1] == "gs://bucket/policy/config.json"  # by which the folder counts as whole
    assert sorted(bucket.objects) == [f"gs://bucket/policy/{name}" for name in ("config.json", "model.safetensors", "sub/a")]
    files.delete_folder(target)
    files.delete_folder(target)
    assert not bucket.objects
    with files.written_locally(tmp_path) as folder:
        assert folder == tmp_path
    assert files.absolute(target) == target and files.absolute(Path("a")) == Path.cwd() / "a"
