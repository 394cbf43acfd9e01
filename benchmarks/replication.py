"""The numbers of docs/replication.md, from results/*.json: between its markers, so that they cannot drift.

    python benchmarks/replication.py             # fill the document in
    python benchmarks/replication.py --check     # exit with 1 where it differs from the results

A block `<!-- numbers: NAME -->` .. `<!-- end -->` is the output of the function of that name below; the text around it is written
by hand. Verdicts follow one rule, from the 95 % interval of a difference that the paper says is positive: "holds" when the interval
is above 0, "does not hold" when it is below, "not shown" when 0 is inside.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bridge_jax.files import write_text

HOME = Path(__file__).parent.parent
DOCUMENT = HOME / "docs" / "replication.md"
RESULTS = HOME / "benchmarks" / "results"
MISSING = "*Not measured yet.*"
BLOCK = re.compile(r"(<!-- numbers: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def verdict(difference: Mapping[str, float]) -> str:
    if difference["low"] > 0:
        return "**holds**"
    return "**does not hold**" if difference["high"] < 0 else "not shown"


def points(value: Mapping[str, float], signed: bool = True) -> str:
    """EM in points with its interval: `+3.1 (+1.0 to +5.2)`."""
    sign = "+" if signed else ""
    return f"{100 * value['mean']:{sign}.1f} ({100 * value['low']:{sign}.1f} to {100 * value['high']:{sign}.1f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


# ------------------------------------------------------------------------------------------------------------- blocks


def ablation(results: Mapping) -> str:
    """EM of every method at equal steps."""
    found = results["ablation"]
    rows = []
    for name in ["start", *found["groups"]["main"]]:
        row = found["table"][name]
        cells = [f"`{name}`", str(row["seeds"]), str(row.get("rollouts", 0))]
        cells += [points(row["em"]["single_hop"], False), points(row["em"]["multi_hop"], False)]
        cells += [points(row["em"]["overall"], False), points(row["minus_vt_search"]["multi_hop"])]
        cells += [points(row["minus_bridge"]["multi_hop"]), " + ".join(f"{a:.1f}" for a in row.get("step_seconds", ())) or "-"]
        rows.append(cells)
    head = ["method", "seeds", "rollouts", "single-hop EM", "multi-hop EM", "average EM"]
    head += ["multi-hop, minus vt_search", "multi-hop, minus bridge", "s a step"]
    return f"{found['steps']} steps a stage; tables made at commit {found['machine']['commit']}.\n\n{table(head, rows)}"


def collapse(results: Mapping) -> str:
    """What becomes of the retriever, seed by seed."""
    found, rows = results["ablation"]["table"], []
    for name in ("decoupled_rl", "decoupled_rl_clamp", "bridge", "bridge_clamp", "decoupled_rag"):
        if name in found:
            drift = [f"{value:.2f}" for value in found[name]["drift_by_seed"]]
            recall = [f"{100 * value:.0f}" for value in found[name]["recall@3_by_seed"]["overall"]]
            em = [f"{100 * value:.0f}" for value in found[name]["em_by_seed"]["overall"]]
            rows.append([f"`{name}`", *(", ".join(values) for values in (drift, recall, em))])
    start = f"{100 * found['start']['recall@3']['overall']:.0f} at the start"
    return table(["row", "drift of the query tower (1 - cos), by seed", f"recall@3 ({start})", "average EM"], rows)


def wall_clock(results: Mapping) -> str:
    """The same at bridge's seconds."""
    found = results["ablation"]["equal_wall_clock"]
    if not found:
        return MISSING
    rows = [
        [
            f"`{name}`",
            str(round(sum(row["loop_steps"]) / len(row["loop_steps"]))),
            f"{row['seconds']:.0f}",
            points(row["em"]["multi_hop"], False),
            points(row["em"]["overall"], False),
            points(row["minus_bridge"]["multi_hop"]),
            points(row["minus_bridge"]["overall"]),
        ]
        for name, row in found.items()
    ]
    head = ["method", "loop steps", "s", "multi-hop EM", "average EM", "multi-hop, minus bridge", "average, minus bridge"]
    return table(head, rows)


