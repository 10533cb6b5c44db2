"""Runs Triton's kernels on a CPU by its interpreter, and compiles them for GPUs without one."""

# The interpreter is chosen by an environment variable when Triton is first imported, so conftest.py
# sets it where there is no GPU; what compiles or needs a GPU has a process of its own.

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from model import fusion
from paro.optim import adamw, muon
from paro.quantization import blocks

CAPABILITIES = (80, 90, 100)  # of A100, H100 and H200, B200


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
    muon.choose_muon_kernels.cache_clear()
    blocks.choose_kernels.cache_clear()


def compiled(kernel: Any, *args: Any, capabilities: tuple[int, ...], **options: Any) -> str:
    """The PTX of a kernel for what it is launched with, for the oldest GPU that runs it.

    Machine code is made for the GPUs that are asked for. The interpreter accepts more.
    """
    from triton.runtime.jit import mangle_type

    bound = kernel.signature.bind(
        *args, **{k: options[k] for k in kernel.arg_names if k in options}
    )
    bound.apply_defaults()
    given = bound.arguments
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
    constants |= {name: None for name, value in given.items() if value is None}
    types = {n: "constexpr" if n in constants else mangle_type(v) for n, v in given.items()}
    return _ptx(kernel, tuple(types.items()), tuple(constants.items()), capabilities)


@cache
def _ptx(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, object], ...],
    capabilities: tuple[int, ...],
) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    places = {(kernel.arg_names.index(name),): value for name, value in constants}
    source = ASTSource(kernel, signature=dict(types), constexprs=places)
    oldest = 90 if dict(constants).get("NATIVE") else 80  # which has fp8
    codes = {
        capability: compile_source(source, target=GPUTarget("cuda", capability, 32)).asm
        for capability in capabilities
        if capability >= oldest
    }
    for capability, code in codes.items():
        assert f".target sm_{capability}" in code["ptx"]
        assert len(code["cubin"]) > 1000
    ptx: str = codes[min(codes)]["ptx"]
    return ptx
