"""The study of recovery, small: a rank, and a node in its update, are killed and recover."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import study_recovery
from tools.bench.recovery import cases
from tools.bench.recovery.cases import Case

SMALL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 128 "
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --lr 0.001 --log-interval 1 --num-workers 0 --eval-iters 0 "
    "--peak-tflops 1 --distributed-timeout-minutes 1 --train-iters 60"
)


@pytest.mark.verify
@pytest.mark.root
@pytest.mark.ranks
def test_failures_are_recovered_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        name="small",
        nodes=2,
        ranks_per_node=2,
        strategy="III",
        kinds={"rank": 1, "node in update": 2, "rank in recovery": 1, "rank in local copy": 1},
    )
    monkeypatch.setattr(cases, "MODEL", SMALL)
    monkeypatch.setattr(study_recovery, "CASES", (case,))
    out = tmp_path / "study.json"
    words = ["--json", str(out), "--folder", str(tmp_path / "runs")]
    study_recovery.main(words)
    found = json.loads(out.read_text())
    assert len(found["failures"]) == 5
    assert all(failure["recovered"] for failure in found["failures"])
    assert max(failure["computed_again"] for failure in found["failures"]) <= 1
    # A rank may be killed before it prints what the others keep; the study says if more is missing.
    assert found["losses_compared"] >= 60 - len(found["failures"])


def test_every_number_of_nodes_divides_the_batch_of_an_elastic_case() -> None:
    assert not cases.CASES[0].agrees(["1.0", "2.0"], ["1.0", "2.000001"])
    elastic = next(case for case in cases.CASES if case.least_nodes < case.nodes)
    assert elastic.agrees(["1.0", "2.0"], ["1.0", "2.000001"])
    batch = int(elastic.flags(Path("x"))[elastic.flags(Path("x")).index("--global-batch-size") + 1])
    for nodes in range(elastic.least_nodes, elastic.nodes + 1):
        assert batch % (nodes * elastic.ranks_per_node) == 0
