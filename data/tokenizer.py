"""The tokenizer interface, and construction of tokenizers by Megatron's tokenizer types."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from data.hugging_face_tokenizer import LibraryTokenizer, hugging_face_tokenizer
from data.tokenizer_config import GPT2_TYPE, SENTENCEPIECE_TYPES, TokenizerConfig
from paro.errors import UserError, importing, reading
from paro.files.regular_file import check_regular, read_bytes
from paro.files.schema import read_json

BLANK = "\u2581"  # how SentencePiece spells a space
END = "<|endoftext|>"
VOCAB_FILE, MERGE_FILE = "vocab.json", "merges.txt"  # their names in a Hugging Face folder
# The regex with which LLaMA-3 splits a text into words before BPE merges.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL = 256  # number of special tokens, whose ids follow the ranks; most are reserved
NAMED = {0: "<|begin_of_text|>", 1: "<|end_of_text|>"}
# Long runs of blanks, or of characters without a blank, cost tiktoken quadratic time. So LLaMA-3
# cuts texts into parts of CHUNK characters, and such runs into parts of RUN characters.
CHUNK, RUN = 400_000, 25_000
LONG_RUN = re.compile(rf"\S{{{RUN + 1},}}|\s{{{RUN + 1},}}")


class Tokenizer(Protocol):
    """The interface that preprocessing, training and generation need from a tokenizer.

    `encode` adds no special tokens: callers add `bos` or `eod` if they need them.
    """

    text_prefix: tuple[int, ...] = ()  # put before every text of a corpus, by Llama2Tokenizer
    vocab_size: int  # the number of ids, not padded
    vocabulary: dict[str, int]  # the id of every piece; empty for NullTokenizer
    eod: int  # the id that ends a document
    bos: int | None  # the id that begins a text; None if there is none

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts, on one thread; in one call of the library that can."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str: ...

    def token_bytes(self) -> list[int] | None:
        """Count the bytes of text that every id stands for, special tokens 0; None if unknown."""
        return None


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of a configuration; `UserError` names the wrong flag."""
    if config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size is not None, "TokenizerConfig checks this"
        return NullTokenizer(config.vocab_size, eod=config.null_tokenizer_eod_id)
    named = config
    config = config.on_this_machine()
    with reading(" and ".join(config.files)):
        tokenizer = _read_tokenizer(config)
    if config.vocab_size not in (None, tokenizer.vocab_size):
        flag = "--vocab-file" if config.tokenizer_type == GPT2_TYPE else "--tokenizer-model"
        raise UserError(
            f"--vocab-size {config.vocab_size} contradicts {flag} {named.files[0]}, which has "
            f"{tokenizer.vocab_size} ids: leave it out; --padded-vocab-size sets the model's rows"
        )
    return tokenizer


def _read_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return a tokenizer read from files."""
    if config.tokenizer_type == GPT2_TYPE:
        vocab_file, merge_file = config.files
        tokenizer = read_gpt2(Path(vocab_file), Path(merge_file))
        end = tokenizer.token_to_id(END)
        return LibraryTokenizer(tokenizer, f"--vocab-file {vocab_file}", eos=end, bos=end)
    (model,) = config.files
    if config.tokenizer_type in SENTENCEPIECE_TYPES:
        begins = config.tokenizer_type == "Llama2Tokenizer"
        return SentencePieceTokenizer(model, begins_texts=begins)
    if config.tokenizer_type == "TikTokenizer":
        return TikTokenizer(model)
    return hugging_face_tokenizer(model)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file, as in LLaMA-1 and LLaMA-2 or from tools/train_tokenizer.py.
    Of Megatron's three names for this type, only Llama2Tokenizer begins texts with `bos`.

    Documents end with the model's own EOS token. Megatron does the same under two of the names; its
    SentencePieceTokenizer ends them with an <EOD> that it adds above the model's ids.
    """

    def __init__(self, model: str, *, begins_texts: bool = False) -> None:
        self._processor = _load_sentencepiece(Path(model))
        self.vocab_size = self._processor.get_piece_size()
        self.eod = self._processor.eos_id()
        bos = self._processor.bos_id()
        self.bos = bos if bos >= 0 else None
        self.vocabulary = {self._processor.id_to_piece(i): i for i in range(self.vocab_size)}
        if self.eod < 0:
            raise UserError(
                f"--tokenizer-model {model} has no end-of-sentence piece to end documents with: "
                "train it with one, as tools/train_tokenizer.py does"
            )
        if begins_texts:
            if self.bos is None:
                raise UserError(
                    f"--tokenizer-model {model} has no piece that begins a text, which "
                    "--tokenizer-type Llama2Tokenizer needs: use SentencePieceTokenizer"
                )
            self.text_prefix = (self.bos,)

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._processor.encode(list(texts), num_threads=1))

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._processor.decode([int(token) for token in ids]))

    def token_bytes(self) -> list[int]:
        counts = [int(self._processor.is_byte(number)) for number in range(self.vocab_size)]
        for piece, number in ordinary_pieces(self._processor).items():
            counts[number] = len(piece.replace(BLANK, " ").encode())
        return counts


