"""Converts a LLaMA between this project's checkpoints and other formats, tensor by tensor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from model.units import num_parameters
from paro.checkpoint.convert.conversion import SOURCES, TARGETS, Conversion
from paro.checkpoint.convert.source import ModelSource
from paro.distributed.user_errors import run_script
from paro.errors import writing
from paro.files.object_store import path_of
from paro.precision import BYTES_OF
from paro.report.log import print_line
from paro.sharding.buffers import TORCH_TYPES
from paro.text import size_text
from tools.shared.command_line import Parser

_WITH_OPTIMIZER = (
    "between torch_dist and paro: convert AdamW's masters, moments and step too, so that --load "
    "continues the training; default: the weights alone"
)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Converts a LLaMA from one format of checkpoints to another. Tensors keep their bits "
            "unless --dtype is given; a few hundred MB of them are in memory at a time."
        ),
    )
    add = parser.add_argument
    add("--from", required=True, choices=SOURCES, dest="source_format", help="what it is")
    add("--to", required=True, choices=TARGETS, dest="target_format", help="what it becomes")
    add("--input", required=True, type=path_of, metavar="DIR", help="the folder to convert")
    add(
        "--ckpt-step",
        type=int,
        metavar="N",
        help="with --from paro: which iteration; default: the latest one",
    )
    add(
        "--weights",
        choices=("trained", "ema"),
        default="trained",
        help="with --from paro: the weights of the training, or their averages by --ema-decay; "
        "default: trained",
    )
    add(
        "--base",
        metavar="DIR",
        help="with --from paro: where its base is, if it moved; with --from peft: the model of the "
        "adapters, a checkpoint of paro or, with --merge, also a Hugging Face folder",
    )
    add(
        "--base-model-name-or-path",
        metavar="NAME",
        help="with --to peft: what the adapters call their base, a Hugging Face folder or a name "
        "of the hub; default: the folder that the base was converted from",
    )
    add(
        "--hf-assets-path",
        type=Path,
        metavar="DIR",
        help="with --from torchtitan: the folder of the model's config.json and tokenizer files; "
        "default: the folder hugging_face in the input",
    )
    add("--merge", action="store_true", help="merge its adapters into the weights, in fp32")
    add("--with-optimizer", action="store_true", help=_WITH_OPTIMIZER)
    _add_output_flags(parser)
    return parser


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="DIR", help="a folder that does not exist")
    add(
        "--dtype",
        choices=list(BYTES_OF),
        help="type of the tensors; default: as they are stored",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="with --to paro, megatron or torch_dist: pad the vocabulary to a multiple of N, as "
        "the trainer with the same flag does (default: %(default)s); others hold no padding",
    )
    add(
        "--padded-vocab-size",
        type=int,
        metavar="N",
        help="give it exactly N rows instead, at least as many as the tokenizer has ids",
    )
    add("--dry-run", action="store_true", help="check and describe it, and write nothing")


def describe(conversion: Conversion, source: ModelSource) -> str:
    config, adapters = source.config, ""
    if source.adapters:
        adapters = f"; {len(source.adapters) // 2} adapters"
    if source.lora is not None:
        adapters += f" of rank {source.lora.rank} on {', '.join(source.lora.targets)}"
    types = sorted({str(t.dtype).removeprefix("torch.") for t in source.tensors.values()})
    return (
        f"{conversion.source}: {config.num_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_attention_heads} heads in {config.num_query_groups} groups, vocabulary "
        f"{config.vocab_size}; {num_parameters(config):,} parameters in {len(source.tensors)} "
        f"tensors, {size_text(source.num_bytes)} as {', '.join(types)}"
        f"{adapters}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    conversion = Conversion(
        source_format=args.source_format,
        target_format=args.target_format,
        source=args.input,
        target=args.output,
        dtype=TORCH_TYPES.get(args.dtype),
        iteration=args.ckpt_step,
        averaged=args.weights == "ema",
        base=args.base,
        base_model=args.base_model_name_or_path,
        assets=args.hf_assets_path,
        merge=args.merge,
        with_optimizer=args.with_optimizer,
        divisible_by=args.make_vocab_size_divisible_by,
        padded_vocab_size=args.padded_vocab_size,
    )
    source = conversion.open()
    print_line(describe(conversion, source), *source.notes)
    if args.dry_run:
        print_line(f"would write {conversion.target} ({conversion.target_format})")
        return
    bar = tqdm(total=conversion.num_bytes(source), unit="B", unit_scale=True, disable=None)
    with writing(f"--output {conversion.target}"), bar:
        notes = conversion.write(source, bar.update)
    print_line(*notes, f"wrote {conversion.target} ({conversion.target_format})")


if __name__ == "__main__":
    run_script("convert_checkpoint.py", main)
