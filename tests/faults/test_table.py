"""The page of faults shows what its record holds."""

from __future__ import annotations

import json

from tests.faults.table import RECORD, table
from tests.helpers.ranks import ROOT


def test_the_page_has_the_table_of_the_record() -> None:
    outcomes = json.loads(RECORD.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert table(outcomes) in page
    assert f"{len(outcomes)} faults" in page
