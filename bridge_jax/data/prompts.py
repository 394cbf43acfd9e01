"""The prompt of an episode: one user message that explains the protocol, then the question; the assistant's single turn follows.

The wording is our own, the protocol Search-R1's (METHOD.md 2): reason in <think>, search in <search>, read <information>, answer in
<answer> with an example. The example is never scored: rewards look at generated text alone.
"""

from __future__ import annotations

import difflib
import re

import numpy as np

from bridge_jax.data.formats import Question
from bridge_jax.errors import UserError

_BRACKETED = re.compile(r"<[^<>]+>")
TAGS = ("think", "search", "information", "answer")  # of the protocol
_TAG = re.compile(f"</?(?:{'|'.join(TAGS)})>")

STYLES = {
    "search_r1": (
        "Answer the question below. Reason inside <think> and </think> first, and again each time you have read something new. "
        "If you then find that you lack some knowledge, call the search engine with <search> your query </search>; it returns "
        "the best matching passages between <information> and </information>. You may search several times. Once no further "
        "knowledge is needed, give the final answer inside <answer> and </answer>, without any explanation. For example, "
        "<answer> Lisbon </answer>.\n"
        "Question: {question}\n"
    ),
    # For small models and short contexts: the same protocol in under half the words.
    "brief": (
        "Think in <think> </think>. Search with <search> query </search>; results come in <information> </information>. "
        "Give a short final answer, for example <answer> Lisbon </answer>.\n"
        "Question: {question}\n"
    ),
    # For the mini world's policy, which was trained on the protocol and needs no explanation.
    "bare": "question : {question}",
}


def build_prompt(question: str | Question, tokenizer, style: str = "search_r1", max_tokens: int | None = None) -> np.ndarray:
    """Token ids of the prompt, int32 [P]: what precedes the first token that the policy generates.

    With a chat template: one user message, then the header of the assistant's turn. Without: plain text, behind the tokenizer's
    beginning-of-text token if it uses one. The question is never cut: UserError when the prompt is longer than `max_tokens`.
    """
    if style not in STYLES:
        near = difflib.get_close_matches(style, STYLES, n=1)
        raise UserError(f"no prompt style '{style}'; {f'did you mean {near[0]!r}' if near else f'take one of {sorted(STYLES)}'}")
    asked = question.question if isinstance(question, Question) else question
    # replace, not format: a question may hold braces
    ids = encode_message(STYLES[style].replace("{question}", _ask(harmless(asked, tokenizer))), tokenizer)
    if max_tokens is not None and len(ids) > max_tokens:
        raise UserError(
            f"the prompt of '{_shorten(asked)}' is {len(ids)} tokens, the limit {max_tokens}; "
            "raise max_prompt_tokens, take style 'brief' or leave the question out (a question is never cut)"
        )
    return np.asarray(ids, np.int32)


def encode_message(text: str, tokenizer) -> list[int]:
    """Token ids of one user message (trusted text) and of what precedes the assistant's first token."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)  # the template wrote the special tokens itself
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos, *ids] if bos is not None and tokenizer.encode("")[:1] == [bos] else ids


def _ask(question: str) -> str:
    """Natural Questions come without a question mark; Search-R1 adds it."""
    question = question.strip()
    return question if question.endswith(("?", ".", "!")) else question + "?"


def harmless(text: str, tokenizer) -> str:
    """Text from outside that spells a control token ('<|im_end|>') must not end its own turn: a space breaks the spelling.

    Half a surrogate pair, such as a shell gives for a byte that is not UTF-8, is no text to a tokenizer: it becomes "?".
    """
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    for spelling in control_tokens(tokenizer).values():
        if len(spelling) > 1 and spelling in text:
            text = text.replace(spelling, f"{spelling[0]} {spelling[1:]}")
    return text


def control_tokens(tokenizer) -> dict[int, str]:
    """{id: spelling} of what steers a model: special tokens, and those that the tokenizer only calls added but that stand in angle
    brackets, such as Qwen's <tool_response> and <|fim_prefix|>. The protocol's own tags are text, even where they are one token."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        i: token.content
        for i, token in added.items()
        if token.special or (_BRACKETED.fullmatch(token.content) and not _TAG.fullmatch(token.content))
    }


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def fill(template: str, **parts: str) -> str:
    """Not str.format: questions and passages may hold braces, and so does JSON in a prompt."""
    return re.sub(r"\{(\w+)\}", lambda match: parts.get(match[1], match[0]), template)
