"""Opens untrusted files of torch.save: tensors are memory-mapped, and no code in them runs."""

from __future__ import annotations

import mmap
import pickle
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.serialization import (
    get_unsafe_globals_in_checkpoint,
    safe_globals,
    set_default_mmap_options,
)

from paro.checkpoint.convert.source import LazyTensor
from paro.errors import UserError, describe, open_files_limit
from paro.untrusted.regular_file import check_regular


class _Inert:
    """A substitute for every class that a file names: accepts all arguments and does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def load_torch_file(path: Path) -> Any:
    """Return the contents of a file, with its tensors memory-mapped.

    torch's weights-only unpickler makes plain data, tensors and namespaces. Everything else that
    the file names, functions included, becomes an inert object. `UserError` for bad files.
    """
    check_regular(path)
    try:
        names = get_unsafe_globals_in_checkpoint(str(path))
        inert = [(_Inert, name) for name in names if name != "argparse.Namespace"]
        with safe_globals([Namespace, *inert]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} names code that cannot be left out: nothing of it was run, and it is not read"
        ) from None
    except Exception as error:  # damage causes many kinds of errors
        if open_files_limit(error) is not None:
            raise
        raise UserError(f"{path} is missing, truncated or damaged ({describe(error)})") from (None)


@contextmanager
def fill_torch_file(path: Path) -> Iterator[Any]:
    """Map the contents of this project's own file: writes to its tensors change the file."""
    with safe_globals([Namespace]), set_default_mmap_options(mmap.MAP_SHARED):
        yield torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def is_weight(value: object) -> TypeGuard[Tensor]:
    """Return whether a value can be a parameter: a plain floating-point vector or matrix."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.is_floating_point()
        and value.ndim in (1, 2)
    )


def lazy(tensor: Tensor) -> LazyTensor:
    """Return a lazy tensor over a mapped tensor or a view of one; its rows are copied when read."""
    return LazyTensor(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        rows=lambda start, stop: tensor[start:stop].clone(memory_format=torch.contiguous_format),
    )
