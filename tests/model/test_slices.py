"""Parts computed slice by slice equal the whole, in forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.config import LlamaConfig, RecomputeConfig
from model.llama import Llama
from model.units import PartSpec, UnitSpec
from paro.layout import make_sliced_layout, slice_box
from tests.model.test_llama import BOTH, CONFIGS, MHA, assert_trains_alike, build

GROUPED = replace(MHA, num_query_groups=2)
CASES: dict[str, tuple[LlamaConfig, int]] = {
    "heads": (MHA, 4),
    "grouped heads": (GROUPED, 2),
    "tied": (CONFIGS["tied"], 4),
    "uneven feed-forward and vocabulary": (replace(MHA, ffn_hidden_size=77, vocab_size=102), 4),
    "one slice": (MHA, 1),
    "biases and norms of heads": (BOTH, 2),
    "recomputed attention": (replace(MHA, recompute=RecomputeConfig(granularity="selective")), 2),
    "recomputed blocks": (
        replace(GROUPED, recompute=RecomputeConfig(granularity="full", num_layers=2)),
        2,
    ),
}


def run_in_slices(model: Llama, number: int) -> None:
    """Computes every part of the model slice by slice from its own weights."""
    for spec in model.units():
        module = model.get_submodule(spec.name)
        for part in spec.parts:
            weights = weights_of(model, spec, part)
            whole, join = getattr(module, part.of_slice), getattr(module, f"join_{part.method}")

            def slices(
                module: nn.Module = module,
                part: PartSpec = part,
                weights: dict[str, Tensor] = weights,
                whole: Any = whole,
            ) -> Iterator[Any]:
                for index in range(number):
                    yield partial(run_slice, module, part, weights, (index, number), whole)

            def joined(*args: Any, join: Any = join, slices: Any = slices) -> Any:
                return join(slices(), *args)

            setattr(module, part.method, joined)


def weights_of(model: Llama, spec: UnitSpec, part: PartSpec) -> dict[str, Tensor]:
    holder = model.get_submodule(spec.holder)
    return {name: holder.get_parameter(name) for name in part.cuts}


def run_slice(
    module: nn.Module,
    part: PartSpec,
    weights: dict[str, Tensor],
    place: tuple[int, int],
    whole: Any,
    *args: Any,
) -> Any:
    index, number = place
    kept = {name: module.__dict__["_parameters"].pop(name, None) for name in part.cuts}
    for name, dim in part.cuts.items():
        shape = tuple(weights[name].shape)
        box = slice_box(name, shape, dim=dim, index=index, number=number)
        if part.of_rows:
            module.first_row = box.start[0]  # type: ignore[assignment]
        module.__dict__[name] = weights[name].narrow(dim, box.start[dim], box.extent[dim])
    out = whole(*args)
    for name, parameter in kept.items():
        del module.__dict__[name]
        module.register_parameter(name, parameter)
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_slices_of_every_part_make_the_whole(name: str) -> None:
    config, number = CASES[name]
    if config.vocab_size < 102:
        config = replace(config, vocab_size=102)
    model = build(config)
    run_in_slices(model, number)
    assert_trains_alike(model, build(config))


def test_a_sliced_layout_holds_every_element_once() -> None:
    shapes = {"wq": (12, 7), "bq": (12,), "wo": (7, 12), "w_up": (13, 3)}
    cuts = {"wq": 0, "bq": 0, "wo": 1, "w_up": 0}
    layout = make_sliced_layout(shapes, cuts=cuts, number=4, world_size=8)
    assert layout.numel % (8 * 8) == 0
    seen = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for index in range(4):
        start = index * layout.numel // 4
        decayed = layout.num_decayed(start, start + layout.numel // 4)
        for piece in layout.pieces(start, start + layout.numel // 4):
            assert (piece.offset - start < decayed) == (piece.box.name != "bq")
            assert piece.low == 0, "a box is cut by the end of its slice"
            corner, extent = piece.box.start, piece.box.extent
            assert piece.high == piece.box.numel
            where = tuple(slice(a, a + b) for a, b in zip(corner, extent, strict=True))
            seen[piece.box.name][where] += 1
    assert all(bool((counts == 1).all()) for counts in seen.values())
