"""Rules for Megatron's flags of parallelism, sharding and communication."""

from __future__ import annotations

from paro.arguments.megatron_rules.rule import accepted, becoming, ignored, refused, unless, values

_SHARD = (
    "give --paro-strategy GGG, or IIG with --paro-group-size {value}, which spread the parameters "
    "over at least as many ranks"
)
_FIT_LONG = (
    "to fit long sequences give --recompute-granularity full, and --paro-strategy GGG to free "
    "memory for activations"
)
_NO_TENSOR_PARALLELISM = "there is no tensor parallelism"
_NO_PIPELINE = "there is no pipeline"
_LETTERS = {
    "no_shard": "--paro-strategy NNN",
    "optim": "--paro-strategy NNG",
    "optim_grads": "--paro-strategy NGG",
    "optim_grads_params": "--paro-strategy GGG",
}
_GIVE_LETTERS = (
    "give --paro-strategy NNN, NNG, NGG or GGG for no_shard, optim, optim_grads or "
    "optim_grads_params"
)
_BY_UNIT = "gradients are reduced unit by unit"
_NCCL = "NCCL is set up by its own environment variables alone"
_RECORDER = "--flight-recorder-dir turns the recorder on, as torch sets it up"

PARALLEL_RULES = (
    *becoming(
        "--paro-strategy GGG",
        (
            *values("--tensor-model-parallel-size", (1,), "blocks are not cut", _SHARD),
            *values("--pipeline-model-parallel-size", (1,), "layers are not cut", _SHARD),
        ),
    ),
    *becoming(
        "--recompute-granularity full",
        values("--context-parallel-size", (1,), "sequences are not cut", _FIT_LONG),
    ),
    *values("--expert-model-parallel-size", (1,), "LLaMA is dense", "LLaMA is dense: give 1"),
    *values("--expert-tensor-parallel-size", (1,), "LLaMA is dense", "LLaMA is dense: give 1"),
    *unless(
        "--sequence-parallel",
        "--tensor-model-parallel-size",
        "it is off without tensor parallelism",
        "it belongs to tensor parallelism; to save activations give --recompute-granularity full",
    ),
    *refused(
        "there is no tensor parallelism; gathers and reductions overlap by themselves, see "
        "--paro-prefetch-units",
        "--tp-comm-overlap --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad",
    ),
    *refused(
        "there is no tensor parallelism; --paro-strategy GGG gathers the weights of a unit "
        "when they are needed",
        "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards "
        "--gtp-remat-opt-in-modules --gtp-remat-reduce-scatter-with-fp32-accumulation "
        "--gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub",
    ),
    *accepted(
        _NO_TENSOR_PARALLELISM,
        "--no-async-tensor-model-parallel-allreduce --no-tp-comm-bulk-wgrad "
        "--disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad "
        "--no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs "
        "--disable-tp-comm-overlap-rs --no-tp-comm-split-ag --disable-tp-comm-split-ag "
        "--no-tp-comm-split-rs --disable-tp-comm-split-rs "
        "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding",
    ),
    *ignored(_NO_TENSOR_PARALLELISM, "--tp-comm-bootstrap-backend"),
    *refused(
        "there is no pipeline; give --paro-strategy GGG to spread the model",
        "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
        "--pipeline-model-parallel-layout --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
    ),
    *ignored(
        _NO_PIPELINE,
        "--pipeline-model-parallel-comm-backend --overlap-p2p-communication-warmup-flush "
        "--no-overlap-p2p-communication --microbatch-group-size-per-virtual-pipeline-stage "
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit --delay-wgrad-compute "
        "--use-ring-exchange-p2p --no-align-grad-reduce --disable-align-grad-reduce "
        "--no-align-param-gather",
    ),
    *refused(
        _FIT_LONG,
        "--hierarchical-context-parallel-sizes --hybrid-context-parallel "
        "--max-seqlen-per-dp-cp-rank",
    ),
    *ignored("sequences are not cut", "--cp-comm-type"),
    *accepted("every rank holds a part of the data", "--use-tp-pp-dp-mapping"),
    # Sharded data parallelism.
    *becoming(
        "--paro-strategy GGG",
        refused(
            "give --paro-strategy GGG, or III to stay inside groups",
            "--use-torch-fsdp2 --enable-full-sharding-in-hsdp",
        ),
    ),
    *becoming(
        "--paro-strategy NGG",
        refused(
            "give --paro-strategy NGG, whose parameters stay whole between forward and backward",
            "--torch-fsdp2-no-reshard-after-forward",
        ),
    ),
    *refused(_GIVE_LETTERS, "--use-megatron-fsdp"),
    *becoming(_LETTERS, refused(_GIVE_LETTERS, "--data-parallel-sharding-strategy")),
    *ignored("there is one implementation of sharding", "--megatron-fsdp-version"),
    *values(
        "--outer-dp-sharding-strategy",
        "no_shard",
        "states are spread as --paro-strategy says",
        "give --paro-strategy IIG, which spreads the optimizer state over all groups",
    ),
    *values(
        "--megatron-fsdp-main-params-dtype",
        "fp32 auto",
        "master parameters are fp32",
        "master parameters are fp32: give fp32",
    ),
    *values(
        "--megatron-fsdp-main-grads-dtype",
        "fp32 auto",
        "gradients are accumulated in fp32 unless --grad-reduce-in-bf16 is given",
        "give fp32; --grad-reduce-in-bf16 accumulates gradients in bf16",
    ),
    *values(
        "--megatron-fsdp-grad-comm-dtype",
        "auto",
        "gradients are sent in the type of computation",
        "leave it out; --accumulate-allreduce-grads-in-fp32 sends gradients in fp32",
    ),
    *ignored(
        "parameters are gathered unit by unit, see --paro-prefetch-units",
        "--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer "
        "--fsdp-db-use-persist-buf-on-alloc-fail --fsdp-double-buffer --fsdp-manual-registration "
        "--suggested-communication-unit-size --create-all-gather-group "
        "--no-use-layer-wise-param-layout",
    ),
    *values(
        "--num-distributed-optimizer-instances",
        (1,),
        "optimizer state has one instance",
        "give --paro-strategy NNI and, as --paro-group-size, the number of ranks / {value}",
    ),
    *accepted("reductions overlap, see --paro-prefetch-units", "--overlap-grad-reduce"),
    *accepted("gathers overlap, see --paro-prefetch-units", "--overlap-param-gather"),
    *ignored(
        "gathers overlap with computation, see --paro-prefetch-units",
        "--overlap-param-gather-with-optimizer-step",
    ),
    *accepted("gradients are scaled before they are summed", "--ddp-average-in-collective"),
    *ignored(
        _BY_UNIT,
        "--ddp-bucket-size --ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw "
        "--no-gradient-reduce-div-fusion",
    ),
    *refused(
        "gradients are sent in the type of computation; --accumulate-allreduce-grads-in-fp32 "
        "sends them in fp32",
        "--ddp-reduce-scatter-with-fp32-accumulation "
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
    ),
    # Processes and communication.
    *ignored(
        "no buffer is registered with NCCL",
        "--use-nccl-ub --disable-symmetric-registration",
    ),
    *ignored(
        "saves agree over groups of gloo's, which are made under any backend",
        "--disable-gloo-process-groups",
    ),
    *ignored(
        _NCCL,
        "--nccl-communicator-config-path --use-sharp --sharp-enabled-group "
        "--high-priority-stream-groups",
    ),
    *ignored("the launcher says it in the environment", "--local-rank"),
    *ignored(
        "--distributed-timeout-minutes holds all the time",
        "--distributed-timeout-seconds-after-init",
    ),
    *becoming(
        "--flight-recorder-dir {value}",
        refused("give --flight-recorder-dir DIR", "--flight-recorder-dump-path"),
    ),
    *ignored(
        _RECORDER,
        "--flight-recorder-trace-buffer-size --flight-recorder-include-stack-trace "
        "--no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout "
        "--no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active "
        "--no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec",
    ),
    *refused(
        "give --dry-run --world-size N, which starts no process group", "--fake-process-group"
    ),
    *refused("the process groups are made at the start: leave it out", "--lazy-mpu-init"),
)
