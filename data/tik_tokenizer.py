"""LLaMA-3's own vocabulary files: byte-level BPE ranks in tiktoken's format."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from paro.errors import UserError, importing
from paro.untrusted.regular_file import read_bytes

# The regex with which LLaMA-3 splits a text into words before BPE merges.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 256  # number of special tokens, whose ids follow the ranks; most are reserved
NAMED = {0: "<|begin_of_text|>", 1: "<|end_of_text|>"}
# Long runs of blanks, or of characters without a blank, cost tiktoken quadratic time. So LLaMA-3
# cuts texts into parts of STRETCH characters, and such runs into parts of RUN characters.
STRETCH, RUN = 400_000, 25_000
LONG_RUN = re.compile(rf"\S{{{RUN + 1},}}|\s{{{RUN + 1},}}")


class TikTokenizer:
    """A file of lines `base64 rank`, as LLaMA-3's `tokenizer.model` is, with its special tokens."""

    def __init__(self, model: str) -> None:
        with importing("--tokenizer-type TikTokenizer needs the package tiktoken"):
            import tiktoken
        ranks = _read_ranks(Path(model))
        first = len(ranks)
        special = {NAMED.get(i, f"<|special_{i}|>"): first + i for i in range(NUM_SPECIAL)}
        self.vocab_size = first + NUM_SPECIAL
        self.bos = first
        self.eod = first + 1
        self.text_prefix: tuple[int, ...] = ()
        self._first_special = first
        # Pieces as text: each byte becomes the character with its code.
        self.vocabulary = {piece.decode("latin-1"): rank for piece, rank in ranks.items()} | special
        self._encoding = tiktoken.Encoding(
            Path(model).name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> list[int]:
        if len(text) <= RUN:  # too short to contain a long run
            ids: list[int] = self._encoding.encode_ordinary(text)
            return ids
        return [token for part in _parts(text) for token in self._encoding.encode_ordinary(part)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        ordinary = [int(token) for token in ids if token < self._first_special]
        text: str = self._encoding.decode(ordinary)
        return text

    def token_bytes(self) -> list[int]:
        pieces = map(self._encoding.decode_single_token_bytes, range(self._first_special))
        return [*map(len, pieces), *[0] * NUM_SPECIAL]


def _read_ranks(path: Path) -> dict[bytes, int]:
    if not path.is_file():
        raise UserError(f"--tokenizer-model {path} is missing: give a tiktoken file")
    content = read_bytes(path, f"--tokenizer-model {path}")
    ranks = {}
    try:
        for line in content.split(b"\n"):
            if line.strip():
                piece, rank = line.split()
                ranks[base64.b64decode(piece, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        ranks = {}
    whole = sorted(ranks.values()) == list(range(len(ranks)))
    if not whole or any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(
            f"--tokenizer-model {path} is not a vocabulary in tiktoken's form: one line 'base64 "
            "rank' for each piece, ranks from 0 without a gap, all 256 bytes among them; a "
            "tokenizer.json goes with --tokenizer-type HuggingFaceTokenizer"
        )
    return ranks


def _parts(text: str) -> Iterable[str]:
    """Cut a long text where LLaMA-3's code does: into stretches, then inside long runs."""
    for begin in range(0, len(text), STRETCH):
        stretch = text[begin : begin + STRETCH]
        runs = LONG_RUN.finditer(stretch)
        cuts = [cut for run in runs for cut in range(run.start() + RUN, run.end(), RUN)]
        for start, stop in pairwise([0, *cuts, len(stretch)]):
            yield stretch[start:stop]
