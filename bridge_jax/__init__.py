"""bridge_jax: BRIDGE (bilevel retrieval-credit-aware agentic RL) in JAX.

    load_config(path, {"group.field": value})    a checked configuration          (bridge_jax.api)
    train_run(config, workdir)                   train, or go on
    open_run(workdir)                            a trained run: .ask(question), .show(episode)

Importing the package imports nothing heavy; everything else is in its submodules (docs/architecture.md, docs/extending.md).
"""

import os
import sys
from typing import TYPE_CHECKING

os.environ.setdefault(
    "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
)  # it says of every run that torch is missing, which nothing here needs

if sys.argv[:1] == ["-m"]:  # a command of the package begins: its libraries take seconds to import, and Ctrl-C may come then
    from bridge_jax.errors import leave_quietly

    sys.excepthook = leave_quietly

__version__ = "0.1.0"
__all__ = ["load_config", "open_run", "train_run"]

if TYPE_CHECKING:
    from bridge_jax.api import load_config, open_run, train_run


def __getattr__(name: str) -> object:
    if name in __all__:
        from bridge_jax import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
