"""Partitions of a corpus on disk: each is complete or absent, even if a process is killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, remove_dataset
from data.sources import SourceChunk
from data.tokenizer import build_tokenizer
from paro.errors import UserError, about, writing
from paro.files.atomic_file import replacing
from paro.files.schema import read_json
from tools.preprocessing.chat_template import chat_template_of
from tools.preprocessing.conversations import without_nulls
from tools.preprocessing.encode import EncodingPlan, Tally

MOST_PARTITIONS = 10_000


class Partitions:
    """The folder that holds finished partitions until all are complete.

    A run that finds the folder of an identical run continues it; a different one is refused.
    """

    def __init__(
        self, output_prefix: str, plan: EncodingPlan, shares: Sequence[Sequence[SourceChunk]]
    ) -> None:
        self.folder = Path(f"{output_prefix}_partitions")
        self._names = plan.names
        self._count = len(shares)
        self._open(_description(plan, shares))

    def _open(self, description: dict[str, Any]) -> None:
        file = self.folder / "run.json"
        if file.exists() and self._read(file, dict[str, Any]) != without_nulls(description):
            raise UserError(
                f"{self.folder} holds partitions of a run with another input, tokenizer or flags: "
                "remove it, or repeat that run"
            )
        with writing(f"{self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(".*.tmp"):  # of a run that was killed
                left_over.unlink()
            with replacing(file) as temporary:
                temporary.write_text(json.dumps(description, indent=1), encoding="utf-8")

    def _read(self, file: Path, kind: Any) -> Any:
        with about(suffix=f"; remove {self.folder}, and begin again"):
            return without_nulls(read_json(file, kind))  # earlier versions have fewer fields

    def prefixes(self, number: int) -> list[str]:
        """Return the prefixes of one partition's data sets."""
        return [str(self.folder / f"{number:05d}_{name}_document") for name in self._names]

    def finished(self, number: int) -> Tally | None:
        """Return the tally of a partition; None if the partition is not complete."""
        file = self._marker(number)
        if not file.exists():
            return None
        tally: Tally = self._read(file, Tally)
        return tally

    def finish(self, number: int, tally: Tally) -> None:
        """Mark a partition whose files have been written."""
        with replacing(self._marker(number)) as temporary:
            temporary.write_text(json.dumps(asdict(tally)), encoding="utf-8")

    def join(self, writers: Sequence[IndexedDatasetWriter]) -> None:
        """Append all partitions in order to the data sets of the whole corpus."""
        for number in range(self._count):
            for writer, prefix in zip(writers, self.prefixes(number), strict=True):
                writer.add_dataset(IndexedDataset(prefix))

    def remove(self) -> None:
        for number in range(self._count):
            self._marker(number).unlink()
            for prefix in self.prefixes(number):
                remove_dataset(prefix)
        (self.folder / "run.json").unlink()
        self.folder.rmdir()

    def _marker(self, number: int) -> Path:
        return self.folder / f"{number:05d}.finished.json"


def _description(plan: EncodingPlan, shares: Sequence[Sequence[SourceChunk]]) -> dict[str, Any]:
    """Return everything that determines the content of each partition's files."""
    places = map(Path, plan.tokenizer.files)
    files = [file for place in places for file in (place, *sorted(place.rglob("*")))]
    stamps = {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
        if path.is_file()
    }
    chunks = [[{**asdict(chunk), "kind": chunk.kind.name} for chunk in share] for share in shares]
    described = asdict(plan)
    template = chat_template_of(plan.tokenizer).text if plan.conversations else None
    described["conversations"] = template
    if plan.tokenizer.tokenizer_type == "NullTokenizer":
        # Older versions put its end of a document above --vocab-size; such partitions differ.
        described["tokenizer"]["null_tokenizer_eod_id"] = build_tokenizer(plan.tokenizer).eod
    description = {"plan": described, "tokenizer_files": stamps, "partitions": chunks}
    as_read: dict[str, Any] = json.loads(json.dumps(description))
    return as_read
