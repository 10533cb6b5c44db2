"""Scores a model by tasks of EleutherAI's lm-eval, which is installed apart: accuracy and more."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root takes the place of this folder on
    # sys.path, where lm-eval would find this file as the package `evaluate` of Hugging Face
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from paro.distributed.user_errors import run_script
from paro.errors import UserError, check_least, reading
from paro.report.log import print_line
from paro.text import align
from tools import generate
from tools.shared.command_line import Parser
from tools.shared.device import device_of
from tools.shared.output import write_json

INSTALL = "pip install lm-eval==0.4.13 -c constraints.txt"


def table_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a line for each figure of each task; the harness names them `metric,filter`."""
    rows = [["task", "figure", "value", "standard error"]]
    for task, figures in results.items():
        for name, value in figures.items():
            metric, comma, kept = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{kept}")
            shown = [f"{x:.4f}" if isinstance(x, float) else "-" for x in (value, error)]
            rows.append([task, metric if kept == "none" else name, *shown])
    return align(rows, left=(0, 1))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        description=(
            "Scores a checkpoint of a training, or a model in any format, by "
            f"tasks of EleutherAI's lm-eval ({INSTALL}), as it scores models of transformers."
        ),
        epilog=(
            "example: python tools/evaluate.py --load runs/model --tasks hellaswag arc_easy "
            "--bf16; tasks of your own: --include-path DIR, a folder with lm-eval's YAML files"
        ),
    )
    generate.add_model_args(parser)
    add = parser.add_argument
    add("--tasks", nargs="+", required=True, metavar="NAME", help="tasks or groups of lm-eval")
    add("--include-path", metavar="DIR", help="more tasks, as lm-eval's YAML files")
    add("--num-fewshot", type=int, metavar="N", help="solved examples; default: the task's")
    add("--limit", type=int, metavar="N", help="only the first N documents of each task")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at once (%(default)s)")
    add("--seq-length", type=int, metavar="N", help="longest text; default: the model's")
    add("--output", type=Path, metavar="FILE", help="write all results there, as JSON")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"tools/evaluate.py needs EleutherAI's lm-eval: {INSTALL}")
    check_least(0, num_fewshot=args.num_fewshot)
    check_least(1, limit=args.limit, batch_size=args.batch_size, seq_length=args.seq_length)
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise UserError(f"--include-path {args.include_path} is no folder")
    # Imported here: it is no requirement, and takes seconds.
    from tools.evaluation import harness

    tasks = harness.task_manager(args.tasks, args.include_path)
    device = device_of(args.device)
    with reading(f"--load {args.load}"):
        source = generate.open_model(args.load, args.ckpt_step, args.base)
    tokenizer = generate.load_tokenizer(source, args.tokenizer_model)
    model = harness.HarnessModel(
        generate.load_model(source, device, generate.dtype_of(args)),
        tokenizer,
        prefix=generate.prefix_of(source, tokenizer),
        max_length=args.seq_length or source.config.max_position_embeddings,
        batch_size=args.batch_size,
    )
    results = harness.simple_evaluate(
        model=model,
        tasks=args.tasks,
        task_manager=tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        log_samples=args.output is not None,
    )
    print_line(table_of(results["results"]), whole=True)
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "samples")
    write_json(args.output, {name: results[name] for name in kept if name in results})


if __name__ == "__main__":
    run_script("evaluate.py", main)
