"""Writes a SentencePiece BPE model, or GPT-2's two files, as a tokenizer.json with the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.tokenizer import BLANK, END, SentencePieceTokenizer, ordinary_pieces, read_gpt2
from paro.files.regular_file import read_bytes

# Test texts that expose differences between the two libraries.
_PROBES = (
    "a",
    " a",
    "The quick  brown fox, jumps.",
    "def f(x):\n\treturn x  # naïve 雪 🙂\n\n",
    "  two  \n   three\r\n",
    "ﬁ ½ ①",  # normalization would change these
    "",
)


def write_tokenizer_json(model: Path, folder: Path, *, begins_texts: bool = False) -> bool:
    """Write tokenizer.json and tokenizer_config.json; False if ids would differ.

    Ids differ if a model normalizes text or is not BPE. With `begins_texts` the BOS token is added
    to each text.
    """
    from sentencepiece import SentencePieceProcessor
    from tokenizers.processors import TemplateProcessing

    try:
        processor = SentencePieceProcessor(model_proto=read_bytes(model))
    except (OSError, RuntimeError):
        return False  # LLaMA-3's tokenizer.model is in tiktoken's format
    pieces = ordinary_pieces(processor)
    if any(not processor.get_score(i).is_integer() for i in pieces.values()):
        return False  # the scores of a BPE model must be the indices of its merges
    whole = _tokenizer(processor)
    original = SentencePieceTokenizer(str(model))
    texts = [piece.replace(BLANK, " ") for piece in pieces]
    for text in (*_PROBES, *("".join(texts[i : i + 64]) for i in range(0, len(texts), 64))):
        if list(whole.encode(text, add_special_tokens=False).ids) != original.encode(text):
            return False
    if begins_texts and original.bos is not None:
        piece = processor.id_to_piece(original.bos)
        whole.post_processor = TemplateProcessing(
            single=[piece, "$A"],
            pair=[piece, "$A", f"{piece}:1", "$B:1"],
            special_tokens=[(piece, original.bos)],
        )
    ids = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unk": processor.unk_id()}
    _save(whole, folder, {role: processor.id_to_piece(i) for role, i in ids.items() if i >= 0})
    return True


def write_gpt2_tokenizer_json(vocab_file: Path, merge_file: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for GPT-2's two files."""
    _save(read_gpt2(vocab_file, merge_file), folder, dict.fromkeys(("bos", "eos", "unk"), END))


def _save(tokenizer: Any, folder: Path, roles: Mapping[str, str]) -> None:
    """Write the two files; `roles` are the texts of special tokens, by a role such as `eos`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": text for role, text in roles.items()},
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(fields, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer(processor: Any) -> Any:
    """Return the model as a tokenizer of the tokenizers library."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    pieces = ordinary_pieces(processor)
    scores = {text: processor.get_score(number) for text, number in pieces.items()}
    ids = range(processor.get_piece_size())
    vocab = {processor.id_to_piece(i): i for i in ids}
    prefixed = processor.encode("a", out_type=str)[0].startswith(BLANK)
    unknown = processor.id_to_piece(processor.unk_id()) if processor.unk_id() >= 0 else None
    model = models.BPE(
        vocab=vocab,
        merges=generate_merges(pieces, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=any(processor.is_byte(i) for i in ids),
    )
    tokenizer = Tokenizer(model)
    spelling: list[Any] = [normalizers.Replace(" ", BLANK)]
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        spelling.insert(0, normalizers.Prepend(BLANK))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spelling)
    tokenizer.decoder = decoders.Sequence(steps)
    special = [i for i in ids if processor.is_control(i) or processor.is_unknown(i)]
    tokenizer.add_special_tokens(
        [AddedToken(processor.id_to_piece(i), special=True, normalized=False) for i in special]
    )
    return tokenizer
