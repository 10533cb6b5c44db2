"""LLaMA sizes, those of published models as presets, and low-rank adapters (LoRA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from model.mup import check_mup, query_key_scale
from model.yarn import check_yarn, yarn_scale
from paro.errors import UserError, check_between, check_least, check_positive

AttentionBackend = Literal["auto", "flash", "fused", "unfused", "local"]
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)
BLOCK_BACKENDS: tuple[AttentionBackend, ...] = ("auto", "flash")  # give a log-sum-exp
PositionEmbedding = Literal["rope", "yarn"]
POSITION_EMBEDDINGS: tuple[PositionEmbedding, ...] = get_args(PositionEmbedding)
Fp8Format = Literal["e4m3", "hybrid"]
Compiler = Literal["inductor", "aot_eager"]
COMPILERS: tuple[Compiler, ...] = get_args(Compiler)
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8  # limits of FlashAttention's head size, in channels
BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)  # least GPU capability for such matmuls


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Activation recomputation by Megatron's flags; `full` takes `num_layers` as L.

    selective        recompute the attention core of every block
    full, uniform    recompute all blocks in groups of L, which save only the group's input
    full, block      recompute the first L blocks, each from its own input
    keeps_core       with full: also save attention's output and log-sum-exp, so skip its core
    """

    granularity: str
    method: str = "uniform"
    num_layers: int = 1
    keeps_core: bool = False

    def __post_init__(self) -> None:
        check_least(1, recompute_num_layers=self.num_layers)
        assert not (self.keeps_core and self.core_attention), "core attention is recomputed"

    @property
    def core_attention(self) -> bool:
        """True if the attention core of every block is recomputed, and nothing else."""
        return self.granularity == "selective"

    @property
    def group_size(self) -> int:
        """The number of consecutive blocks that keep only the input of the first."""
        return self.num_layers if (self.granularity, self.method) == ("full", "uniform") else 1

    def first_layer(self, layer: int) -> int | None:
        """Return the first layer of the group recomputed with `layer`; None: not recomputed."""
        if self.core_attention or (self.method == "block" and layer >= self.num_layers):
            return None
        return layer - layer % self.group_size


Shape = tuple[int, ...]

# peft's names of a block's projections, and this project's names of their weights.
MODULES = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w_gate",
    "up_proj": "w_up",
    "down_proj": "w_down",
}
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters: `weight @ x` becomes `weight @ x + alpha / rank * B @ A @ dropout(x)`."""

    rank: int
    alpha: float = 8.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("wq", "wv")  # weights of every block, in the block's order

    def __post_init__(self) -> None:
        check_least(1, lora_rank=self.rank)
        check_positive(lora_alpha=self.alpha)
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"--lora-dropout {self.dropout} must be at least 0 and below 1")
        known = set(MODULES.values())
        if not self.targets or not known.issuperset(self.targets):
            raise UserError(f"adapters of {', '.join(self.targets)}: there are {', '.join(known)}")

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def shapes(self, block: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of a block's adapters, given its weights' shapes."""
        shapes: dict[str, Shape] = {}
        for name in self.targets:
            rows, columns = block[name]
            if self.rank > min(rows, columns):
                raise UserError(
                    f"--lora-rank {self.rank} is above the {min(rows, columns)} of {name}, a "
                    f"matrix of {rows} x {columns}: give a smaller rank"
                )
            shapes |= {down_name(name): (self.rank, columns), up_name(name): (rows, self.rank)}
        return shapes


def down_name(weight: str) -> str:
    """Return the name of a weight's adapter that reads its input (peft's lora_A)."""
    return f"{weight}_lora_a"


def up_name(weight: str) -> str:
    """Return the name of a weight's adapter that makes its output (peft's lora_B)."""
    return f"{weight}_lora_b"


