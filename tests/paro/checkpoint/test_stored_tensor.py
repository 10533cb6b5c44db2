"""A saved tensor is found in its bytes, without a copy, and no code runs."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paro.checkpoint.storage import tensor_in
from paro.errors import UserError
from tests.paro.checkpoint.toy_run import Harmful


def saved(value: Any) -> memoryview:
    stream = io.BytesIO()
    torch.save(value, stream)
    return memoryview(bytearray(stream.getvalue()))


def shares_memory_with(content: memoryview, tensor: Tensor) -> bool:
    whole = torch.frombuffer(content, dtype=torch.uint8)
    return 0 <= tensor.data_ptr() - whole.data_ptr() < len(content)


WIDE = torch.randn(6, 8)


@pytest.mark.parametrize(
    "tensor",
    [
        WIDE,
        WIDE.bfloat16(),
        WIDE.half(),
        WIDE.double(),
        WIDE[2:5, 1:],
        WIDE.t(),
        torch.tensor(3.5),
        torch.randn(2, 3, 4),
        torch.arange(5),
        torch.nn.Parameter(WIDE),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_a_tensor_is_a_view_of_the_bytes(tensor: Tensor) -> None:
    content = saved(tensor)
    found = tensor_in(content)
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)
    assert shares_memory_with(content, found)


def rewritten(content: memoryview, **entries: bytes) -> memoryview:
    """The same archive with other entries, by the ends of their names."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, entries.get(Path(name).stem, old.read(name)))
    return memoryview(bytearray(stream.getvalue()))


def test_bytes_of_another_order_are_refused() -> None:
    other = {"little": b"big", "big": b"little"}[sys.byteorder]
    with pytest.raises(UserError, match="order"):
        tensor_in(rewritten(saved(WIDE), byteorder=other))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(UserError, match=r"^refused: not a tensor but a dict$"):
        tensor_in(saved({"a": WIDE}))


def test_no_code_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    pickled = pickle.dumps(Harmful(os.mkdir, str(made)), 2)
    with pytest.raises(UserError, match=r"^refused: not a tensor, and no code in it was run$"):
        tensor_in(rewritten(saved(WIDE), data=pickled))
    assert not made.exists()


def test_nothing_beyond_the_bytes_is_reached() -> None:
    content = saved(WIDE)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        pickled = archive.read("archive/data.pkl")
    sizes = b"K\x06K\x08\x86"
    assert pickled.count(sizes) == 1
    larger = rewritten(content, data=pickled.replace(sizes, b"K\x06K\x7f\x86"))
    with pytest.raises(RuntimeError, match=r"out of bounds|not resizable"):
        tensor_in(larger)
    with pytest.raises((RuntimeError, UserError)):
        tensor_in(content[:-30])
