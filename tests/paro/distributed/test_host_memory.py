"""A CPU rank's step gets the memory that the last one freed."""

from __future__ import annotations

import pytest

from tests.helpers.warm_python import run_python

PAGES = 1024  # of 4 KB, in a tensor

# Page faults of 20 steps that allocate 3 tensors of 4 MB, keep one and free all.
STEPS = """
import resource, torch
from paro.distributed.process_group import keep_freed_memory

def step():
    tensors = [torch.ones(2**20) for _ in range(3)]
    del tensors[1]
    return sum(float(x[0]) for x in tensors)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
plain = faults()
keep_freed_memory()
step()
print(plain, faults())
"""


@pytest.mark.process
def test_the_next_step_has_no_page_faults() -> None:
    done = run_python(["-c", STEPS])
    assert done.returncode == 0, done.stderr
    plain, keeping = map(int, done.stdout.split())
    assert plain > 4 * PAGES, "glibc keeps them by itself"
    assert keeping < PAGES / 4
