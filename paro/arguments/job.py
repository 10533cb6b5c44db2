"""Flags of input and output: data, tokenizer, validation, checkpoints, logging."""

from __future__ import annotations

from data.tokenizer_config import TOKENIZER_TYPES
from paro.arguments.flag_parser import AddFlag, flag_group
from paro.precision import BYTES_OF

# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


@flag_group("data", "Corpora as tools/preprocess_data.py and Megatron-LM write them; needed, or "
    "--mock-data.")
def add_data_args(add: AddFlag) -> None:
    add("--data-path", nargs="*", default=(), metavar="PREFIX",
        help="a corpus as tools/preprocess_data.py writes it, PREFIX.bin and PREFIX.idx, files or "
        "objects of a store (s3://BUCKET/PREFIX); or "
        "several, each after its weight (0.3 A 0.7 B), or without weights: by their sizes")
    add("--data-args-path", metavar="FILE",
        help="the same from a file: words, or a JSON list in which lists may stand for paths")
    for split in ("train", "valid", "test"):
        add(f"--{split}-data-path", nargs="*", default=(), metavar="PREFIX",
            help=f"corpora for {split} alone, as for --data-path; nothing is cut by --split")
    add("--per-split-data-args-path", metavar="FILE",
        help='the same from a file: JSON, {"train": [...], "valid": [...], "test": [...]}')
    add("--data-phases", metavar="FILE",
        help='blends for training alone that follow one another: JSON, [{"name": "web", '
        '"samples": 1000, "data": [0.7, "A", 0.3, "B"]}, ...]; each has an order of its own')
    add("--mock-data", action="store_true",
        help="deterministic synthetic tokens instead of a corpus")
    add("--split", metavar="TRAIN,VALID,TEST",
        help="the parts of every corpus to train, validate and test on, in any unit; default "
        "969, 30, 1")
    add("--data-cache-path", metavar="DIR",
        help="where sample indices are kept between runs; default: next to the corpus")
    add("--object-storage-cache-path", metavar="DIR",
        help="a local folder that the ranks of a node share, for what is read from object stores "
        "(s3://, gs://, az://) and for checkpoints on their way there; what was read takes at most "
        "half of the room on its disk; default: in the temporary folder")
    add("--eod-mask-loss", action="store_true",
        help="leave the tokens that end documents out of the loss")
    add("--reset-position-ids", action="store_true",
        help="count positions from the beginning of each document, not of each sample")
    add("--reset-attention-mask", action="store_true",
        help="keep documents that share a sample from seeing each other")
    add("--sft", action="store_true",
        help="corpora are conversations (preprocess_data.py --apply-chat-template): a sample is "
        "one of them, cut or filled up to --seq-length")
    add("--num-workers", type=int, default=2, metavar="N",
        help="background workers of the data loader, per rank; 0: none")


@flag_group("tokenizer", "The one that made the corpus: it sets the vocabulary and ends documents.")
def add_tokenizer_args(add: AddFlag) -> None:
    add("--tokenizer-type", metavar="TYPE",
        help=f"needed except with --mock-data or --vocab-file: {' '.join(TOKENIZER_TYPES)}")
    add("--tokenizer-model", metavar="FILE", help="the tokenizer's file, folder or name")
    add("--vocab-file", metavar="FILE",
        help="for GPT2BPETokenizer, which is the default where this is given: vocab.json")
    add("--merge-file", metavar="FILE", help="for GPT2BPETokenizer: merges.txt")
    add("--vocab-size", type=int, metavar="N",
        help="for NullTokenizer: ids are below N, and N - 1 ends a document; default: the "
        "preset's; for others checked against the tokenizer")
    add("--null-tokenizer-eod-id", type=int, metavar="ID",
        help="for NullTokenizer: the id that ends a document; default: the last one")


@flag_group(
    "averaged weights",
    "An average of the weights that train, in fp32 with the sharding of the masters. Nothing is "
    "sent for it. tools/merge_checkpoints.py averages checkpoints of a run without one.",
)
def add_average_args(add: AddFlag) -> None:
    add("--ema-decay", type=float, metavar="D",
        help="keep an exponential moving average: D times the average and 1 - D times the updated "
        "weights, with Adam's bias correction")
    add("--ema-start", type=int, default=0, metavar="N",
        help="the first iteration after which weights are averaged")
    add("--ema-interval", type=int, default=1, metavar="N",
        help="average every N iterations, counted from --ema-start")
    add("--eval-ema", action="store_true",
        help="evaluate the averaged weights too, on the same samples")