def claims(results: Mapping) -> str:
    """The paper's comparisons as differences, with verdicts."""
    found = results["ablation"]["table"]
    order = results["ablation"]["order"]
    rows = []

    def compare(text: str, paper: str, better: str, worse: str, group: str = "multi_hop") -> None:
        other = {"bridge": "minus_bridge", "vt_search": "minus_vt_search"}
        if better not in found or worse not in found:
            rows.append([text, paper, "-", "not measured"])
            return
        if worse in other:
            gap = found[better][other[worse]][group]
        else:
            back = found[worse][other[better]][group]
            gap = {"mean": -back["mean"], "low": -back["high"], "high": -back["low"]}
        rows.append([text, paper, points(gap), verdict(gap)])

    compare("bridge above vt_search, multi-hop", "31.3 against 21.7", "bridge", "vt_search")
    compare("bridge above vt_search, single-hop", "-", "bridge", "vt_search", "single_hop")
    for name, figure in (("decoupled_rl", 22.5), ("decoupled_rag", 23.0), ("rl_then_rag", 23.3), ("rag_then_rl", 23.8)):
        compare(f"bridge above {name}, multi-hop", f"31.3 against {figure}", "bridge", name)
    for name, figure in (("decoupled_rl", 22.5), ("decoupled_rag", 23.0), ("rl_then_rag", 23.3), ("rag_then_rl", 23.8)):
        compare(f"{name} above vt_search, multi-hop", f"{figure} against 21.7", name, "vt_search")
    if order:
        for group, gap in order["rag_then_rl_minus_rl_then_rag"].items():
            paper = {"multi_hop": "23.8 against 23.3"}.get(group, "-")
            rows.append([f"RAG-then-RL above RL-then-RAG, {group.replace('_', '-')}", paper, points(gap), verdict(gap)])
    for many in (2, 4):
        paper, row = "G=8 against G=16" if many == 2 else "-", f"vt_search_{many}g"
        size = results["ablation"]["changes"].get(row, {}).get("grpo.group_size")
        ours = f"; ours: G={size // many} against {size}" if size else ""
        compare(f"bridge with G above vt_search with {many} G, multi-hop{ours}", paper, "bridge", row)
    return table(["claim", "paper, EM", "ours, difference in points (95 %)", "verdict"], rows)


def options(results: Mapping) -> str:
    """What each option changes, one at a time."""
    groups = results["ablation"]["groups"]
    return changed(results, groups["options"] + [row for row in groups["rollouts"] if row not in groups["options"]])


def comparators(results: Mapping) -> str:
    """The systems that train their own way, between bridge and vt_search."""
    found = results["ablation"]["groups"].get("comparators", [])
    return changed(results, ["bridge", "vt_search", *found]) if found else MISSING


def changed(results: Mapping, names: Sequence[str]) -> str:
    """Rows by what they change."""
    found = results["ablation"]
    rows = []
    for name in names:
        row = found["table"][name]
        changes = ", ".join(f"`{field}={value}`" for field, value in row_changes(found, name).items()) or "-"
        cells = [f"`{name}`", changes, str(row["seeds"]), points(row["em"]["multi_hop"], False)]
        cells += [points(row["minus_bridge"]["multi_hop"]), points(row["minus_bridge"]["overall"])]
        [own] = [key for key in row if key.startswith("minus_") and key not in ("minus_bridge", "minus_vt_search")] or [""]
        gap = f"{points(row[own]['multi_hop'])} `{own.removeprefix('minus_')}`" if own else "-"
        rows.append([*cells, gap, f"{100 * row['recall@3']['overall']:.1f}"])
    if not rows:
        return MISSING
    head = ["row", "change", "seeds", "multi-hop EM", "multi-hop, minus bridge", "average, minus bridge"]
    return table([*head, "multi-hop, minus its own baseline", "recall@3"], rows)


