#!/usr/bin/env bash
# Trains a small LLaMA on text that every machine has, from nothing to a sample of its own.
#
# 6.6 million parameters on 4 CPU ranks that play 2 nodes of 2, under PaRO's IIG. Every step prints
# the command that it runs, and is left out when what it makes is there already; an interrupted
# training goes on from its last checkpoint. `make quickstart` calls this with .venv on the PATH.
#
# From the environment:
#   TEXT             a .jsonl file of your own, {"text": ...} a line, instead of Python's library
#   RUN_DIR          where everything is written (runs/quickstart; of a TEXT runs/quickstart-ITS_NAME)
#   TRAIN_ITERS      optimizer steps (240)
#   EXTRA_FLAGS      more flags for the training, such as --tensorboard-dir runs/quickstart/board
#   OMP_NUM_THREADS  threads of a rank (1: the 4 ranks already fill the cores of a small machine)
#   DRY_RUN=1        only print the commands, and check that of the training if its tokenizer is there
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "$0")/.."

TRAIN_ITERS=${TRAIN_ITERS:-240}
OWN_TEXT=${TEXT:-}
OWN_NAME=$(basename "$OWN_TEXT" .jsonl)
RUN_DIR=${RUN_DIR:-runs/quickstart${OWN_NAME:+-$OWN_NAME}}
TEXT=${OWN_TEXT:-$RUN_DIR/text.jsonl}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

TOKENIZER=$RUN_DIR/tokenizer
CORPUS=$RUN_DIR/corpus
CHECKPOINTS=$RUN_DIR/checkpoints
LOG=$RUN_DIR/quickstart.log

DISTRIBUTED_ARGS=(
    --nproc-per-node 4
)
PARO_ARGS=(
    --distributed-backend gloo
    --paro-strategy IIG
    --paro-group-size 2
)
MODEL_ARGS=(
    --num-layers 6
    --hidden-size 256
    --num-attention-heads 4
    --seq-length 256
    --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters "$TRAIN_ITERS"
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta2 0.95
)
DATA_ARGS=(
    --data-path "${CORPUS}_text_document"
    --split "95,5,0"
    --num-workers 0
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$TOKENIZER.model"
)
EVAL_AND_LOGGING_ARGS=(
    --eval-interval 10
    --eval-iters 3
    --log-interval 5
    --metrics-file "$RUN_DIR/metrics.jsonl"
    --save "$CHECKPOINTS"
    --save-interval 80
    --load "$CHECKPOINTS"
    --override-opt_param-scheduler # a run may go on with other TRAIN_ITERS
)
read -ra EXTRA_ARGS <<<"${EXTRA_FLAGS:-}"

# Prints a command as one would type it, and runs it.
run() {
    local word line=+
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:,=+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        line+=" $word"
    done
    echo "$line"
    [[ -n ${DRY_RUN:-} ]] || "$@"
}

# Runs a command unless the files before `--` are there; they get their names only when whole.
make_once() {
    local files=() file missing=
    while [[ $1 != -- ]]; do
        files+=("$1")
        [[ -s $1 ]] || missing=yes
        shift
    done
    shift
    if [[ -n $missing || -n ${DRY_RUN:-} ]]; then
        run "$@"
    else
        for file in "${files[@]}"; do echo "= $file is there"; done
    fi
}

trained_iters() {
    cat "$CHECKPOINTS/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0
}

train() {
    if (($(trained_iters) >= TRAIN_ITERS)) && [[ -z ${DRY_RUN:-} ]]; then
        echo "= $CHECKPOINTS holds iteration $(trained_iters)"
        return
    fi
    local flags=(
        "${PARO_ARGS[@]}" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}"
        "${EVAL_AND_LOGGING_ARGS[@]}" "${EXTRA_ARGS[@]}"
    )
    run bash examples/one_machine.sh "${DISTRIBUTED_ARGS[@]}" pretrain_llama.py "${flags[@]}"
    if [[ -n ${DRY_RUN:-} && -s $TOKENIZER.model ]]; then
        python pretrain_llama.py "${flags[@]}" --dry-run --world-size 4
    fi
}

steps() {
    [[ -n $OWN_TEXT ]] || make_once "$TEXT" -- python tools/gather_text.py --output "$TEXT"
    make_once "$TOKENIZER.model" -- python tools/train_tokenizer.py \
        --input "$TEXT" --output-prefix "$TOKENIZER" --vocab-size 4096
    make_once "${CORPUS}_text_document.bin" "${CORPUS}_text_document.idx" -- \
        python tools/preprocess_data.py --input "$TEXT" --output-prefix "$CORPUS" --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER.model"
    train
    run python tools/generate.py --load "$CHECKPOINTS" --prompt 'def __init__(self' \
        --max-new-tokens 100
}

# The last value that a sed expression finds in the log.
from_log() {
    sed -nE "s/$1/\1/p" "$LOG" | tail -n 1
}

summary() {
    local start end
    start=$(from_log '.* iteration +1\/.* lm loss: ([^ ]+) .*')
    end=$(from_log '.*validation loss at .* on validation set .* value: ([^ ]+) .*')
    [[ -z $start || -z $end ]] || awk -v start="$start" -v end="$end" 'BEGIN {
        printf "loss of the untrained model %.2f, on held-out text after training %.2f: ", start, end
        printf "%.2f nats gained\n", start - end
    }'
    cat <<END
text         $TEXT
tokenizer    $TOKENIZER.model
token ids    ${CORPUS}_text_document.bin, .idx
checkpoints  $CHECKPOINTS
metrics      $RUN_DIR/metrics.jsonl
log          $LOG
END
}

if [[ -n ${DRY_RUN:-} ]]; then
    steps
    exit
fi
mkdir -p "$RUN_DIR"
steps 2>&1 | tee -a "$LOG"
summary
