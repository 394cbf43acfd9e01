"""docs/results.md comes from the results beside it; cells are filled by policy and method, and say when they are partial."""

import results_page
from results_page import NOT, QA, SIZES, load, page

MODEL = "Qwen/Qwen2.5-3B-Instruct"


def run(method="bridge", model=MODEL, baseline=None, n=SIZES, judge=None):
    datasets = {name: {"n": n[name], "em": 0.25} for name in n}
    averages = {"multi_hop": {"n": sum(n[name] for name in QA[3:]), "em": 0.125, "datasets": QA[3:]}}
    averages |= {"overall": {"n": sum(n.values()), "em": 0.5, "datasets": QA}, "medical": {"n": 9, "em": 0.625, "datasets": []}}
    settings = {"policy": {"model": model}, "baseline": baseline}
    return {"datasets": datasets, "averages": averages, "settings": settings, "config": {"method.name": method}} | (
        {"judge": judge} if judge else {}
    )


def lines(text, *words):
    return [line for line in text.split("\n") if all(word in line for word in words)]


def test_the_page_is_in_step_with_the_results():
    text = results_page.DOCUMENT.read_text(encoding="utf-8")
    assert page(*load(results_page.RESULTS, [])) == text, "run python benchmarks/results_page.py"


def test_nothing_is_filled_without_a_measurement():
    text = page({}, [])
    assert text.count(NOT) > 50 and "46.3 / not measured" in text
    assert text.count(" / ") == text.count(f" / {NOT}") + 1  # the heading of the medical table


def test_cells_are_filled_by_policy_and_method():
    text = page({}, [run(), run("vt_search", n=dict.fromkeys(SIZES, 100)), run(model="other")])
    [bridge] = lines(text, MODEL, "`bridge`")
    assert "46.3 / 25.0 |" in bridge and "34.5 / 12.5 |" in bridge and "41.5 / 50.0 |" in bridge and "(n" not in bridge
    [search] = lines(text, MODEL, "`vt_search`")
    assert "48.1 / 25.0 (n = 100)" in search and "- / 50.0 (n = 700)" in search
    assert not lines(text, "Qwen/Qwen2.5-7B", "/ 25.0")


def test_medical_cells_take_the_judge():
    row = run(model="Qwen/Qwen2.5-7B", judge={"averages": {"medical": {"quality": 70.125}}}) | {
        "datasets": {"medqa": {"n": 5, "em": 0.5}}
    }
    text = page({}, [row, {**row, "settings": {**row["settings"], "baseline": "medrag"}, "judge": None}])
    assert "| `bridge` | 72.27 / 70.12 | 70.72 / 62.50 |" in text
    assert f"| `medrag` | 69.19 / {NOT} | 68.61 / 62.50 |" in text
