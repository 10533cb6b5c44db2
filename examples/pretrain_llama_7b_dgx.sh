#!/usr/bin/env bash
# Pre-trains LLaMA-7B on DGX nodes with torchrun: optimizer state spread inside a node (NNI).
#
# Run it on every node:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_llama_7b_dgx.sh \
#       CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX
# MOCK as tokenizer and data trains on synthetic tokens.
# DRY_RUN=1 NNODES=16 in front starts nothing: one plain process, on any machine, checks the whole
# command line for 16 nodes and says what a GPU would hold and send.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "$0")/.."

CHECKPOINT_PATH=${1:-checkpoints/llama_7b}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_7b}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
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

# NNI: parameters and gradients whole on every GPU, optimizer state spread inside the node. Nothing
# is sent before the last micro-batch of a step, and what crosses nodes then is one sum that hides
# under its backward; updated parameters never cross. Where it fits it is the fastest: AMSP's search
# picks it for 7B and measures 51% MFU on 1024 GPUs, ZeRO-1 36%, MiCS 35%; PaRO measures 49% more
# than ZeRO-1 on 32. It takes the same memory on any number of nodes:
#
#   GPUs  strategy  micro-batch  GB of a GPU
#     16  NNI       2            63.7
#    128  NNI       2            63.7
#
# by the predictor (DRY_RUN=1 prints it by kind), of 76.4 that can be used. Of a GPU with 40 GB:
# PARO_STRATEGY=IIG, which takes 24.6 GB on 16 GPUs and 20.2 GB on 128.
PARO_ARGS=(
    --paro-strategy "${PARO_STRATEGY:-NNI}"
    --paro-group-size "$GPUS_PER_NODE"
)

MODEL_ARGS=(
    --llama-preset 7B
    --seq-length 2048
)

# LLaMA's recipe: 4 million tokens a batch, a trillion in all. A micro-batch of 2 x 2048 tokens
# fills an A100 (InternEvo measures 4,078 tokens/s on each of 8 GPUs with it, 3,625 on 1024).
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 2048
    --train-iters 238419
    --lr 3.0e-4
    --min-lr 3.0e-5
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

# All activations fit. Where memory is short, recompute the inside of the first 16 blocks in
# backward, or of all:
#   RECOMPUTE_ARGS=(--recompute-granularity full --recompute-method block --recompute-num-layers 16)
#   RECOMPUTE_ARGS=(--recompute-granularity full)
RECOMPUTE_ARGS=()

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
