"""Every method as a configuration of one loop (METHOD 5): what a method's retriever learns from, and nothing else differs."""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Method:
    """use_outcome: the retriever's loss has J_ret. use_rag: it has gamma L_RAG. Neither: the retriever stays the base encoder."""

    summary: str
    use_outcome: bool
    use_rag: bool

    @property
    def trains_retriever(self) -> bool:
        return self.use_outcome or self.use_rag


METHODS = {
    "bridge": Method("outcome credit and gamma x RAG likelihood, before each policy step", use_outcome=True, use_rag=True),
    "vt_search": Method("GRPO on the policy alone, the retriever stays as it is", use_outcome=False, use_rag=False),
}


def method_of(config: ConfigDict) -> Method:
    return METHODS[config.method.name]
