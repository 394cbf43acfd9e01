"""What a step's metrics warn of, and what ends a run: sampler and trainer that disagree, gradients that stay non-finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ml_collections import ConfigDict

from bridge_jax.errors import UserError

# Limits of the difference between the sampler's and the trainer's log-probs, by the policy's dtype. In bfloat16 the largest of
# thousands of tokens is one token's rounding, up to 0.07 in a sound run (benchmarks/bfloat16_gap.py), so there the mean is held to
# TRAPS.md's limit; its limit of the largest is for what no rounding does: a row of another prompt, a wrong position.
GAP_ALARM = {"float32": {"gap/logp_max": 1e-3}, "bfloat16": {"gap/logp_mean": 2e-2, "gap/logp_max": 1.0}}


class Alarms:
    """`rows`: of the steps before, when a run goes on."""

    def __init__(self, config: ConfigDict, rows: Iterable[Mapping] = ()):
        self._limits = GAP_ALARM[config.policy.compute_dtype]
        self._most = config.train.max_skipped_updates
        self._skipped = 0  # steps in a row with a skipped update
        for row in rows:
            self._count(row)

    def check(self, step: int, metrics: Mapping, say: Callable[[str], None]) -> None:
        """Warn when sampler and trainer disagree; stop a run that only produces non-finite gradients.

        Raises:
          UserError: `config.train.max_skipped_updates` steps in a row had a skipped update.
        """
        for name, limit in self._limits.items():
            if not metrics.get(name, 0.0) <= limit:  # also where it is no number
                say(
                    f"warning: step {step}: the sampler's and the trainer's log-probs differ: {name} is {metrics[name]:.1e}, "
                    f"expected below {limit:.0e}: importance ratios are off"
                )
        self._count(metrics)
        if self._skipped >= self._most:
            raise UserError(
                f"step {step}: non-finite gradients in {self._skipped} steps in a row; the newest checkpoint is good: lower "
                "config.grpo.lr, config.credit.lr or config.ppo.critic_lr and go on in a copy of this workdir"
            )

    def _count(self, row: Mapping) -> None:
        skipped = sum(row.get(f"{part}/skipped_updates") or 0.0 for part in ("policy", "retriever", "ppo"))
        self._skipped = self._skipped + 1 if skipped else 0
