"""Records which tokenizer made a corpus: a few fields in `<prefix>.tokenizer`, next to `.idx`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from data.tokenizer import build_tokenizer
from data.tokenizer_config import TokenizerConfig
from paro.errors import UserError, about
from paro.files.object_store import path_of
from paro.files.schema import read_json

_COUNTS = re.compile(r"(?:[0-9]{1,9} )*[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The identity of a tokenizer; `digest` decides equality, other fields are for messages.

    Equal digests mean that every id is the same piece and that the same id ends documents,
    regardless of tokenizer type, file or library version.
    """

    tokenizer_type: str
    file: str
    vocab_size: int
    digest: str
    # Counts of the bytes of text that ids 0, 1, ... stand for, blanks between; None: unknown.
    token_bytes: str | None = None

    def __post_init__(self) -> None:
        text = self.token_bytes
        if text is None:
            return
        if not _COUNTS.fullmatch(text) or text.count(" ") + 1 != self.vocab_size:
            raise UserError(f"token_bytes: must be {self.vocab_size} counts with blanks between")

    def write(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")

    def describe(self) -> str:
        name = f"{self.tokenizer_type} {self.file}".rstrip()
        return f"{name} ({self.vocab_size:,} ids, fingerprint {self.digest[:8]})"


@cache
def fingerprint_of(config: TokenizerConfig, *, with_bytes: bool = False) -> Fingerprint | None:
    """Return a tokenizer's fingerprint; None for NullTokenizer, whose ids fit any corpus.

    `with_bytes` adds the bytes of text per id, which takes a second for a vocabulary of 256,000.
    """
    tokenizer = build_tokenizer(config)
    if not tokenizer.vocabulary:
        return None
    counts = tokenizer.token_bytes() if with_bytes else None
    for number in (tokenizer.eod, tokenizer.bos):  # either may be an ordinary piece
        if counts is not None and number is not None:
            counts[number] = 0
    # Tokenizer files of published models share one name; only their folders differ.
    file = "/".join(Path(config.files[0]).absolute().parts[-2:]) if config.files else ""
    return Fingerprint(
        tokenizer_type=config.tokenizer_type,
        file=file,
        vocab_size=tokenizer.vocab_size,
        digest=digest_of(tokenizer.vocabulary, tokenizer.eod),
        token_bytes=None if counts is None else " ".join(map(str, counts)),
    )


def digest_of(vocabulary: Mapping[str, int], eod: int) -> str:
    """Hash the pieces by id; corpora store this hash, so this function must never change."""
    digest = hashlib.blake2b(digest_size=16)
    for piece, number in sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0])):
        text = piece.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d %b" % (number, len(text), text))
    digest.update(b"end %d" % eod)
    return digest.hexdigest()


def fingerprint_path(prefix: str | Path) -> Path:
    return path_of(f"{prefix}.tokenizer")


def read_fingerprint(prefix: str | Path) -> Fingerprint | None:
    """Return the fingerprint of a corpus; None if it has none, like corpora made by Megatron."""
    path = fingerprint_path(prefix)
    if not path.exists():
        return None
    remedy = "write the corpus again, or remove this file to go without the check of its tokenizer"
    with about(suffix=f"; {remedy}"):
        return _shared(read_json(path, Fingerprint))


@cache
def _shared(fingerprint: Fingerprint) -> Fingerprint:
    """Return one object for equal fingerprints, of which thousands of corpora may have one."""
    return fingerprint


def check_tokenizer(
    prefix: str | Path, made_with: Fingerprint | None, tokenizer: TokenizerConfig | None
) -> None:
    """Raise `UserError` if another tokenizer made a corpus, as far as both are known."""
    other = None if made_with is None or tokenizer is None else fingerprint_of(tokenizer)
    if made_with is None or other is None or other.digest == made_with.digest:
        return
    raise UserError(
        f"{prefix}.bin was made with {made_with.describe()}, and the tokenizer given is "
        f"{other.describe()}: give the first one, or write the corpus again with the second; if "
        f"you know that their ids mean the same, remove {fingerprint_path(prefix)}"
    )
