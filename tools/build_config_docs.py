"""docs/configuration.md from bridge_jax/config.py: every field with its default, what it may be, and the comment beside it.

python tools/build_config_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path

from bridge_jax import config as configuration

ROOT = Path(__file__).resolve().parents[1]
FIELD = re.compile(r"    c\.(?P<group>\w+)\.(?P<field>\w+) = (?P<value>.+?)(?:  # (?P<comment>.*))?$")
GROUP = re.compile(r"    c\.(?P<group>\w+) = ConfigDict\(\)(?:  # (?P<comment>.*))?$")

HEAD = """# Configuration

Generated from [bridge_jax/config.py](../bridge_jax/config.py) by `python tools/build_config_docs.py`.

A run has one configuration: a Python file whose `get_config()` starts from `bridge_jax.config.default()` and sets fields
(`configs/` has some to begin with; `python -m bridge_jax.prepare` writes one). Any field can be set on the command line,
`--config.group.field=value`, with lists as `a,b`. A method sets some fields by itself, unless the command line says otherwise
([training/methods.py](../bridge_jax/training/methods.py)). An unknown field, a value of another type or out of range, and
settings that contradict each other are refused before anything is loaded.

Defaults are the paper's scale. What is resolved is written to `config.json` in the run's folder.

"""
ABOUT = {
    "method": "What learns, when, from which loss.",
    "policy": "The language model.",
    "retriever": "The encoder and the LoRA on its query side.",
    "index": "The passages and how they are searched.",
    "data": "Questions.",
    "rollout": "How an episode goes. Lengths are in tokens.",
    "reward": "What a rollout is worth.",
    "grpo": "The policy's update.",
    "ppo": "",
    "credit": "The retriever's update.",
    "agentic": "Method `agentic_r` alone ([comparators.md](comparators.md)): rounds of training the whole encoder, then the agent.",
    "selection": "Method `simple_deep_searcher` alone: which rollouts it learns from, with the settings of `warmstart`.",
    "train": "The run.",
    "mesh": "How devices are used ([scaling.md](scaling.md)).",
    "warmstart": "The supervised phase before RL, `python -m bridge_jax.warmstart`.",
}


def page() -> str:
    """The whole page.

    Raises:
      ValueError: a field or group of the configuration that the source does not show, or that is not described.
    """
    known = configuration.flatten(configuration.default())
    groups: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    above: list[str] = []
    for line in (ROOT / "bridge_jax" / "config.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        if found := GROUP.match(line):
            groups[found["group"]], notes[found["group"]] = [], found["comment"] or ""
        elif found := FIELD.match(line):
            name = f"{found['group']}.{found['field']}"
            words = " ".join([*above, found["comment"] or ""]).strip()
            if name not in known or not words:
                raise ValueError(f"{name}: {'no comment beside it in config.py' if name in known else 'not in default()'}")
            groups[found["group"]].append(_row(found["field"], name, known.pop(name), words))
        above = []
    if known or set(groups) != set(ABOUT):
        raise ValueError(f"not shown: {', '.join(known)}; groups without ABOUT: {set(groups) ^ set(ABOUT)}")
    parts = []
    for group, rows in groups.items():
        about = " ".join(filter(None, (ABOUT[group], _sentence(notes[group]))))
        parts.append(f"## {group}\n\n{about}\n\n| field | default | allowed | |\n|---|---|---|---|\n" + "".join(rows))
    return HEAD + "\n".join(parts)


def _row(field: str, name: str, default: object, words: str) -> str:
    choices = () if name == "method.name" else configuration._CHOICES.get(name, ())
    least = configuration._AT_LEAST.get(name, 0) if isinstance(default, int | float) and not isinstance(default, bool) else 0
    most = configuration._AT_MOST.get(name)
    bounds = [f"at least {least:g}"] * bool(least) + [f"at most {most}"] * (most is not None)
    allowed = ", ".join((*map(str, choices), *bounds))
    value = ",".join(map(str, default)) or "()" if isinstance(default, tuple) else str(default) or '""'
    words = "" if words == " | ".join(choices) else words
    cells = (f"`{field}`", f"`{value}`", allowed, words.replace("|", "\\|").replace("<", "&lt;"))
    return f"| {' | '.join(cells)} |\n"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


if __name__ == "__main__":
    path = ROOT / "docs" / "configuration.md"
    path.write_text(page(), encoding="utf-8")
    print(path)