def row_changes(found: Mapping, name: str) -> dict[str, object]:
    """What a row changes, the method's name left out where it is bridge or the row's."""
    changes = found["changes"][name].items()
    return {field: value for field, value in changes if field != "method.name" or value not in ("bridge", name)}


def fidelity(results: Mapping) -> str:
    """Cosine and relative error against two_state."""
    rows = []
    for checkpoint, of_way in results["fidelity"]["checkpoints"].items():
        for way, of_gamma in of_way.items():
            for gamma, found in of_gamma.items():
                level = found["descent"]["eta_gamma"]
                potential, norm = (" to ".join(f"{x:.2g}" for x in level[name]) for name in ("potential", "gradient_norm"))
                cells = [checkpoint, way, gamma]
                for name in ("one_state", "drop"):
                    cells += [f"{found[name]['cosine']['mean']:.4f}", f"{found[name]['relative_error']['mean']:.3f}"]
                cells += [f"{found['pair_over_rl']['mean']:.3f}", potential, norm]
                rows.append([*cells, f"{100 * found['descent']['without_minimum']:.0f}"])
    head = [
        "checkpoint",
        "lower levels",
        "gamma",
        "bridge: cosine",
        "rel. error",
        "drop: cosine",
        "rel. error",
        "pair / J_RL gradient",
        "potential of eta_gamma",
        "its gradient's norm",
        "turns without a minimum, %",
    ]
    found = results["fidelity"]
    flags = " ".join(f"--{flag}={found[flag]}" for flag in ("seeds", "batches", "passes"))
    return f"Made by `python benchmarks/fidelity.py {flags}` at commit {found['machine']['commit']}.\n\n{table(head, rows)}"


def cost(results: Mapping) -> str:
    """Time and memory of a step."""
    found = results["method_cost"]
    by_round = found["bridge_over_vt_search_by_round"]
    rounds = f"{min(by_round):.2f} to {max(by_round):.2f}"
    rows = [
        ["a bridge step over a vt_search step, time", "2.07x", f"{found['bridge_over_vt_search']:.2f}x ({rounds} by round)"],
        ["one state against two, time of an update", "-55.8 %", f"{-100 * found['one_state_time_saving']:+.1f} %"],
        ["one state against two, compiled memory", "-49.7 %", f"{-100 * found['one_state_memory_saving']:+.1f} %"],
        ["one state against two, peak measured", "-49.7 %", f"{-100 * found['one_state_measured_memory_saving']:+.1f} %"],
    ]
    return table(["what", "paper", "ours"], rows)


def paper_scale(results: Mapping) -> str:
    """The counted cost at the paper's scale, by the number of credited turns."""
    rows = []
    for turns, found in results["paper_scale"]["by_turns"].items():
        seconds = found["seconds"]
        cells = [turns, *(f"{seconds[phase]:.0f}" for phase in ("read", "decode", "policy", "score"))]
        rows.append([*cells, f"{found['bridge_over_vt_search']:.2f}x"])
    head = ["credited turns", "reading, s", "decoding, s", "policy, s", "scoring, s", "bridge over vt_search"]
    return table(head, rows)


def credit(results: Mapping) -> str:
    """Zero-advantage share, entropy, largest responsibility."""
    rows = []
    for row_name, row in results["credit_audit"]["rows"].items():
        turns = row["whole_run"]["all"]["turns"]
        for part in ("whole_run", "early", "late", "zero_advantage", "negative_advantage"):
            for group in ("all", "turn1", "turn2", "yes_no", "other_answers"):
                found = row[part].get(group)
                if found and (part in ("whole_run", "zero_advantage") or group == "all"):
                    cells = [
                        f"`{row_name}`",
                        part.replace("_", " "),
                        group.replace("_", " "),
                        f"{100 * found['turns'] / turns:.0f}",
                    ]
                    cells += [f"{100 * found['zero_advantage']['mean']:.1f}", f"{found['p_entropy']['mean']:.2f}"]
                    measures = ("p_max", "w_max", "argmax_w_gold")
                    rows.append(cells + [f"{found[name]['mean']:.2f}" if name in found else "-" for name in measures])
    head = [
        "row",
        "part",
        "turns of",
        "% of turns",
        "zero advantage, %",
        "entropy of p",
        "largest p",
        "largest w",
        "w's argmax is gold",
    ]
    return table(head, rows)


