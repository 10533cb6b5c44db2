"""The page of faults shows what its record holds."""

from __future__ import annotations

import json

from tests.faults.table import RECORD, table
from tests.helpers.ranks import ROOT


def test_a_row_has_the_median_and_the_most_of_a_kind() -> None:
    one = {"fault": "x", "end": "status 1", "seconds_to_end": 1.0, "seconds_to_step": None}
    other = one | {"end": 'status -9: "1"', "seconds_to_end": 4.0, "seconds_to_step": 2.0}
    assert (
        table([one, other]).splitlines()[-1] == "| x | 2 | status -9, 1 | 2.5, at most 4.0 | 2.0 |"
    )


def test_the_page_has_the_table_of_the_record() -> None:
    outcomes = json.loads(RECORD.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert table(outcomes) in page
    assert f"{len(outcomes)} faults" in page
