"""Your own functions in a run, named in its configuration: a reward, a tool, a retriever (docs/extending.md).

config.reward.function = "my_rewards:cited"        a module that Python finds (the current folder is looked in) and its function
config.rollout.tool = "tools/calculator.py:tool"   a file, from the current folder, and its function
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from bridge_jax.errors import UserError


def load_function(name: str, field: str) -> Callable | None:
    """The function that "module:function" or "file.py:function" names; None for "".

    Raises:
      UserError: naming `config.<field>`, when there is no such function.
    """
    if not name:
        return None
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise UserError(f"config.{field}={name!r}: must be module:function or file.py:function")
    try:
        module = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(f"config.{field}={name!r}: {where} cannot be imported ({error}); is it where you run this?") from error
    found = getattr(module, function, None)
    if not callable(found):
        have = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(f"config.{field}={name!r}: {where} has no function {function!r}; it has {have or 'none'}")
    return found


def _file(path: Path):
    """A module is loaded once, as by `import`: what it counts or keeps is the same for all that use it."""
    name = f"bridge_jax_plugin_{path.resolve().as_posix().replace('/', '_')}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # its name ends with .py
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
