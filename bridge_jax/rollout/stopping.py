"""Stop strings matched on the device, exactly, whatever the tokenisation.

``</search>`` is several tokens in most vocabularies, and its ``>`` may be merged with what follows. So the matcher reads *bytes*:
an Aho-Corasick automaton (Knuth-Morris-Pratt for several strings) over the bytes of the vocabulary, folded once into a table
``next_state[S, V]``: the state after reading all bytes of a token. Decoding then costs one gather a token, and a generation
stops at the very token that completes a tag. Accepting states are absorbing: the first match stays.

The same byte strings decode generated ids to text (`StopTable.decode`): what the matcher saw and what the parser reads are one
thing.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.rollout.protocol import STOP_STRINGS

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class StopTable:
    """The automaton of a vocabulary.

    next_state [S, V] int8: state after a token, from a state; state 0 is the start of a generation.
    accepting: for each stop string, the (absorbing) state that means it was completed first.
    pieces: the bytes of each token id; b"" for ids beyond the tokenizer (a padded vocabulary), which change nothing.
    """

    next_state: np.ndarray
    accepting: tuple[int, ...]
    pieces: tuple[bytes, ...]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of generated ids, special tokens spelled out."""
        return b"".join(self.pieces[int(token)] for token in tokens).decode("utf-8", errors="replace").removeprefix(" ")


@functools.lru_cache(maxsize=4)
def _gpt2_bytes() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable latin-1 is itself, the other 68 are U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    table = _gpt2_bytes()
    # A character outside the alphabet can only come from a token added without being declared as one.
    return bytes(table[char] for char in token) if all(char in table for char in token) else token.encode()


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_FALLBACK.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _word_piece(token: str) -> bytes:
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()


def _word(token: str) -> bytes:
    return b" " + token.encode()


def _decoder_names(node) -> set[str]:
    """Every decoder type in a tokenizer.json "decoder" entry, sequences unrolled."""
    if node is None:
        return set()
    return {node["type"]}.union(*(_decoder_names(child) for child in node.get("decoders", ())))


def token_pieces(tokenizer, vocab_size: int) -> tuple[bytes, ...]:
    """The bytes each id in [0, vocab_size) adds to the text, read from the tokenizer's own decoder.

    Byte-level BPE (GPT-2, Qwen, SmolLM), sentencepiece-style (``▁``, ``<0x0A>``), WordPiece (``##``), plain fusing, and word-level
    vocabularies without a decoder (words joined by spaces). Raises UserError for a tokenizer without a fast backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"tokenizer {type(tokenizer).__name__} has no tokenizer.json; save it in the fast format first")
    names = _decoder_names(json.loads(backend.to_str())["decoder"])
    if "ByteLevel" in names:
        piece = _byte_level
    elif names & {"Metaspace", "ByteFallback", "Replace"}:
        piece = _sentencepiece
    elif "WordPiece" in names:
        piece = _word_piece
    elif not names:
        piece = _word
    else:
        piece = str.encode
    joined_by_spaces = piece in (_word, _word_piece)
    pieces = [b""] * vocab_size
    for token, index in tokenizer.get_vocab().items():
        if index < vocab_size:
            pieces[index] = piece(token)
    for index, added in tokenizer.added_tokens_decoder.items():  # added tokens are literal text in every scheme
        if index < vocab_size:
            pieces[index] = (b" " if joined_by_spaces else b"") + added.content.encode()
    return tuple(pieces)


def byte_automaton(stops: Sequence[bytes]) -> tuple[np.ndarray, tuple[int, ...]]:
    """(transitions [S, 256] int8, the absorbing state of each stop string). No stop string may contain another."""
    children: list[dict[int, int]] = [{}]
    accepting = []
    for stop in stops:
        state = 0
        for byte in stop:
            if byte not in children[state]:
                children.append({})
                children[state][byte] = len(children) - 1
            state = children[state][byte]
        accepting.append(state)
    transitions = np.zeros((len(children), 256), np.int8)
    fallback = [0] * len(children)
    queue = []
    for byte, child in children[0].items():
        transitions[0, byte] = child
        queue.append(child)
    for state in queue:  # breadth first: a state's fallback is shallower, so its row is complete
        transitions[state] = transitions[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = int(transitions[fallback[state], byte])
            transitions[state, byte] = child
            queue.append(child)
    for state in accepting:
        transitions[state] = state
    return transitions, tuple(accepting)


def fold_vocabulary(transitions: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """next_state [S, V] int8: each token's bytes run through `transitions` from every state, all tokens of a length at once."""
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    starts = np.cumsum(lengths) - lengths
    flat = np.frombuffer(b"".join(pieces), np.uint8)
    longest_first = np.argsort(-lengths, kind="stable")
    state = np.repeat(np.arange(len(transitions), dtype=np.int8)[:, None], len(pieces), axis=1)
    for offset in range(int(lengths.max(initial=0))):
        active = longest_first[: np.searchsorted(-lengths[longest_first], -offset, side="left")]  # tokens longer than `offset`
        state[:, active] = transitions[state[:, active], flat[starts[active] + offset]]
    return state


@functools.lru_cache(maxsize=8)
def _cached_table(tokenizer, vocab_size: int, tokenizer_size: int, stops: tuple[str, ...]) -> StopTable:
    del tokenizer_size  # in the key only: a tokenizer that gained tokens gets a new table
    pieces = token_pieces(tokenizer, vocab_size)
    transitions, accepting = byte_automaton([stop.encode() for stop in stops])
    return StopTable(fold_vocabulary(transitions, pieces), accepting, pieces)


def stop_table(tokenizer, vocab_size: int, stops: tuple[str, ...] = STOP_STRINGS) -> StopTable:
    """The stop table of a tokenizer for a model with `vocab_size` logits (cached)."""
    return _cached_table(tokenizer, vocab_size, len(tokenizer), stops)
