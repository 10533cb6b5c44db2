"""Rules for Megatron's optimizer, data, tokenizer, checkpoint and logging flags."""

from __future__ import annotations

from paro.arguments.megatron_rules.rule import (
    accepted,
    becoming,
    ignored,
    paired_with,
    refused,
    values,
)

_ADAMW = "the optimizer is AdamW: leave it out"
_ONE_PASS = "samples are read in one pass"
_TEXTS = "training texts are whole: leave it out"
_FORMAT = "checkpoints are torch.distributed.checkpoint's"
_NO_RANDOM_STATE = "no random state is kept: what is random follows from --seed"
_OWN_PART = "every rank saves what it alone holds"
_BACKGROUND = "with --async-save a thread of each rank writes its part"
_FEWER = (
    "give --save-interval, with --async-save to continue meanwhile and --save-retain-interval to "
    "keep few"
)
_CONVERT = "tools/convert_checkpoint.py converts: leave it out"
_NOT_RECORDED = "it is not recorded; --metrics-file has what is"

JOB_RULES = (
    # Optimizer and steps.
    *values("--optimizer", "adam", "the optimizer is AdamW", "give adam, which is AdamW"),
    *refused(
        _ADAMW,
        "--sgd-momentum --muon-momentum --muon-no-split-qkv --muon-nesterov --muon-scale-mode "
        "--muon-fp32-matmul-prec --muon-coefficient-type --muon-num-ns-steps --muon-tp-mode "
        "--muon-use-syrk --muon-extra-scale-factor --muon-scalar-optimizer --lion-beta1 "
        "--lion-beta2",
    ),
    *refused(
        "one learning rate serves all parameters: leave it out",
        "--decoupled-lr --decoupled-min-lr --head-lr-mult",
    ),
    *refused(
        "the weights of norms are not decayed, all others are: leave it out",
        "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type",
    ),
    *accepted(
        "a step that is not finite is skipped and does not end the run",
        "--no-check-for-nan-in-loss-and-grad",
    ),
    *refused(
        "--global-batch-size has to divide by --micro-batch-size and ranks: leave it out",
        "--decrease-batch-size-if-needed",
    ),
    *refused("every iteration is trained: leave it out", "--iterations-to-skip"),
    *refused(
        "nothing is made to fail on purpose: leave it out",
        "--error-injection-rate --error-injection-type --fault-injector-ranks "
        "--fault-injector-num-ranks --fault-injector-fault-types "
        "--fault-injector-fault-probabilities --fault-injector-fault-delay "
        "--fault-injector-delay-start-iteration --fault-injector-mtti-seconds "
        "--fault-injector-offset-seconds --fault-injector-seed",
    ),
    *ignored(
        "ranks are not tested during training",
        "--gpu-sniff-test-interval --train-sync-interval",
    ),
    *ignored(
        "--exit-signal-handler makes a training save and leave at a signal",
        "--exit-signal-handler-for-training --exit-signal-handler-for-dataloader",
    ),
    *accepted(
        "garbage is not collected around evaluations",
        "--no-manual-gc-eval --disable-manual-gc-eval",
    ),
    *ignored("evaluations begin with the first --eval-interval", "--start-eval-at-iter"),
    *ignored("sets are named by their corpora", "--validation-set-names"),
    *ignored("there are no tests that run along", "--test-mode"),
    # Data.
    *values("--dataloader-type", "single", _ONE_PASS, f"{_ONE_PASS}: give single"),
    *accepted("attention is causal without a mask", "--no-create-attention-mask-in-dataloader"),
    *paired_with(
        "--dataloader-inter-document-masking",
        "--reset-attention-mask",
        "documents that share a sample do not see each other",
        "give --reset-attention-mask, and --reset-position-ids where positions restart",
    ),
    *ignored("corpora are read, not mapped into memory", "--no-mmap-bin-files"),
    *ignored(
        "indices are built once and read from their files",
        "--num-dataset-builder-threads --dataloader-fast-cache-load "
        "--dataloader-defer-npy-index-mmap --per-dataset-sequences-path "
        "--mid-level-dataset-surplus",
    ),
    *ignored("nothing is padded", "--allow-ambiguous-pad-tokens"),
    *accepted("data are files", "--disable-msc"),
    *refused("data are files: leave it out", "--enable-msc --object-storage-cache-path"),
    *refused("a training has one blend from start to end", "--phase-transition-iterations"),
    *refused(
        _TEXTS,
        "--fim-data --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate "
        "--fim-no-prefix --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token "
        "--fim-eod-token --sample-rate --mask-prob --short-seq-prob",
    ),
    # Tokenizer.
    *ignored("TikTokenizer cuts texts as LLaMA-3 does", "--tiktoken-pattern"),
    *values(
        "--tiktoken-num-special-tokens",
        (256,),
        "TikTokenizer has LLaMA-3's special tokens",
        "TikTokenizer has LLaMA-3's special tokens: give 256",
    ),
    *values(
        "--vocab-extra-ids",
        (0,),
        "the vocabulary is the tokenizer's",
        "the vocabulary is the tokenizer's: give 0",
    ),
    *becoming(
        "--make-vocab-size-divisible-by 1",
        refused(
            "give --make-vocab-size-divisible-by 1", "--no-pad-vocab-size --disable-pad-vocab-size"
        ),
    ),
    *accepted("texts get no special tokens", "--tokenizer-hf-no-include-special-tokens"),
    *ignored("the ids are the same", "--tokenizer-hf-no-use-fast --use-gigatoken"),
    *refused(
        "a tokenizer is what its file says: leave it out",
        "--tokenizer-metadata --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces --trust-remote-code "
        "--null-tokenizer-pad-id --chat-template",
    ),
    # Checkpoints.
    *values("--ckpt-format", "torch_dist torch_dcp", _FORMAT, f"{_FORMAT}: give torch_dcp"),
    *accepted(_NO_RANDOM_STATE, "--no-save-rng --no-load-rng"),
    *accepted(_FORMAT, "--use-dist-ckpt"),
    *accepted("there is one format", "--auto-detect-ckpt-format"),
    *accepted(_OWN_PART, "--ckpt-fully-parallel-save"),
    *accepted("every rank loads what it holds", "--ckpt-fully-parallel-load"),
    *accepted("checkpoints load under any strategy", "--dist-ckpt-optim-fully-reshardable"),
    *accepted("master parameters are what is saved", "--load-main-params-from-ckpt"),
    *accepted("the parameters of a run keep their shapes", "--ckpt-assume-constant-structure"),
    *accepted(_BACKGROUND, "--use-persistent-ckpt-worker"),
    *values("--async-strategy", "nvrx mcore", _BACKGROUND, "give nvrx or mcore; both mean that"),
    *accepted(
        "a checkpoint keeps the tokenizer's flags, not its files",
        "--no-save-tokenizer-assets --disable-save-tokenizer-assets",
    ),
    *ignored(
        _BACKGROUND,
        "--async-ckpt-cpu-priority --async-ckpt-io-priority --async-ckpt-use-cpu-shm",
    ),
    *ignored(
        _OWN_PART,
        "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-save-process-group "
        "--ckpt-fully-parallel-load-process-group --ckpt-fully-parallel-load-exchange-algo "
        "--ckpt-fully-parallel-load-per-rank-objects --ckpt-pg-tensors-cache-path "
        "--ckpt-pg-tensors-cache-create --dist-ckpt-workers --ckpt-drop-redundant-extra-state "
        "--distrib-optim-fully-reshardable-mem-efficient",
    ),
    *ignored(
        "a checkpoint has to match the model exactly",
        "--dist-ckpt-strictness --no-ckpt-load-validate-sharding-integrity "
        "--disable-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load "
        "--disable-strict-fsdp-dtensor-load",
    ),
    *ignored(
        "the sizes of a checkpoint's files are checked, not their bytes", "--verify-integrity"
    ),
    *ignored(
        "a checkpoint loads on any number of ranks",
        "--use-mp-args-from-checkpoint-args",
    ),
    *refused(
        "give --tokenizer-type, which wins over the checkpoint's",
        "--no-use-tokenizer-model-from-checkpoint-args "
        "--disable-use-tokenizer-model-from-checkpoint-args",
    ),
    *refused(_FEWER, "--non-persistent-global-ckpt-dir"),
    *ignored(
        "the ranks of a node that hold the same shard each copy a part of it",
        "--non-persistent-local-ckpt-algo",
    ),
    *refused(
        "--paro-survive N keeps every state on N more nodes, from which a run recovers",
        "--replication --replication-jump --replication-factor",
    ),
    *becoming(
        "--load {value} --finetune",
        refused("give it as --load, with --finetune", "--pretrained-checkpoint"),
    ),
    *becoming(
        "--ckpt-step {value}",
        refused("--ckpt-step chooses the iteration to resume from", "--override-ckpt-iteration"),
    ),
    *refused(
        _CONVERT,
        "--ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format "
        "--dist-ckpt-save-pre-mcore-014",
    ),
    *refused(
        "a checkpoint holds parameters and moments: leave it out",
        "--save-params-interval --save-activations-interval --save-tokens-per-expert-interval "
        "--save-wgrads-interval --save-dgrads-interval",
    ),
    # Logging.
    *accepted("perplexity is always written", "--log-validation-ppl-to-tensorboard"),
    *accepted("memory is always written", "--log-memory-to-tensorboard"),
    *accepted("the number of ranks is always written", "--log-world-size-to-tensorboard"),
    *accepted("the batch size is always written", "--log-batch-size-to-tensorboard"),
    *accepted("there is no such logger to turn off", "--no-one-logger"),
    *accepted("timers do not wait for other ranks", "--no-barrier-with-level-1-timing"),
    *ignored(
        "the loss scale is always written",
        "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
    ),
    *ignored(
        _NOT_RECORDED,
        "--log-energy --log-max-attention-logit --log-device-memory-used --config-logger-dir "
        "--one-logger-project --one-logger-run-name --one-logger-async --app-tag-run-name "
        "--app-tag-run-version --otel-enabled --otel-service-name --otel-span-groups "
        "--dump-param-to-param-group-map",
    ),
    *ignored(
        "a profile has the ranges of the timers, without shapes and stacks",
        "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
        "--pytorch-profiler-collect-chakra --record-shapes --nvtx-ranges",
    ),
    *ignored(
        "--log-straggler prints with every line who is waited for",
        "--straggler-ctrlr-port --straggler-minmax-count --disable-straggler-on-startup "
        "--run-workload-inspector-server",
    ),
)