@flag_group("validation")
def add_validation_args(add: AddFlag) -> None:
    add("--eval-interval", type=int, default=1000, metavar="N",
        help="evaluate on held-out data every N iterations; 0: only at the end")
    add("--eval-iters", type=int, default=100, metavar="N",
        help="global batches per evaluation; 0: never evaluate")
    add("--eval-global-batch-size", type=int, metavar="SAMPLES",
        help="samples of such a batch over all ranks; default: --global-batch-size, or the last "
        "size of --step-batch-size-schedule")
    add("--eval-micro-batch-size", type=int, metavar="SAMPLES",
        help="samples per rank and forward pass of an evaluation; default: --micro-batch-size")
    add("--full-validation", action="store_true",
        help="let every evaluation read all validation data once, instead of --eval-iters batches")
    add("--multiple-validation-sets", action="store_true",
        help="evaluate each corpus of --valid-data-path by itself, under its name")
    add("--skip-train", action="store_true",
        help="evaluate what --load holds on validation and test data and leave; nothing is written")


@flag_group("checkpointing")
def add_checkpointing_args(add: AddFlag) -> None:
    add("--save", metavar="DIR", help="save checkpoints under DIR; default: none is saved")
    add("--save-interval", "--persistent-save-interval", type=int, metavar="N",
        help="save every N iterations; default: at the end only")
    add("--save-retain-interval", type=int, metavar="N",
        help="keep checkpoints of every N iterations and the last two; another is removed by the "
        "save after the next, if training went on from that one; default: all are kept")
    add("--async-save", action="store_true",
        help="train on while a copy of this rank's part is written from host memory; the next save "
        "waits for the last")
    add("--on-save-failure", choices=("stop", "continue"), default="stop",
        help="what a save that fails (a full disk, say) does to the training; either way the old "
        "checkpoint stays, and a run whose end cannot be saved fails")
    add("--no-save-optim", action="store_true",
        help="save parameters without the optimizer's moments, a third of the bytes")
    add("--start-over", action="store_true",
        help="train into a --save that holds checkpoints of another run: they move to "
        "DIR/earlier_1 (or _2 ...), which --load takes; without it such a run is refused")
    add("--save-hf", metavar="DIR",
        help="write the final model to DIR, which must not exist, for Hugging Face transformers: "
        "all ranks write it at once, byte for byte as tools/convert_checkpoint.py --to hf does. A "
        "run that exits early writes none; the one that completes it does")
    add("--save-hf-dtype", choices=list(BYTES_OF),
        help="type of the tensors in DIR; default: as checkpoints hold them, fp32 for what trains")
    add("--load", metavar="DIR",
        help="a folder of checkpoints, as --save or tools/convert_checkpoint.py wrote it (not one "
        "iteration's folder in it): continue from the iteration that its tracker names, or the "
        "newest whole one where that is damaged. An empty folder, or --save's own before it "
        "exists, begins at iteration 0; any other that does not exist is an error")
    add("--base", metavar="DIR",
        help="where the base of --load is, if it is no longer where it was: the checkpoints that "
        "hold the frozen parameters of a run with --trainable")
    add("--save-frozen", action="store_true",
        help="save the frozen parameters of a run with --trainable too; without it they are read "
        "from the checkpoint with which it began, its base, if there is one")
    add("--ckpt-step", type=int, metavar="N",
        help="continue from iteration N of --load; an error if it is missing or damaged")
    add("--exit-on-missing-checkpoint", action="store_true",
        help="stop if --load holds no checkpoint instead of starting afresh")
    add("--finetune", action="store_true",
        help="take the parameters of --load alone and begin at iteration 0")
    add("--no-load-optim", action="store_true",
        help="continue without the optimizer's moments; loss scale and schedules restart too")
    add("--use-checkpoint-args", action="store_true",
        help="take the model's sizes from --load, and the tokenizer where no flag gives one")
    add("--non-persistent-ckpt-type", choices=("local",),
        help="local: also copy the states to the node's memory while training; a run that torchrun "
        "restarts recovers from there, and the states of a lost node from other nodes that hold "
        "them; on with --paro-survive and --paro-elastic")
    add("--non-persistent-local-ckpt-dir", metavar="DIR",
        help="the folder for local copies on every node; default: /dev/shm")
    add("--non-persistent-save-interval", type=int, metavar="N",
        help="make local copies every N iterations; default: 1")


