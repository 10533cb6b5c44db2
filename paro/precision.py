"""The dtypes of parameters, gradient communication and gradient accumulation, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from paro.errors import UserError, contradiction
from paro.quantization.formats import FULL_BITS

BYTES_OF = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The dtypes of a run's states and messages, by name; masters are always fp32.

    `inter_param_bits` and `inter_grad_bits` are for updated parameters and gradients that cross
    groups once a step; below 16 they are quantized (paro/quantization/formats.py).
    """

    compute: str
    grad_reduce_in_bf16: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    inter_param_bits: int = FULL_BITS
    inter_grad_bits: int = FULL_BITS
    inter_grad_error_feedback: bool = False
    lora_base_dtype: str | None = None  # of parameters that adapters freeze; None: `compute`
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    optimizer: str = "adam"  # or "muon"
    ema_decay: float | None = None  # decay of averaged weights, in fp32; None: there are none
    optimizer_cpu_offload: bool = False  # whether optimizer states are in host memory
    optimizer_offload_fraction: float = 1.0  # least share of them that is

    def __post_init__(self) -> None:
        for flag, dtype in (
            ("--exp-avg-dtype", self.exp_avg_dtype),
            ("--exp-avg-sq-dtype", self.exp_avg_sq_dtype),
        ):
            if dtype not in ("fp32", "bf16"):
                raise UserError(f"{flag} {dtype} needs a scale per tensor: give bf16, or fp32")
        if self.grad_reduce_in_bf16 and self.compute != "bf16":
            raise UserError("--grad-reduce-in-bf16 needs --bf16")
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise contradiction("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32")
        if self.accumulate_allreduce_grads_in_fp32 and self.inter_grad_bits != FULL_BITS:
            bits = f"--paro-inter-grad-bits {self.inter_grad_bits}"
            raise contradiction("--accumulate-allreduce-grads-in-fp32", bits)
        feedback = "--paro-inter-grad-error-feedback"
        if self.inter_grad_error_feedback and self.inter_grad_bits == FULL_BITS:
            raise UserError(
                f"{feedback} adds what codes of gradients lose to later ones: give "
                "--paro-inter-grad-bits 8 or 4 too, or leave it out"
            )
        if self.inter_grad_error_feedback and self.compute == "fp16":
            raise UserError(
                f"{feedback} and --fp16 contradict each other, because the loss scale changes: "
                "give --bf16 instead, or leave it out"
            )
        if self.ema_decay is not None and not 0.0 <= self.ema_decay < 1.0:
            raise UserError(f"--ema-decay {self.ema_decay} must be in [0, 1)")
        fraction = self.optimizer_offload_fraction
        if not 0.0 < fraction <= 1.0:
            raise UserError(f"--optimizer-offload-fraction {fraction} must be in (0, 1]")
        if fraction != 1.0 and not self.optimizer_cpu_offload:
            raise UserError("--optimizer-offload-fraction needs --optimizer-cpu-offload")
        if self.optimizer_cpu_offload and self.optimizer == "muon":
            reason = "Muon's rounds need all states on the device"
            raise contradiction("--optimizer-cpu-offload", "--optimizer muon", reason)
        if self.lora_base_dtype is not None and self.compute == "fp16":
            raise UserError(
                f"--lora-base-dtype {self.lora_base_dtype} and --fp16 contradict each other: give "
                "one of them; either takes 2 bytes for a frozen element"
            )

    @property
    def offload_fraction(self) -> float:
        """The least share of optimizer states that are in host memory; 0: none."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @cached_property
    def quantizes(self) -> bool:
        """True if gradients or updates are quantized between groups."""
        return (self.inter_param_bits, self.inter_grad_bits) != (FULL_BITS, FULL_BITS)

    def with_inter_bits(self, bits: int) -> PrecisionConfig:
        """Return a config that sends gradients and updates in `bits` between groups."""
        feedback = self.inter_grad_error_feedback and bits != FULL_BITS
        return replace(
            self, inter_param_bits=bits, inter_grad_bits=bits, inter_grad_error_feedback=feedback
        )

    def describe_inter_bits(self) -> str:
        """Describe the bits of gradients and updates that cross groups in fewer than 16."""
        if self.inter_param_bits == self.inter_grad_bits:
            return f"gradients and updates in {self.inter_grad_bits} bits"
        parts = (("gradients", self.inter_grad_bits), ("updates", self.inter_param_bits))
        return " and ".join(f"{what} in {b} bits" for what, b in parts if b != FULL_BITS)

    @property
    def frozen(self) -> str:
        """The dtype in which frozen parameters are held and gathered."""
        return self.lora_base_dtype or self.compute

    @property
    def accumulate(self) -> str:
        """The dtype of gradient accumulators: fp32, or bf16 with `--grad-reduce-in-bf16`."""
        return "bf16" if self.grad_reduce_in_bf16 else "fp32"

    @property
    def matrix_wire(self) -> str:
        """The communication dtype of momentum and updates that Muon exchanges."""
        return "fp32" if self.wire == "fp32" else "bf16"

    @cached_property
    def wire(self) -> str:
        """The communication dtype of gradients."""
        return "fp32" if self.accumulate_allreduce_grads_in_fp32 else self.compute

    @property
    def rounds_moments(self) -> bool:
        """True if moments of AdamW are kept in bf16."""
        return "bf16" in (self.exp_avg_dtype, self.exp_avg_sq_dtype)

    def describe(self) -> str:
        """Describe the dtypes in the line that a run prints at its start."""
        frozen = f", frozen ones {self.frozen}" if self.frozen != self.compute else ""
        moments = "and moments fp32"
        if self.rounds_moments:
            moments = f"fp32, exp_avg {self.exp_avg_dtype}, exp_avg_sq {self.exp_avg_sq_dtype}"
        average = "" if self.ema_decay is None else ", averaged weights fp32"
        text = (
            f"params {self.compute}{frozen}, gradients are sent as {self.wire} and accumulate in "
            f"{self.accumulate}, master parameters {moments}{average}"
        )
        if self.optimizer_cpu_offload:
            text += f", of these {self.offload_fraction:.0%} in host memory"
        if self.quantizes:
            text += f", {self.describe_inter_bits()} cross groups"
        if self.inter_grad_error_feedback:
            text += " with error feedback"
        return text
