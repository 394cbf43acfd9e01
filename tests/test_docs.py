"""The documentation says what the code does: generated pages are current, links lead somewhere, names exist."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"])


def test_the_configuration_page_is_the_one_that_is_generated(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_config_docs

    assert build_config_docs.page() == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    sys.modules.pop("build_config_docs")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    local = [link.split("#")[0] for link in links if "://" not in link and not link.startswith("#")]
    assert not [link for link in local if not (page.parent / link).exists()]


def test_every_documented_metric_is_written_somewhere():
    """Its last part is in the source, where the name is not put together of a stage's and a fact's there (`training/agentic.py`).

    Keys that are written but not documented fail tests of runs.
    """
    keys = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(keys) == len(set(keys)) > 80
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "bridge_jax").rglob("*.py"))
    words = set(re.findall(r"[a-z]+", source))
    stale = []
    for key in keys:
        part = [part for part in key.split("/") if part not in ("turn1", "turn2")][-1].removeprefix("star_")
        known = set(part.split("_")) <= words if "agentic" in key else re.search(rf"\b{re.escape(part)}\b", source)
        stale += [] if known else [key]
    assert not stale


def test_functions_that_the_method_page_names_exist():
    """`file.py` `name`: every name in code type is somewhere in the files that the page links."""
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    files = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\((\.\./bridge_jax/[^)]+)\)", text)}
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names = {name for name in re.findall(r"`([A-Za-z_.]+)`", text) if not name.endswith(".py") and "." not in name}
    names |= {part for name in re.findall(r"`([A-Z][a-z]+\.[a-z_]+)`", text) for part in name.split(".")}
    missing = sorted(name for name in names if not re.search(rf"\b{name}\b", source + (ROOT / "bridge_jax/config.py").read_text()))
    assert not missing
