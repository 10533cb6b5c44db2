"""Sizes of a LLaMA, published presets, and how many parameters and FLOPs they come to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Which activations are computed again in backward instead of being kept.

    `selective`: the attention core of every block. `full` and `uniform`: every block, in runs of
    `num_layers` blocks that keep one input together. `full` and `block`: the first `num_layers`
    blocks, each by itself.
    """

    granularity: str
    method: str = "uniform"
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.granularity not in ("full", "selective"):
            raise ValueError(
                f"--recompute-granularity {self.granularity} is neither full nor selective"
            )
        if self.method not in ("uniform", "block"):
            raise ValueError(f"--recompute-method {self.method} is neither uniform nor block")
        if self.num_layers < 1:
            raise ValueError(f"--recompute-num-layers {self.num_layers} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A LLaMA's sizes, under the names of their flags."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key and value heads; as many as query heads unless grouped
    kv_channels: int  # size of a head
    max_position_embeddings: int
    vocab_size: int  # rows of the embedding, padding included
    rotary_base: float = 10000.0
    use_rope_scaling: bool = False  # LLaMA-3.1's, see rotary.py
    rope_scaling_factor: float = 8.0
    rope_scaling_original_max_position_embeddings: int = 8192
    rope_scaling_low_freq_factor: float = 1.0
    rope_scaling_high_freq_factor: float = 4.0
    add_qkv_bias: bool = False  # on the projections to queries, keys and values (Qwen2)
    qk_layernorm: bool = False  # RMSNorm of every head's query and key (Qwen3)
    norm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    tie_embeddings_and_output_weights: bool = False
    recompute: RecomputeConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "max_position_embeddings",
            "vocab_size",
            "rope_scaling_original_max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(self, name)} must be at least 1")
        if self.num_attention_heads % self.num_query_groups != 0:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by "
                f"--num-query-groups {self.num_query_groups}"
            )
        if self.kv_channels % 2 != 0:
            raise ValueError(
                f"heads of {self.kv_channels} channels cannot be rotated in pairs: choose "
                "--hidden-size, --num-attention-heads or --kv-channels so that heads are even"
            )
        for flag, value in (
            ("--rotary-base", self.rotary_base),
            ("--rope-scaling-factor", self.rope_scaling_factor),
            ("--rope-scaling-low-freq-factor", self.rope_scaling_low_freq_factor),
            ("--norm-epsilon", self.norm_epsilon),
            ("--init-method-std", self.init_method_std),
        ):
            if not value > 0.0:
                raise ValueError(f"{flag} {value} must be positive")
        if not self.rope_scaling_low_freq_factor < self.rope_scaling_high_freq_factor:
            raise ValueError(
                f"--rope-scaling-low-freq-factor {self.rope_scaling_low_freq_factor} must be below "
                f"--rope-scaling-high-freq-factor {self.rope_scaling_high_freq_factor}"
            )


def loss_chunk_tokens(device_type: str) -> int:
    """For how many tokens at a time the loss makes logits.

    The gradient of the output weight is read and written once a chunk, which the products of a
    chunk must outweigh. A CPU needs fewer tokens for that, and is faster with chunks that its
    allocator keeps from one to the next.
    """
    return 512 if device_type == "cpu" else 1024


# A part of a unit may be computed slice by slice: its weights are cut along these dims, as are the
# heads (query heads together with the key and value heads that they use), the feed-forward's
# columns, or the vocabulary; every slice gives a partial result. Norms are read whole.
ATTENTION_CUTS = {"wq": 0, "wk": 0, "wv": 0, "wo": 1}
QKV_BIAS_CUTS = {"bq": 0, "bk": 0, "bv": 0}
MLP_CUTS = {"w_gate": 0, "w_up": 0, "w_down": 1}
VOCABULARY_CUTS = {"weight": 0}


def attention_cuts(config: LlamaConfig) -> dict[str, int]:
    """What a block's attention is cut along, biases included."""
    return ATTENTION_CUTS | (QKV_BIAS_CUTS if config.add_qkv_bias else {})


def attention_norms(config: LlamaConfig) -> tuple[str, ...]:
    """The norms that a block's attention reads."""
    return ("attention_norm", *(("q_norm", "k_norm") if config.qk_layernorm else ()))


def _llama1(layers: int, hidden: int, ffn: int, heads: int, epsilon: float) -> LlamaConfig:
    return LlamaConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        max_position_embeddings=2048,
        vocab_size=32000,
        norm_epsilon=epsilon,
    )


def _llama2(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> LlamaConfig:
    return LlamaConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        max_position_embeddings=4096,
        vocab_size=32000,
    )


def _llama3(layers: int, hidden: int, ffn: int, heads: int, *, scaling: float = 0.0) -> LlamaConfig:
    """`scaling` is 3.1's and 3.2's factor, which also stretches positions to 131,072."""
    return LlamaConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=hidden // heads,
        max_position_embeddings=131072 if scaling else 8192,
        vocab_size=128256,
        rotary_base=500000.0,
        use_rope_scaling=bool(scaling),
        rope_scaling_factor=scaling or 8.0,
        tie_embeddings_and_output_weights=scaling == 32.0,
    )


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=128,
        max_position_embeddings=40960,
        vocab_size=151936,
        rotary_base=1e6,
        norm_epsilon=1e-6,
        qk_layernorm=True,
        tie_embeddings_and_output_weights=tied,
    )


