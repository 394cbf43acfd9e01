"""The mini policy's warm-start traces are what the rollout engine would write, and never teach what was not read."""

import sys
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "mini"


@pytest.fixture(scope="module")
def made():
    sys.path.insert(0, str(TOOLS))
    try:
        import tokenizer as tokenizers
        import traces
    finally:
        sys.path.remove(str(TOOLS))
    tokenizer = tokenizers.build(for_encoder=False)
    writer = traces.TraceWriter(tokenizer, 0)
    return tokenizer, traces, writer, [writer.trace() for _ in range(300)]


def test_observations_are_the_protocols_token_for_token(made):
    from bridge_jax.rollout import protocol

    tokenizer, traces, writer, _ = made
    row = traces.Row()
    passages = writer.world.passages[:3]
    writer._observe(row, [p.id for p in passages], ((None, None),), 0, set())
    assert row.tokens == protocol.render_observation(passages, tokenizer, 100).tokens.tolist()


def test_generated_text_parses_and_prompts_are_the_configs(made):
    from bridge_jax.data.prompts import build_prompt
    from bridge_jax.rollout import protocol
    from bridge_jax.rollout.stopping import stop_table

    tokenizer, _, _, rows = made
    table = stop_table(tokenizer, len(tokenizer))
    for row in rows[:100]:
        text = table.decode(row.tokens)
        question = text.split("<search>")[0].removeprefix("question :").strip()
        prompt = build_prompt(question, tokenizer, "bare").tolist()
        assert row.tokens[: len(prompt)] == prompt
        spans, here = [], []
        for token, own in zip([*row.tokens, 0], [*row.generated, False]):
            if own:
                here.append(token)
            elif here:
                spans.append(protocol.parse(table.decode(here)))
                here = []
        assert [span.kind for span in spans[:-1]] == ["search"] * (len(spans) - 1) and spans[-1].kind == "answer"
        assert 2 <= len(spans) <= 3 and all(span.content for span in spans)


def test_answers_stand_in_the_trace_or_are_unknown(made):
    """An answer that no shown passage tells is "unknown" (or, to a yes/no question, a guess)."""
    tokenizer, _, _, rows = made
    kinds = set()
    for row in rows:
        text = tokenizer.decode(row.tokens)
        answer = text.split("<answer>")[1].split("</answer>")[0].strip()
        read = text.split("<answer>")[0]
        kinds.add(answer if answer in ("unknown", "yes", "no") else "told")
        assert answer in ("unknown", "yes", "no") or f" {answer}" in read
    assert kinds == {"unknown", "yes", "no", "told"}


def test_labels_mark_values(made):
    tokenizer, _, _, rows = made
    full_stop = tokenizer.convert_tokens_to_ids(".")
    for row in rows[:100]:
        tokens, relevant = np.asarray(row.tokens), np.asarray(row.relevant)
        marked = np.flatnonzero(relevant >= 0)
        assert len(row.tokens) == len(row.aspect) == len(row.relevant) == len(row.generated)
        assert not np.asarray(row.generated)[marked].any()
        ends = [i for i in marked if i + 1 == len(relevant) or relevant[i + 1] < 0]
        assert all(tokens[i] == full_stop for i in ends)


def test_traces_are_deterministic(made):
    tokenizer, traces, _, rows = made
    again = traces.TraceWriter(tokenizer, 0)
    assert [again.trace().tokens for _ in range(20)] == [row.tokens for row in rows[:20]]
