"""The rows that are measured: every method, and every option that isolates a claim, as changes of one configuration."""

from __future__ import annotations

from bridge_jax.training.methods import METHODS

# What a row is compared with besides bridge and vt_search: the row that differs from it in one thing.
BASELINES = {
    "bridge_llds": "bridge_minibatches",
    "vt_search_llds": "vt_search_minibatches",
    "decoupled_rl_clamp": "decoupled_rl",
}


# Systems that train their own way (docs/comparators.md).
COMPARATORS = ("replug", "replug_pdist", "agentic_r", "r1_searcher", "simple_deep_searcher")


def rows_of(group_size: int) -> dict[str, dict[str, dict[str, object]]]:
    """{group: {row: what it changes}}. A row may stand in several groups; it is run once.

    Args:
      group_size: G of the config file.
    """
    methods = {name: {"method.name": name} for name in METHODS}
    comparators = {name: methods.pop(name) for name in COMPARATORS}
    bridge, vt = methods["bridge"], methods["vt_search"]
    # METHOD 11: 0.2 is reported too strong for small models. It looks at what fell since the rollouts: several minibatches.
    several = {"grpo.minibatch_questions": 8}
    guard = several | {"grpo.llds": 0.01}
    return {
        "main": methods | {"search_r1_ppo": methods["search_r1"] | {"policy.algorithm": "ppo"}},
        "comparators": comparators,
        "order": {name: methods[name] for name in ("vt_search", "rag_then_rl", "rl_then_rag", "bridge")},
        "rollouts": {
            "bridge": bridge,
            "vt_search": vt,
            "vt_search_2g": vt | {"grpo.group_size": 2 * group_size},
            "bridge_2g": bridge | {"grpo.group_size": 2 * group_size},
            "vt_search_4g": vt | {"grpo.group_size": 4 * group_size},
        },
        "options": {
            "bridge": bridge,
            "vt_search": vt,
            "bridge_clamp": bridge | {"credit.clamp_negative": True},
            "decoupled_rl_clamp": methods["decoupled_rl"] | {"credit.clamp_negative": True},
            "bridge_shown_only": bridge | {"credit.shown_only": True},
            "bridge_tau_1": bridge | {"credit.tau": 1.0},
            "bridge_tau_0.2": bridge | {"credit.tau": 0.2},
            "bridge_gamma_0.02": bridge | {"credit.gamma": 0.02},
            "bridge_gamma_0.2": bridge | {"credit.gamma": 0.2},
            "bridge_period_2": bridge | {"credit.period": 2},
            "bridge_dr_grpo": bridge | {"grpo.advantage": "dr_grpo", "grpo.aggregation": "dr_grpo"},
            "bridge_dapo_filter": bridge | {"grpo.filter_zero_advantage": True},
            "bridge_minibatches": bridge | several,
            "vt_search_minibatches": vt | several,
            "bridge_llds": bridge | guard,
            "vt_search_llds": vt | guard,
            "bridge_anchor": bridge | {"credit.anchor": 1.0},
            "bridge_mask": bridge | {"credit.first_hop": "mask"},
            "bridge_next_action": bridge | {"credit.target": "next_action"},
        },
    }
