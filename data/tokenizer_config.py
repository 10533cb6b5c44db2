"""The tokenizer flags as a dataclass, from the command line or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paro.errors import UserError, check_between, check_least, flag_of
from paro.files.object_cache import local_copy

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
GPT2_TYPE, NULL_TYPE = "GPT2BPETokenizer", "NullTokenizer"
FILE_FLAGS = ("tokenizer_model", "vocab_file", "merge_file")  # the arguments that name files
_MAX_ROWS = 2**31  # most rows of an embedding
TOKENIZER_TYPES = (
    *SENTENCEPIECE_TYPES,
    "HuggingFaceTokenizer",
    "TikTokenizer",
    GPT2_TYPE,
    NULL_TYPE,
)
# Megatron's tokenizer types that do not fit a plain-text language model, and what to use instead.
_REFUSED_TYPES = {
    **dict.fromkeys(
        ("BertWordPieceLowerCase", "BertWordPieceCase"),
        "it is BERT's and has no end of a document: tokenize again with HuggingFaceTokenizer or "
        "SentencePieceTokenizer",
    ),
    "MultimodalTokenizer": "the model reads text alone: give HuggingFaceTokenizer and the same "
    "--tokenizer-model",
    "NullMultimodalTokenizer": "the model reads text alone: give NullTokenizer",
    "SFTTokenizer": "tools/preprocess_data.py --apply-chat-template writes conversations: give "
    "HuggingFaceTokenizer and the same --tokenizer-model",
}
_NEEDED = {GPT2_TYPE: ("vocab_file", "merge_file"), NULL_TYPE: ("vocab_size",)}
_ONLY = {"vocab_file": GPT2_TYPE, "merge_file": GPT2_TYPE, "null_tokenizer_eod_id": NULL_TYPE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """The choice of a tokenizer; `vocab_size` is required for NullTokenizer, else checked."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    null_tokenizer_eod_id: int | None = None

    def __post_init__(self) -> None:
        flag = f"--tokenizer-type {self.tokenizer_type}"
        if self.tokenizer_type in _REFUSED_TYPES:
            raise UserError(f"{flag} is not supported: {_REFUSED_TYPES[self.tokenizer_type]}")
        if self.tokenizer_type not in TOKENIZER_TYPES:
            raise UserError(f"{flag} is unknown: choose one of {', '.join(TOKENIZER_TYPES)}")
        check_least(1, vocab_size=self.vocab_size)
        for name, kind in _ONLY.items():
            if self.tokenizer_type != kind and getattr(self, name) not in (None, ""):
                raise UserError(
                    f"{flag_of(name)} contradicts {flag}: it goes with {kind}; leave it "
                    "out or change the type"
                )
        if self.tokenizer_type == GPT2_TYPE and self.tokenizer_model is not None:
            raise UserError(
                f"{flag} is read from --vocab-file and --merge-file: leave --tokenizer-model out; "
                "a tokenizer.json goes with HuggingFaceTokenizer"
            )
        for name in _NEEDED.get(self.tokenizer_type, ("tokenizer_model",)):
            if getattr(self, name) is None:
                raise UserError(f"{flag} needs {flag_of(name)}")
        eod, size = self.null_tokenizer_eod_id, self.vocab_size
        if eod is not None and size is not None and not 0 <= eod < size:
            raise UserError(
                f"--null-tokenizer-eod-id {eod} must be at least 0 and below --vocab-size {size}"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """All files and folders that the tokenizer is read from."""
        return tuple(filter(None, (getattr(self, name) for name in FILE_FLAGS)))

    def on_this_machine(self) -> TokenizerConfig:
        """Return the configuration with local copies of files that are in an object store."""
        copies: dict[str, Any] = {
            name: local_copy(at) for name in FILE_FLAGS if (at := getattr(self, name)) is not None
        }
        return replace(self, **copies)


def tokenizer_config(flags: Mapping[str, Any]) -> TokenizerConfig | None:
    """Return the tokenizer that the flags select; None if no flag does.

    GPT-2's files without a type are enough: that type is Megatron's default.
    """
    values: dict[str, Any] = {each.name: flags.get(each.name) for each in fields(TokenizerConfig)}
    if values["tokenizer_type"] is None and (values["vocab_file"] or values["merge_file"]):
        values["tokenizer_type"] = GPT2_TYPE
    return None if values["tokenizer_type"] is None else TokenizerConfig(**values)


def saved_tokenizer(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the TokenizerConfig fields stored in a checkpoint; empty if it stores none.

    In the past NullTokenizer's --vocab-size did not count the EOD, an extra id. The checkpoint's
    own `vocab_size` counts all ids; if it is missing, the checkpoint is older than that change.
    """
    saved = dict(common.get("tokenizer") or {})
    if saved.get("tokenizer_type") == NULL_TYPE:
        saved["vocab_size"] = common.get("vocab_size", saved["vocab_size"] + 1)
    return saved


def padded_vocab_size(vocab_size: int, divisible_by: int, exactly: int | None = None) -> int:
    """Round `vocab_size` up to --make-vocab-size-divisible-by: rows of embedding and head.

    With --padded-vocab-size the number is `exactly`, and the multiple is ignored.
    """
    if exactly is not None:
        if exactly < vocab_size:
            raise UserError(
                f"--padded-vocab-size {exactly} is less than the {vocab_size} entries of the "
                f"vocabulary: give {vocab_size} or more, or leave it out"
            )
        check_between(1, _MAX_ROWS, padded_vocab_size=exactly)
        return exactly
    check_between(1, _MAX_ROWS, make_vocab_size_divisible_by=divisible_by)
    return -(-vocab_size // divisible_by) * divisible_by


def unpadded_vocab_size(common: Mapping[str, Any]) -> int | None:
    """Return the number of vocabulary rows without padding in a checkpoint's model; None: unknown.

    The tokenizer may have fewer ids. Older checkpoints have only the tokenizer's number of ids.
    """
    rows: int | None = common.get("unpadded_vocab_size", common.get("vocab_size"))
    return rows or saved_tokenizer(common).get("vocab_size")
