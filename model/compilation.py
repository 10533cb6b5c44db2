"""torch.compile of blocks: one graph, or one before and one after attention's core."""

# One graph serves all blocks: weights are inputs of the graph. Attention's core stays outside the
# graph if documents are separate, since every set of lengths would need its own graph, and if the
# core is recomputed or saves scores: the compiler would choose itself what to save for backward.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from model.config import LlamaConfig
from paro.errors import UserError

_MOST_GRAPHS = 64  # graphs at most of one part of a block; more end the run with an error


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile the function by a backend of torch.compile; graph breaks raise an error."""
    # Blocks with different frozen weights, and evaluation, each have their own graph.
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def check_compiler(config: LlamaConfig, device: torch.device) -> None:
    """Raise `UserError` if blocks cannot be compiled here, for example without a C++ compiler."""
    backend = config.torch_compile
    if backend is None:
        return
    if backend == "inductor" and config.fp8_format is not None and device.type == "cpu":
        raise UserError(  # torch 2.13, fp8 from bf16: parts of the operands, and then NaN
            "--torch-compile inductor computes wrong operands in fp8 on a CPU: leave it or "
            "--fp8-format out"
        )
    x = torch.ones(8, device=device, requires_grad=True)
    try:
        compiled(lambda x: x.sin() + 1.0, backend)(x).sum().backward()
    except Exception as error:  # whatever the backend, its compilers or the device's driver raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--torch-compile {backend} does not work on this {device.type}: {lines[0]}: install "
            "what is missing, or leave the flag out"
        ) from error
