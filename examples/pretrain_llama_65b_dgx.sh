#!/usr/bin/env bash
# Pre-trains LLaMA-65B on DGX nodes with torchrun: all states spread, blocks recomputed (IIG).
#
# Run it on every node:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_llama_65b_dgx.sh \
#       CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX
# MOCK as tokenizer and data trains on synthetic tokens.
# DRY_RUN=1 NNODES=16 in front starts nothing: one plain process, on any machine, checks the whole
# command line for 16 nodes and says what a GPU would hold and send.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "$0")/.."

CHECKPOINT_PATH=${1:-checkpoints/llama_65b}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_65b}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9} # what torch sees of an A100 or H100 of 80 GB; for the dry run

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)
LAUNCHER=(torchrun "${DISTRIBUTED_ARGS[@]}")

# Megatron-LM's scripts set this to 1: then all streams of a GPU share one hardware queue, and
# communication no longer runs beside compute.
unset CUDA_DEVICE_MAX_CONNECTIONS
# Ranks that talk between nodes have the same number on theirs, as in PaRO: on a fabric with a rail
# per adapter their traffic need not leave its rail. On another fabric give NCCL_CROSS_NIC=2.
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-0}
# The rest is NCCL's choice, or the fabric's and belongs in /etc/nccl.conf of the nodes (on RoCE
# NCCL_IB_GID_INDEX, beside storage adapters NCCL_IB_HCA). AMSP's figures are without SHARP too.
# Whole units come and go with every block; on GPUs this full nothing may be lost in between.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# IIG: parameters and gradients spread over the node's NVLink, optimizer state over all GPUs. Only a
# step's end crosses nodes, not every micro-batch. PaRO runs 65B by it on 32 GPUs of 80 GB, where of
# all strategies just ZeRO-3, ZeRO++, IGG and IIG fit, and measures 1.86 times the throughput of
# ZeRO-3. On fewer GPUs all states have to be spread over all of them (GGG, which is ZeRO-3): that
# works on two nodes, and crosses between them in every micro-batch.
#
#   GPUs  strategy  micro-batch  GB of a GPU
#     16  GGG       1            75.6
#     32  IIG       2            70.6
#     64  IIG       2            58.3
#    128  IIG       2            52.2
#
# by the predictor (DRY_RUN=1 prints it by kind), of 76.4 that can be used.
if ((NNODES * GPUS_PER_NODE < 32)); then
    STRATEGY=GGG MICRO_BATCH_SIZE=1
else
    STRATEGY=IIG MICRO_BATCH_SIZE=2
fi
PARO_ARGS=(
    --paro-strategy "${PARO_STRATEGY:-$STRATEGY}"
    --paro-group-size "$GPUS_PER_NODE"
)

MODEL_ARGS=(
    --llama-preset 65B
    --seq-length 2048
)

# LLaMA's recipe: 4 million tokens a batch, 1.4 trillion in all. bf16 accumulators, as in the
# papers, save 2 bytes a parameter, which decides on 32 GPUs: 86.9 GB without.
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH_SIZE"
    --global-batch-size 2048
    --train-iters 333786
    --lr 1.5e-4
    --min-lr 1.5e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --grad-reduce-in-bf16
    --manual-gc
    --manual-gc-interval 100
)

# Only the input of every block is kept; its inside is computed again in backward, a third more
# compute (PaRO's 65B and AMSP's 30B do the same). To keep some blocks' activations on many nodes:
# --recompute-method block --recompute-num-layers 70.
RECOMPUTE_ARGS=(
    --recompute-granularity full
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
    "${DRY_RUN_ARGS[@]}"
