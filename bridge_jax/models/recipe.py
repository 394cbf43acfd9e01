"""How an encoder's vectors are made from a text: pooling, what stands before it, whether an end token stands behind it.

`read` is the one place that finds it out. A folder of sentence-transformers says it in its files; what the files leave open, the
model's family says, which is known by its name; what neither says is the mean over tokens, with nothing before the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.models import hub

WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
BGE_EN = "Represent this sentence for searching relevant passages: "
BGE_ZH = "为这个句子生成表示以用于检索相关文章："


@dataclass(frozen=True)
class Recipe:
    """pooling: of `pooling.POOLINGS`, None where nothing says it. append_eos: every text's last token is the model's end token."""

    pooling: str | None = None
    query_prefix: str = ""
    passage_prefix: str = ""
    append_eos: bool = False


# Name's pattern -> recipe; the first that matches, in the name's last part. Source: the models' cards.
FAMILIES = (
    (r"(^|[-_])e5[-_].*instruct", Recipe("mean", query_prefix=f"{WEB_SEARCH} ")),
    (r"(^|[-_])e5([-_]|$)", Recipe("mean", "query: ", "passage: ")),
    (r"bge[-_](small|base|large)[-_]zh", Recipe("cls", query_prefix=BGE_ZH)),
    (r"bge[-_](small|base|large)([-_]en|$)", Recipe("cls", query_prefix=BGE_EN)),
    (r"bge[-_]m3", Recipe("cls")),
    (r"qwen3[-_]embedding", Recipe("last", query_prefix=WEB_SEARCH, append_eos=True)),
    (r"minilm", Recipe("mean")),
)

# Field of a Pooling module's config.json -> our name; newer files name the mode in one field.
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_MODE_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


def by_name(*names: str | Path) -> Recipe:
    """The recipe of the family that one of the names (ids, folders) belongs to, as intfloat/e5-base-v2 and its folder in the hub's
    cache do; an empty one for others."""
    parts = [part.lower() for name in names for part in Path(name).parts[-1:] + Path(name).parts[-3:-2]]
    return next((recipe for pattern, recipe in FAMILIES if any(re.search(pattern, part) for part in parts)), Recipe())


def read(folder: Path, *names: str | Path) -> Recipe:
    """The recipe of a model folder; `names`: what the model is called.

    Raises:
      UserError: the folder's files ask for something that is not computed, naming the file.
    """
    family = by_name(*names)
    pooling = _pooling(folder)
    query, passage = _prompts(folder)
    return Recipe(pooling or family.pooling, query or family.query_prefix, passage or family.passage_prefix, family.append_eos)


def write(pooling: str, query_prefix: str, passage_prefix: str, dim: int) -> dict[str, object]:
    """{file: JSON content} that makes a model folder one of sentence-transformers with this recipe."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    modes = {"word_embedding_dimension": dim} | {name: pooling == ours for name, ours in _MODES.items()}
    prompts = {"query": query_prefix, "document": passage_prefix}
    about = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    return {"modules.json": modules, "1_Pooling/config.json": modes, "config_sentence_transformers.json": about}


def _pooling(folder: Path) -> str | None:
    """As modules.json and the Pooling module's config.json say; None where neither is there."""
    listed, place = folder / "modules.json", "1_Pooling"
    if listed.is_file():
        modules = hub.read_json(listed, list)
        kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules if isinstance(module, Mapping)]
        strange = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        if strange or len(kinds) != len(modules) or kinds[:2] != ["Transformer", "Pooling"]:
            what = f"module {strange[0]}" if strange else f"modules {', '.join(kinds)}"
            raise UserError(
                f"{listed}: {what} cannot be computed, only Transformer, Pooling and Normalize in this order; give another encoder"
            )
        place = modules[1].get("path") or place
        _refuse_lengths(folder, kinds)
    elif any(folder.glob("*_Dense")):
        raise UserError(f"{folder}: a Dense layer follows the pooling, which is not supported; give another encoder")
    where = folder / place / "config.json"
    if not where.is_file():
        if listed.is_file():
            raise UserError(f"{where} is missing, which {listed.name} names; fetch the folder again")
        return None
    settings = hub.read_json(where)
    modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    found = [_MODES.get(mode) for mode in modes]
    if isinstance(settings.get("pooling_mode"), str):
        modes, found = [settings["pooling_mode"]], [_MODE_NAMES.get(settings["pooling_mode"])]
    if len(found) != 1 or found[0] is None:
        raise UserError(
            f"{where}: {', '.join(modes) or 'no pooling mode'}; only one of {', '.join(_MODES)} is computed: give another encoder"
        )
    if settings.get("include_prompt", True) is False:
        raise UserError(f"{where}: include_prompt = false is not computed, only true; give another encoder")
    return found[0]


def _refuse_lengths(folder: Path, kinds: list[str]) -> None:
    """Vectors here have unit length and are compared by inner product."""
    about = folder / "config_sentence_transformers.json"
    similarity = hub.read_json(about).get("similarity_fn_name") if about.is_file() else None
    if "Normalize" not in kinds and similarity not in (None, "cosine"):
        raise UserError(
            f"{about}: similarity_fn_name = {similarity!r} of vectors that are not of unit length is not computed; give an encoder "
            "for cosine similarity"
        )


def _prompts(folder: Path) -> tuple[str, str]:
    """(query's, passage's) of config_sentence_transformers.json; "" where none is written."""
    where = folder / "config_sentence_transformers.json"
    settings = hub.read_json(where) if where.is_file() else {}
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise UserError(f"{where}: prompts must be names with texts; fetch the folder again, or mend it")
    common = prompts.get(settings.get("default_prompt_name") or "", "")

    def first(*names: str) -> str:
        return next((prompts[name] for name in names if name in prompts), common)

    return first("query"), first("document", "passage", "corpus")
