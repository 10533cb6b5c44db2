#!/usr/bin/env bash
# Trains a small LLaMA on text that every machine has, from nothing to a sample of its own.
#
# 6.6 million parameters on CPU ranks that play 2 nodes, under PaRO's IIG. Every step prints the
# command that it runs, and is left out when what it makes is there already; an interrupted training
# goes on from its last checkpoint. A terminal shows the training live while its lines go to the log.
# The end says which loss to expect, and whether it came. `make quickstart` calls this with .venv on
# the PATH.
#
# From the environment:
#   TEXT             a .jsonl file of your own, {"text": ...} a line, instead of Python's library
#   RUN_DIR          where everything is written (runs/quickstart; of a TEXT runs/quickstart-ITS_NAME)
#   TRAIN_ITERS      optimizer steps (300)
#   RANKS            2, 4 or 8 ranks (4 if there are as many cores, else 2)
#   EXTRA_FLAGS      more flags for the training, such as --tensorboard-dir runs/quickstart/board
#   OMP_NUM_THREADS  threads of a rank (1: the ranks already fill the cores of a small machine)
#   DRY_RUN=1        only print the commands, and check that of the training if its tokenizer is there
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=steps.sh
source examples/steps.sh

DEFAULT_ITERS=300
TRAIN_ITERS=${TRAIN_ITERS:-$DEFAULT_ITERS}
# On held-out text, with the settings below: the mean of 5 seeds, and 3 standard deviations around it
# (examples/measured/README.md).
EXPECTED_LOSS=(4.58 4.77)
RANKS=${RANKS:-$(($(nproc) < 4 ? 2 : 4))}
[[ $RANKS == [248] ]] || { echo "RANKS=$RANKS: give 2, 4 or 8" >&2; exit 2; }
OWN_TEXT=${TEXT:-}
OWN_NAME=$(basename "$OWN_TEXT" .jsonl)
DEFAULT_DIR=runs/quickstart${OWN_NAME:+-$OWN_NAME}
RUN_DIR=${RUN_DIR:-$DEFAULT_DIR}
TEXT=${OWN_TEXT:-$RUN_DIR/text.jsonl}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

TOKENIZER=$RUN_DIR/tokenizer
CORPUS=$RUN_DIR/corpus
CHECKPOINTS=$RUN_DIR/checkpoints
METRICS=$RUN_DIR/metrics.jsonl
REPORT=$RUN_DIR/report.html
CHARTS=$RUN_DIR/charts
LOG=$RUN_DIR/quickstart.log

DISTRIBUTED_ARGS=(
    --nproc-per-node "$RANKS"
)
PARO_ARGS=(
    --distributed-backend gloo
    --paro-strategy IIG
    --paro-group-size $((RANKS / 2))
)
MODEL_ARGS=(
    --num-layers 6
    --hidden-size 256
    --num-attention-heads 4
    --seq-length 256
    --untie-embeddings-and-output-weights
)
TRAINING_ARGS=(
    --micro-batch-size $((8 / RANKS))
    --global-batch-size 8
    --train-iters "$TRAIN_ITERS"
    --lr 1e-3
    --min-lr 1e-4
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
    --eval-interval 120
    --full-validation
    --log-interval 5
    --metrics-file "$METRICS"
    --save "$CHECKPOINTS"
    --save-interval 100
    --load "$CHECKPOINTS"
    --override-opt_param-scheduler # a run may go on with other TRAIN_ITERS
)
read -ra EXTRA_ARGS <<<"${EXTRA_FLAGS:-}"

# Whether standard error is a terminal: for progress bars, and the live view of the training.
on_terminal() {
    [[ -t 2 && ${TERM:-dumb} != dumb ]]
}

