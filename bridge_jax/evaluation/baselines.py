"""Inference baselines: each a prompt and the rules of its turns. `driver.py` runs them all, on our engine and against endpoints.

    direct      the answer at once                                     no search
    cot         reasoning, then the answer                             no search
    rag         the passages for the question, then the answer         one search, by the question
    ircot       one sentence of reasoning a turn; each sentence is the next query (Trivedi et al. 2023)
    search_o1   reasons and searches; what is found is first read and condensed by the model itself (Li et al. 2025)
    react       Thought, Action: Search[..] or Finish[..], Observation (Yao et al. 2023)
    medrag      32 snippets for the question alone, answer as JSON (Xiong et al. 2024); multiple choice only

The wording is ours, zero-shot. Every turn is one user message that holds all there is so far, so that a baseline runs on a chat
endpoint as on a base model. Whoever may search no more is asked for the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bridge_jax.errors import UserError
from bridge_jax.rollout.protocol import ANSWER_CLOSE, ANSWER_OPEN, SEARCH_CLOSE, SEARCH_OPEN

Stops = tuple[str, str]


@dataclass(frozen=True)
class Action:
    """What a generation asks for; "think" goes on without a search."""

    kind: Literal["search", "answer", "think"]
    content: str = ""
    keep: str = ""  # what of the text stays in the history


@dataclass(frozen=True)
class Baseline:
    """One baseline.

    prompt: a user message with {question}, {passages}, {history} (turns so far) and {ending} (`going` or `last`).
    read: (text, may search) -> Action.
    opens: the question itself is searched for first. searches: at most so many, the opening one included; None: as configured.
    found: how passages enter the history, with {passages}; "": they are gathered, each once, and stand in the prompt's {passages}.
    condense: if given, they are first put before the model with this prompt ({question}, {history}, {query}, {passages}), and what
    it writes enters in their place. shown: passages a search shows; None: as configured.
    """

    name: str
    prompt: str
    read: Callable[[str, bool], Action]
    stops: Stops
    searches: int | None = 0
    opens: bool = False
    going: str = ""
    last: str = ""
    found: str = ""
    condense: str = ""
    shown: int | None = None
    multiple_choice: bool = False

    @property
    def may_search(self) -> bool:
        return self.searches is None or self.searches > 0


# ---- reading a generation --------------------------------------------------------------------------------------------------------

_TAGGED = re.compile(rf"{ANSWER_OPEN}(.*?)(?:{ANSWER_CLOSE}|$)", re.DOTALL)
_ANSWER_IS = re.compile(r"\banswer(?:\s+to\s+[^.:\n]{0,80}?)?(?:\s+is\b\s*:?|\s*:)\s*", re.IGNORECASE)
_QUERY = re.compile(rf"{SEARCH_OPEN}(.*?)(?:{SEARCH_CLOSE}|$)", re.DOTALL)
_ACTION = re.compile(r"\b(search|finish)\s*\[([^\]\n]*)\]?", re.IGNORECASE)
_SENTENCE = re.compile(r".*?[.!?](?=\s+[A-Z\"'(]|\s*$)", re.DOTALL)
_ABBREVIATION = re.compile(r"(?:\b[A-Z]|\b(?:Dr|Mr|Mrs|Ms|St|Jr|Sr|No|vs|e\.g|i\.e|U\.S))\.$")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.split("\n") if line.strip()), "")


def short_answer(text: str) -> str:
    """The answer of a text that should hold little else: the last answer tag, else what follows the last "answer is" or "Answer:",
    else the first line."""
    if tagged := _TAGGED.findall(text):
        return " ".join(tagged[-1].split())
    *_, said = _ANSWER_IS.split(text)
    return _first_line(said if said.strip() else text)


def conclusion(text: str) -> str:
    """The answer at the end of a reasoning: as `short_answer`, but a text that names none says it in its last line."""
    if _TAGGED.search(text) or _ANSWER_IS.search(text):
        return short_answer(text)
    return _first_line("\n".join(reversed(text.split("\n"))))


def first_sentence(text: str) -> str:
    """Up to the first end of a sentence that is no initial or abbreviation, within the first line that is not empty."""
    line = _first_line(text)
    end = 0
    for match in _SENTENCE.finditer(line):
        end = match.end()
        if not _ABBREVIATION.search(line[:end]):
            return line[:end].strip()
    return line[:end].strip() or line


def _read_short(text: str, may_search: bool) -> Action:
    return Action("answer", short_answer(text))


def _read_conclusion(text: str, may_search: bool) -> Action:
    return Action("answer", conclusion(text))


def _read_json(text: str, may_search: bool) -> Action:
    """The whole text: `choices.choose` finds the field, and takes anything else it can be sure of."""
    return Action("answer", text.strip())


def _read_sentence(text: str, may_search: bool) -> Action:
    if not may_search:
        return Action("answer", conclusion(text))
    sentence = first_sentence(text)
    if _ANSWER_IS.search(sentence) or ANSWER_OPEN in sentence:
        return Action("answer", short_answer(_first_line(text)))
    return Action("search", sentence, f"{sentence}\n") if sentence else Action("think")


def _read_tags(text: str, may_search: bool) -> Action:
    """Search-o1 in our own tags: the first closed one counts, as in a rollout."""
    query, answer = _QUERY.search(text), _TAGGED.search(text)
    if query and not (answer and answer.start() < query.start()):
        content = " ".join(query[1].split())
        if content and may_search:
            return Action("search", content, f"{text[: query.start()]}{SEARCH_OPEN} {content} {SEARCH_CLOSE}\n")
        return Action("think", keep=text[: query.start()])
    if answer:
        return Action("answer", " ".join(answer[1].split()))
    return Action("answer", conclusion(text)) if _ANSWER_IS.search(text) or not may_search else Action("think", keep=f"{text}\n")


def _read_action(text: str, may_search: bool) -> Action:
    """ReAct: the first Search[..] or Finish[..]; a text without one is thought."""
    match = _ACTION.search(text)
    if match is None:
        return Action("answer", conclusion(text)) if not may_search else Action("think", keep=f"{text.strip()}\n")
    content = " ".join(match[2].split())
    if match[1].lower() == "finish":
        return Action("answer", content)
    keep = f"{text[: match.end()].strip()}\n"
    return Action("search", content, keep) if content and may_search else Action("think", keep=keep)


# ---- the baselines ---------------------------------------------------------------------------------------------------------------

_SHORT = "Give only the answer itself, in a few words, without an explanation."
_SO = "So the answer is:"

_ALL = (
    Baseline("direct", f"Answer the question. {_SHORT}\nQuestion: {{question}}\nAnswer:", _read_short, (ANSWER_CLOSE, "\n\n")),
    Baseline(
        "cot",
        "Answer the question. Think step by step, in a few sentences; then end with one line that begins with "
        f'"{_SO}" and holds nothing but the answer, in a few words.\nQuestion: {{question}}',
        _read_conclusion,
        (ANSWER_CLOSE, "\nQuestion:"),
    ),
    Baseline(
        "rag",
        f"Answer the question. These passages may help:\n{{passages}}\n{_SHORT}\nQuestion: {{question}}\nAnswer:",
        _read_short,
        (ANSWER_CLOSE, "\n\n"),
        searches=1,
        opens=True,
    ),
    Baseline(
        "ircot",
        "Answer the question by reasoning over the passages, one sentence at a time. {ending}\n\n"
        "{passages}\nQuestion: {question}\nReasoning so far: {history}\nNext:",
        _read_sentence,
        (ANSWER_CLOSE, "\n\n"),
        searches=None,
        opens=True,
        going=f'Write only the next sentence. As soon as the answer is known, write "{_SO}" and the answer, in a few words.',
        last=f'Now give the answer: write "{_SO}" and the answer, in a few words.',
    ),
    Baseline(
        "search_o1",
        "Answer the question by reasoning step by step. Whenever a fact is missing or unsure, write "
        f"{SEARCH_OPEN} a query {SEARCH_CLOSE}: you are then told what a search engine found. "
        f"Give the answer, in a few words, in {ANSWER_OPEN} {ANSWER_CLOSE}. {{ending}}\n"
        "Question: {question}\n{history}",
        _read_tags,
        (SEARCH_CLOSE, ANSWER_CLOSE),
        searches=None,
        last="No searches are left: answer now.",
        found="Found: {passages}\n",
        condense="Somebody reasons about a question and has searched for something. Read what was found and write down, in one to "
        "three sentences, only what helps to go on. If nothing does, write: nothing helpful.\n"
        "Question: {question}\nReasoning so far: {history}\nQuery: {query}\nFound:\n{passages}\nWhat helps:",
    ),
    Baseline(
        "react",
        "Answer the question in turns of Thought, Action and Observation. An action is one of:\n"
        "Search[a query] - the passages that fit best come as the observation\n"
        "Finish[the answer, in a few words]\n{ending}\n"
        "Question: {question}\n{history}",
        _read_action,
        ("\nObservation", ANSWER_CLOSE),
        searches=None,
        going="Write one Thought and one Action.",
        last="No searches are left: write Action: Finish[the answer].",
        found="Observation: {passages}\n",
    ),
    Baseline(
        "medrag",
        "You are an expert in medicine. Use the documents to answer the multiple-choice question. Think step by step, then choose "
        'one option. Write JSON of the form {"step_by_step_thinking": "...", "answer_choice": "A"} and nothing else; the choice '
        "must be definite.\nDocuments:\n{passages}\nQuestion: {question}\nJSON:",
        _read_json,
        ("}\n", "\n\n\n"),
        searches=1,
        opens=True,
        shown=32,
        multiple_choice=True,
    ),
)
BASELINES = {baseline.name: baseline for baseline in _ALL}


def baseline_of(name: str) -> Baseline:
    """By name. UserError for an unknown one."""
    if name not in BASELINES:
        raise UserError(f"--baseline={name}: must be one of {', '.join(BASELINES)}")
    return BASELINES[name]
