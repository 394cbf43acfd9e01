"""The mini world's tokenizer: WordPiece whose whole words are the world's; other words fall into characters."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bridge_jax.data.mini.language import vocabulary
from bridge_jax.rollout import protocol

SPECIAL = ["<|endoftext|>", "[UNK]", "[CLS]", "[SEP]"]
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
FRAME = "doc title question query passage ( ) : . ? , ; ' \" - ! 1 2 3 4 5 6 7 8 9 0"
MULTIPLE = 64


def build(for_encoder: bool) -> PreTrainedTokenizerFast:
    """for_encoder: texts get [CLS] and [SEP], as BERT's do."""
    words = list(dict.fromkeys(FRAME.split() + vocabulary() + _protocol_words()))
    pieces = list(string.ascii_lowercase + string.digits)
    tokens = list(dict.fromkeys(SPECIAL + TAGS + words + pieces + [f"##{piece}" for piece in pieces]))
    tokens += [f"<|unused{n}|>" for n in range(-len(tokens) % MULTIPLE)]
    tokenizer = Tokenizer(models.WordPiece({token: n for n, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    if for_encoder:
        ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "[UNK]"}
    names |= {"cls_token": "[CLS]", "sep_token": "[SEP]"} if for_encoder else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _protocol_words() -> list[str]:
    text = " ".join((protocol.EMPTY_QUERY, protocol.MALFORMED, protocol.NO_SEARCHES_LEFT)).lower()
    return text.replace(".", "").split()
