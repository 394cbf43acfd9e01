"""Engines in processes: turns, missing peers, failures. The workers are stand-ins written here."""

import compare
import pytest

WORKER = """
import pathlib, sys
sys.path.insert(0, {peers!r})
from serve import serve

def setup(job, memory):
    {before}
    memory.imported()
    def timed():
        with open(job["log"], "a") as file:
            file.write({name!r} + "\\n")
        print("noise on the standard output")
        {during}
    return timed, {{"versions": {{"it": "1"}}, "told": job["word"]}}

serve(setup)
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """(make a worker, compare)"""
    peers = str(compare.WORKERS)
    monkeypatch.setattr(compare, "WORKERS", tmp_path)

    def write(name, before="pass", during="pass"):
        (tmp_path / f"{name}_x.py").write_text(WORKER.format(peers=peers, name=name, before=before, during=during))

    made = compare.Engines(compare.sys.executable, tmp_path / "programs")

    def run(*names, rounds=3):
        job = {"log": str(tmp_path / "log"), "word": "hello"}
        return made.compare({name: f"{name}_x" for name in names}, job, rounds)

    return write, run, made, tmp_path / "log"


def test_they_take_turns_and_another_one_is_first_each_round(engines):
    write, run, made, log = engines
    for name in ("ours", "tunix", "hf"):
        write(name)
    found = run("ours", "tunix", "hf")
    assert log.read_text().split() == ["ours", "tunix", "hf", "tunix", "hf", "ours", "hf", "ours", "tunix"]
    assert [len(one["rounds"]) for one in found.values()] == [3, 3, 3] and found["hf"]["told"] == "hello"
    assert made.versions == {name: {"it": "1"} for name in ("ours", "tunix", "hf")}
    assert all(row["seconds"] >= 0 and row["peak_bytes"] >= 0 for row in found["ours"]["rounds"])


def test_a_peer_that_is_not_installed_is_left_out_with_what_installs_it(engines, capsys):
    write, run, made, _ = engines
    write("ours")
    write("tunix", before="import a_package_that_is_not_there")
    for _ in range(2):
        assert list(run("ours", "tunix", rounds=1)) == ["ours"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "pip install google-tunix==0.1.7" in said[0] and "a_package_that_is_not_there" in said[0]
    assert list(made.left_out) == ["tunix"]


@pytest.mark.parametrize("fails", [{"before": "raise MemoryError('too much')"}, {"during": "raise MemoryError('too much')"}])
def test_a_peer_that_fails_costs_only_its_own_column(engines, fails):
    write, run, made, _ = engines
    write("ours")
    write("tunix", **fails)
    found = run("ours", "tunix")
    assert "too much" in found["tunix"]["failed"] and len(found["ours"]["rounds"]) == 3
    assert compare.speedup(found, "tunix") is None and compare.peak(found, "tunix") is None and not made.left_out
    write("ours", **fails)
    with pytest.raises(compare.Failed, match="too much"):
        run("ours")


def test_peak_memory_is_of_the_rounds_and_above_the_libraries(engines):
    write, run, *_ = engines
    write("ours", before="job['held'] = bytearray(200 << 20); job.pop('held')", during="taken = b'1' * (64 << 20)")
    peak = compare.peak(run("ours", rounds=1), "ours")
    assert 60 << 20 < peak < 120 << 20


def test_a_ratio_above_one_is_faster():
    found = {"ours": {"rounds": [{"seconds": 1.0}, {"seconds": 2.0}]}, "hf": {"rounds": [{"seconds": 3.0}, {"seconds": 4.0}]}}
    assert compare.speedup(found, "hf") == {"median": 2.5, "min": 2.0, "max": 3.0}
