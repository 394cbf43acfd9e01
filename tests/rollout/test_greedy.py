"""Greedy rollouts equal transformers' `generate`: tokens, and log-probs to 1e-4, for 20 prompts of mixed length in one batch."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_tiny as tiny
import torch
from rollout_engine import CONFIG, WORDS, prompts_of
from rounding import SPREAD
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bridge_jax.models import hub, qwen2
from bridge_jax.rollout.episodes import RolloutConfig, RolloutEngine

LENGTHS = [1, 2, 3, 5, 8, 13, 16, 16, 15, 14, 1, 7, 9, 11, 4, 6, 10, 12, 2, 16]


def generate(model, prompt, ends, new, **options):
    """(tokens, log-probs) of transformers, one prompt at a time: no padding."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor(np.asarray(prompt))[None],
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=list(ends),
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    tokens = out.sequences[0, len(prompt) :].numpy()
    logps = torch.log_softmax(torch.cat(out.logits).float(), -1).numpy()
    return tokens, logps[np.arange(len(tokens)), tokens]


def greedy(engine, params, prompts):
    return engine.run(
        {"params": params}, tiny.questions(len(prompts)), prompts=prompts, group_size=1, key=jax.random.key(0), temperature=0.0
    )[0]


def assert_same(episodes, references):
    for episode, (tokens, logps) in zip(episodes, references, strict=True):
        assert episode.tokens.tolist() == tokens.tolist()
        np.testing.assert_allclose(episode.logps, logps, atol=1e-4 * SPREAD)


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory):
    """(torch model, its folder): a Qwen2 over the word vocabulary, in which every tag is inside a token."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.4,
        eos_token_id=[1, 2],
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    folder = tmp_path_factory.mktemp("random")
    model.save_pretrained(folder)
    return model, folder


def tag_tokens():
    return [index for token, index in WORDS.get_vocab().items() if "</search>" in token or "</answer>" in token]


def test_a_random_model(random_pair):
    torch_model, folder = random_pair
    model, params = qwen2.load(folder)
    prompts = prompts_of(LENGTHS, seed=4)
    references = [generate(torch_model, prompt, [1, 2, *tag_tokens()], 9) for prompt in prompts]
    lengths = {len(tokens) for tokens, _ in references}
    assert len(lengths) > 3 and max(lengths) == 9  # ends of every kind
    config = dataclasses.replace(CONFIG, max_searches=0, max_new_tokens=9, batch_groups=20)
    for changes in ({}, {"batch_groups": 3, "chunk": 7}, {"max_prompt_tokens": 64}):  # company and padding change nothing
        engine = RolloutEngine(model, WORDS, [1, 2], dataclasses.replace(config, **changes), tiny.Retriever(tiny.corpus()))
        assert_same(greedy(engine, params, prompts), references)


def test_minimum_length(random_pair):
    """transformers bars its end tokens for as long; here the tags are among them."""
    torch_model, folder = random_pair
    model, params = qwen2.load(folder)
    prompts = prompts_of(LENGTHS, seed=4)
    references = [generate(torch_model, prompt, [1, 2, *tag_tokens()], 9, min_new_tokens=4) for prompt in prompts]
    assert {len(tokens) for tokens, _ in references} > {4 + 1}
    config = dataclasses.replace(CONFIG, max_searches=0, max_new_tokens=9, min_new_tokens=4, batch_groups=20)
    engine = RolloutEngine(model, WORDS, [1, 2], config, tiny.Retriever(tiny.corpus()))
    assert_same(greedy(engine, params, prompts), references)


@pytest.mark.real
def test_qwen_with_its_weights():
    """Qwen2.5-Coder-0.5B-Instruct, 8 tokens behind each of 20 beginnings of one text."""
    torch.set_num_threads(1)
    folder = hub.resolve("qwen2.5-coder-0.5b-instruct")
    tokenizer = qwen2.load_tokenizer(folder)
    ends = qwen2.eos_ids(folder, tokenizer)
    text = (
        "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)  # The river Rhine rises in Switzerland and flows into the sea."
    )
    ids = np.asarray(tokenizer(text)["input_ids"], np.int32)
    prompts = [ids[at : at + length] for at, length in enumerate(LENGTHS)]
    torch_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    references = [generate(torch_model, prompt, ends, 8) for prompt in prompts]
    del torch_model
    model, params = qwen2.load(folder)
    config = RolloutConfig(max_searches=0, max_prompt_tokens=16, max_new_tokens=8, batch_groups=20, candidates=8, chunk=8)
    engine = RolloutEngine(model, tokenizer, ends, config, tiny.Retriever(tiny.corpus()))
    assert_same(greedy(engine, params, prompts), references)
