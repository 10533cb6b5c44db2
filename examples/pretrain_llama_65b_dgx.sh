#!/usr/bin/env bash
# Pre-trains LLaMA-65B on DGX nodes with torchrun: bf16 accumulators, every block recomputed.
#
# Run it on every node:
#   NNODES=8 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_llama_65b_dgx.sh \
#       CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX
# MOCK as tokenizer and data trains on synthetic tokens. DRY=1 prints the command instead.
set -euo pipefail
cd "$(dirname "$0")/.."

CHECKPOINT_PATH=${1:-checkpoints/llama_65b}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_65b}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK

# Megatron-LM's scripts set this to 1: then all streams of a GPU share one hardware queue, and
# communication no longer runs beside compute.
unset CUDA_DEVICE_MAX_CONNECTIONS

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-8}
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
    --llama-preset 65B
    --seq-length 2048
)

# LLaMA's recipe: 4 million tokens a batch, 1.4 trillion in all. bf16 accumulators halve what
# gradients take of a GPU: with IIG on 64 of them model states come to 45 GB each, 61 GB without.
TRAINING_ARGS=(
    --micro-batch-size 2
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
# compute. To keep some blocks' activations: --recompute-method block --recompute-num-layers 60.
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