def _mistral(
    layers: int, hidden: int, ffn: int, heads: int, *, vocab: int, positions: int, base: float
) -> LlamaConfig:
    """Those without a sliding window."""
    return LlamaConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=128,
        max_position_embeddings=positions,
        vocab_size=vocab,
        rotary_base=base,
    )


# Sizes as in the published config.json and params.json files; the smallest model comes first.
LLAMA_PRESETS: dict[str, LlamaConfig] = {
    "qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "llama3.2-1B": _llama3(16, 2048, 8192, 32, scaling=32.0),
    "qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True),
    "llama3.2-3B": _llama3(28, 3072, 8192, 24, scaling=32.0),
    "qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True),
    "7B": _llama1(32, 4096, 11008, 32, 1e-6),
    "llama2-7B": _llama2(32, 4096, 11008, 32, 32),
    # Version 0.3: 0.1 has a sliding window.
    "mistral-7B": _mistral(32, 4096, 14336, 32, vocab=32768, positions=32768, base=1e6),
    "llama3-8B": _llama3(32, 4096, 14336, 32),
    "llama3.1-8B": _llama3(32, 4096, 14336, 32, scaling=8.0),
    "qwen3-8B": _qwen3(36, 4096, 12288, 32),
    "mistral-nemo-12B": _mistral(40, 5120, 14336, 32, vocab=131072, positions=131072, base=1e6),
    "13B": _llama1(40, 5120, 13824, 40, 1e-6),
    "llama2-13B": _llama2(40, 5120, 13824, 40, 40),
    "qwen3-14B": _qwen3(40, 5120, 17408, 40),
    "mistral-small-24B": _mistral(40, 5120, 32768, 32, vocab=131072, positions=32768, base=1e8),
    "30B": _llama1(60, 6656, 17920, 52, 1e-6),
    "qwen3-32B": _qwen3(64, 5120, 25600, 64),
    "65B": _llama1(80, 8192, 22016, 64, 1e-5),
    "llama2-70B": _llama2(80, 8192, 28672, 64, 8),
    "llama3-70B": _llama3(80, 8192, 28672, 64),
    "llama3.1-70B": _llama3(80, 8192, 28672, 64, scaling=8.0),
    "mistral-large-123B": _mistral(88, 12288, 28672, 96, vocab=32768, positions=131072, base=1e6),
    "llama3.1-405B": _llama3(126, 16384, 53248, 128, scaling=8.0),
}


def preset_name(text: str) -> str:
    """The preset that is meant, whatever its case and dashes; the text itself where it is none."""
    meant = (name for name in LLAMA_PRESETS if _plain(name) == _plain(text))
    return next(meant, text)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by name, in the order of the model."""
    hidden, ffn, vocab = config.hidden_size, config.ffn_hidden_size, config.vocab_size
    query = config.num_attention_heads * config.kv_channels
    key = config.num_query_groups * config.kv_channels
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        shapes |= {
            f"blocks.{layer}.attention_norm": (hidden,),
            f"blocks.{layer}.wq": (query, hidden),
            f"blocks.{layer}.wk": (key, hidden),
            f"blocks.{layer}.wv": (key, hidden),
            f"blocks.{layer}.wo": (hidden, query),
        }
        if config.add_qkv_bias:
            shapes |= {
                f"blocks.{layer}.bq": (query,),
                f"blocks.{layer}.bk": (key,),
                f"blocks.{layer}.bv": (key,),
            }
        if config.qk_layernorm:
            shapes |= {
                f"blocks.{layer}.q_norm": (config.kv_channels,),
                f"blocks.{layer}.k_norm": (config.kv_channels,),
            }
        shapes |= {
            f"blocks.{layer}.mlp_norm": (hidden,),
            f"blocks.{layer}.w_gate": (ffn, hidden),
            f"blocks.{layer}.w_up": (ffn, hidden),
            f"blocks.{layer}.w_down": (hidden, ffn),
        }
    shapes["head.norm"] = (hidden,)
    if not config.tie_embeddings_and_output_weights:
        shapes["head.weight"] = (vocab, hidden)
    return shapes


def num_parameters(config: LlamaConfig) -> int:
    """All parameters, a tied weight once."""
    total = 0
    for shape in parameter_shapes(config).values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    return total


def flops_per_token(config: LlamaConfig, seq_length: int, *, causal: bool) -> float:
    """FLOPs of one token's forward and backward: matrix products alone, a multiply-add as two.

    Forward: 2 per weight of every linear layer and of the output layer, and attention's two
    products over all `seq_length` positions (half of them where `causal`). Backward is twice the
    forward. The embedding's look-up, norms, rotations and recomputation do not count.
    PaLM (appendix B) counts attention in full, Megatron-LM halves it.
    """
    per_layer = sum(
        shape[0] * shape[1]
        for name, shape in parameter_shapes(config).items()
        if name.startswith("blocks.0.") and len(shape) == 2
    )
    weights = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    positions = seq_length / 2 if causal else seq_length
    attention = 2 * config.num_layers * positions * config.num_attention_heads * config.kv_channels
    return 3.0 * 2.0 * (weights + attention)
