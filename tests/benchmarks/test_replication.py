"""The document's numbers come from the results, and are those of the results that lie beside it."""

import replication

GAP = {"mean": 0.03, "low": 0.01, "high": 0.052, "not_above": 0.0}


def test_the_document_is_in_step_with_the_results():
    text = replication.DOCUMENT.read_text()
    assert replication.filled(text, replication.load(replication.RESULTS)) == text, "run python benchmarks/replication.py"


def test_every_block_is_in_the_document_once():
    blocks = [name for _, name, _ in replication.BLOCK.findall(replication.DOCUMENT.read_text())]
    assert sorted(blocks) == sorted(replication.BLOCKS)


def test_verdicts():
    assert replication.verdict(GAP) == "**holds**"
    assert replication.verdict({"mean": -0.02, "low": -0.03, "high": -0.01}) == "**does not hold**"
    assert replication.verdict({"mean": 0.02, "low": -0.01, "high": 0.05}) == "not shown"
    assert replication.points(GAP) == "+3.0 (+1.0 to +5.2)"


def test_claims_are_taken_from_whichever_side_has_the_difference():
    """`bridge` above `rag_then_rl` is in rag_then_rl's row, as its difference to bridge, with the other sign."""
    row = {"minus_vt_search": {"multi_hop": GAP, "single_hop": GAP}, "minus_bridge": {"multi_hop": {**GAP, "mean": -0.03}}}
    behind = {"multi_hop": {"mean": -0.2, "low": -0.3, "high": -0.1}}
    found = {"bridge": row, "vt_search": row, "rag_then_rl": {**row, "minus_bridge": behind}}
    order = {"rag_then_rl_minus_rl_then_rag": {"multi_hop": GAP}}
    text = replication.claims({"ablation": {"table": found, "order": order, "changes": {"vt_search_4g": {"grpo.group_size": 16}}}})
    assert "| bridge above rag_then_rl, multi-hop | 31.3 against 23.8 | +20.0 (+10.0 to +30.0) | **holds** |" in text
    assert "| bridge above vt_search, multi-hop | 31.3 against 21.7 | +3.0 (+1.0 to +5.2) | **holds** |" in text
    assert "| RAG-then-RL above RL-then-RAG, multi-hop | 23.8 against 23.3 | +3.0 (+1.0 to +5.2) | **holds** |" in text
    assert "| bridge with G above vt_search with 2 G, multi-hop | G=8 against G=16 | - | not measured |" in text
    assert "| bridge with G above vt_search with 4 G, multi-hop; ours: G=4 against 16 | - |" in text


def test_a_block_is_written_anew_and_the_text_around_it_stays():
    text = "before\n<!-- numbers: cost -->\nold\n<!-- end -->\nafter\n"
    measured = {
        "bridge_over_vt_search": 1.2, "bridge_over_vt_search_by_round": [1.1, 1.3],
        "one_state_time_saving": 0.5, "one_state_memory_saving": 0.4,
        "one_state_measured_memory_saving": -0.1,
    }  # fmt: skip
    new = replication.filled(text, {"method_cost": measured})
    assert new.startswith("before\n<!-- numbers: cost -->\n\n| what |") and new.endswith("\n\n<!-- end -->\nafter\n")
    assert "| 1.20x (1.10 to 1.30 by round) |" in new and "| -50.0 % |" in new and "| +10.0 % |" in new
    assert replication.filled(new, {}).count(replication.MISSING) == 1
