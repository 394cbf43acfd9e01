"""The notebooks are their sources, hold no path of the machine that made them, and run at their small size.

01 and 03 run here, one after the other in one folder (03 looks at the run of 01). 02 and 04 take programs of their own to compile:
`BRIDGE_JAX_ALL_NOTEBOOKS=1 python -m pytest tests/notebooks` runs all four.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))
import build  # noqa: E402

sys.path.pop(0)

SOURCES = build.sources()
RUN = ("01", "03", "04", "02") if "BRIDGE_JAX_ALL_NOTEBOOKS" in os.environ else ("01", "03")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_is_its_source(source):
    made = build.notebook(source)
    there = nbformat.read(ROOT / "notebooks" / f"{source.stem}.ipynb", as_version=4)
    assert [(cell.cell_type, cell.source) for cell in there.cells] == [(cell.cell_type, cell.source) for cell in made.cells]
    nbformat.validate(there)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_what_is_committed_was_run_and_is_clean(source):
    path = ROOT / "notebooks" / f"{source.stem}.ipynb"
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 500_000
    assert not any(word in text for word in ("/root/", "/home/", "/tmp/", "Traceback"))
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]) or "04" in source.stem


def test_small(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("notebooks")
    monkeypatch.setenv("BRIDGE_JAX_NOTEBOOK", "small")
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(folder / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for number in RUN:
        [source] = [source for source in SOURCES if source.stem.startswith(number)]
        made = build.notebook(source)
        build.execute(made, folder)  # raises what a cell raises
    assert (folder / "runs" / "01" / "metrics.jsonl").read_text().count("\n") == 1
    shutil.rmtree(folder)
