#!/usr/bin/env bash
# Pre-trains LLaMA-7B on DGX nodes with torchrun: parameters inside a node, optimizer over all.
#
# Run it on every node:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_llama_7b_dgx.sh \
#       CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX
# MOCK as tokenizer and data trains on synthetic tokens. DRY=1 prints the command instead.
set -euo pipefail
cd "$(dirname "$0")/.."

CHECKPOINT_PATH=${1:-checkpoints/llama_7b}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_7b}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK

# Megatron-LM's scripts set this to 1: then all streams of a GPU share one hardware queue, and
# communication no longer runs beside compute.
unset CUDA_DEVICE_MAX_CONNECTIONS

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

# Parameters and gradients spread over the node's fast links, optimizer state over every GPU:
# between nodes only once per optimizer step, however many micro-batches it has.
PARO_ARGS=(
    --paro-strategy IIG
    --paro-group-size "$GPUS_PER_NODE"
)

MODEL_ARGS=(
    --llama-preset 7B
    --seq-length 2048
)

# LLaMA's recipe: 4 million tokens a batch, a trillion in all.
TRAINING_ARGS=(
    --micro-batch-size 4
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

# Where memory is short, recompute the inside of the first 16 blocks in backward, or of all:
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
        --split 989,10,1
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
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
    --metrics-file "$CHECKPOINT_PATH/metrics.jsonl"
)

COMMAND=(
    torchrun "${DISTRIBUTED_ARGS[@]}"
    pretrain_llama.py
    "${PARO_ARGS[@]}"
    "${MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${RECOMPUTE_ARGS[@]}"
    "${DATA_ARGS[@]}"
    "${EVAL_AND_LOGGING_ARGS[@]}"
)
if [[ -n ${DRY:-} ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
    exit
fi
exec "${COMMAND[@]}"
