"""A tiny byte-level BPE tokenizer."""

import pytest

TEXT = [
    "Paris is the capital of France. The Eiffel Tower stands in Paris.",
    "<information>Doc 1(Title: Paris) Paris is a city.</information><answer> Paris</answer>",
    "<search> capital of France </search> Berlin is the capital of Germany.",
]


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXT * 5, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>"]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
