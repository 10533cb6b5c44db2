"""Several data sets at once: all get their names at the end, or none."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from data.indexed_dataset import IndexedDatasetWriter
from tests.tools.test_preprocess_data import NULL, both_files, write_lines
from tools.preprocess_data import main


@pytest.mark.parametrize("failing", ["title", "body"])
def test_a_key_that_cannot_be_finished_leaves_all_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"title": "1", "body": "2 3"})
    prefix = tmp_path / "out" / "x"
    flags = ["--input", str(path), "--output-prefix", str(prefix), "--workers", "1", *NULL]
    keys = ["--json-keys", "title", "body"]
    main([*flags, *keys])
    before = [both_files(prefix, key) for key in ("title", "body")]
    write_index = IndexedDatasetWriter._write_index

    def fail(self: IndexedDatasetWriter, place: Path) -> None:
        if failing in self.prefix:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_index(self, place)

    monkeypatch.setattr(IndexedDatasetWriter, "_write_index", fail)
    told = f"{prefix}_{failing}_document.bin cannot be written: No space left on device"
    with pytest.raises(OSError, match=re.escape(told)):
        main([*flags, *keys, "--append-eod"])
    assert [both_files(prefix, key) for key in ("title", "body")] == before
    assert len(list(prefix.parent.iterdir())) == 6
