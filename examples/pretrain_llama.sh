#!/usr/bin/env bash
# The core of pretrain_llama_{7b,65b}_{dgx,slurm}.sh: a model's choices, its launch and its flags.
#
# Not a script to start: each of the four sets MODEL, LAUNCH and NNODES and sources this file from
# its own folder. For your own model copy both into a folder next to examples/ and add a case below.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CHECKPOINT_PATH=${1:-checkpoints/llama_${MODEL,,}}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_${MODEL,,}}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9} # what torch sees of an A100 or H100 of 80 GB; for the dry run

# The launcher

case ${LAUNCH:?is set by the scripts that source this file} in
torchrun)
    GPUS_PER_NODE=${GPUS_PER_NODE:-8}
    DISTRIBUTED_ARGS=(
        --nproc-per-node "$GPUS_PER_NODE"
        --nnodes "$NNODES"
    )
    if [[ -z ${SURVIVE:-} ]]; then
        DISTRIBUTED_ARGS+=(
            --node-rank "${NODE_RANK:-0}"
            --master-addr "${MASTER_ADDR:-localhost}"
            --master-port "${MASTER_PORT:-6000}"
        )
    else
        # Nodes meet again after a failure, and continue from memory: docs/recovery.md.
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        DISTRIBUTED_ARGS+=(
            --rdzv-backend c10d
            --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-6000}"
            --rdzv-id "${RUN_ID:-llama-$MODEL}"
            --local-addr "${LOCAL_ADDR:-$(hostname)}"
            --max-restarts "${MAX_RESTARTS:-10}"
        )
    fi
    LAUNCHER=(torchrun "${DISTRIBUTED_ARGS[@]}")
    ;;
srun)
    GPUS_PER_NODE=${SLURM_NTASKS_PER_NODE:-${GPUS_PER_NODE:-8}}
    # Ranks, world size and ranks per node come from SLURM itself; where to meet does not.
    if [[ -z ${MASTER_ADDR:-} && -n ${SLURM_JOB_NODELIST:-} ]]; then
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    fi
    export MASTER_ADDR
    export MASTER_PORT=${MASTER_PORT:-6000}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun sets it
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-8} # srun does not take it over from sbatch
    CONTAINER_ARGS=()
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then
        CONTAINER_ARGS=(
            --container-image "$CONTAINER_IMAGE"
            --container-mounts "${CONTAINER_MOUNTS:-$PWD:$PWD}" # data and checkpoints as well
            --container-workdir "$PWD"
        )
    fi
    LAUNCHER=(srun "${CONTAINER_ARGS[@]}" python -u)
    ;;
esac

# Megatron-LM's scripts set this to 1: then all streams of a GPU share one hardware queue, and
# communication no longer overlaps with compute.
unset CUDA_DEVICE_MAX_CONNECTIONS
# Ranks communicate between nodes only with the same local rank, as in PaRO: on a rail-optimized
# fabric their traffic stays on its rail. On another fabric give NCCL_CROSS_NIC=2.
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-0}
# Every block allocates and frees whole units: expandable segments keep that from fragmenting memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# NCCL chooses the rest; what depends on the fabric belongs in /etc/nccl.conf of the nodes (on RoCE
# NCCL_IB_GID_INDEX, with storage adapters NCCL_IB_HCA). AMSP's figures are without SHARP too.

# The model: its strategy, recipe and what is recomputed

case $MODEL in
7B)
    # NNI: parameters and gradients replicated on every GPU, optimizer state sharded in the node.
    # Nothing is sent before the last micro-batch of a step; then one all-reduce between nodes
    # overlaps with its backward, and updated parameters are gathered inside the node. Where it fits
    # it is the fastest: AMSP's search picks it for 7B and measures 51% MFU on 1024 GPUs, ZeRO-1
    # 36%, MiCS 35%; PaRO measures 49% more than ZeRO-1 on 32. It takes the same memory on any
    # number of nodes:
    #
    #   GPUs  strategy  micro-batch  GB of a GPU
    #     16  NNI       2            69.2
    #    128  NNI       2            69.2
    #
    # by the predictor (DRY_RUN=1 prints it by kind), of 84.9. Of a GPU with 40 GB:
    # PARO_STRATEGY=IIG, which takes 28.9 GB on 16 GPUs and 24.2 GB on 128.
    STRATEGY=NNI
    # LLaMA's recipe: 4 million tokens a batch, a trillion in all. A micro-batch of 2 x 2048 tokens
    # fills an A100 (InternEvo measures 4,078 tokens/s on each of 8 GPUs with it, 3,625 on 1024).
    RECIPE_ARGS=(
        --micro-batch-size 2
        --train-iters 238419
        --lr 3.0e-4
        --min-lr 3.0e-5
    )
    # All activations fit. Where memory is short, recompute the inside of all blocks in backward:
    # RECOMPUTE_ARGS=(--recompute-granularity full), or of the first 16: with
    # --recompute-method block --recompute-num-layers 16 in addition.
    RECOMPUTE_ARGS=()
    ;;