def adapted_weight(name: str) -> str:
    """Return the name of the weight that an adapter of this name is added to."""
    return name.removesuffix("_lora_a").removesuffix("_lora_b")


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter."""
    return name.endswith(("_lora_a", "_lora_b"))


def targets_of(text: str) -> tuple[str, ...]:
    """Return the weights of --lora-target-modules, in the block's order."""
    if text == ALL_LINEAR:
        return tuple(MODULES.values())
    modules = text.split(",")
    for module in modules:
        if module not in MODULES:
            raise UserError(
                f"--lora-target-modules {module!r} is unknown: give {ALL_LINEAR}, or some of "
                f"{', '.join(MODULES)} with commas between them"
            )
    return tuple(weight for module, weight in MODULES.items() if module in modules)


FP8_MULTIPLE = 16  # a GPU's matmuls in fp8 need sizes that are multiples of it
# Limits far above any LLaMA. A larger size is a slip or a forged file: its layout would take
# minutes, or overflow a tensor's size.
_MAX = {
    "num_layers": 1024,
    "hidden_size": 2**20,
    "ffn_hidden_size": 2**22,
    "num_attention_heads": 2**16,
    "num_query_groups": 2**16,
    "kv_channels": 2**16,
    "max_position_embeddings": 2**31,
    "vocab_size": 2**31,
    "rope_scaling_original_max_position_embeddings": 2**31,
    "yarn_original_max_position_embeddings": 2**31,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a LLaMA, named like their flags."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # number of key and value heads; without GQA the number of query heads
    kv_channels: int  # head size, in channels
    max_position_embeddings: int
    vocab_size: int  # rows of embedding and output layer, including padding
    rotary_base: float = 10000.0
    use_rope_scaling: bool = False  # scale rotary frequencies as LLaMA-3.1 does (rotary.py)
    rope_scaling_factor: float = 8.0
    rope_scaling_original_max_position_embeddings: int = 8192
    rope_scaling_low_freq_factor: float = 1.0
    rope_scaling_high_freq_factor: float = 4.0
    rotary_seq_len_interpolation_factor: float = 1.0  # divisor of rotary positions
    position_embedding_type: PositionEmbedding = "rope"  # "yarn": scaled by YaRN (rotary.py)
    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True
    add_qkv_bias: bool = False  # biases on the query, key and value projections (Qwen2)
    qk_layernorm: bool = False  # RMSNorm on each head's query and key (Qwen3)
    norm_epsilon: float = 1e-5
    z_loss_weight: float = 0.0  # weight of z-loss in training (cross_entropy.py); 0: none
    init_method_std: float = 0.02
    use_mup: bool = False  # muP (mup.py)
    mup_base_hidden_size: int | None = None  # None: `hidden_size`
    mup_embedding_mult: float = 1.0
    mup_output_mult: float = 1.0  # 1: the base model's hidden size over this model's
    mup_base_head_dim: float | None = None
    mup_attn_scale_power: float = 1.0
    tie_embeddings_and_output_weights: bool = False
    recompute: RecomputeConfig | None = None
    lora: LoraConfig | None = None
    attention_backend: AttentionBackend = "auto"  # attention kernel (attention.py)
    fp8_format: Fp8Format | None = None  # fp8 format of the blocks' matmuls; None: no fp8 (fp8.py)
    fuses_swiglu: bool = False  # True: Triton computes SwiGLU (fusion.py)
    fuses_rotary: bool = False  # True: Triton computes rotary embedding
    fuses_fp8_casts: bool = False  # True: Triton casts operands of matmuls to fp8
    fuses_norms: bool = False  # True: Triton computes backward of the blocks' norms
    fuses_loss: bool = False  # True: Triton computes losses and gradients of logits
    torch_compile: Compiler | None = None  # torch.compile backend for blocks; None: eager

    def __post_init__(self) -> None:
        for name, most in _MAX.items():
            check_between(1, most, **{name: getattr(self, name)})
        if self.num_attention_heads % self.num_query_groups != 0:
            raise UserError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by "
                f"--num-query-groups {self.num_query_groups}"
            )
        if self.kv_channels % 2 != 0:
            raise UserError(
                f"heads of {self.kv_channels} channels cannot be rotated in pairs: choose "
                "--hidden-size, --num-attention-heads or --kv-channels so that heads are even"
            )
        check_positive(
            rotary_base=self.rotary_base,
            rope_scaling_factor=self.rope_scaling_factor,
            rope_scaling_low_freq_factor=self.rope_scaling_low_freq_factor,
            rope_scaling_high_freq_factor=self.rope_scaling_high_freq_factor,
            rotary_seq_len_interpolation_factor=self.rotary_seq_len_interpolation_factor,
            norm_epsilon=self.norm_epsilon,
            init_method_std=self.init_method_std,
        )
        if not self.rope_scaling_low_freq_factor < self.rope_scaling_high_freq_factor:
            raise UserError(
                f"--rope-scaling-low-freq-factor {self.rope_scaling_low_freq_factor} must be below "
                f"--rope-scaling-high-freq-factor {self.rope_scaling_high_freq_factor}"
            )
        check_yarn(self)
        check_mup(self)
        if not 0.0 <= self.z_loss_weight < math.inf:
            raise UserError(f"--z-loss-weight {self.z_loss_weight} must be at least 0")
        if self.torch_compile is not None and self.lora is not None:
            raise UserError("--torch-compile compiles no adapters: leave it or --lora-rank out")

    @property
    def rotary_scale(self) -> float:
        """The factor on rotated queries and keys, of YaRN and of muP; 1 without both."""
        scale = yarn_scale(self) if self.position_embedding_type == "yarn" else 1.0
        return scale * query_key_scale(self)

    def why_no_log_sum_exp(self, device_type: str, compute: str) -> str | None:
        """Say why attention returns no log-sum-exp, needed to merge parts, and what to change.

        None if attention returns it on this device type in this compute dtype.
        """
        if self.attention_backend not in BLOCK_BACKENDS:
            return (
                f"--attention-backend {self.attention_backend} gives no log-sum-exp, without which "
                f"attention is not computed in parts or kept: give {' or '.join(BLOCK_BACKENDS)}"
            )
        num_bytes = 4 if compute == "fp32" else 2
        if device_type == "cuda" and not flash_takes(num_bytes, self.kv_channels):
            return (
                "FlashAttention, which computes attention in parts and keeps it, takes no heads of "
                f"{self.kv_channels} channels in {compute} on a GPU: give --bf16 and a multiple of "
                f"{_HEAD_MULTIPLE} up to {_LARGEST_HEAD} (--kv-channels)"
            )
        return None

    @property
    def keeps_core(self) -> bool:
        """True if recomputed blocks save attention's output and log-sum-exp for backward."""
        return self.recompute is not None and self.recompute.keeps_core

    @property
    def keeps_scores(self) -> bool:
        """True if attention saves the scores of all pairs of tokens (unfused matmuls)."""
        return self.attention_backend in ("unfused", "local")