def ordinary_pieces(processor: Any) -> dict[str, int]:
    """Return the ids of the pieces that stand for a text, by this text with BLANK for spaces."""
    return {
        processor.id_to_piece(i): i
        for i in range(processor.get_piece_size())
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    }


def _load_sentencepiece(path: Path) -> Any:
    with importing("this --tokenizer-type needs the package sentencepiece"):
        from sentencepiece import SentencePieceProcessor
    content = read_bytes(path, f"--tokenizer-model {path}")
    with suppress(OSError, RuntimeError):
        processor = SentencePieceProcessor(model_proto=content)
        if content and processor.get_piece_size():  # it takes nothing for no model
            return processor
    raise UserError(f"--tokenizer-model {path} is not a SentencePiece model")


def read_gpt2(vocab_file: Path, merge_file: Path) -> Any:
    """Read the two files with the tokenizers library; `UserError` names a bad file.

    Ids are those of Megatron's GPT2BPETokenizer. If a text contains END literally, it becomes that
    one id, as in transformers.
    """
    with importing("--tokenizer-type GPT2BPETokenizer needs the package tokenizers"):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    files = (("--vocab-file", vocab_file, VOCAB_FILE), ("--merge-file", merge_file, MERGE_FILE))
    if gone := [
        f"{flag} {path} is missing: give GPT-2's {name}"
        for flag, path, name in files
        if not path.exists()
    ]:
        raise UserError(*gone)
    vocabulary = _read_vocabulary(vocab_file)
    check_regular(merge_file, f"--merge-file {merge_file}")
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"--merge-file {merge_file} holds no merges of pieces of --vocab-file {vocab_file}: "
            f"{error} (a line #version does not count)"
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    missing = [piece for piece in (*alphabet, END) if piece not in vocabulary]
    if missing:
        what = END if missing == [END] else f"{len(missing)} of the 256 bytes"
        raise UserError(f"--vocab-file {vocab_file} is not GPT-2's: it has no {what}")
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Read pieces and their ids, which are consecutive from 0."""
    vocabulary: dict[str, int] = read_json(path, dict[str, int], f"--vocab-file {path}")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(f"--vocab-file {path}: the ids must count from 0 without a gap")
    try:
        "".join(vocabulary).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--vocab-file {path} has a piece with half a surrogate pair") from error
    return vocabulary


class TikTokenizer(Tokenizer):
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
        self._first_special = first
        # Pieces as text: each byte becomes the character with its code.
        self.vocabulary = {piece.decode("latin-1"): rank for piece, rank in ranks.items()} | special
        self._encoding = tiktoken.Encoding(
            Path(model).name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> list[int]:
        if len(text) <= RUN:  # too short to contain a long run
            return list(self._encoding.encode_ordinary(text))
        return [token for part in _parts(text) for token in self._encoding.encode_ordinary(part)]

    def decode(self, ids: Iterable[int]) -> str:
        ordinary = [int(token) for token in ids if token < self._first_special]
        return str(self._encoding.decode(ordinary))

    def token_bytes(self) -> list[int]:
        pieces = map(self._encoding.decode_single_token_bytes, range(self._first_special))
        return [*map(len, pieces), *[0] * NUM_SPECIAL]


def _read_ranks(path: Path) -> dict[bytes, int]:
    content = read_bytes(path, f"--tokenizer-model {path}")
    ranks = {}
    try:
        for line in content.split(b"\n"):
            if line.strip():
                piece, rank = line.split()
                ranks[base64.b64decode(piece, validate=True)] = int(rank)
    except ValueError:
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
    for begin in range(0, len(text), CHUNK):
        chunk = text[begin : begin + CHUNK]
        runs = LONG_RUN.finditer(chunk)
        cuts = [cut for run in runs for cut in range(run.start() + RUN, run.end(), RUN)]
        for start, stop in pairwise([0, *cuts, len(chunk)]):
            yield chunk[start:stop]


class NullTokenizer(Tokenizer):
    """A tokenizer of numbers: `3 1 2` becomes the ids 3, 1, 2, all below --vocab-size.

    The EOD is the last id, --vocab-size - 1, unless --null-tokenizer-eod-id is given: as in
    Megatron since core 0.18; before, it was an extra id on top of --vocab-size.
    """

    def __init__(self, vocab_size: int, *, eod: int | None = None) -> None:
        self.eod = vocab_size - 1 if eod is None else eod
        self.bos = None
        self.vocab_size = vocab_size
        self.vocabulary = {}

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            known = word.isascii() and word.isdigit() and len(word) < 20
            if not known or int(word) >= self.vocab_size:
                raise UserError(
                    f"{word[:20]!r} is no token id: --tokenizer-type NullTokenizer takes numbers "
                    f"from 0 to {self.vocab_size - 1}, separated by blanks"
                )
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in ids)
