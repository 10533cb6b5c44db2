"""The commands that check and launch the best candidate of a plan, and why another is not it."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence

from model.config import LLAMA_PRESETS
from paro.arguments.flag_parser import by_flag, wrapped
from paro.arguments.parser import build_parser
from paro.planning.description import behind, exposed_text, seconds_text
from paro.planning.estimator import Estimate
from paro.planning.planner import SearchResult, plan
from paro.planning.search_space import PlanRequest, SearchSpace, recompute_flags
from paro.quantization.formats import FULL_BITS
from paro.spec.context_layout import SIZE_FLAG, SIZES_FLAG, TYPE_FLAG
from paro.text import size_text
from tools.planning.tables import enough_alone

# What the planner chooses, or a dry run alone needs: written anew, or left out.
_ANEW = {
    *("--paro-machine", "--world-size", "--device-memory-gb", "--paro-collective"),
    *("--paro-inter-bits", "--paro-inter-param-bits", "--paro-inter-grad-bits"),
    *("--seq-length", "--max-position-embeddings", "--micro-batch-size", "--global-batch-size"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-activations", "--recompute-modules", "--paro-recompute-keep"),
    *(SIZE_FLAG, TYPE_FLAG, SIZES_FLAG, "--paro-context-ring"),
}
_YOURS = "--mock-data --lr 3e-4 --train-iters 1000"  # a plan depends on neither


def launch_flags(
    args: Namespace, request: PlanRequest, best: Estimate, words: Sequence[str]
) -> list[list[str]]:
    """Return the flags of pretrain_llama.py for a candidate of a plan, each with its values.

    `words` are the command line of the plan.
    """
    known = build_parser()._option_string_actions
    groups = [
        group for group in by_flag(words)
        if (flag := group[0].partition("=")[0]) in known and flag not in _ANEW
    ]  # fmt: skip
    candidate, model, precision = best.candidate, request.model, best.precision
    preset = args.llama_preset and LLAMA_PRESETS[args.llama_preset]
    positions = preset.max_position_embeddings if preset else request.seq_length
    if model.max_position_embeddings != positions:
        groups.append(["--max-position-embeddings", str(model.max_position_embeddings)])
    groups += [
        ["--seq-length", str(request.seq_length)],
        ["--micro-batch-size", str(candidate.micro_batch_size)],
        ["--global-batch-size", str(request.global_batch_size)],
        ["--paro-strategy", candidate.strategy.name],
    ]
    if (context := candidate.context).size > 1:
        groups += [[SIZE_FLAG, str(context.size)], *by_flag(context.type_flags.split())]
    if candidate.collective != "native":
        groups.append(["--paro-collective", candidate.collective])
    if candidate.recompute is not None:
        groups += by_flag(recompute_flags(candidate.recompute).split())
    for flag, bits in (
        ("--paro-inter-param-bits", precision.inter_param_bits),
        ("--paro-inter-grad-bits", precision.inter_grad_bits),
    ):
        if bits != FULL_BITS:
            groups.append([flag, str(bits)])
    if not request.machine.is_of_gpus:
        groups.append(["--distributed-backend", "gloo"])
    return groups


def launch_lines(
    args: Namespace, request: PlanRequest, best: Estimate, words: Sequence[str]
) -> Iterator[str]:
    """Yield lines for bash: the flags as an array, a dry run with them, and both ways to launch
    them."""
    yield "to launch it, with data, learning rate and length of your own in the last line:"
    yield "FLAGS=("
    yield from wrapped(launch_flags(args, request, best, words))
    yield f"    {_YOURS}"
    yield ")"
    yield f'python pretrain_llama.py "${{FLAGS[@]}}" {shlex.join(_dry_run(args, request))}'
    per_node = request.machine.group_size
    nodes = request.world_size // per_node
    program = 'pretrain_llama.py "${FLAGS[@]}"'
    if request.machine.is_of_gpus:
        yield "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    if nodes == 1:
        yield f"bash examples/one_machine.sh --nproc-per-node {per_node} {program}"
    else:
        yield f"# on each node, its number 0 to {nodes - 1} in NODE_RANK, node 0 in MASTER_ADDR:"
        yield (
            f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --node-rank $NODE_RANK "
            f"--master-addr $MASTER_ADDR --master-port 6000 {program}"
        )
    gpus = f" --gpus-per-node {per_node}" if request.machine.is_of_gpus else ""
    yield f"# or once, in a SLURM allocation of {nodes if nodes > 1 else 'one'} of them:"
    yield (
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
        f"MASTER_PORT=6000 srun --nodes {nodes} --ntasks-per-node {per_node}{gpus} "
        f"python -u {program}"
    )


def _dry_run(args: Namespace, request: PlanRequest) -> list[str]:
    """Make a dry run of the launch, on the machine of the plan if a file has it."""
    words = ["--dry-run", "--world-size", str(request.world_size)]
    machine = args.paro_machine or args.machine_file
    if machine is not None:
        words += ["--paro-machine", str(machine)]
    words += ["--ranks-per-node", str(request.machine.group_size)]
    if machine is None or args.device_memory_gb is not None:
        words += ["--device-memory-gb", f"{request.device_bytes / 1e9:g}"]
    return words


def why_not(request: PlanRequest, found: SearchResult, text: str) -> tuple[str, str]:
    """Write in two lines the cost of the best setting with a strategy, and where it comes from."""
    strategy, best = request.strategy(text), found.best
    name = f"why not {text}: "
    reason = request.infeasible_reason(strategy, request.materialize)
    if reason is not None:
        return f"{name}it is not among the candidates", reason
    own = plan(request, SearchSpace(strategies=(strategy,)))
    if own.best is None:
        least = own.least
        needs = f"{size_text(least.memory_bytes)} with {least.candidate.describe()}"
        return (
            f"{name}it does not fit, the least is {needs}",
            f"{least.memory.describe()}; {enough_alone(request, least.candidate)}",
        )
    if best is None or own.best.candidate.strategy.degrees == best.candidate.strategy.degrees:
        return f"{name}it is the best", _spends(own.best)
    return (
        f"{name}its best, {own.best.candidate.describe()}, {behind(own.best, best)}: "
        f"{seconds_text(own.best.seconds)} a step, {size_text(own.best.memory_bytes)}",
        f"{_spends(own.best)}; {best.candidate.name} waits {exposed_text(best)} and sends "
        f"{size_text(best.sent.inter)}",
    )


def _spends(estimate: Estimate) -> str:
    return (
        f"it computes for {seconds_text(estimate.timeline.compute_seconds)}, waits "
        f"{exposed_text(estimate)}, and sends {size_text(estimate.sent.inter)} between groups"
    )
