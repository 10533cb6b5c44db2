"""The model configuration (LlamaConfig) from flags and presets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from data.tokenizer_config import padded_vocab_size
from model.config import LLAMA_PRESETS, LlamaConfig, LoraConfig, RecomputeConfig, targets_of
from paro.arguments.needed import missing_sizes
from paro.arguments.parser import spelled
from paro.errors import UserError, contradiction


def take_model(args: Namespace, vocab_size: int) -> LlamaConfig:
    """Build the model config: each size from its flag, else the preset, else derived."""
    default = {item.name: item.default for item in fields(LlamaConfig)}
    # Other fields are derived or chosen on the device; --vocab-size belongs to the tokenizer.
    named = default.keys() & vars(args).keys() - {"vocab_size"}
    values = _values(args, *(name for name in default if name in named))
    sizes = values
    if args.llama_preset is not None:
        preset = LLAMA_PRESETS[args.llama_preset]
        is_grouped = preset.num_query_groups < preset.num_attention_heads
        if args.group_query_attention and not (is_grouped or "num_query_groups" in values):
            raise UserError(
                f"--group-query-attention: --llama-preset {args.llama_preset} has no groups of "
                "queries: give --num-query-groups"
            )
        sizes = _published_sizes(preset, values) | values
    if missing := missing_sizes(args):
        raise UserError(*missing)
    is_yarn = sizes.get("position_embedding_type") == "yarn"
    others = {name: value for name, value in values.items() if value != default[name]}
    for prefix, needed, is_given in (
        ("rope_scaling_", "--use-rope-scaling", sizes.get("use_rope_scaling")),
        ("yarn_", "--position-embedding-type yarn", is_yarn),
        ("mup_", "--use-mup", sizes.get("use_mup")),
    ):
        if not is_given:
            details = {name: others[name] for name in others if name.startswith(prefix)}
            _refuse_without(needed, details)
    if is_yarn and "yarn_rotary_scaling_factor" not in values:
        raise UserError("--position-embedding-type yarn needs --yarn-rotary-scaling-factor")
    hidden_size, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    is_grouped = args.group_query_attention or args.llama_preset is not None
    if args.num_query_groups not in (None, heads) and not is_grouped:
        _refuse_without("--group-query-attention", {"num_query_groups": args.num_query_groups})
    defaults = {
        "ffn_hidden_size": 8 * hidden_size // 3 // 64 * 64,
        "num_query_groups": 1 if args.group_query_attention else heads,
        "kv_channels": hidden_size // max(heads, 1),
        "max_position_embeddings": args.seq_length,
    }
    if "kv_channels" not in sizes and hidden_size != heads * defaults["kv_channels"]:
        raise UserError(
            f"--hidden-size {hidden_size} is not divisible by --num-attention-heads {heads}: "
            "change one, or give --kv-channels"
        )
    return LlamaConfig(
        **(defaults | sizes),
        vocab_size=padded_vocab_size(
            vocab_size, args.make_vocab_size_divisible_by, args.padded_vocab_size
        ),
        recompute=_take_recompute(args),
        lora=_take_lora(args),
    )


def vocab_size_given(args: Namespace) -> int | None:
    """Return the size of --vocab-size, the preset or --padded-vocab-size, in this order."""
    preset = args.llama_preset and LLAMA_PRESETS[args.llama_preset].vocab_size
    sizes: tuple[int | None, ...] = (args.vocab_size, preset, args.padded_vocab_size)
    return next((size for size in sizes if size is not None), None)


def _published_sizes(preset: LlamaConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return the preset's sizes, without sizes that a flag replaces or that follow from it."""
    sizes = {field.name: getattr(preset, field.name) for field in fields(preset)}
    del sizes["vocab_size"], sizes["recompute"], sizes["lora"]
    if values.get("position_embedding_type") == "yarn":
        sizes = {name: sizes[name] for name in sizes if "rope_scaling" not in name}
    if "hidden_size" in values or "num_attention_heads" in values:
        del sizes["kv_channels"]
        if preset.num_query_groups == preset.num_attention_heads:
            del sizes["num_query_groups"]
    return sizes


def _values(args: Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _refuse_without(needed: str, values: Mapping[str, object]) -> None:
    """Raise `UserError` if arguments are given without the flag that they need."""
    ending = f"needs {needed}: give that too, or leave it out"
    if values:
        raise UserError(*(f"{' '.join(spelled(*each))} {ending}" for each in values.items()))


def _take_lora(args: Namespace) -> LoraConfig | None:
    values = _values(args, "lora_alpha", "lora_base_dtype", "lora_dropout", "lora_target_modules")
    if args.lora_rank is None:
        _refuse_without("--lora-rank", values)
        return None
    if args.trainable != "all":
        reason = "with adapters all else is frozen"
        raise contradiction(f"--trainable {args.trainable}", "--lora-rank", reason)
    modules = values.pop("lora_target_modules", None)
    values.pop("lora_base_dtype", None)  # PrecisionConfig holds the type of frozen weights
    detail = {name.removeprefix("lora_"): value for name, value in values.items()}
    if modules is not None:
        detail["targets"] = targets_of(modules)
    return LoraConfig(rank=args.lora_rank, **detail)


def _take_recompute(args: Namespace) -> RecomputeConfig | None:
    granularity = args.recompute_granularity
    if args.recompute_activations:
        if granularity == "full":
            full = "--recompute-granularity full"
            raise contradiction("--recompute-activations", full, "the first means selective")
        granularity = "selective"
    values = _values(args, "recompute_method", "recompute_num_layers", "paro_recompute_keep")
    if granularity != "full":
        _refuse_without("--recompute-granularity full", values)
    modules = args.recompute_modules
    if granularity != "selective":
        _refuse_without("--recompute-granularity selective", _values(args, "recompute_modules"))
    for module in modules or ():
        if module not in ("core_attn", "layernorm"):
            raise UserError(
                f"--recompute-modules {module} is not supported: core_attn and layernorm are "
                "recomputed by themselves, all else only with --recompute-granularity full"
            )
    if granularity is None or (modules is not None and "core_attn" not in modules):
        return None  # norms are always recomputed
    keeps_core = values.pop("paro_recompute_keep", None) is not None
    detail = {name.removeprefix("recompute_"): value for name, value in values.items()}
    return RecomputeConfig(granularity=granularity, keeps_core=keeps_core, **detail)
