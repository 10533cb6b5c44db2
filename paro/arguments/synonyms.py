"""Option names of other frameworks, and the flags that mean the same here."""

# From Hugging Face's Trainer and model configurations, torchtitan, DeepSpeed, nanoGPT, Lightning
# and old Megatron-LM. Names are without leading dashes, section (optimizer.lr) and underscores.

from __future__ import annotations

_LAUNCHER = "it belongs to torchrun: give it before pretrain_llama.py"
TABLE = (
    # The model.
    ("--llama-preset", "model model-name model-size model-type flavor config-name size"),
    (
        "--load, with --finetune for a model to continue from (tools/convert_checkpoint.py makes "
        "a checkpoint of a Hugging Face folder)",
        "model-name-or-path model-path pretrained pretrained-model pretrained-model-name-or-path "
        "init-from hf-model checkpoint-path initial-load-path",
    ),
    ("--num-layers", "n-layer n-layers num-hidden-layers layers depth"),
    ("--hidden-size", "n-embd dim d-model hidden-dim embed-dim embedding-dim model-dim width"),
    ("--ffn-hidden-size", "intermediate-size ffn-dim mlp-dim d-ff mlp-hidden-size"),
    ("--num-attention-heads", "n-head n-heads num-heads heads attention-heads"),
    (
        "--group-query-attention and --num-query-groups",
        "num-key-value-heads n-kv-heads num-kv-heads kv-heads n-kv-head gqa",
    ),
    ("--kv-channels", "head-dim head-size"),
    ("--rotary-base", "rope-theta rope-base theta"),
    ("--use-rope-scaling and --rope-scaling-factor", "rope-factor"),
    ("--norm-epsilon", "rms-norm-eps norm-eps layernorm-epsilon layer-norm-eps rmsnorm-eps"),
    ("--init-method-std", "initializer-range init-std"),
    ("--tie-embeddings-and-output-weights", "tie-word-embeddings tie-embeddings weight-tying"),
    ("--attention-dropout 0: LLaMA trains without dropout", "dropout attn-dropout resid-dropout"),
    (
        "--seq-length",
        "seq-len sequence-length max-seq-len max-seq-length block-size context-length "
        "context-size n-ctx max-length model-max-length",
    ),
    # Batches and lengths.
    (
        "--micro-batch-size for a rank's pass and --global-batch-size for a step",
        "batch-size train-batch-size bs batch",
    ),
    (
        "--micro-batch-size",
        "per-device-train-batch-size per-device-batch-size per-gpu-train-batch-size "
        "train-micro-batch-size-per-gpu local-batch-size micro-batch device-batch-size mbs",
    ),
    ("--global-batch-size", "gbs total-batch-size effective-batch-size"),
    (
        "--global-batch-size: gradients are accumulated over as many micro-batches of "
        "--micro-batch-size on each rank as it takes",
        "gradient-accumulation-steps grad-accumulation-steps gradient-accumulation grad-accum "
        "accumulate-grad-batches grad-acc-steps num-micro-batches num-microbatches",
    ),
    (
        "--train-iters, or --train-samples: a training has a length, and reads a corpus as often "
        "as that takes",
        "epochs num-epochs num-train-epochs max-epochs n-epochs epoch",
    ),
    (
        "--train-iters",
        "max-steps steps train-steps training-steps max-iters iters iterations num-steps "
        "num-iterations total-steps max-train-steps num-train-steps train-iterations",
    ),
    ("--train-samples", "max-samples max-train-samples num-samples"),
    # Optimizer.
    ("--lr", "learning-rate max-lr peak-lr base-lr initial-lr"),
    ("--min-lr", "lr-min min-learning-rate eta-min final-lr end-lr"),
    (
        "--lr-decay-style",
        "lr-scheduler lr-scheduler-type scheduler schedule lr-schedule decay-type decay-lr "
        "lr-decay-type",
    ),
    ("--lr-warmup-iters", "warmup-steps warmup-iters warmup num-warmup-steps lr-warmup-steps"),
    ("--lr-warmup-fraction", "warmup-ratio warmup-fraction"),
    ("--lr-decay-iters", "decay-steps lr-decay-steps decay-iters"),
    ("--weight-decay", "wd"),
    ("--adam-beta1", "beta1 adam-beta-1"),
    ("--adam-beta2", "beta2 adam-beta-2"),
    ("--adam-beta1 and --adam-beta2", "betas adam-betas"),
    ("--adam-eps", "eps adam-epsilon epsilon"),
    ("--clip-grad", "max-grad-norm max-norm gradient-clipping grad-clip gradient-clip-val"),
    ("--optimizer adam, which is AdamW", "optim optimizer-name optimizer-type"),
    # Precision, kernels, memory.
    (
        "--bf16 or --fp16",
        "dtype precision mixed-precision torch-dtype amp half fp16-opt-level autocast "
        "mixed-precision-param params-dtype",
    ),
    ("--grad-reduce-in-bf16", "mixed-precision-reduce grad-dtype"),
    ("--torch-compile inductor", "compile torchcompile torch-compile-backend"),
    (
        "attention chooses its kernel by itself: leave it out",
        "flash-attention flash-attn use-flash-attention attn-implementation attn-impl sdpa",
    ),
    (
        "--recompute-granularity full; of some blocks alone with --recompute-method block",
        "gradient-checkpointing activation-checkpointing activation-checkpoint "
        "checkpoint-activations recompute ac-mode activation-checkpoint-mode use-checkpoint",
    ),
    # Sharding and parallelism.
    (
        "--paro-strategy: GGG shards all states over all ranks, III inside groups (HSDP)",
        "fsdp fsdp-config full-shard use-fsdp sharding-strategy hsdp fully-sharded fsdp2 "
        "data-parallel-shard-degree dp-shard",
    ),
    (
        "--paro-strategy: NNG, NGG and GGG are ZeRO stages 1, 2 and 3",
        "zero-stage zero deepspeed deepspeed-config ds-config use-deepspeed zero-optimization "
        "zero1 zero2 zero3",
    ),
    ("--paro-strategy NNN", "ddp data-parallel use-ddp"),
    (
        "--paro-group-size",
        "data-parallel-replicate-degree dp-replicate hybrid-shard zero-hpz-partition-size",
    ),
    (
        "--paro-strategy GGG: states are spread, blocks are not cut",
        "tp tp-size pp pp-size tensor-parallel tensor-parallel-degree tensor-parallel-size "
        "pipeline-parallel pipeline-parallel-degree pipeline-parallel-size model-parallel-size",
    ),
    (
        "--context-parallel-size",
        "cp cp-size context-parallel context-parallel-degree sequence-parallel-size "
        "context-parallel-shard-degree ulysses-degree sp-size",
    ),
    ("--distributed-backend", "backend dist-backend device accelerator"),
    (
        _LAUNCHER,
        "nproc-per-node nnodes node-rank master-addr master-port rdzv-backend rdzv-endpoint "
        "rdzv-id standalone max-restarts num-gpus gpus num-nodes nodes devices num-processes",
    ),
    # Data.
    (
        "--data-path, the prefix that tools/preprocess_data.py wrote",
        "data dataset dataset-name dataset-path train-file train-data data-dir data-folder "
        "data-prefix dataset-dir",
    ),
    ("--valid-data-path", "validation-file valid-file eval-data val-data validation-data"),
    ("--mock-data", "synthetic-data fake-data dummy-data"),
    (
        "--tokenizer-type and --tokenizer-model",
        "tokenizer tokenizer-name tokenizer-path tokenizer-name-or-path",
    ),
    ("--num-workers", "dataloader-num-workers workers num-data-workers data-workers"),
    # Checkpoints and reports.
    (
        "--save",
        "output-dir out-dir save-dir save-path checkpoint-dir save-folder output ckpt-dir "
        "default-root-dir checkpoint-folder dump-folder",
    ),
    ("--load", "resume resume-from-checkpoint resume-from load-path load-dir ckpt restore"),
    (
        "--save-interval",
        "save-steps save-every checkpoint-interval save-freq checkpoint-every ckpt-interval "
        "save-frequency",
    ),
    ("--save-retain-interval", "save-total-limit keep-latest-k keep-last"),
    ("--ckpt-format", "dist-ckpt-format"),
    ("--log-interval", "logging-steps log-every log-steps log-freq print-freq logging-interval"),
    ("--eval-interval", "eval-steps eval-every val-interval eval-freq validation-freq"),
    ("--eval-iters", "eval-batches limit-val-batches validation-steps"),
    ("--skip-train", "eval-only evaluate do-eval"),
    ("--tensorboard-dir", "logging-dir tensorboard log-dir enable-tensorboard tb-dir"),
    (
        "--wandb-project, or --tensorboard-dir",
        "report-to wandb use-wandb wandb-log enable-wandb tracker logger",
    ),
    ("--wandb-exp-name", "run-name wandb-run-name experiment-name exp-name wandb-name"),
    ("--yaml-cfg", "config config-file job-config cfg config-path"),
)
# By the name in another framework: what to use here.
SYNONYMS = {name: meaning for meaning, names in TABLE for name in names.split()}
