"""Training with separate documents: flags reach the model; results do not depend on ranks."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, train

# With 10 ids a tenth of the tokens end a document.
FLAGS = f"{TINY} --vocab-size 10 --global-batch-size 8 --train-iters 3"
APART = f"{FLAGS} --eod-mask-loss --reset-position-ids --reset-attention-mask"


@pytest.mark.parametrize(
    "flag", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]
)
def test_every_flag_changes_what_is_learned(flag: str) -> None:
    plain, changed = train(FLAGS).steps, train(f"{FLAGS} {flag}").steps
    assert plain[-1].loss != changed[-1].loss
    assert changed[-1].loss == pytest.approx(plain[-1].loss, rel=0.2)


def losses(flags: str, group_size: int | None) -> list[float]:
    return [step.loss for step in train(flags, group_size=group_size).steps]


@pytest.mark.ranks
def test_ranks_make_no_difference() -> None:
    alone = losses(f"{APART} --recompute-granularity full", None)
    for found in run_ranks(losses, 4, APART, 2):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu() -> None:
    from model.llama import Llama
    from tests.model.test_documents import LENGTHS, draw, positions
    from tests.model.test_llama import CONFIGS, build

    model: Llama = build(CONFIGS["gqa of 2"])
    documents = {"positions_BS": positions(), "document_lengths": LENGTHS}
    expected = model(*draw(), **documents)
    documents["positions_BS"] = positions().cuda()
    found = model.cuda()(*(part.cuda() for part in draw()), **documents)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=0.0)