def first_hop(results: Mapping) -> str:
    """Credit variants in both worlds."""
    parts = []
    for world, found in results["first_hop"]["worlds"].items():
        rows = []
        for variant, row in found.items():
            turns = row["training_turns"].get("golds2/turn1", {})
            cells = [f"`{variant}`", str(row["seeds"])]
            scored = "argmax_l_gold" in turns and not variant.startswith("mask")  # masked turns have no l
            cells += [f"{turns['argmax_l_gold']['mean']:.2f}" if scored else "-"]
            cells += [f"{100 * row['recall@3_by_hop'][hop]['mean']:.1f}" for hop in ("hop1", "hop2")]
            cells += [points(row["em"]["two_hop"], False), points(row["em"]["overall"], False)]
            for other in ("paper", "mask"):
                gap = row.get(f"minus_{other}")
                cells.append(points(gap["em"]["two_hop"]) if gap else "-")
            rows.append(cells)
        head = ["credit", "seeds", "first turn: l's argmax is gold", "recall@3 hop 1", "hop 2", "two-hop EM", "average EM"]
        head += ["two-hop EM, minus paper", "minus mask"]
        parts.append(f"World `{world}`:\n\n{table(head, rows)}")
    return "\n\n".join(parts) or MISSING


def first_hop_turns(results: Mapping) -> str:
    """How often the gold passage is first by p, l and w, on training turns of the last third."""
    groups = {
        "golds2/turn1": "two gold passages, turn 1",
        "golds2/turn2": "two gold passages, turn 2",
        "hop1": "any question, hop 1",
        "hop2": "any question, hop 2",
    }
    rows = []
    for world, found in results["first_hop"]["worlds"].items():
        for variant, row in found.items():
            if turns := row["training_turns"]:
                masked = ("golds2/turn1",) if variant.startswith("mask") else ()
                rows.append([world, f"`{variant}`", *(_first(turns.get(group, {}), group in masked) for group in groups)])
    return table(["world", "credit", *groups.values()], rows) if rows else MISSING


def _first(found: Mapping, masked: bool) -> str:
    """`p / l / w`; masked turns have neither l nor w."""
    measures = ("argmax_p_gold",) if masked else ("argmax_p_gold", "argmax_l_gold", "argmax_w_gold")
    shown = [f"{found[name]['mean']:.2f}" if name in found else "-" for name in measures]
    return " / ".join(shown + ["-"] * (3 - len(shown)))


BLOCKS: dict[str, tuple[str, Callable[[Mapping], str]]] = {  # block: (the result it needs, its text)
    "ablation": ("ablation", ablation),
    "collapse": ("ablation", collapse),
    "wall_clock": ("ablation", wall_clock),
    "claims": ("ablation", claims),
    "options": ("ablation", options),
    "comparators": ("ablation", comparators),
    "fidelity": ("fidelity", fidelity),
    "cost": ("method_cost", cost),
    "paper_scale": ("paper_scale", paper_scale),
    "credit": ("credit_audit", credit),
    "first_hop": ("first_hop", first_hop),
    "first_hop_turns": ("first_hop", first_hop_turns),
}


def filled(text: str, results: Mapping) -> str:
    """The document with every block written anew."""

    def block(match: re.Match) -> str:
        needs, write = BLOCKS[match[2]]
        return f"{match[1]}\n{write(results) if needs in results else MISSING}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def load(folder: Path) -> dict[str, dict]:
    names = {needs for needs, _ in BLOCKS.values()}
    return {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names if (folder / f"{name}.json").exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where numbers differ from the results")
    args = parser.parse_args()
    old = DOCUMENT.read_text(encoding="utf-8")
    new = filled(old, load(RESULTS))
    if args.check:
        print("in step with the results" if new == old else f"{DOCUMENT} is behind the results: python benchmarks/replication.py")
        return int(new != old)
    write_text(DOCUMENT, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
