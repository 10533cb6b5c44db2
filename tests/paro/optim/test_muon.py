"""Muon: arithmetic against torch's class and Megatron's formulas, and matrices' owner ranks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from model.config import LLAMA_PRESETS
from paro.optim.muon import (
    BY_TORCH,
    MomentumUpdate,
    choose_muon_kernels,
    momentum_by_torch,
    newton_schulz,
    orthogonal,
    square_by_torch,
)
from paro.optim.rounding import Rounding
from paro.planning.run_memory import RunMemory
from paro.precision import PrecisionConfig
from paro.spec.muon_rounds import bucket_sizes, muon_rounds
from paro.spec.optim_config import COEFFICIENT_TYPES, MuonConfig
from paro.spec.units import units_of_run
from paro.training.step import Training
from tests.helpers.training import TINY, built
from tests.helpers.triton_kernels import interpreter
from tests.model.values import assert_near
from tests.paro.planning.cases import allocated_at_most, run_of

CPU = torch.device("cpu")
FP32 = "--muon-fp32-matmul-prec highest"
RUN = f"{TINY} --train-iters 20 --clip-grad 0 --optimizer muon {FP32}"
LR, DECAY = 0.01, 0.1


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(shape, generator=generator)


def parameters(training: Training) -> dict[str, Tensor]:
    """The masters of one process, as views."""
    return {
        placed.chunk.name: shard.values.detach()[placed.offset : placed.stop].view(
            placed.chunk.shape
        )
        for shard in training.optimizer.flat_shards()
        if shard.state == "param"
        for placed in shard.layout.chunks
    }


def trained(
    flags: str, num_steps: int = 20, **rates: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters before and after steps with random gradients."""
    _, training = built(f"{RUN} {flags}")
    before = {name: values.clone() for name, values in parameters(training).items()}
    for step in range(num_steps):
        for unit in training.model.trainable_units:
            for placed in unit.layout.chunks:
                into = unit.optim_grad[placed.offset : placed.stop]
                into.copy_(gradient(placed.chunk.name, placed.chunk.shape, step).view(-1))
        training.optimizer.step(lr=LR, weight_decay=DECAY, grad_norm=1.0, unscale=1.0, **rates)
    return before, parameters(training)


def is_muons(name: str, values: Tensor) -> bool:
    return name.startswith("blocks.") and values.dim() == 2


