"""Weights that are infinite or no number, stored or made by a cast, are refused by their name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from paro.checkpoint.convert.hugging_face import write_hugging_face
from paro.checkpoint.convert.megatron import write_megatron
from paro.checkpoint.convert.native import open_native, write_native
from paro.checkpoint.convert.source import Source
from paro.checkpoint.convert.tensor_files import lazy
from tests.helpers.refusals import refused
from tests.model.values import SMALL
from tests.paro.checkpoint.convert.folders import random_tensors
from tests.tools.untrained import convert
from tools.generate import load_model

ROWS = SMALL.vocab_size


# Of each format: what the weight is called, and what writes it without a check.
FORMATS: dict[str, tuple[str, Callable[[Source, Path], object]]] = {
    "hf": (
        "model.layers.0.mlp.down_proj.weight",
        lambda source, folder: write_hugging_face(source, folder),
    ),
    "paro": (
        "blocks.0.w_down",
        lambda source, folder: write_native(source, folder, folder, rows=ROWS),
    ),
    "megatron": (
        "decoder.layers.0.mlp.linear_fc2.weight",
        lambda source, folder: write_megatron(source, folder, rows=ROWS, divisible_by=1),
    ),
}


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize(
    ("value", "flags", "told"),
    [
        (math.nan, "", "infinity or NaN"),
        (-math.inf, "--dtype bf16", "infinity or NaN"),
        (1e5, "--dtype fp16", "100000 ... float16 ... 65504"),
        (-3.4e38, "--dtype bf16", "3.4e+38 ... bfloat16"),
    ],
)
def test_no_format_is_written_with_such_a_weight(
    source: str, value: float, flags: str, told: str, tmp_path: Path
) -> None:
    name, write = FORMATS[source]
    tensors = random_tensors(SMALL)
    tensors["blocks.0.w_down"][-1, -1] = value
    folder = tmp_path / "wrong"
    folder.mkdir()
    write(Source(config=SMALL, tensors={key: lazy(each) for key, each in tensors.items()}), folder)
    for target in FORMATS:
        words = (source, target, folder, tmp_path / "out", *flags.split())
        refused(partial(convert, *words), f"{folder} ... {name} ... {told}")
        assert [path.name for path in tmp_path.iterdir()] == ["wrong"]
    if source == "paro":
        dtype = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[flags[-4:]]
        load = partial(load_model, open_native(folder), torch.device("cpu"), dtype)
        refused(load, f"{folder} ... {name} ... {told}")
