#!/usr/bin/env bash
# Trains an adapter (LoRA) on conversations, from a Hugging Face folder to a first answer.
#
#   bash examples/finetune.sh Llama-2-7b-chat-hf talks.jsonl
#
# Five commands: convert the model, preprocess the conversations, train on this machine, export the
# adapter for peft, and ask a first question. Each is printed before it runs, and left out when what
# it makes is there already; an interrupted training continues from its last checkpoint. docs/data.md
# has the forms of conversations, docs/finetuning.md the commands one by one.
#
# From the environment:
#   RUN_DIR      where everything is written (runs/finetune-MODEL-CONVERSATIONS)
#   KEYS         keys of the conversations (messages), such as "messages tools", "conversations" of
#                ShareGPT or "instruction input output" of Alpaca
#   TRAIN_ITERS  optimizer steps (100), of 16 conversations each
#   SEQ_LENGTH   tokens of a conversation at most (2048); longer ones are cut
#   RANKS        processes (one per GPU; without a GPU one, on the CPU)
#   EXTRA_FLAGS  more flags for the training, such as --lr 1e-4
#   QUESTION     what is asked at the end (Who are you?)
#   DRY_RUN=1    only print the commands
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
[[ $# == 2 ]] || { echo "$0: give a Hugging Face folder and a file of conversations" >&2; exit 2; }
MODEL=$(realpath -m "$1")
CONVERSATIONS=$(realpath -m "$2")
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=steps.sh
source examples/steps.sh

NAME=$(basename "$CONVERSATIONS")
RUN_DIR=${RUN_DIR:-runs/finetune-$(basename "$MODEL")-${NAME%%.*}}
TRAIN_ITERS=${TRAIN_ITERS:-100}
GPUS=$(nvidia-smi -L 2>/dev/null | wc -l) || GPUS=0
RANKS=${RANKS:-$((GPUS > 0 ? GPUS : 1))}
read -ra JSON_KEYS <<<"${KEYS:-messages}"
read -ra EXTRA_ARGS <<<"${EXTRA_FLAGS:-}"

BASE=$RUN_DIR/base
CORPUS=$RUN_DIR/corpus
CHECKPOINTS=$RUN_DIR/adapter
PEFT=$RUN_DIR/peft-$TRAIN_ITERS
DOCUMENTS=$CORPUS
for key in "${JSON_KEYS[@]}"; do
    [[ $key == tools ]] || DOCUMENTS+=_$key
done
DOCUMENTS+=_document

DEVICE_ARGS=(--bf16)
((GPUS > 0)) || DEVICE_ARGS=(--distributed-backend gloo)
LORA_ARGS=(
    --lora-rank 16
    --lora-alpha 32
    --lora-target-modules all-linear
)
TRAINING_ARGS=(
    --paro-strategy ING
    --seq-length "${SEQ_LENGTH:-2048}"
    --sft
    --calculate-per-token-loss
    --micro-batch-size 1
    --global-batch-size $(((16 + RANKS - 1) / RANKS * RANKS))
    --train-iters "$TRAIN_ITERS"
    --lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.0
)
DATA_AND_LOGGING_ARGS=(
    --data-path "$DOCUMENTS"
    --split "100,0,0"
    --log-interval 5
    --save-interval 50
    --save "$CHECKPOINTS"
    --override-opt_param-scheduler # a run may go on with other TRAIN_ITERS
)

train() {
    local load=$BASE
    if is_trained "$CHECKPOINTS" "$TRAIN_ITERS"; then return; fi
    [[ ! -e $CHECKPOINTS/latest_checkpointed_iteration.txt ]] || load=$CHECKPOINTS
    run bash examples/one_machine.sh --nproc-per-node "$RANKS" pretrain_llama.py \
        --use-checkpoint-args --load "$load" "${DEVICE_ARGS[@]}" "${LORA_ARGS[@]}" \
        "${TRAINING_ARGS[@]}" "${DATA_AND_LOGGING_ARGS[@]}" "${EXTRA_ARGS[@]}"
}

make_once "$BASE/latest_checkpointed_iteration.txt" -- python tools/convert_checkpoint.py \
    --from hf --to paro --input "$MODEL" --output "$BASE"
make_once "$DOCUMENTS.bin" "$DOCUMENTS.idx" -- python tools/preprocess_data.py \
    --input "$CONVERSATIONS" --output-prefix "$CORPUS" --json-keys "${JSON_KEYS[@]}" \
    --apply-chat-template --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL"
train
make_once "$PEFT/adapter_model.safetensors" -- python tools/convert_checkpoint.py \
    --from paro --to peft --input "$CHECKPOINTS" --output "$PEFT"
run python tools/generate.py --chat --load "$CHECKPOINTS" --prompt "${QUESTION:-Who are you?}"
[[ -z ${DRY_RUN:-} ]] || exit 0
cat <<END
adapter for peft  $PEFT
checkpoints       $CHECKPOINTS
next, in $PWD:
  $(typed python tools/generate.py --chat --load "$CHECKPOINTS")
  $(typed python tools/convert_checkpoint.py --from paro --to hf --merge --input "$CHECKPOINTS" \
    --output "$RUN_DIR/merged")
END
