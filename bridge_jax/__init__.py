"""bridge_jax: BRIDGE (bilevel retrieval-credit-aware agentic RL) in JAX."""

__version__ = "0.1.0"
