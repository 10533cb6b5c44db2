"""Data sets are joined in the order of their names, exactly as if written at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.fingerprint import Fingerprint, read_fingerprint
from data.indexed_dataset import IndexedDataset
from tests.helpers.commands import printed
from tests.helpers.corpora import Documents, corpus_bytes, read_corpus, write_corpus
from tests.helpers.refusals import refused
from tools.merge_datasets import main

SEQUENCE = st.lists(st.integers(0, 65535), min_size=1, max_size=5)
CORPORA = st.lists(st.lists(st.lists(SEQUENCE, max_size=3), max_size=6), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(corpora=CORPORA)
def test_joined_is_as_if_written_at_once(
    tmp_path_factory: pytest.TempPathFactory, corpora: list[Documents]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for number in reversed(range(len(corpora))):
        write_corpus(folder / f"part{number}", corpora[number])
    (folder / "notes.txt").write_text("not a data set")
    main(["--input", str(folder), "--output-prefix", str(folder / "sub" / "all")])
    write_corpus(folder / "once", [document for corpus in corpora for document in corpus])
    assert corpus_bytes(folder / "sub" / "all") == corpus_bytes(folder / "once")


def merged(source: Path, target: Path) -> None:
    main(["--input", str(source), "--output-prefix", str(target)])


def test_half_data_sets_other_types_folders_and_targets_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1]]])
    before = (folder / "a.bin").read_bytes()
    for source, target, told in (
        (tmp_path / "none", tmp_path / "x", f"--input {tmp_path / 'none'} is no folder"),
        (tmp_path, tmp_path / "x", "holds no data set"),
        (folder, folder / "a", f"--output-prefix {folder / 'a'}"),
    ):
        refused(partial(merged, source, target), told)
    for missing in ("b.bin", "b.idx"):
        (write_corpus(folder / "b", [[[1]]]).parent / missing).unlink()
        refused(lambda: merged(folder, tmp_path / "x"), f"{missing} is missing")
    write_corpus(folder / "b", [[[70000]]], "<i4")
    refused(lambda: merged(folder, tmp_path / "x"), "holds int32")
    assert (folder / "a.bin").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_damaged_part_is_refused_and_a_part_without_checksums_gets_them(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1, 2, 3]]])
    write_corpus(folder / "b", [[[4, 5]]])
    (folder / "b.bin").write_bytes(b"\x05\0\x05\0")
    write_corpus(tmp_path / "x", [[[9]]])
    told = f"{folder / 'b'}.bin is damaged in bytes 0 to 4,"
    refused(lambda: merged(folder, tmp_path / "x"), told)
    assert read_corpus(tmp_path / "x") == [[[9]]]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["in", "x.bin", "x.bin.crc", "x.idx"]
    (folder / "b.bin.crc").unlink()
    merged(folder, tmp_path / "x")
    assert read_corpus(tmp_path / "x") == [[[1, 2, 3]], [[5, 5]]]
    assert IndexedDataset(tmp_path / "x").has_checksums


def made(prefix: Path, digest: str | None, token_bytes: str | None = None) -> None:
    """A corpus made with the tokenizer of this digest."""
    made_with = None
    if digest is not None:
        made_with = Fingerprint(
            tokenizer_type="Llama2Tokenizer",
            file=f"{digest}.model",
            vocab_size=2,
            digest=digest,
            token_bytes=token_bytes,
        )
    write_corpus(prefix, [[[1]]], made_with=made_with)


def test_corpora_of_two_tokenizers_are_refused_and_one_is_carried(tmp_path: Path) -> None:
    folder, target = tmp_path / "in", tmp_path / "all"
    words = ("--input", folder, "--output-prefix", target)
    made(folder / "a", "one")
    made(folder / "b", "one", "0 3")
    assert "made with Llama2Tokenizer one.model (2 ids" in printed(main, *words)
    assert read_fingerprint(target) == read_fingerprint(folder / "b") is not None
    made(folder / "c", None)
    assert "an unknown tokenizer: not all of them say" in printed(main, *words)
    assert read_fingerprint(target) is None
    made(folder / "d", "two")
    told = (f"{folder / 'a'}.bin ... one.model", f"{folder / 'd'}.bin ... two.model")
    refused(lambda: merged(folder, target), *told)