@flag_group("logging")
def add_logging_args(add: AddFlag) -> None:
    add("--log-interval", type=int, default=100, metavar="N",
        help="print a line, and write one to --metrics-file, every N iterations")
    add("--logging-level", type=int, metavar="LEVEL",
        help="what torch and other libraries say on standard error, by Python's levels: 10 all, 20 "
        "what goes on, 30 warnings, 40 errors alone; default: as they have it")
    add("--log-throughput", action="store_true", help="add TFLOP/s per device to that line")
    add("--log-num-zeros-in-grad", action="store_true",
        help="add how many elements of the gradients are zero")
    add("--log-params-norm", action="store_true",
        help="add the norm of all parameters after the update")
    add("--metrics-file", metavar="FILE",
        help="append a JSON object per logged iteration: losses in full precision, throughput, "
        "memory, bytes sent")
    add("--peak-tflops", type=float, metavar="X",
        help="what one device can compute, for MFU; default: a table of GPUs, else timed at start")
    add("--log-progress", action="store_true",
        help="note every start and save in progress.txt under --save, with throughput and tokens")
    add("--timing-log-level", type=int, choices=(0, 1, 2), default=0, metavar="LEVEL",
        help="time more than the iteration, and print it with the line: 1, the parts of a step; 2, "
        "those of each micro-batch; on a GPU a timer waits for the device, which costs overlap")
    add("--timing-log-option", choices=("max", "minmax", "all"), default="minmax",
        help="of every timer the slowest rank, the fastest and the slowest, or all ranks")
    add("--log-timers-to-tensorboard", action="store_true",
        help="write the timers of --timing-log-level to TensorBoard and W&B too, as <timer>-time")
    add("--terminal", choices=("auto", "lines", "live"), default="auto",
        help="live: a view with progress, loss, throughput, memory and placement instead of log "
        "lines, drawn by the first rank; auto: live on a terminal that the ranks of one node "
        "share; live with standard output in a file: the lines go there, the view to the terminal")
    add("--heartbeat-file", metavar="FILE",
        help="a small file that is rewritten during training, at most once a second")
    add("--hang-dump-minutes", type=float, metavar="MINUTES",
        help="after so long without progress every rank prints where its threads stand; default: "
        "half of --distributed-timeout-minutes; 0: never")
    add("--flight-recorder-dir", metavar="DIR",
        help="write a rank's last collectives to DIR/rank_<rank> when it is stuck "
        "or when one times out in NCCL; torchfrtrace DIR compares the ranks")
    add("--log-straggler", action="store_true",
        help="print with the line which rank the others wait for, and whether computing, data or "
        "communication is the cause")
    add("--log-memory-interval", type=int, metavar="N",
        help="print measured and predicted memory every N iterations, not only after the first")
    add("--tensorboard-dir", metavar="DIR", help="write TensorBoard events to DIR")
    add("--tensorboard-log-interval", type=int, default=1, metavar="N",
        help="write to TensorBoard and W&B every N iterations")
    add("--tensorboard-queue-size", type=int, default=1000, metavar="N",
        help="TensorBoard events held back before they are written")
    add("--wandb-project", metavar="NAME", help="log to this Weights & Biases project")
    add("--wandb-entity", metavar="NAME", help="the user or team it belongs to")
    add("--wandb-exp-name", metavar="NAME", help="name of the run there")
    add("--wandb-save-dir", metavar="DIR", help="folder for its files on this machine")


@flag_group("profiling")
def add_profiling_args(add: AddFlag) -> None:
    add("--profile", action="store_true",
        help="profile some iterations: for nsys (--capture-range cudaProfilerApi), or by torch")
    add("--use-pytorch-profiler", action="store_true",
        help="with --profile: torch's profiler; the trace goes to --tensorboard-dir, or --save")
    add("--profile-step-start", type=int, default=10, metavar="N",
        help="profile from after N iterations")
    add("--profile-step-end", type=int, default=12, metavar="N", help="to after N iterations")
    add("--profile-ranks", type=int, nargs="+", default=[0], metavar="RANK",
        help="the ranks that are profiled")
    add("--record-memory-history", action="store_true",
        help="record every allocation on the GPUs of --profile-ranks; the snapshot is for "
        "pytorch.org/memory_viz")
    add("--memory-snapshot-path", default="snapshot.pickle", metavar="FILE",
        help="where it is written, at every save, when memory runs out, and at the end")


# In the order of --help.
JOB_GROUPS = (
    add_data_args, add_tokenizer_args, add_average_args, add_validation_args,
    add_checkpointing_args, add_logging_args, add_profiling_args,
)