def flash_takes(num_bytes: int, head_size: int) -> bool:
    """Return whether FlashAttention on a GPU takes heads of this size and element size."""
    return num_bytes == 2 and head_size <= _LARGEST_HEAD and head_size % _HEAD_MULTIPLE == 0


# The loss computes the logits of a chunk of tokens at a time. Every chunk reads and writes the
# output weight's gradient once, which the chunk's matmuls must outweigh. On a GPU larger matmuls
# are faster. Triton has no fp32 logits, so its chunks grow up to _FUSED_LOSS_TOKENS tokens or
# _FUSED_LOSS_BYTES bytes of logits.
LOSS_CHUNK_TOKENS = 1024
_FUSED_LOSS_TOKENS, _FUSED_LOSS_BYTES = 4096, 2**30


def loss_chunk(vocab_size: int, element_bytes: int, *, fused: bool) -> int:
    """Return the number of tokens in a chunk of the loss; `fused`: Triton computes the loss."""
    if not fused:
        return LOSS_CHUNK_TOKENS
    fit = _FUSED_LOSS_BYTES // (vocab_size * element_bytes)
    power_of_two = (1 << fit.bit_length()) >> 1
    return min(max(LOSS_CHUNK_TOKENS, power_of_two), _FUSED_LOSS_TOKENS)


def matmul_writes(buffer_bytes: int, operand_bytes: int, device_type: str) -> bool:
    """Return whether a matmul can write elements of a buffer, by the sizes of its and operands'.

    It writes in the type of its operands, on a GPU also in fp32.
    """
    return buffer_bytes == operand_bytes or (buffer_bytes == 4 and device_type == "cuda")


