"""Classes of a GPU's kernels by their names: matrix products, attention, NCCL and others."""

from __future__ import annotations

import re
from functools import cache

MATRIX, ATTENTION, ELEMENTWISE = "matrix products", "attention", "elementwise, norms"
OPTIMIZER, COPIES, NCCL, OTHER = "optimizer", "copies", "NCCL", "other"
CLASSES = (MATRIX, ATTENTION, ELEMENTWISE, OPTIMIZER, COPIES, NCCL, OTHER)
NOT_COMPUTING = (NCCL, COPIES)

# The first that matches. The order matters: a flash kernel is built of cutlass templates, a fused
# triton kernel may have "gemm" or "copy" among its operations, and an optimizer's kernel is
# elementwise too.
_PATTERNS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (NCCL, r"^nccl"),
        (ATTENTION, r"flash|fmha|attention|sdpa"),
        (OPTIMIZER, r"adam|multi_tensor|sgd"),
        (MATRIX, r"^triton_tem_.*mm"),
        (ELEMENTWISE, r"^triton_"),
        (COPIES, r"direct_copy|batchedcopy|chunk_cat|split_with_sizes|^mem(cpy|set)"),
        (MATRIX, r"(?<!fb)gemm|gemv|nvjet|xmma|cutlass|splitkreduce|cublas|matmul"),
        (
            ELEMENTWISE,
            r"elementwise|reduce_kernel|norm|softmax|embedding|indexselect|index_|_scan"
            r"|fillfunctor|nll_loss|dropout|cross_entropy",
        ),
    )
)


@cache
def class_of(name: str) -> str:
    """Return the class of a kernel by its name; elementwise ones have no finer class."""
    plain = short_name(name)  # types of parameters may have the names of other classes
    return next((kind for kind, pattern in _PATTERNS if pattern.search(plain)), OTHER)


def short_name(name: str) -> str:
    """Return a kernel's name without its parameters and the namespaces of PyTorch."""
    if name.startswith(("Memcpy", "Memset")):
        return name  # in parentheses: from where to where
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth = 0
    for place, letter in enumerate(plain):
        if letter == "(" and depth == 0 and place > 0:
            plain = plain[:place]
            break
        depth += (letter in "<(") - (letter in ">)" and plain[place - 1] != "-")
    return plain.replace("at::native::", "").strip()
