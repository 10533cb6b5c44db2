"""What a run imports: libraries that take long are left to the runs that need them."""

from __future__ import annotations

import pytest

from tests.helpers.processes import python_apart
from tests.helpers.training import TINY

# torch.compile, DCP and transformers take as long to import as the rest of a start.
SLOW = ("torch._dynamo", "torch.distributed.checkpoint", "transformers", "matplotlib")
PROGRAM = f"""
import sys
from pretrain_llama import main
main()
print([name for name in {SLOW} if name in sys.modules])
"""


@pytest.mark.process
def test_a_run_without_checkpoints_imports_nothing_that_takes_long() -> None:
    flags = f"{TINY} --train-iters 1 --eval-iters 0".split()
    assert python_apart(PROGRAM, *flags).splitlines()[-1] == "[]"
