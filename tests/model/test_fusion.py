"""Triton's kernels equal torch's operations: by its interpreter, and compiled for GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from model import fusion
from model.config import FP8_CAPABILITY, Fp8Format, LlamaConfig
from model.cross_entropy import ZLoss, linear_cross_entropy
from model.fusion import Fusions, usable_kernels
from model.layers import gated_linear, normed_linears
from model.llama import Llama
from model.norm import SharedNorm
from model.rotary import rotate, rotations
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import says
from tests.helpers.training import TINY, Trained, train
from tests.helpers.triton_kernels import interpreter, skip_on_gpus
from tests.model.values import SMALL, assert_near, normal

pytestmark = pytest.mark.bits

CPU = torch.device("cpu")
ALL = Fusions()
CONFIG = replace(SMALL, hidden_size=24, ffn_hidden_size=37, num_query_groups=2, kv_channels=6)
FUSED = replace(CONFIG, fuses_norms=True, fuses_swiglu=True, fuses_rotary=True, fuses_loss=True)
FP8_FORMATS: tuple[Fp8Format, ...] = ("e4m3", "hybrid")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreter():
        yield


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """To the rounding of their type, relative to the largest."""
    assert found.dtype == wanted.dtype
    assert_near(found, wanted, within=TOLERANCE[wanted.dtype])


def compare(run: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    found = []
    for fused in (False, True):
        own = [each.detach().clone().requires_grad_(each.requires_grad) for each in leaves]
        out = run(*own, fused=fused)
        out.backward(normal(*out.shape, seed=9, dtype=out.dtype))
        found.append([out.detach(), *(leaf.grad for leaf in own if leaf.requires_grad)])
    for plain, fused in zip(*found, strict=True):
        assert_close(fused, plain)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("needed", ["gate up weight", "gate up", "up weight", "weight"])
def test_swiglu(dtype: torch.dtype, needed: str) -> None:
    names = ("gate", "up", "weight")
    shapes = ((3, 5, 37), (3, 5, 37), (24, 37))
    leaves = [
        normal(*shape, seed=seed, dtype=dtype).requires_grad_(name in needed.split())
        for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    compare(gated_linear, leaves)
    strided = [normal(3, 37, 5, seed=4, dtype=dtype).transpose(1, 2).requires_grad_(), *leaves[1:]]
    compare(gated_linear, strided)


@pytest.mark.slow("interprets kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_heads", [1, 19])
def test_rotary_embedding(dtype: torch.dtype, num_heads: int) -> None:
    cos, sin = rotations(CONFIG, 3, dtype, CPU)
    x = normal(2, 3, num_heads, 6, seed=1, dtype=dtype).requires_grad_()
    compare(lambda x, fused: rotate(x, cos, sin, fused=fused), [x])
    positions = torch.tensor([[0, 1, 0], [2, 0, 1]])
    compare(lambda x, fused: rotate(x, cos[positions], sin[positions], fused=fused), [x])


@pytest.mark.slow("interprets kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", [(1, False, False), (7, True, False), (20, True, True)])
def test_norms(
    dtype: torch.dtype, case: tuple[int, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the gradient of a residual is added to that of the norm."""
    num_rows, passes_x, for_cast = case
    monkeypatch.setattr("model.kernels._NORM_PROGRAMS", 8)  # which sum 20 rows, or one each

    def run(x: Tensor, scale: Tensor, fused: bool) -> Tensor:
        norm = SharedNorm(x, scale, 1e-5, fused=fused, for_cast=for_cast)
        made = normed_linears(norm, x, scale, *weights, passes_x=passes_x)
        return torch.cat(made, dim=-1)

    weights = [normal(rows, 37, seed=rows, dtype=dtype) for rows in (3, 2)]
    scale = (1.0 + 0.1 * normal(37, seed=5)).to(dtype).requires_grad_()
    compare(run, [normal(num_rows, 1, 37, seed=1, dtype=dtype).requires_grad_(), scale])


