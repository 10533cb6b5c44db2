#!/usr/bin/env bash
# Functions of scripts that print each command before they run it; they source this file.

# A command as one would type it.
typed() {
    local word line=
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:,=+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        line+=" $word"
    done
    echo "${line# }"
}

# Prints a command and runs it.
run() {
    echo "+ $(typed "$@")"
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

# Whether a folder of checkpoints holds this iteration or a later one.
is_trained() {
    local iteration
    iteration=$(cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
    ((iteration >= $2)) && [[ -z ${DRY_RUN:-} ]] || return 1
    echo "= $1 holds iteration $iteration"
}
