"""Preprocessed and merged files equal those of megatron-core's own writer, byte for byte."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.corpora import corpus_bytes
from tools import merge_datasets, preprocess_data

NULL = ["--tokenizer-type", "NullTokenizer"]


@pytest.fixture(scope="module")
def megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    gc.freeze()  # its builder collects garbage, among all that its import brings
    return module


def write_as_megatron(
    megatron: Any, prefix: Path, documents: list[list[list[int]]], *, eod: int, append_eod: bool
) -> None:
    """The loop of Megatron-LM's tools/preprocess_data.py."""
    dtype = megatron.DType.optimal_dtype(eod + 1)
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in document:
            if sentence:
                ids += sentence
                lengths.append(len(sentence))
        if ids and append_eod:
            ids.append(eod)
            lengths[-1] += 1
        builder.add_document(np.array(ids, dtype=np.int64), lengths)
    builder.finalize(f"{prefix}.idx")


def write_lines(path: Path, documents: list[list[list[int]]]) -> Path:
    texts = [[" ".join(map(str, ids)) for ids in document] for document in documents]
    lines = [json.dumps({"text": text[0] if len(text) == 1 else text}) for text in texts]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# The type of the ids changes at these sizes, or just not yet.
SIZES = st.sampled_from([10, 65498, 65499, 65500, 70000])
DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3),
    min_size=1,
    max_size=8,
).filter(lambda documents: any(ids for document in documents for ids in document))
QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slow("preprocesses fifteen corpora")
@QUICK
@given(documents=DOCUMENTS, size=SIZES, append_eod=st.booleans(), parts=st.integers(1, 3))
def test_preprocessed_files_are_megatrons(
    megatron: Any,
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[list[int]]],
    size: int,
    append_eod: bool,
    parts: int,
) -> None:
    folder = tmp_path_factory.mktemp("oracle")
    write_as_megatron(megatron, folder / "theirs", documents, eod=size, append_eod=append_eod)
    path = write_lines(folder / "a.jsonl", documents)
    flags = ["--input", str(path), "--output-prefix", str(folder / "ours"), "--workers", "1"]
    flags += [*NULL, "--vocab-size", str(size + 1), "--partitions", str(parts)]
    preprocess_data.main([*flags, "--append-eod"] if append_eod else flags)
    ours, theirs = folder / "ours_text_document", folder / "theirs"
    assert corpus_bytes(ours, "bin", "idx") == corpus_bytes(theirs, "bin", "idx")


@QUICK
@given(corpora=st.lists(DOCUMENTS, min_size=1, max_size=3))
def test_joined_files_are_megatrons(
    megatron: Any, tmp_path_factory: pytest.TempPathFactory, corpora: list[list[list[list[int]]]]
) -> None:
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "in").mkdir()
    joined = megatron.IndexedDatasetBuilder(
        f"{folder / 'theirs'}.bin", dtype=megatron.DType.optimal_dtype(11)
    )
    for number, documents in enumerate(corpora):
        prefix = folder / "in" / str(number)
        write_as_megatron(megatron, prefix, documents, eod=10, append_eod=True)
        joined.add_index(str(prefix))
    joined.finalize(f"{folder / 'theirs'}.idx")
    flags = ["--input", str(folder / "in"), "--output-prefix", str(folder / "ours")]
    merge_datasets.main(flags)
    ours, theirs = folder / "ours", folder / "theirs"
    assert corpus_bytes(ours, "bin", "idx") == corpus_bytes(theirs, "bin", "idx")
