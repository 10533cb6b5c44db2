"""GPT-2's byte-level BPE, from its two files: a JSON vocabulary and the ordered merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.hugging_face_tokenizer import LibraryTokenizer
from paro.errors import UserError, importing
from paro.untrusted.regular_file import check_regular
from paro.untrusted.schema import read_json

END = "<|endoftext|>"
VOCAB_FILE, MERGE_FILE = "vocab.json", "merges.txt"  # their names in a Hugging Face folder


def gpt2_tokenizer(vocab_file: str, merge_file: str) -> LibraryTokenizer:
    """Read `--vocab-file` and `--merge-file`, with the ids of Megatron's GPT2BPETokenizer.

    END ends documents. If a text contains END literally, it becomes that one id, as in
    transformers.
    """
    tokenizer = read_gpt2(Path(vocab_file), Path(merge_file))
    end = tokenizer.token_to_id(END)
    return LibraryTokenizer(tokenizer, f"--vocab-file {vocab_file}", eos=end, bos=end)


def read_gpt2(vocab_file: Path, merge_file: Path) -> Any:
    """Read the two files with the tokenizers library; `UserError` names a bad file."""
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