@pytest.mark.usefixtures("interpreted")
def test_a_residuals_gradient_is_added_with_the_bits_of_a_sum() -> None:
    from model import kernels

    x, grad, residual = (normal(5, 37, seed=seed) for seed in range(3))
    _, rstd = kernels.norm(x, scale := normal(37, seed=5), 1e-5)
    alone, _ = kernels.norm_backward(grad, x, scale, rstd)
    both, _ = kernels.norm_backward(grad, x, scale, rstd, residual)
    assert torch.equal(both, alone + residual)


@pytest.mark.slow("interprets kernels")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab_size", [5, 9001])
def test_losses(dtype: torch.dtype, vocab_size: int) -> None:
    labels = torch.tensor([[0, vocab_size - 1, 3], [1, 2, 4]])
    weights = torch.tensor([[0.5, 1.0, 0.0], [2.0, 0.25, 1.0]])
    x, weight = normal(2, 3, 16, seed=1, dtype=dtype), normal(vocab_size, 16, seed=2, dtype=dtype)
    x[0, 2] = 1e4  # its logits overflow; its weight is 0

    penalties = [ZLoss(0.1, torch.zeros(())) for _ in range(2)]

    def run(x: Tensor, weight: Tensor, fused: bool) -> Tensor:
        plain = linear_cross_entropy(x, weight, labels, weights, fused=fused)
        z_loss = penalties[fused]
        return plain + linear_cross_entropy(x, weight, labels, weights, fused=fused, z_loss=z_loss)

    for needed in ((True, True), (True, False), (False, True), (False, False)):
        leaves = [x.requires_grad_(needed[0]), weight.requires_grad_(needed[1])]
        if any(needed):
            compare(run, leaves)
        else:
            assert_close(run(*leaves, fused=True), run(*leaves, fused=False))
    assert_close(penalties[1].total, penalties[0].total)


@pytest.mark.usefixtures("interpreted")
def test_logits_that_are_not_finite_make_the_loss_so() -> None:
    x, weight = torch.ones(1, 2, 4), torch.ones(9, 4)
    labels, weights = torch.tensor([[3, 5]]), torch.ones(1, 2)
    for value in (float("inf"), float("-inf"), float("nan")):
        x[0, 1] = value
        assert not linear_cross_entropy(x, weight, labels, weights, fused=True).isfinite()


def of_model(config: LlamaConfig, **documents: Any) -> list[Tensor]:
    llama = Llama(config)
    with torch.no_grad():
        for seed, parameter in enumerate(llama.parameters()):
            parameter.copy_(0.3 * normal(*parameter.shape, seed=seed))
    tokens = torch.arange(2 * 7).view(2, 7)
    loss = llama(tokens, tokens.roll(1), torch.ones(2, 7), **documents)
    loss.backward()
    return [loss.detach(), *(p.grad for p in llama.parameters() if p.grad is not None)]


@pytest.mark.slow("interprets kernels")
@pytest.mark.usefixtures("interpreted")
def test_a_model_with_tied_weights_and_documents_apart_has_the_same_gradients() -> None:
    cut = {"positions_BS": torch.arange(7).repeat(2, 1) % 4, "document_lengths": (4, 3, 4, 3)}
    plain, fused = (
        of_model(replace(config, tie_embeddings_and_output_weights=True), **cut)
        for config in (CONFIG, FUSED)
    )
    for found, wanted in zip(fused, plain, strict=True):
        assert_close(found, wanted)


def test_a_cpu_has_no_choice() -> None:
    assert usable_kernels(CONFIG, ALL, torch.float32, CPU) == (CONFIG, None)


def usable(
    config: LlamaConfig = CONFIG, fusions: Fusions = ALL, dtype: torch.dtype = torch.float32
) -> tuple[LlamaConfig, str]:
    usable_kernels.cache_clear()
    found = usable_kernels(config, fusions, dtype, CPU)
    usable_kernels.cache_clear()
    return found.config, str(found.line)


@pytest.mark.verify
@pytest.mark.usefixtures("interpreted")
def test_every_kernel_works_where_it_is_tried() -> None:
    found, line = usable(replace(CONFIG, fp8_format="hybrid"), dtype=torch.bfloat16)
    assert found == replace(FUSED, fp8_format="hybrid", fuses_fp8_casts=True)
    assert line.startswith("norms, SwiGLU, rotary embedding, casts to fp8 and loss: Triton 3.")


