"""Encodes batches of raw documents, many texts to a call, into ids ready to be written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.corpus import BATCH_BYTES, DocumentTexts, OnBad, RawBatch, place_of, texts_of
from data.hugging_face_tokenizer import ends_in
from data.indexed_dataset import EncodedDocuments, dtype_for_vocab
from data.loss_mask import TRAINED
from data.sources import SourceKind
from data.tokenizer import Tokenizer, build_tokenizer
from data.tokenizer_config import TokenizerConfig
from paro.errors import UserError, about
from tools.preprocessing.chat_template import chat_template_of
from tools.preprocessing.conversations import TOOLS, conversation_of

NAMED_BAD = 3  # how many of the documents that were left out are named


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingPlan:
    """The settings with which a worker process encodes."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    skip_malformed: bool = False
    conversations: bool = False  # of one data set, under one key or as prompt and completion

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the data sets that are written."""
        together = "_".join(key for key in self.keys if key != TOOLS)
        return (together,) if self.conversations else self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts of documents, their bytes, bytes of their sources, bad documents and answers."""

    documents: int = 0
    num_bytes: int = 0
    advance: int = 0
    skipped: int = 0
    named: tuple[str, ...] = ()
    answers: int = 0  # of conversations
    ended: int = 0  # answers in which a token ends the generation

    def __add__(self, other: Tally) -> Tally:
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        return Tally(**{**sums, "named": sums["named"][:NAMED_BAD]})


class EncodedBatch(NamedTuple):
    """The encoded documents of a batch, per data set, in the order of the plan."""

    by_key: tuple[EncodedDocuments, ...]
    tally: Tally


