"""Data sets are joined in the order of their names, exactly as if written at once."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.fingerprint import Fingerprint, read_fingerprint
from data.indexed_dataset import IndexedDataset
from tests.helpers.corpora import Documents, corpus_bytes, read_corpus, write_corpus
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
    assert main(["--input", str(folder), "--output-prefix", str(folder / "sub" / "all")]) == 0
    write_corpus(folder / "once", [document for corpus in corpora for document in corpus])
    assert corpus_bytes(folder / "sub" / "all") == corpus_bytes(folder / "once")


def test_sequences_in_another_order_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1], [2], [3], [4, 5]]])
    content = bytearray((folder / "a.idx").read_bytes())
    struct.pack_into("<4q", content, 34 + 4 * 4, 0, 4, 2, 6)
    (folder / "a.idx").write_bytes(content)
    assert main(["--input", str(folder), "--output-prefix", str(tmp_path / "x")]) == 2
    assert f"{folder / 'a.idx'} contradicts itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "message"),
    [("b.bin", "b.bin is missing, the other file"), ("b.idx", "b.idx is missing, the other")],
)
def test_half_a_data_set_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str, message: str
) -> None:
    for name in "ab":
        write_corpus(tmp_path / "in" / name, [[[1]]])
    (tmp_path / "in" / missing).unlink()
    assert main(["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "x")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_other_types_folders_and_targets_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1]]])
    before = (folder / "a.bin").read_bytes()
    cases = [
        (["--input", str(tmp_path / "none"), "--output-prefix", "x"], "is no folder"),
        (["--input", str(tmp_path), "--output-prefix", "x"], "holds no data set"),
        (["--input", str(folder), "--output-prefix", str(folder / "a")], "is one of the data sets"),
    ]
    for flags, message in cases:
        assert main(flags) == 2
        assert message in capsys.readouterr().err
    write_corpus(folder / "b", [[[70000]]], "<i4")
    assert main(["--input", str(folder), "--output-prefix", str(tmp_path / "x")]) == 2
    assert "holds int32" in capsys.readouterr().err
    assert (folder / "a.bin").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_damaged_part_is_refused_and_a_part_without_checksums_gets_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1, 2, 3]]])
    write_corpus(folder / "b", [[[4, 5]]])
    (folder / "b.bin").write_bytes(b"\x05\0\x05\0")
    write_corpus(tmp_path / "x", [[[9]]])
    flags = ["--input", str(folder), "--output-prefix", str(tmp_path / "x")]
    assert main(flags) == 2
    assert f"error: {folder / 'b'}.bin is damaged in bytes 0 to 4, " in capsys.readouterr().err
    assert read_corpus(tmp_path / "x") == [[[9]]]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["in", "x.bin", "x.bin.crc", "x.idx"]
    (folder / "b.bin.crc").unlink()
    assert main(flags) == 0
    assert read_corpus(tmp_path / "x") == [[[1, 2, 3]], [[5, 5]]]
    assert IndexedDataset(tmp_path / "x").has_checksums


def test_a_part_with_bad_document_indices_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    write_corpus(folder / "a", [[[1]], [[2]], [[3]]])
    index = (folder / "a.idx").read_bytes()
    (folder / "a.idx").write_bytes(index[:-24] + index[-16:-8] + index[-24:-16] + index[-8:])
    assert main(["--input", str(folder), "--output-prefix", str(tmp_path / "x")]) == 2
    assert f"{folder / 'a'}.idx contradicts itself, it is damaged" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def made(prefix: Path, digest: str | None) -> None:
    """A corpus made with the tokenizer of this digest."""
    made_with = None
    if digest is not None:
        made_with = Fingerprint(
            tokenizer_type="Llama2Tokenizer", file=f"{digest}.model", vocab_size=9, digest=digest
        )
    write_corpus(prefix, [[[1]]], made_with=made_with)


def test_corpora_of_two_tokenizers_are_refused_and_one_is_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = tmp_path / "in", tmp_path / "all"
    words = ["--input", str(folder), "--output-prefix", str(target)]
    for name in "ab":
        made(folder / name, "one")
    assert main(words) == 0
    assert "made with Llama2Tokenizer one.model (9 ids" in capsys.readouterr().out
    assert read_fingerprint(target) == read_fingerprint(folder / "a") is not None
    made(folder / "c", None)
    assert main(words) == 0
    assert "an unknown tokenizer: not all of them say" in capsys.readouterr().out
    assert read_fingerprint(target) is None
    made(folder / "d", "two")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"{folder / 'a'}.bin was made with Llama2Tokenizer one.model" in err
    assert f"{folder / 'd'}.bin with Llama2Tokenizer two.model" in err
    assert err.count("\n") == 1
