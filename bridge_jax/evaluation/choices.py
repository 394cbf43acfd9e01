"""Which option of a multiple-choice question an answer names: by letter or by text, and never by default.

An answer that names no option, or several, is unparseable: it is wrong, and counted. (MIRAGE's own evaluator reads such an answer
as "A".) Pure functions over text.
"""

from __future__ import annotations

import re

from bridge_jax.objectives.rewards import normalize_answer

Options = tuple[tuple[str, str], ...]  # (letter, text)

_JSON_FIELD = re.compile(r'"answer_choice"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)
_ALONE = re.compile(r"[\s(\[\"'*]*([A-Za-z])[\s.):\]\"'*,]*")
# A letter that stands for an option is set off by punctuation: "A 45-year-old man" begins with an article.
_LEADING = re.compile(r"[\s(\[\"'*]*([A-Z])(?=[.):\],\"*/]|\s+(?:or|and)\b)")
_ANSWER = re.compile(r"(?i:\banswer)\b(?:[^.\n]{0,40}?\bis\b)?[\s:(\[\"'*]*([A-Z])\b")
_OPTION = re.compile(r"(?i:\b(?:option|choice))\b(?:\s+is\b)?[\s:(\[\"'*]*([A-Z])\b")
_SECOND = re.compile(r"\s*(?:or|and|/|,)\s*(?:or\s+|and\s+)?[(\[]?([A-Z])(?![\w'])")


def choose(text: str | None, options: Options) -> str | None:
    """The letter of the option that an answer names; None when it names none, or several.

    Looked at in this order: the field "answer_choice" of a JSON answer; the text of one option, or a letter, as the whole answer; a
    letter at the beginning; a letter behind "answer", then behind "option"; the one option whose text occurs in the answer.
    """
    if text is None:
        return None
    fields = _JSON_FIELD.findall(text)
    text = (fields[-1] if fields else text).strip()
    letters = {letter for letter, _ in options}
    texts = {letter: normalize_answer(option) or option.strip().lower() for letter, option in options}
    said = normalize_answer(text) or text.lower()
    same = [letter for letter, option in texts.items() if said == option]
    if not same and text[:1] in letters:  # "D Cross-linking of DNA"
        same = [text[0]] if normalize_answer(text[1:]) == texts[text[0]] else []
    if same:
        return same[0] if len(same) == 1 else None
    if (alone := _ALONE.fullmatch(text)) and alone[1].upper() in letters:
        return alone[1].upper()
    if (lead := _LEADING.match(text)) and lead[1] in letters:
        second = _SECOND.match(text[lead.end() :])
        return None if second and second[1] in letters else lead[1]
    for pattern in (_ANSWER, _OPTION):
        named = [match for match in pattern.finditer(text) if match[1] in letters]
        if named:
            second = _SECOND.match(text[named[-1].end() :])
            several = len({match[1] for match in named}) > 1 or (second is not None and second[1] in letters)
            return None if several else named[-1][1]
    inside = [letter for letter, option in texts.items() if f" {option} " in f" {said} "]
    # One option's text can be part of another's ("DNA", "cross-linking of DNA"): the longest that occurs is meant.
    inside = [one for one in inside if not any(one != other and texts[one] in texts[other] for other in inside)]
    return inside[0] if len(inside) == 1 else None
