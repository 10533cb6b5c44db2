"""Values of --input: files, folders, patterns and data sets; others are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from data import sources
from data.corpus import read_batches, texts_of
from data.sources import SourceKind, find_pieces, share_out
from tests.helpers.refusals import refused


def write(path: Path, text: str = "a") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_folder_and_a_pattern_stand_for_their_files_by_name(tmp_path: Path) -> None:
    names = ["b.txt", "a.jsonl", "deep/c.jsonl.gz", "d.txt.zst", "readme.md", "e.parquet.gz"]
    for name in names:
        write(tmp_path / name)
    found = [piece.path.removeprefix(f"{tmp_path}/") for piece in find_pieces([tmp_path])]
    assert found == ["a.jsonl", "b.txt", "d.txt.zst", "deep/c.jsonl.gz"]
    found = [Path(piece.path).name for piece in find_pieces([f"{tmp_path}/*.txt"])]
    assert found == ["b.txt"]


def test_sources_are_read_in_the_order_given(tmp_path: Path) -> None:
    paths = [write(tmp_path / "b.jsonl", '{"text": "b"}\n'), write(tmp_path / "a.txt")]
    assert [piece.path for piece in find_pieces(paths)] == [str(path) for path in paths]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv", "a.csv: give .txt (one document)"),
        ("none.txt", "none.txt is missing"),
        ("empty", "holds no file that is"),
        ("*.jsonl", "*.jsonl matches no file"),
        ("bad.parquet", "bad.parquet is not a Parquet file"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / "a.csv")
    write(tmp_path / "bad.parquet")
    (tmp_path / "empty").mkdir()
    refused(lambda: find_pieces([tmp_path / name]), message)


def found_texts(pieces: list[sources.Piece]) -> list[str]:
    batches = read_batches(pieces, ["text"])
    return [item.by_key[0][0] for batch in batches for item in texts_of(batch, ["text"])]


@pytest.mark.slow("imports datasets")
def test_a_data_set_on_disk(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [str(i) for i in range(50)], "id": [1] * 50})
    rows.save_to_disk(tmp_path / "alone")
    datasets.DatasetDict({"train": rows, "held": rows.select(range(3))}).save_to_disk(
        tmp_path / "splits"
    )
    (piece,) = find_pieces([tmp_path / "alone"])
    assert piece.kind is SourceKind.HUGGING_FACE
    shares = share_out([piece], 4)
    assert [len(found_texts(share)) > 0 for share in shares] == [True] * 4
    assert [text for share in shares for text in found_texts(share)] == [str(i) for i in range(50)]
    assert found_texts(find_pieces([tmp_path / "splits"], split="held")) == ["0", "1", "2"]
    told = "'test': give --dataset-split, one of train"
    refused(lambda: find_pieces([tmp_path / "splits"], split="test"), told)
    refused(lambda: list(read_batches([piece], ["body"])), "'body' ... text, id")


@pytest.mark.slow("imports datasets")
def test_a_data_set_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, config: str | None, *, split: str) -> datasets.Dataset:
        if name == "nobody/nothing":
            raise ConnectionError("no way\nto the hub")
        return datasets.Dataset.from_dict({"text": [f"{name} {config} {split}"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    pieces = find_pieces(["some/corpus-1.0"], config="en", split="held")
    assert found_texts(pieces) == ["some/corpus-1.0 en held"]
    refused(lambda: find_pieces(["nobody/nothing"]), "datasets does not find it: no way")


def test_shares_are_of_about_the_same_size(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": "one"}\n' * 1000)
    write(tmp_path / "b.txt", "x" * 5000)
    pieces = find_pieces([tmp_path])
    shares = share_out(pieces, 3)
    assert [piece.path for piece in shares[0]] == [pieces[0].path]
    sizes = [sum(piece.num_bytes for piece in share) for share in shares]
    assert sum(sizes) == sum(piece.num_bytes for piece in pieces)
    assert max(sizes) < 9000
    assert len(share_out([], 3)) == 3