train() {
    if is_trained "$CHECKPOINTS" "$TRAIN_ITERS"; then return; fi
    local flags=(
        "${PARO_ARGS[@]}" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}"
        "${EVAL_AND_LOGGING_ARGS[@]}" "${EXTRA_ARGS[@]}"
    )
    local command=(bash examples/one_machine.sh "${DISTRIBUTED_ARGS[@]}" pretrain_llama.py)
    if on_terminal && [[ -z ${DRY_RUN:-} ]]; then
        command+=("${flags[@]}" --terminal live)
        echo "+ $(typed "${command[@]}") >>$LOG"
        "${command[@]}" >>"$LOG"
    else
        run "${command[@]}" "${flags[@]}"
    fi
    if [[ -n ${DRY_RUN:-} && -s $TOKENIZER.model ]]; then
        python pretrain_llama.py "${flags[@]}" --dry-run --world-size "$RANKS"
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
    run python tools/report.py "$METRICS" --output "$REPORT" --png-dir "$CHARTS"
    run python tools/generate.py --load "$CHECKPOINTS" --prompt 'def __init__(self' \
        --max-new-tokens 100
}

# The last value that a sed expression finds in the log.
from_log() {
    sed -nE "s/$1/\1/p" "$LOG" | tail -n 1
}

# Which loss to expect on held-out text, and whether that of the log, at its iteration, came.
verdict() {
    local loss=$1 iteration=$2
    if [[ -n $OWN_TEXT || ${#EXTRA_ARGS[@]} -gt 0 || $iteration != "$DEFAULT_ITERS" ]]; then
        echo "measured for the default text, flags and TRAIN_ITERS alone"
        return
    fi
    awk -v loss="$loss" -v low="${EXPECTED_LOSS[0]}" -v high="${EXPECTED_LOSS[1]}" 'BEGIN {
        place = loss >= low && loss <= high ? "inside" : "OUTSIDE"
        printf "%s to %s on held-out text, by 5 seeds: %.2f is %s", low, high, loss, place
        print (place == "inside" ? "" : " (docs/quickstart.md#which-loss-to-expect)")
    }'
}

summary() {
    local start end iteration at='.*validation loss at iteration +([0-9]+) on validation set .*'
    start=$(from_log '.* iteration +1\/.* lm loss: ([^ ]+) .*')
    end=$(from_log '.*validation loss at .* on validation set .* value: ([^ ]+) .*')
    iteration=$(from_log "$at")
    if [[ -n $start && -n $end ]]; then
        awk -v start="$start" -v end="$end" 'BEGIN {
            printf "loss of the untrained model %.2f, on held-out text after training %.2f: ", start, end
            printf "%.2f nats gained\n", start - end
        }'
        echo "expected     $(verdict "$end" "$iteration")"
    fi
    cat <<END
report       $REPORT
loss curve   $CHARTS/loss.png
checkpoints  $CHECKPOINTS
text         $TEXT
tokenizer    $TOKENIZER.model
token ids    ${CORPUS}_text_document.bin, .idx
metrics      $METRICS
log          $LOG
END
}

# Commands that can be pasted as they are: another sample, a longer training, a plan for GPUs.
next_steps() {
    local python again settings=("TRAIN_ITERS=$((2 * TRAIN_ITERS))")
    [[ -z $OWN_TEXT ]] || settings+=("TEXT=$OWN_TEXT")
    [[ $RUN_DIR == "$DEFAULT_DIR" ]] || settings+=("RUN_DIR=$RUN_DIR")
    python=$(command -v python)
    python=${python#"$PWD/"}
    again=(env "${settings[@]}" bash examples/quickstart.sh)
    [[ $python != .venv/bin/python ]] || again=(make quickstart "${settings[@]}")
    echo "next, in $PWD:"
    echo "  $(typed "$python" tools/generate.py --load "$CHECKPOINTS" --prompt 'import os')"
    echo "  $(typed "${again[@]}")"
    echo "  $(typed "$python" pretrain_llama.py --llama-preset llama3-8B --mock-data \
        --seq-length 8192 --micro-batch-size 1 --global-batch-size 512 --bf16 --lr 3e-4 \
        --train-iters 1000 --dry-run --world-size 64 --device-memory-gb 80)"
}

if [[ -n ${DRY_RUN:-} ]]; then
    steps
    exit
fi
mkdir -p "$RUN_DIR"
if on_terminal; then
    steps | tee -ia "$LOG"
else
    steps 2>&1 | tee -ia "$LOG"
fi
summary
next_steps