@cache
def tokenizer_of(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of a configuration, one per process."""
    return build_tokenizer(config)


@cache
def ends_of(config: TokenizerConfig) -> tuple[int, ...]:
    """Return the ids that stop a generation with the tokenizer, and the folder that it is in."""
    ends = {tokenizer_of(config).eod}
    path = Path(config.on_this_machine().tokenizer_model or "")
    if path.exists():
        folder = path if path.is_dir() else path.parent
        ends |= ends_in(folder / "generation_config.json")
    return (*sorted(ends),)


def ended_answers(documents: EncodedDocuments, ends: Sequence[int]) -> tuple[int, int]:
    """Count answers, each a run of answered tokens, and how many of them have an end."""
    assert documents.loss_mask is not None, "conversations have a loss mask"
    is_answered = documents.loss_mask == TRAINED
    begins = is_answered & ~np.concatenate([[False], is_answered[:-1]])
    numbers = np.cumsum(begins)
    with_end = numbers[is_answered & np.isin(documents.ids, ends)]
    return int(begins.sum()), len(np.unique(with_end))


def prepare(plan: EncodingPlan) -> None:
    """Load tokenizer and chat template in this process; `UserError` for a mistake in them."""
    tokenizer_of(plan.tokenizer)
    if plan.conversations:
        chat_template_of(plan.tokenizer)


def tasks_of(batches: Iterable[RawBatch]) -> Iterator[list[RawBatch]]:
    """Yield batches grouped into tasks: small texts together, since each task has an overhead."""
    together: list[RawBatch] = []
    size = 0
    for batch in batches:
        together.append(batch)
        size += len(batch.content) if isinstance(batch.content, bytes) else BATCH_BYTES
        if size >= BATCH_BYTES:
            yield together
            together, size = [], 0
    if together:
        yield together


def encode_all(plan: EncodingPlan, batches: Sequence[RawBatch]) -> list[EncodedBatch]:
    """Return the function that a worker runs on a task."""
    return [encode(plan, batch) for batch in batches]


def encode(plan: EncodingPlan, batch: RawBatch) -> EncodedBatch:
    """Return the ids of a batch; `UserError` names the position of a bad text."""
    bad: list[str] = []
    on_bad = bad.append if plan.skip_malformed else None
    chats = plan.conversations
    optional = (TOOLS,) if chats else ()
    texts = texts_of(batch, plan.keys, on_bad, as_they_are=chats, optional=optional)
    documents = list(texts)
    if plan.conversations:
        by_key: tuple[EncodedDocuments, ...] = (_conversations(plan, batch, documents, on_bad),)
    else:
        by_key = tuple(
            _encode_key(plan, batch, documents, [texts.by_key[number] for texts in documents])
            for number in range(len(plan.keys))
        )
    whole = 0 if batch.unfinished else len(by_key[0].sequences)
    answers, ended = (0, 0) if not chats else ended_answers(by_key[0], ends_of(plan.tokenizer))
    tally = Tally(
        documents=whole,
        num_bytes=sum(texts.num_bytes for texts in documents),
        advance=batch.advance,
        skipped=len(bad),
        named=tuple(bad[:NAMED_BAD]),
        answers=answers,
        ended=ended,
    )
    return EncodedBatch(by_key, tally)


def _conversations(
    plan: EncodingPlan, batch: RawBatch, documents: Sequence[DocumentTexts], on_bad: OnBad | None
) -> EncodedDocuments:
    """Return each conversation as a document of one sequence."""
    tokenizer, template = tokenizer_of(plan.tokenizer), chat_template_of(plan.tokenizer)
    sequences, masks = [], [np.empty(0, np.uint8)]
    for document in documents:
        try:
            conversation = conversation_of(
                plan.keys, document.by_key, from_columns=not isinstance(batch.content, bytes)
            )
            ids, loss_mask = template.encode(conversation)
        except UserError as error:
            message = f"{place_of(batch.chunk, document.number)}: {error}"
            if on_bad is None:
                raise UserError(message) from error
            on_bad(message)
            continue
        if plan.append_eod and ids[-1] != tokenizer.eod:
            ids.append(tokenizer.eod)
            is_answer = conversation.is_answer(len(conversation.messages) - 1)
            loss_mask = np.append(loss_mask, np.uint8(is_answer))
        sequences.append(ids)
        masks.append(loss_mask)
    return EncodedDocuments(
        _ids(sequences, tokenizer.vocab_size, batch),
        np.array([len(ids) for ids in sequences], dtype=np.int32),
        np.ones(len(sequences), dtype=np.int64),
        loss_mask=np.concatenate(masks),
    )


def _encode_key(
    plan: EncodingPlan,
    batch: RawBatch,
    documents: Sequence[DocumentTexts],
    texts: Sequence[list[str]],
) -> EncodedDocuments:
    """Encode the documents under one key; an empty text has neither ids nor an end."""
    tokenizer = tokenizer_of(plan.tokenizer)
    flat = [text for by_document in texts for text in by_document if text]
    try:
        encoded = iter(tokenizer.encode_batch(flat))
    except UserError:
        _name_the_bad_one(tokenizer, batch, documents, texts)
        raise
    continued = batch.chunk.kind is SourceKind.TEXT and batch.first > 0
    prefix = [] if continued else list(tokenizer.text_prefix)
    sequences: list[list[int]] = []
    counts = []
    for by_document in texts:
        before = len(sequences)
        for ids in (next(encoded) for text in by_document if text):
            if ids:
                sequences.append(prefix + ids if prefix else ids)
        if plan.append_eod and not batch.unfinished:
            if len(sequences) > before:
                sequences[-1].append(tokenizer.eod)
            elif continued:
                sequences.append([tokenizer.eod])
        counts.append(len(sequences) - before)
    return EncodedDocuments(
        _ids(sequences, tokenizer.vocab_size, batch),
        np.array([len(ids) for ids in sequences], dtype=np.int32),
        np.array(counts, dtype=np.int64),
        batch.unfinished,
    )


def _ids(
    sequences: Iterable[list[int]], vocab_size: int, batch: RawBatch
) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
    """Return all ids concatenated in the type of the data set, each below `vocab_size`."""
    dtype = dtype_for_vocab(vocab_size)
    together = array("q")
    for ids in sequences:
        together.fromlist(ids)  # the fastest way to convert a list
    wide = np.frombuffer(together, dtype=np.int64)
    for extreme in (int(wide.min(initial=0)), int(wide.max(initial=0))):
        if not 0 <= extreme < min(vocab_size, np.iinfo(dtype).max + 1):
            raise UserError(
                f"{place_of(batch.chunk, batch.first + 1)} or a later line becomes token id "
                f"{extreme}, and the tokenizer has only {vocab_size}: its ids and its size "
                "contradict each other"
            )
    return wide.astype(dtype)


def _name_the_bad_one(
    tokenizer: Tokenizer,
    batch: RawBatch,
    documents: Sequence[DocumentTexts],
    texts: Sequence[list[str]],
) -> None:
    """Raise for the first document that the tokenizer rejects."""
    for document, by_document in zip(documents, texts, strict=True):
        for text in by_document:
            with about(f"{place_of(batch.chunk, document.number)}: "):
                tokenizer.encode(text)
