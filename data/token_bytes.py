"""How many bytes of text the pieces of a tokenizer of the tokenizers library stand for."""

from __future__ import annotations

import json
import re
from typing import Any

_ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")
_UNCHANGING = ("ByteFallback", "ByteLevel", "Fuse", "Strip")  # inside a text, beside single bytes


def bytes_of_pieces(tokenizer: Any, vocab_size: int) -> list[int] | None:
    """Return the bytes of every id; 0 for what is special or unknown.

    None if the decoder makes blanks up, as WordPiece's: then the text is not in the pieces.
    """
    described = json.loads(tokenizer.to_str())
    decoder, model = described["decoder"] or {}, described["model"]
    steps = decoder.get("decoders", [decoder])
    spelled = [_spelling(step) for step in steps]
    kinds = {step.get("type") for step in steps}
    counts = [0] * vocab_size
    for piece, number in tokenizer.get_vocab(with_added_tokens=False).items():
        text = piece
        for pair in spelled:
            if pair is None:
                return None
            text = text.replace(*pair)
        if "ByteLevel" in kinds:  # a character for every byte
            counts[number] = len(text)
        elif "ByteFallback" in kinds and _ONE_BYTE.fullmatch(text):
            counts[number] = 1
        else:
            counts[number] = len(text.encode())
    for number, token in tokenizer.get_added_tokens_decoder().items():
        counts[number] = 0 if token.special else len(token.content.encode())
    unknown = model.get("unk_token")
    for number in (model.get("unk_id"), unknown and tokenizer.token_to_id(unknown)):
        if number is not None:
            counts[number] = 0
    return counts


def _spelling(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return the text that a decoder step replaces and its replacement; None if not simple."""
    kind = step.get("type")
    if kind == "Metaspace":
        return step["replacement"], " "
    if kind == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return ("", "") if kind in _UNCHANGING else None
