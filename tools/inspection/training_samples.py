"""The samples that a training would see, in its order, without the training."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from data.loader import Samples, SplitCounts, build_datasets
from data.loss_mask import TRAINED
from data.tokenizer import build_tokenizer
from data.tokenizer_config import TokenizerConfig
from paro.arguments.parser import build_parser
from paro.config.run import configure
from paro.distributed.world import World
from paro.errors import UserError, check_least
from paro.training.assembly import count_samples
from tools.shared.output import output_file

# What a training needs but its samples do not depend on: set where it is not given.
SMALL_MODEL = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1}
# Flags that depend on ranks that do not exist here, or on other files of the run: ignored.
IGNORED = (
    *("ranks_per_node", "device_memory_gb", "paro_strategy", "paro_group_size", "paro_machine"),
    *("paro_collective", "paro_materialize", "paro_rotate_in_place", "use_distributed_optimizer"),
    *("eval_global_batch_size", "eval_micro_batch_size", "save", "start_over", "log_progress"),
    *("use_pytorch_profiler", "use_checkpoint_opt_param_scheduler"),
)
# The checkpoint too, unless the tokenizer comes from there.
CHECKPOINT = ("load", "ckpt_step")
ALONE = {"dry_run": True, "world_size": 1}  # a dry run of one rank needs no folder and no package


def training_samples(
    args: Namespace, iteration: int | None
) -> tuple[Samples, range, TokenizerConfig]:
    """Return the training split, the indices of its samples that are trained on, its tokenizer.

    With `iteration` the indices are of one iteration, and the flags of batch sizes count.
    """
    ignored = (*IGNORED, *(() if args.use_checkpoint_args else CHECKPOINT))
    settled = vars(args) | {name: build_parser().get_default(name) for name in ignored} | ALONE
    if args.llama_preset is None:
        settled |= {name: settled[name] or size for name, size in SMALL_MODEL.items()}
    settled["lr"] = args.lr or 1e-3
    settled["micro_batch_size"] = args.micro_batch_size or 1
    is_batched = args.global_batch_size or args.step_batch_size_schedule
    if args.train_samples is not None and iteration is None:
        # All samples, whatever the batch sizes.
        settled |= {"micro_batch_size": 1, "global_batch_size": 1}
        settled |= dict.fromkeys(("rampup_batch_size", "step_batch_size_schedule"))
    elif not is_batched and (iteration is not None or args.train_iters is not None):
        flag = "--train-iters" if iteration is None else "--iteration"
        raise UserError(
            f"--dump-samples with {flag} needs --global-batch-size, which would follow from the "
            "number of ranks: give it" + (", or --train-samples" if iteration is None else "")
        )
    config = configure(Namespace(**settled), World())
    count = count_samples(config.data, config.train, config.batches).train
    indices = range(count)
    if iteration is not None:
        indices = range(*map(config.batches.samples_after, (iteration - 1, iteration)))
    if indices.stop > count:
        raise UserError(f"--iteration {iteration}: the training ends before, after {count} samples")
    counts = SplitCounts(train=count, consumed=indices.start)
    datasets = build_datasets(config.data, counts, config.vocab_size, config.tokenizer)
    return datasets.train, indices, config.tokenizer


def dump(args: Namespace, path: Path, iteration: int | None) -> str:
    """Write `{"tokens": [...]}` per sample, with `"answered"` of conversations.

    Samples of one iteration have their `"number"`, from 1 on, and their `"text"`, too.
    """
    check_least(1, iteration=iteration)
    samples, indices, config = training_samples(args, iteration)
    tokenizer = None if iteration is None else build_tokenizer(config)
    with output_file(path) as temporary, temporary.open("w", encoding="ascii") as stream:
        for index in indices:
            text, loss_mask = samples[index]
            sample = {"tokens": text[:-1].tolist()}  # the last token is only a label
            if loss_mask is not None:
                sample["answered"] = (loss_mask[:-1] == TRAINED).astype(int).tolist()
            if tokenizer is not None:
                named = {"number": index + 1, "text": tokenizer.decode(sample["tokens"])}
                sample = named | sample
            stream.write(json.dumps(sample) + "\n")
    count = len(indices)
    return f"wrote {path}: {count:,} samples of {args.seq_length} tokens; {samples.describe()}"