def in_fp32(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Torch's Newton-Schulz without its cast to bf16."""
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


@pytest.mark.slow("trains twenty steps")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("exact", [True, False])
def test_twenty_steps_are_those_of_torch(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if exact:
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_fp32)
    monkeypatch.setattr("paro.optim.muon._has_bf16_matmuls", lambda device: True)
    precision = "highest" if exact else "medium"
    params, found = trained(
        f"--muon-fp32-matmul-prec {precision} --muon-momentum 0.95 --muon-nesterov "
        "--muon-coefficient-type simple "
        "--muon-scale-mode shape_scaling"
    )
    own = {name: values for name, values in params.items() if is_muons(name, values)}
    others = [values for name, values in params.items() if name not in own]
    groups = [
        {"params": [v for v in others if (v.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizers = [
        torch.optim.Muon(own.values(), lr=LR, weight_decay=DECAY, momentum=0.95),
        torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999)),
    ]
    for step in range(20):
        for name, values in params.items():
            values.grad = gradient(name, values.shape, step)
        for optimizer in optimizers:
            optimizer.step()
    for name, values in params.items():
        error = float((found[name] - values).norm() / values.norm())
        assert error < (1e-5 if exact or name not in own else 0.02), name


def test_defaults_are_those_of_megatron() -> None:
    params, found = trained("", num_steps=3)
    quintic = MuonConfig().coefficients()
    assert (len(quintic), quintic[0], quintic[-1][2]) == (5, (4.0848, -6.8946, 2.9270), 1.2012)
    for name, values in params.items():
        if not is_muons(name, values):
            continue
        momentum = torch.zeros_like(values)
        for step in range(3):
            momentum = 0.9 * momentum + 0.1 * gradient(name, values.shape, step)
            x = momentum / momentum.norm()
            for a, b, c in quintic:
                x = a * x + (b * (x @ x.T) + c * (x @ x.T) @ (x @ x.T)) @ x
            values = (1 - LR * DECAY) * values - LR * math.sqrt(max(values.shape)) * x
        assert torch.allclose(found[name], values, rtol=1e-4, atol=1e-5), name


def test_an_update_reads_the_momentum_before_it_is_rounded() -> None:
    _, exact = trained("", num_steps=1)
    _, rounded = trained("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", num_steps=1)
    assert all(torch.equal(rounded[name], exact[name]) for name in exact)


@pytest.mark.parametrize("kind", COEFFICIENT_TYPES)
@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (1, 7)])
def test_singular_values_become_nearly_one(kind: str, shape: tuple[int, int]) -> None:
    config = MuonConfig(muon_coefficient_type=kind, muon_num_ns_steps=10)
    matrix = gradient(kind, torch.Size(shape), 0)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = newton_schulz(matrix, config.coefficients())
    assert float((found - left @ right).norm() / (left @ right).norm()) < 0.3


@pytest.mark.parametrize(
    ("precision", "multiplies", "dtype"),
    [
        ("low", True, torch.bfloat16),
        ("medium", False, torch.float32),
        ("highest", True, torch.float32),
    ],
)
def test_matmuls_are_bf16_where_asked_and_possible(
    precision: str, multiplies: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paro.optim.muon._has_bf16_matmuls", lambda device: multiplies)
    before = torch.get_float32_matmul_precision()
    matrix = gradient("it", torch.Size((30, 50)), 0)
    config = MuonConfig(muon_fp32_matmul_prec=precision)
    found = orthogonal(matrix, config)
    assert found.dtype == dtype
    assert torch.get_float32_matmul_precision() == before
    exact = newton_schulz(matrix, config.coefficients())
    error = float((found.float() - exact).norm() / exact.norm())
    assert error < (0.02 if dtype == torch.bfloat16 else 1e-6)
    of_bf16 = newton_schulz(matrix.bfloat16(), config.coefficients(), torch.float32)
    assert float((of_bf16 - exact).norm() / exact.norm()) < 0.02


@pytest.mark.slow("interprets kernels")
@pytest.mark.bits
@pytest.mark.parametrize("shape", [(1, 7), (5, 70), (130, 65), (260, 40)])
@pytest.mark.parametrize("tall", [False, True])
def test_half_of_a_symmetric_product_is_computed_and_mirrored(
    shape: tuple[int, int], tall: bool
) -> None:
    x = gradient("x", torch.Size(shape), 0).bfloat16()
    x = x if tall else x.mT
    with interpreter():
        from paro.optim.kernels import square

        gram = square(x)
        polynomial = square(gram, (-1.5, 0.5))
    assert_near(gram, square_by_torch(x.float()), within=2.0**-7)
    assert_near(polynomial, square_by_torch(gram.float(), (-1.5, 0.5)), within=2.0**-7)
    for found in (gram, polynomial):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, found.mT)


ROUNDING = Rounding(seed=3, name="w", low=5, width=7, stride=9, start=2)


@pytest.mark.bits
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rounding", [None, ROUNDING, replace(ROUNDING, stride=7)])
def test_momentum_in_one_pass_is_torchs(nesterov: bool, rounding: Rounding | None) -> None:
    config = MuonConfig(muon_momentum=0.9, muon_nesterov=nesterov)
    update = MomentumUpdate(config, 0.3, torch.float32, rounding, step=4)
    found = []
    with interpreter():
        from paro.optim.kernels import momentum

        for by in (momentum_by_torch, momentum):
            kept = gradient("kept", torch.Size((2500,)), 0)
            kept = kept if rounding is None else kept.bfloat16()
            grad = gradient("grad", kept.shape, 1)
            found.append((by(kept, grad, update), kept))
    (read, kept), (read_too, kept_too) = found
    assert_near(read_too, read, within=1e-6)
    assert kept_too.dtype == kept.dtype
    differ = ~torch.isclose(kept_too.float(), kept.float(), rtol=1e-5, atol=1e-6)
    assert differ.float().mean() < 0.01  # one apart by rounding may be rounded to the other side


@pytest.mark.slow("interprets kernels")
@pytest.mark.bits
def test_newton_schulz_multiplies_by_triton_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paro.optim.muon._has_bf16_matmuls", lambda device: True)
    matrix, config = gradient("it", torch.Size((50, 30)), 0), MuonConfig()
    assert choose_muon_kernels("auto", CPU) == BY_TORCH
    with interpreter():
        from paro.optim import kernels

        chosen = choose_muon_kernels("auto", CPU)
        assert "symmetric products by Triton 3." in chosen.line
        assert choose_muon_kernels("torch", CPU) == BY_TORCH
        found = orthogonal(matrix, config, chosen.square).float()
        exact = newton_schulz(matrix, config.coefficients())
        assert float((found - exact).norm() / exact.norm()) < 0.03
        monkeypatch.setattr(
            kernels, "square", lambda x, factors: square_by_torch(x, factors).triu()
        )
        choose_muon_kernels.cache_clear()
        chosen = choose_muon_kernels("auto", CPU)
        assert (chosen.momentum, chosen.square) == (momentum_by_torch, square_by_torch)
        assert "because Triton fails: RuntimeError: results differ by" in chosen.line


def run_on_gpu() -> None:
    chosen = choose_muon_kernels("auto", torch.device("cuda"))
    square = chosen.square
    assert square is not square_by_torch, chosen.line
    for shape in ((1000, 2048), (2048, 1000)):
        x = gradient("x", torch.Size(shape), 0).bfloat16().cuda()
        for matrix in (x, x.mT):
            assert_near(square(matrix, None), square_by_torch(matrix.float()), within=2.0**-7)


def test_neighbouring_units_of_one_kind_are_a_bucket() -> None:
    assert bucket_sizes([None, *"aaaa", None], 2) == [1, 2, 0, 2, 0, 1]
    assert bucket_sizes([*"aaaaa"], 2) == [1, 2, 0, 2, 0]
    assert bucket_sizes([*"abbbaa"], 3) == [1, 3, 0, 0, 1, 1]
    assert bucket_sizes([*"aa"], 3) == bucket_sizes([*"aa"], 1) == [1, 1]


@pytest.mark.parametrize(("preset", "world_size"), [("7B", 32), ("65B", 128)])
@pytest.mark.parametrize("letters", ["IIG", "IGG", "NNN"])
def test_owner_ranks_have_nearly_equal_work(preset: str, world_size: int, letters: str) -> None:
    precision = PrecisionConfig(compute="bf16", optimizer="muon")
    model, sizes = LLAMA_PRESETS[preset], {"world_size": world_size, "group_size": 8}
    run = run_of(model, letters, precision, **sizes)
    (assigned,) = muon_rounds(run.specs(units_of_run(run)))
    assert assigned.num_ranks == (world_size if letters == "IGG" else 8)
    owned = Counter(owner for owned in assigned.rounds for owner in owned)
    assert max(owned.values()) <= len(assigned.rounds)
    longest, total = assigned.newton_schulz_flops(5)
    assert longest * assigned.num_ranks / total <= 1.15


def test_whole_blocks_cross_groups_with_adamws_bytes() -> None:
    for degrees, num_layers, is_equal in (
        *((name, 4, True) for name in ("IIG", "NNG", "ING", "2,2,4", "1,2,8")),
        ("IIG", 5, False),
        ("IGG", 4, False),
    ):
        model = replace(LLAMA_PRESETS["7B"], num_layers=num_layers)
        adamw = PrecisionConfig(compute="bf16")
        runs = (
            run_of(model, degrees, one, group_size=2)
            for one in (adamw, replace(adamw, optimizer="muon"))
        )
        adamws, muons = (partial(RunMemory(None).sent, run, 1) for run in runs)
        by_rank = [muons(rank).inter for rank in range(8)]
        adamws = adamws().inter
        assert (set(by_rank) == {adamws}) is is_equal
        assert min(by_rank) >= adamws


def test_memory_of_rounds_is_what_a_step_allocates() -> None:
    _, training = built(RUN)
    (muon,) = training.optimizer.muons
    step = partial(training.optimizer.step, lr=LR, weight_decay=DECAY, grad_norm=1.0, unscale=1.0)
    step()
    predicted = muon.rounds.peak_bytes(4)
    assert 0.6 * predicted < allocated_at_most(step) <= predicted