def _sizes(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> LlamaConfig:
    """Build a preset; by default one query head per group, head size = hidden size / heads."""
    by_heads = {"num_query_groups": heads, "kv_channels": hidden // heads}
    return LlamaConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        **(by_heads | more),
    )


_llama1 = partial(_sizes, max_position_embeddings=2048, vocab_size=32000, norm_epsilon=1e-6)
_llama2 = partial(_sizes, max_position_embeddings=4096, vocab_size=32000)
_llama3 = partial(
    _sizes, num_query_groups=8, max_position_embeddings=8192, vocab_size=128256, rotary_base=5e5
)
_llama3_1 = partial(_llama3, max_position_embeddings=131072, use_rope_scaling=True)
_llama3_2 = partial(_llama3_1, rope_scaling_factor=32.0, tie_embeddings_and_output_weights=True)
_qwen3 = partial(
    _sizes,
    num_query_groups=8,
    kv_channels=128,
    max_position_embeddings=40960,
    vocab_size=151936,
    rotary_base=1e6,
    norm_epsilon=1e-6,
    qk_layernorm=True,
)
_small_qwen3 = partial(_qwen3, tie_embeddings_and_output_weights=True)


def _mistral(*sizes: int, vocab: int, positions: int, base: float) -> LlamaConfig:
    """Return a Mistral model without sliding-window attention."""
    more: Any = {"max_position_embeddings": positions, "vocab_size": vocab, "rotary_base": base}
    return _sizes(*sizes, num_query_groups=8, kv_channels=128, **more)


# Sizes as in the published config.json and params.json files, smallest model first.
LLAMA_PRESETS: dict[str, LlamaConfig] = {
    "qwen3-0.6B": _small_qwen3(28, 1024, 3072, 16),
    "llama3.2-1B": _llama3_2(16, 2048, 8192, 32),
    "qwen3-1.7B": _small_qwen3(28, 2048, 6144, 16),
    "llama3.2-3B": _llama3_2(28, 3072, 8192, 24),
    "qwen3-4B": _small_qwen3(36, 2560, 9728, 32),
    "7B": _llama1(32, 4096, 11008, 32),
    "llama2-7B": _llama2(32, 4096, 11008, 32),
    # Version 0.3: 0.1 has a sliding window.
    "mistral-7B": _mistral(32, 4096, 14336, 32, vocab=32768, positions=32768, base=1e6),
    "llama3-8B": _llama3(32, 4096, 14336, 32),
    "llama3.1-8B": _llama3_1(32, 4096, 14336, 32),
    "qwen3-8B": _qwen3(36, 4096, 12288, 32),
    "mistral-nemo-12B": _mistral(40, 5120, 14336, 32, vocab=131072, positions=131072, base=1e6),
    "13B": _llama1(40, 5120, 13824, 40),
    "llama2-13B": _llama2(40, 5120, 13824, 40),
    "qwen3-14B": _qwen3(40, 5120, 17408, 40),
    "mistral-small-24B": _mistral(40, 5120, 32768, 32, vocab=131072, positions=32768, base=1e8),
    "30B": _llama1(60, 6656, 17920, 52),
    "qwen3-32B": _qwen3(64, 5120, 25600, 64),
    "65B": _llama1(80, 8192, 22016, 64, norm_epsilon=1e-5),
    "llama2-70B": _llama2(80, 8192, 28672, 64, num_query_groups=8),
    "llama3-70B": _llama3(80, 8192, 28672, 64),
    "llama3.1-70B": _llama3_1(80, 8192, 28672, 64),
    "mistral-large-123B": _mistral(88, 12288, 28672, 96, vocab=32768, positions=131072, base=1e6),
    "llama3.1-405B": _llama3_1(126, 16384, 53248, 128),
}


def preset_name(text: str) -> str:
    """Return the preset matching `text`, ignoring case and dashes; `text` if none matches."""
    meant = (name for name in LLAMA_PRESETS if _plain(name) == _plain(text))
    return next(meant, text)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