@pytest.mark.usefixtures("interpreted")
def test_what_runs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("norm", "swiglu", "rotary", "casts", "loss"):
        monkeypatch.setattr(fusion, f"_try_{name}", Mock())
    found, line = usable()
    assert found == FUSED
    assert line.startswith("norms, SwiGLU, rotary embedding and loss: Triton 3.")
    found, line = usable(fusions=Fusions(bias_swiglu_fusion=False, apply_rope_fusion=False))
    assert found == replace(FUSED, fuses_swiglu=False, fuses_rotary=False)
    assert line.startswith("norms and loss: Triton 3.")
    compiled = replace(CONFIG, torch_compile="inductor")
    found, line = usable(compiled)
    assert found == replace(compiled, fuses_loss=True)
    assert line.startswith("blocks: torch.compile by inductor; loss: Triton 3.")


@pytest.mark.slow("tries every kernel")
@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.verify)])
def test_what_fails_is_left_to_torch_and_said(monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    with interpreter():
        from model import kernels as imported

        cast, remember = imported.cast, imported.remember_largest

        def casts_one_up(*args: Any, **options: Any) -> tuple[Tensor | None, ...]:
            data, transposed, scale = cast(*args, **options)
            return data, transposed, scale * (1.0 + 2.0**-23)

        in_fp8 = replace(CONFIG, fp8_format="hybrid")
        no_compiler = RuntimeError("Failed to find C compiler.\nPlease specify")
        cases: list[tuple[LlamaConfig, str, Any, str]] = [
            (CONFIG, "swiglu", lambda gate, up, **_: gate + up, "RuntimeError: results differ by"),
            (CONFIG, "swiglu", Mock(side_effect=no_compiler), "Failed to find C compiler."),
        ]
        if fp8:
            cases = [
                (in_fp8, "cast", casts_one_up, "WARNING: fp8 is slower ... casts to fp8 differ"),
                (
                    in_fp8,
                    "remember_largest",
                    lambda x, bits: remember(x, bits + 1),
                    "largest values are",
                ),
            ]
        for config, name, wrong, message in cases:
            with monkeypatch.context() as patch:
                patch.setattr(imported, name, wrong)
                for other in {"norm", "swiglu", "rotary", "loss"} - {name}:  # not tried again
                    patch.setattr(fusion, f"_try_{other}", Mock())
                found, line = usable(config)
            assert found == config
            says(line, message)
    monkeypatch.setattr(fusion, "DEVICES", {"cpu"})
    monkeypatch.setitem(sys.modules, "model.kernels", None)
    found, line = usable()
    assert found == CONFIG
    assert "ModuleNotFoundError" in line


def run_on_gpu() -> None:
    for dtype in TOLERANCE:
        found = usable_kernels(CONFIG, ALL, dtype, torch.device("cuda"))
        assert found.config == FUSED, found.line
        if torch.cuda.get_device_capability() >= FP8_CAPABILITY:
            for form in FP8_FORMATS:
                config = replace(CONFIG, fp8_format=form)
                found = usable_kernels(config, ALL, dtype, torch.device("cuda"))
                assert found.config.fuses_fp8_casts, found.line


def train_both(runs: list[str]) -> list[tuple[Trained, Trained]]:
    found = []
    for flags in runs:
        plain = train(flags)
        with interpreter():
            found.append((plain, train(flags)))
    return found


@pytest.mark.ranks
def test_strategies_train_to_the_same_losses() -> None:
    skip_on_gpus()
    flags = f"{TINY} --num-layers 1 --train-iters 1 --global-batch-size 2 --paro-group-size 2"
    rotated = "--paro-strategy IIG --paro-materialize rotate"
    full = "--paro-strategy GGG --recompute-granularity full"
    runs = [f"{flags} {more}" for more in (full, rotated)]
    for plain, fused in run_ranks(train_both, 2, runs)[0]:
        pairs = zip(plain.steps, fused.steps, strict=True)
        assert all(a.loss == pytest.approx(b.loss, rel=1e-5) for a, b in pairs)
        for name, values in plain.parameters.items():
            assert torch.allclose(values, fused.parameters[name], rtol=1e-4, atol=1e-5), name
        assert any(not torch.equal(v, fused.parameters[n]) for n, v in plain.parameters.items())
