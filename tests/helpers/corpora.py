"""Small corpora in the .bin/.idx format, read back as lists of ids, and a tokenizer of GPT-2's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, DTypeLike
from tokenizers import models, pre_tokenizers, trainers

from data.fingerprint import Fingerprint
from data.indexed_dataset import EncodedDocuments, IndexedDataset, IndexedDatasetWriter
from data.tokenizer import END

Documents = list[list[list[int]]]


def write_corpus(
    prefix: Path | str,
    documents: Iterable[Iterable[ArrayLike]],
    dtype: DTypeLike = "<u2",
    made_with: Fingerprint | None = None,
) -> Path:
    """Writes documents, each of any number of sequences of ids; returns the prefix."""
    with IndexedDatasetWriter(prefix, np.dtype(dtype), made_with) as writer:
        writer.add_documents(encoded(documents, writer.dtype))
    return Path(prefix)


def write_conversations(
    prefix: Path | str, conversations: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Path:
    """Writes conversations, each as its ids and the mark of each id; returns the prefix."""
    documents = encoded([[ids] for ids, _ in conversations])
    loss_mask = np.array([mark for _, marks in conversations for mark in marks], dtype=np.uint8)
    with IndexedDatasetWriter(prefix, np.dtype("<u2"), has_loss_mask=True) as writer:
        writer.add_documents(documents._replace(loss_mask=loss_mask))
    return Path(prefix)


def encoded(
    documents: Iterable[Iterable[ArrayLike]], dtype: DTypeLike = "<u2", *, unfinished: bool = False
) -> EncodedDocuments:
    """Documents as a writer takes them; sequences without ids are left out."""
    sequences = [[np.asarray(ids) for ids in document] for document in documents]
    kept = [[ids for ids in document if ids.size] for document in sequences]
    every = [ids for document in kept for ids in document]
    return EncodedDocuments(
        np.concatenate([np.array([], dtype), *every]).astype(dtype),
        np.array([ids.size for ids in every], dtype=np.int32),
        np.array([len(document) for document in kept], dtype=np.int64),
        unfinished,
    )


def read_corpus(prefix: Path | str) -> Documents:
    """All documents, each a list of sequences of ids."""
    indexed = IndexedDataset(prefix)
    bounds = indexed.document_indices().tolist()
    return [[indexed[i].tolist() for i in range(begin, end)] for begin, end in pairwise(bounds)]


def corpus_bytes(prefix: Path | str, *suffixes: str) -> list[bytes]:
    """The contents of a corpus's files: of all three, or of those with these suffixes."""
    names = suffixes or ("bin", "idx", "bin.crc")
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in names]


TEXT = "The fox's tail: it'll jump 123 times!\n\n  def f(x):\n\treturn x  # naïve 雪 🙂\r\n"


def write_gpt2(folder: Path) -> tuple[Path, Path]:
    """A vocabulary of 256 bytes, 44 merges and the end token, in the format of GPT-2's 50,257."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([TEXT] * 3, trainer)
    vocabulary = trained.get_vocab()
    vocabulary[END] = len(vocabulary)
    vocab_file, merge_file = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    vocab_file.write_text(json.dumps(vocabulary), encoding="utf-8")
    merges = json.loads(trained.to_str())["model"]["merges"]
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    merge_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return vocab_file, merge_file
