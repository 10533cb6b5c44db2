#!/usr/bin/env bash
# Pre-trains a LLaMA of 364 million parameters on one GPU of 16 GB: one plain process, no launcher.
# bf16 needs a GPU of compute capability 8.0 or newer (RTX 3090, 4080, A4000, L4 and later); for a
# T4 or V100 set PRECISION=fp16.
#
#   bash examples/single_gpu.sh CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX
# MOCK as tokenizer and data trains on synthetic tokens; a SentencePiece tokenizer and a corpus are
# what examples/quickstart.sh makes, too. DRY_RUN=1 in front starts nothing: it checks the command
# line, on any machine, and says what the GPU would hold.
#
# A model this small is bound by its kernels' launches: TORCH_COMPILE=inductor, which needs a C++
# compiler, fuses most of them (the gain is not measured).
#
# From the environment: TRAIN_ITERS, GPU_MEMORY_GB (16), PRECISION (bf16), TORCH_COMPILE.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "$0")/.."

CHECKPOINT_PATH=${1:-checkpoints/llama_364m}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_364m}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK
GPU_MEMORY_GB=${GPU_MEMORY_GB:-16}

# The sizes of a LLaMA between the published ones. There is nobody to share states with, so that
# all strategies are one; a tokenizer with another vocabulary changes embedding and output layer.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --untie-embeddings-and-output-weights
)

# 64 x 1024 tokens a step in 8 micro-batches; 7.3 billion tokens, 20 a parameter, in all. Where
# memory is short, halve the micro-batch: the step, and what is learned, stay the same.
#
#   GPUs  strategy  micro-batch  GB of a GPU
#      1  IIG       8            12.7
#
# by the predictor (DRY_RUN=1 prints it by kind).
TRAINING_ARGS=(
    --micro-batch-size 8
    --global-batch-size 64
    --train-iters "${TRAIN_ITERS:-111000}"
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    "--${PRECISION:-bf16}"
)

if [[ $TOKENIZER_ARG == MOCK || $DATA_ARG == MOCK ]]; then
    DATA_ARGS=(
        --mock-data
        --tokenizer-type NullTokenizer
        --vocab-size 32000
    )
else
    DATA_ARGS=(
        --data-path "$DATA_ARG"
        --split "989,10,1"
        --tokenizer-type SentencePieceTokenizer
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

if [[ -n ${TORCH_COMPILE:-} ]]; then
    TRAINING_ARGS+=(--torch-compile "$TORCH_COMPILE")
fi

DRY_RUN_ARGS=()
if [[ -n ${DRY_RUN:-} ]]; then
    DRY_RUN_ARGS=(
        --dry-run
        --world-size 1
        --device-memory-gb "$GPU_MEMORY_GB"
    )
fi

export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # less fragmentation
exec python pretrain_llama.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${DRY_RUN_ARGS[@]}"
