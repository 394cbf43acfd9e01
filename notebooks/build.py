"""Notebooks from `source/*.py` (text between `# %% [markdown]` and `# %%` lines), executed on demand.

    python notebooks/build.py                    sources into .ipynb; a cell that has not changed keeps its output
    python notebooks/build.py --execute 01 03    the same, and run these
    BRIDGE_JAX_NOTEBOOK=small python notebooks/build.py --execute 02     at the size that the tests use

Needs pip install 'bridge-jax[notebooks,test]'.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode, v4

HERE = Path(__file__).resolve().parent
URL = re.compile(r'url="https://github\.com/([\w.-]+/[\w.-]+)"')
REPOSITORY = URL.findall((HERE.parent / "setup.py").read_text(encoding="utf-8"))[0]  # owner/name, for install cells and badges
MARK = re.compile(r"^# %%(?P<markdown> \[markdown\])?\n", re.MULTILINE)
SECONDS = 3600  # a cell may take


def sources() -> list[Path]:
    return sorted((HERE / "source").glob("*.py"))


def notebook(source: Path) -> NotebookNode:
    """The notebook of a source file, without outputs. Its cells' ids are their numbers, so that it is the same every time."""
    badge = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{source.stem}.ipynb"
    text = source.read_text(encoding="utf-8").replace("@REPOSITORY@", REPOSITORY)
    text = text.replace("@BADGE@", f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({badge})")
    marks = [*MARK.finditer(text)]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    cells = []
    for number, (mark, end) in enumerate(zip(marks, ends)):
        body = text[mark.end() : end].strip("\n")
        if mark["markdown"]:
            cell = v4.new_markdown_cell("\n".join(line.removeprefix("#").removeprefix(" ") for line in body.split("\n")))
        else:
            cell = v4.new_code_cell(body)
        cell["id"] = f"cell-{number:02d}"
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def keep_outputs(new: NotebookNode, old: NotebookNode) -> None:
    """Outputs of the cells up to the first one that has changed: what comes behind it may depend on it. (Not on the repository's
    address, which is another one in a fork.)"""

    def content(cell: NotebookNode) -> str:
        return re.sub("^REPOSITORY = .*$", "", cell.source, flags=re.MULTILINE)

    for cell, before in zip(new.cells, old.cells):
        if cell.cell_type == "code":
            if before.cell_type != "code" or content(cell) != content(before):
                return
            cell.outputs, cell.execution_count = before.outputs, before.execution_count


def execute(made: NotebookNode, folder: Path) -> None:
    """Run it in `folder`, then `clean` it."""
    client = NotebookClient(made, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    clean(made, folder)


def clean(made: NotebookNode, folder: Path) -> None:
    """No paths of this machine, no times of execution; one output for what a cell printed, progress lines at their last state."""
    for cell in made.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = _relative(output["text"], folder)
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = _relative(data, folder)
        cell_outputs = cell.get("outputs")
        if cell_outputs is not None:
            merged: list[NotebookNode] = []
            for output in cell_outputs:
                if output.output_type == "stream":
                    if not output["text"]:
                        continue
                    output["name"] = "stdout"
                    if merged and merged[-1].output_type == "stream":
                        merged[-1]["text"] += output["text"]
                        continue
                merged.append(output)
            cell["outputs"] = merged


def _relative(text: str, folder: Path) -> str:
    text = re.sub(r".*TqdmWarning: IProgress not found.*\n.*autonotebook.*\n", "", text)  # Colab has its widgets
    for path, short in ((folder, "."), (HERE.parent, ".."), (Path.home(), "~")):
        text = text.replace(str(path), short)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--execute", nargs="*", default=[], metavar="NN", help="numbers of the notebooks to run")
    args = parser.parse_args()
    for source in sources():
        path, made = HERE / f"{source.stem}.ipynb", notebook(source)
        if source.stem[:2] in args.execute:
            print(f"running {path.name} ({os.environ.get('BRIDGE_JAX_NOTEBOOK', 'as it is')})", flush=True)
            execute(made, HERE)
        elif path.exists():
            keep_outputs(made, nbformat.read(path, as_version=4))
        nbformat.write(made, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
