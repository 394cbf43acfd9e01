"""Real pretrained weights against transformers in float32: logits over 512 tokens, and 64 greedy tokens with their log-probs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rounding import SPREAD
from transformers import AutoModelForCausalLM

from bridge_jax.models import hub, qwen2
from bridge_jax.models.cache import KVBlock

pytestmark = pytest.mark.real

PROMPT, NEW = 512, 64
TEXT = """The Brandenburg Concertos are a collection of six instrumental works presented by Johann Sebastian Bach to
Christian Ludwig, Margrave of Brandenburg-Schwedt, in 1721 (though probably composed earlier). The original
French title is Six Concerts à plusieurs instruments, meaning "six concertos for several instruments". Some of
the pieces feature several solo instruments in combination. They are widely regarded as some of the greatest
orchestral compositions of the Baroque era. def f(x): return x ** 2 + 3.14 * x  # 1,234,567
"""


@pytest.fixture(
    scope="module", params=["smollm2-135m-instruct", pytest.param("qwen2.5-coder-0.5b-instruct", marks=pytest.mark.long)]
)
def pair(request):
    torch.set_num_threads(1)  # generation on few cores that others use too spends its time in thread barriers otherwise
    folder = hub.resolve(request.param)
    tokens = np.array(qwen2.load_tokenizer(folder)(TEXT * 8)["input_ids"][:PROMPT])
    assert len(tokens) == PROMPT
    torch_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = torch_model(torch.tensor(tokens)[None]).logits[0].numpy()
        answer = torch_model.generate(
            torch.tensor(tokens[:64])[None],
            max_new_tokens=NEW,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        scores = torch.log_softmax(torch.cat(answer.logits).float(), -1).numpy()
        chosen = answer.sequences[0, 64:].numpy()
    del torch_model
    return qwen2.load(folder), tokens, logits, chosen, scores[np.arange(NEW), chosen]


def test_logits_over_512_tokens(pair):
    (model, params), tokens, want, _, _ = pair
    got = np.asarray(jax.jit(model.apply)({"params": params}, tokens[None])[0])
    assert np.abs(got - want).max() <= 2e-4 * SPREAD
    log_p, log_q = (np.asarray(jax.nn.log_softmax(jnp.asarray(x))) for x in (want, got))
    kl = (np.exp(log_p) * (log_p - log_q)).astype(np.float64).sum(-1)
    assert np.abs(kl).max() < 1e-6
    # A language model, not noise: it predicts this repeated text well.
    assert -log_p[np.arange(256, PROMPT - 1), tokens[257:]].mean() < 1.0


def test_greedy_tokens_and_log_probs_with_the_cache(pair):
    (model, params), tokens, _, chosen, scores = pair

    @functools.partial(jax.jit, donate_argnums=2)
    def step(params, tokens, cache, at):
        logits, cache = model.apply({"params": params}, tokens, private=cache, write_at=at)
        log_p = jax.nn.log_softmax(logits[:, -1])
        return log_p.argmax(-1), log_p.max(-1), cache

    token, log_p, cache = step(params, tokens[None, :64], KVBlock.empty(model.config, 1, 64 + NEW), 0)
    got, got_scores = [token], [log_p]
    for at in range(64, 64 + NEW - 1):
        token, log_p, cache = step(params, token[:, None], cache, jnp.int32(at))
        got.append(token)
        got_scores.append(log_p)
    np.testing.assert_array_equal(np.concatenate(got), chosen)
    np.testing.assert_allclose(np.concatenate(got_scores), scores, atol=2e-4)