65B)
    # IIG: parameters and gradients sharded in the node, optimizer state over all GPUs. Only the end
    # of a step communicates between nodes, not every micro-batch. PaRO trains 65B so on 32 GPUs
    # of 80 GB, where only ZeRO-3, ZeRO++, IGG and IIG fit, at 1.86 times the throughput of ZeRO-3.
    # On fewer GPUs all states must be sharded over all of them (GGG, which is ZeRO-3): that fits on
    # two nodes, and communicates between them in every micro-batch.
    #
    #   GPUs  strategy  micro-batch  GB of a GPU
    #     16  GGG       1            82.4
    #     32  IIG       2            77.3
    #     64  IIG       2            64.4
    #    128  IIG       2            58.0
    #
    # by the predictor (DRY_RUN=1 prints it by kind), of 84.9.
    if ((NNODES * GPUS_PER_NODE < 32)); then
        STRATEGY=GGG MICRO_BATCH_SIZE=1
    else
        STRATEGY=IIG MICRO_BATCH_SIZE=2
    fi
    # LLaMA's recipe: 4 million tokens a batch, 1.4 trillion in all. bf16 accumulators, as in the
    # papers, save 2 bytes per parameter; without them 32 GPUs would need 94.4 GB each.
    RECIPE_ARGS=(
        --micro-batch-size "$MICRO_BATCH_SIZE"
        --train-iters 333786
        --lr 1.5e-4
        --min-lr 1.5e-5
        --grad-reduce-in-bf16
    )
    # Only the input of every block is kept; its inside is computed again in backward, a third more
    # compute (PaRO's 65B and AMSP's 30B do the same). To keep some blocks' activations on many
    # nodes: --recompute-method block --recompute-num-layers 70.
    RECOMPUTE_ARGS=(
        --recompute-granularity full
    )
    ;;
*)
    echo "$0: MODEL=$MODEL has no case in ${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac

# What all share

PARO_ARGS=(
    --paro-strategy "${PARO_STRATEGY:-$STRATEGY}"
    --paro-group-size "$GPUS_PER_NODE"
)

MODEL_ARGS=(
    --llama-preset "$MODEL"
    --seq-length 2048
)

TRAINING_ARGS=(
    "${RECIPE_ARGS[@]}"
    --global-batch-size 2048
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --manual-gc
    --manual-gc-interval 100
)

if [[ $TOKENIZER_ARG == MOCK || $DATA_ARG == MOCK ]]; then
    DATA_ARGS=(
        --mock-data
        --tokenizer-type NullTokenizer
    )
else
    DATA_ARGS=(
        --data-path "$DATA_ARG"
        --split "989,10,1"
        --tokenizer-type Llama2Tokenizer
        --tokenizer-model "$TOKENIZER_ARG"
    )
fi

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
    --save-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --exit-signal-handler
    --log-progress
    --flight-recorder-dir "$CHECKPOINT_PATH/flight_recorder"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
    --metrics-file "$CHECKPOINT_PATH/metrics.jsonl"
)

RECOVERY_ARGS=()
if [[ -n ${SURVIVE:-} ]]; then
    RECOVERY_ARGS=(
        --paro-survive "$SURVIVE"
        --non-persistent-ckpt-type local # with SURVIVE=0 the failure of a rank is still survived
    )
fi

DRY_RUN_ARGS=()
if [[ -n ${DRY_RUN:-} ]]; then
    LAUNCHER=(python)
    DRY_RUN_ARGS=(
        --dry-run
        --world-size $((NNODES * GPUS_PER_NODE))
        --ranks-per-node "$GPUS_PER_NODE"
        --device-memory-gb "$GPU_MEMORY_GB"
    )
fi

exec "${LAUNCHER[@]}" pretrain_llama.py \
    "${PARO_ARGS[@]}" \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${RECOMPUTE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${RECOVERY_ARGS[@]}" \
    "${DRY_RUN_ARGS[@]}"
