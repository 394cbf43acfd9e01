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


def test_a_fork_has_its_address_in_one_place():
    """Badge and install cell follow the url of setup.py, and nothing of a committed notebook but these changes with it."""
    assert build.URL.findall('    url="https://github.com/me/my.fork",') == ["me/my.fork"]
    text = "".join(path.read_text(encoding="utf-8") for path in (*SOURCES, ROOT / "notebooks" / "build.py"))
    assert build.REPOSITORY in (ROOT / "setup.py").read_text(encoding="utf-8") and build.REPOSITORY not in text
    source = SOURCES[0]
    old = nbformat.read(ROOT / "notebooks" / f"{source.stem}.ipynb", as_version=4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "REPOSITORY", "me/my.fork")
        made = build.notebook(source)
    build.keep_outputs(made, old)
    changed = [number for number, (a, b) in enumerate(zip(made.cells, old.cells)) if a.source != b.source]
    assert changed == [0, 1] and all(
        made.cells[number].source == old.cells[number].source.replace(build.REPOSITORY, "me/my.fork") for number in changed
    )
    assert [cell.get("outputs") for cell in made.cells] == [cell.get("outputs") for cell in old.cells]


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
