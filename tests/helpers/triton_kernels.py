"""Runs Triton's kernels on a CPU by its interpreter, and compiles them for GPUs without one."""

# The interpreter is chosen by an environment variable when Triton is first imported, so conftest.py
# sets it where there is no GPU; what compiles or needs a GPU has a process of its own.

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from model import fusion
from paro.optim import adamw
from paro.quantization import blocks
from tests.helpers.processes import python_apart


def skip_on_gpus() -> None:
    """There Triton does not interpret, and tests marked `gpu` compare the kernels themselves."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here: tests marked gpu run the kernels on it")


@contextmanager
def interpreter() -> Iterator[None]:
    """In the block a CPU has the kernels, interpreted."""
    skip_on_gpus()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion, "DEVICES", {"cpu"})
        patch.setattr(adamw, "TRITON_DEVICES", {"cpu"})
        patch.setattr(blocks, "DEVICES", {"cpu"})
        _let_scalars_be_indices(patch)
        forget_choices()
        try:
            yield
        finally:
            forget_choices()


def _let_scalars_be_indices(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.6, with torch 2.11, takes int() of an array of one, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    as_it_is = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        as_it_is(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


@contextmanager
def bytes_by_kernel() -> Iterator[dict[str, int]]:
    """What the kernels that the interpreter runs in the block read and write, by their names.

    A dispatch mode sees nothing of them.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    moved: dict[str, int] = {}
    running: list[str] = []
    launch = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        moved[running[-1]] += int(mask.data.sum()) * size

    def launched(grid: Any, *args: Any, **kwargs: Any) -> None:
        running.append(grid.fn.__name__)
        moved.setdefault(running[-1], 0)
        with _disable_current_modes():  # it copies arguments
            launch(grid, *args, **kwargs)
        running.pop()

    def loaded(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return load(builder, pointers, mask, *others)

    def stored(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return store(builder, pointers, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        patch.setattr(InterpreterBuilder, "create_masked_load", loaded)
        patch.setattr(InterpreterBuilder, "create_masked_store", stored)
        yield moved


def forget_choices() -> None:
    fusion.usable_kernels.cache_clear()
    adamw.choose_adamw.cache_clear()
    blocks.choose_kernels.cache_clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The arguments of a kernel in their order, by names: types, and constants' values."""

    types: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)


def compile_kernel(module: str, name: str, signature: Signature, capability: int) -> str:
    """Compiles a kernel down to machine code, which the interpreter does not: it accepts more.

    Returns the code in PTX.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    types = {**signature.types, **dict.fromkeys(signature.constants, "constexpr")}
    places = {key: (list(types).index(key),) for key in signature.constants}
    source = ASTSource(
        getattr(import_module(module), name),
        signature=types,
        constexprs={places[key]: value for key, value in signature.constants.items()},
    )
    code = compiled(source, target=GPUTarget("cuda", capability, 32)).asm
    assert f".target sm_{capability}" in code["ptx"]
    assert len(code["cubin"]) > 1000
    ptx: str = code["ptx"]
    return ptx


_CALL_EACH = """
import importlib, json, sys
_, function, arguments, *modules = sys.argv
for module in modules:
    getattr(importlib.import_module(f"tests.{module}"), function)(*json.loads(arguments))
print("called")
"""


def run_apart(modules: Sequence[str], function: str, folder: Path, *arguments: int) -> None:
    """Calls a function of modules of tests in a process whose Triton never interpreted."""
    words = (function, json.dumps(arguments), *modules)
    out = python_apart(_CALL_EACH, *words, TRITON_CACHE_DIR=str(folder))
    assert out.endswith("called\n")
