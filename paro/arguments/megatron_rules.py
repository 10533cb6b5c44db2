"""The table of Megatron's flags that PaRO does not have: what each does here, or what to do."""

# Flags share a row if they share its reason. `--moe-*` stands for all flags that begin so; where
# one of its own name follows another rule, that one wins.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping

_SHARD = (
    "give --paro-strategy GGG, or IIG with --paro-group-size {value}, which spread the parameters "
    "over at least as many ranks"
)
_STRETCH = (
    "YaRN is not supported; --use-rope-scaling stretches as LLaMA-3.1 does, and "
    "--rotary-seq-len-interpolation-factor divides positions"
)
_KERNEL = "scaled-dot-product attention chooses its kernel by itself"
_CHUNKS = "cross-entropy runs in chunks of tokens"
_GRADS = (
    "gradients are accumulated in fp32 unless --grad-reduce-in-bf16 is given",
    "give fp32; --grad-reduce-in-bf16 accumulates gradients in bf16",
)
_NO_DROPOUT = ("there is no dropout", "LLaMA trains without dropout: give 0")
_DENSE = ("LLaMA is dense", "LLaMA is dense: give 1")
_FORMAT = "checkpoints are torch.distributed.checkpoint's"
_BACKGROUND = "with --async-save a thread of each rank writes its part"
_OWN_PART = "every rank saves what it alone holds"

# Rows of one to three lines each read as a table; the formatter would use six.
# fmt: off

# Switches that request what PaRO does anyway: why, and the switches.
ACCEPTED = (
    ("the MLP is SwiGLU", "--swiglu"),
    ("linear layers have no bias but by --add-qkv-bias", "--disable-bias-linear"),
    ("positions are rotary", "--use-rotary-position-embeddings"),
    ("positions are rotary, none is learned", "--no-position-embedding"),
    ("a norm's weight starts at 1 and is not decayed either way", "--apply-layernorm-1p"),
    ("queries are not scaled by layer", "--no-query-key-layer-scaling"),
    ("there is one implementation", "--use-mcore-models"),
    (_KERNEL, "--use-flash-attn"),
    ("softmax accumulates in fp32", "--attention-softmax-in-fp32"),
    (_CHUNKS, "--cross-entropy-loss-fusion"),
    ("there is no fused softmax to turn off", "--no-masked-softmax-fusion"),
    ("there is no such fusion to turn off",
     "--no-bias-dropout-fusion --no-bias-gelu-fusion --disable-jit-fuser"),
    ("there is no such kernel to turn off", "--no-persist-layer-norm"),
    ("gradients are accumulated by the unit", "--no-gradient-accumulation-fusion"),
    ("initial values are made on the CPU", "--use-cpu-initialization"),
    ("a rank makes only what it holds", "--init-model-with-meta-device"),
    ("nothing is drawn at random after the start", "--te-rng-tracker"),
    ("--exp-avg-dtype and --exp-avg-sq-dtype say it all", "--use-precision-aware-optimizer"),
    ("there is no tensor parallelism",
     "--no-async-tensor-model-parallel-allreduce --no-tp-comm-* --disable-tp-comm-* "
     "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding"),
    ("every rank holds a part of the data", "--use-tp-pp-dp-mapping"),
    ("reductions overlap, see --paro-prefetch-units", "--overlap-grad-reduce"),
    ("gathers overlap, see --paro-prefetch-units", "--overlap-param-gather"),
    ("gradients are scaled before they are summed", "--ddp-average-in-collective"),
    ("a step that is not finite is skipped and does not end the run",
     "--no-check-for-nan-in-loss-and-grad"),
    ("garbage is not collected around evaluations", "--no-manual-gc-eval --disable-manual-gc-eval"),
    ("attention is causal without a mask", "--no-create-attention-mask-in-dataloader"),
    ("data are files", "--disable-msc"),
    ("texts get no special tokens", "--tokenizer-hf-no-include-special-tokens"),
    ("no random state is kept: what is random follows from --seed", "--no-save-rng --no-load-rng"),
    (_FORMAT, "--use-dist-ckpt"),
    ("there is one format", "--auto-detect-ckpt-format"),
    (_OWN_PART, "--ckpt-fully-parallel-save"),
    ("every rank loads what it holds", "--ckpt-fully-parallel-load"),
    ("checkpoints load under any strategy", "--dist-ckpt-optim-fully-reshardable"),
    ("master parameters are what is saved", "--load-main-params-from-ckpt"),
    ("the parameters of a run keep their shapes", "--ckpt-assume-constant-structure"),
    (_BACKGROUND, "--use-persistent-ckpt-worker"),
    ("a checkpoint keeps the tokenizer's flags, not its files",
     "--no-save-tokenizer-assets --disable-save-tokenizer-assets"),
    ("perplexity is always written", "--log-validation-ppl-to-tensorboard"),
    ("memory is always written", "--log-memory-to-tensorboard"),
    ("the number of ranks is always written", "--log-world-size-to-tensorboard"),
    ("the batch size is always written", "--log-batch-size-to-tensorboard"),
    ("there is no such logger to turn off", "--no-one-logger"),
    ("timers do not wait for other ranks", "--no-barrier-with-level-1-timing"),
)

# Flags of which some values request what PaRO does anyway: these values, why, and what to do
# instead of others.
VALUES: tuple[tuple[str, tuple[str | int | float, ...], str, str], ...] = (
    ("--normalization", ("RMSNorm", "rmsnorm"), "norms are RMSNorm", "LLaMA's norm is RMSNorm"),
    ("--position-embedding-type", ("rope",), "positions are rotary",
     "LLaMA's positions are rotary: give rope"),
    ("--rope-type", ("rope",), "positions are rotary", _STRETCH),
    ("--rotary-percent", (1.0,), "heads are rotated whole", "LLaMA rotates whole heads: give 1.0"),
    ("--attention-dropout", (0.0,), *_NO_DROPOUT),
    ("--hidden-dropout", (0.0,), *_NO_DROPOUT),
    ("--softmax-type", ("vanilla",), "attention's softmax is the plain one",
     "LLaMA's softmax has no sink: give vanilla"),
    ("--transformer-impl", ("local", "transformer_engine"), "there is one implementation",
     "give local or transformer_engine; both mean the one implementation"),
    ("--flash-attention-version", (2, 3, 4), _KERNEL, "give 2, 3 or 4, or leave it out"),
    ("--cross-entropy-fusion-impl", ("native", "te"), _CHUNKS,
     "give native or te; both mean the one implementation"),
    ("--main-params-dtype", ("fp32",), "master parameters are fp32",
     "master parameters are fp32: give fp32, and to spread them further --paro-strategy NNG"),
    ("--main-grads-dtype", ("fp32",), *_GRADS),
    ("--fp8-recipe", ("tensorwise",),
     "--fp8-format has a scale per tensor, from its own largest value",
     "give tensorwise, the only recipe"),
    ("--tensor-model-parallel-size", (1,), "blocks are not cut", _SHARD),
    ("--pipeline-model-parallel-size", (1,), "layers are not cut", _SHARD),
    ("--expert-model-parallel-size", (1,), *_DENSE),
    ("--expert-tensor-parallel-size", (1,), *_DENSE),
    ("--outer-dp-sharding-strategy", ("no_shard",), "states are spread as --paro-strategy says",
     "give --paro-strategy IIG, which spreads the optimizer state over all groups"),
    ("--megatron-fsdp-main-params-dtype", ("fp32", "auto"), "master parameters are fp32",
     "master parameters are fp32: give fp32"),
    ("--megatron-fsdp-main-grads-dtype", ("fp32", "auto"), *_GRADS),
    ("--megatron-fsdp-grad-comm-dtype", ("auto",), "gradients are sent in the type of computation",
     "leave it out; --accumulate-allreduce-grads-in-fp32 sends gradients in fp32"),
    ("--num-distributed-optimizer-instances", (1,), "optimizer state has one instance",
     "give --paro-strategy NNI and, as --paro-group-size, the number of ranks / {value}"),
    ("--muon-tp-mode", ("duplicated", "blockwise", "distributed"),
     "there is no tensor parallelism", "give duplicated"),
    ("--muon-scalar-optimizer", ("adam",), "AdamW updates what Muon does not",
     "AdamW updates what Muon does not: give adam"),
    ("--dataloader-type", ("single",), "samples are read in one pass",
     "samples are read in one pass: give single"),
    ("--tiktoken-num-special-tokens", (256,), "TikTokenizer has LLaMA-3's special tokens",
     "TikTokenizer has LLaMA-3's special tokens: give 256"),
    ("--vocab-extra-ids", (0,), "the vocabulary is the tokenizer's",
     "the vocabulary is the tokenizer's: give 0"),
    ("--ckpt-format", ("torch_dist", "torch_dcp"), _FORMAT, f"{_FORMAT}: give torch_dcp"),
    ("--async-strategy", ("nvrx", "mcore"), _BACKGROUND, "give nvrx or mcore; both mean that"),
)

# Switches that request what PaRO does anyway on a condition: it, why, and what to do otherwise.
CONDITIONAL: tuple[tuple[str, Callable[[Namespace], bool], str, str], ...] = (
    ("--sequence-parallel", lambda args: getattr(args, "tensor_model_parallel_size", 1) == 1,
     "without tensor parallelism it is off",
     "it belongs to tensor parallelism; to save activations give --recompute-granularity full"),
    ("--dataloader-inter-document-masking", lambda args: bool(args.reset_attention_mask),
     "with --reset-attention-mask documents that share a sample do not see each other",
     "give --reset-attention-mask, and --reset-position-ids where positions restart"),
)

# Flags that change no result and have no effect: why, and the flags.
IGNORED = (
    ("there is no such fused kernel",
     "--use-te-activation-func --use-transformer-engine-op-fuser --fused-residual-rmsnorm"),
    ("no CUDA graph is captured",
     "--enable-cuda-graph --external-cuda-graph --cuda-graph-* --optimizer-cuda-graph"),
    ("Newton-Schulz's products are torch's", "--muon-use-syrk"),
    ("nothing that is experimental is switched off", "--enable-experimental"),
    ("initial values are always made", "--no-initialization"),
    ("initial values depend on --seed alone", "--data-parallel-random-init"),
    ("ranks sum in a fixed order, a GPU's kernels choose theirs", "--deterministic-mode"),
    ("no step is run again to check it", "--rerun-mode --result-rejected-tracker-filename"),
    ("there is no tensor parallelism", "--tp-comm-bootstrap-backend"),
    ("there is no pipeline",
     "--pipeline-model-parallel-comm-backend --overlap-p2p-communication-warmup-flush "
     "--no-overlap-p2p-communication --microbatch-group-size-per-virtual-pipeline-stage "
     "--defer-embedding-wgrad-compute --wgrad-deferral-limit --delay-wgrad-compute "
     "--use-ring-exchange-p2p --no-align-grad-reduce --disable-align-grad-reduce "
     "--no-align-param-gather"),
    ("there is one implementation of sharding", "--megatron-fsdp-version"),
    ("parameters are gathered unit by unit, see --paro-prefetch-units",
     "--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer "
     "--fsdp-db-use-persist-buf-on-alloc-fail --fsdp-double-buffer --fsdp-manual-registration "
     "--suggested-communication-unit-size --create-all-gather-group "
     "--no-use-layer-wise-param-layout"),
    ("gathers overlap with computation, see --paro-prefetch-units",
     "--overlap-param-gather-with-optimizer-step"),
    ("gradients are reduced unit by unit",
     "--ddp-bucket-size --ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw "
     "--no-gradient-reduce-div-fusion"),
    ("no buffer is registered with NCCL", "--use-nccl-ub --disable-symmetric-registration"),
    ("saves agree over groups of gloo's, which are made under any backend",
     "--disable-gloo-process-groups"),
    ("NCCL is set up by its own environment variables alone",
     "--nccl-communicator-config-path --use-sharp --sharp-enabled-group "
     "--high-priority-stream-groups"),
    ("the launcher says it in the environment", "--local-rank"),
    ("--distributed-timeout-minutes holds all the time",
     "--distributed-timeout-seconds-after-init"),
    ("--flight-recorder-dir turns the recorder on, as torch sets it up",
     "--flight-recorder-trace-buffer-size --flight-recorder-include-stack-trace "
     "--no-flight-recorder-* --disable-flight-recorder-*"),
    ("ranks are not tested during training", "--gpu-sniff-test-interval --train-sync-interval"),
    ("--exit-signal-handler makes a training save and leave at a signal",
     "--exit-signal-handler-for-training --exit-signal-handler-for-dataloader"),
    ("evaluations begin with the first --eval-interval", "--start-eval-at-iter"),
    ("sets are named by their corpora", "--validation-set-names"),
    ("there are no tests that run along", "--test-mode"),
    ("corpora are read, not mapped into memory", "--no-mmap-bin-files"),
    ("indices are built once and read from their files",
     "--num-dataset-builder-threads --dataloader-fast-cache-load "
     "--dataloader-defer-npy-index-mmap --per-dataset-sequences-path --mid-level-dataset-surplus"),
    ("nothing is padded", "--allow-ambiguous-pad-tokens"),
    ("TikTokenizer cuts texts as LLaMA-3 does", "--tiktoken-pattern"),
    ("the ids are the same", "--tokenizer-hf-no-use-fast --use-gigatoken"),
    (_BACKGROUND, "--async-ckpt-*"),
    (_OWN_PART,
     "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-save-process-group "
     "--ckpt-fully-parallel-load-process-group --ckpt-fully-parallel-load-exchange-algo "
     "--ckpt-fully-parallel-load-per-rank-objects --ckpt-pg-tensors-cache-* --dist-ckpt-workers "
     "--ckpt-drop-redundant-extra-state --distrib-optim-fully-reshardable-mem-efficient"),
    ("a checkpoint has to match the model exactly",
     "--dist-ckpt-strictness --no-ckpt-load-validate-sharding-integrity "
     "--disable-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load "
     "--disable-strict-fsdp-dtensor-load"),
    ("the sizes of a checkpoint's files are checked, not their bytes", "--verify-integrity"),
    ("a checkpoint loads on any number of ranks", "--use-mp-args-from-checkpoint-args"),
    ("the ranks of a node that hold the same shard each copy a part of it",
     "--non-persistent-local-ckpt-algo"),
    ("the loss scale is always written",
     "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard"),
    ("it is not recorded; --metrics-file has what is",
     "--log-energy --log-max-attention-logit --log-device-memory-used --config-logger-dir "
     "--one-logger-* --app-tag-* --otel-* --dump-param-to-param-group-map"),
    ("a profile has the ranges of the timers, without shapes and stacks",
     "--pytorch-profiler-* --record-shapes --nvtx-ranges"),
    ("--log-straggler prints with every line who is waited for",
     "--straggler-* --disable-straggler-on-startup --run-workload-inspector-server"),
)

# Flags that request something PaRO does not do: what to do, and the flags.
REFUSED = (
    ("queries and keys are normalized by --qk-layernorm alone: leave it out",
     "--qk-l2-norm --qk-clip --qk-clip-alpha --qk-clip-threshold"),
    (_STRETCH, "--yarn-* --no-yarn-* --rotary-scaling-factor --mscale --mscale-all-dim"),
    ("LLaMA rotates heads by halves: leave it out", "--rotary-interleaved"),
    ("LLaMA rotates in every block: leave it out", "--no-rope-freq"),
    ("LLaMA's positions are rotary: leave it out", "--relative-attention-* --mrope-section"),
    ("LLaMA's MLP is SwiGLU: leave it out",
     "--squared-relu --openai-gelu --quick-geglu --glu-linear-offset "
     "--activation-func-clamp-value --use-fused-weighted-squared-relu"),
    ("LLaMA's blocks add to the residual what was there before the norm, in the type of "
     "computation: leave it out",
     "--apply-residual-connection-post-layernorm --fp32-residual-connection --mhc-* "
     "--enable-mhc-connections"),
    ("initial weights follow --init-method-std, embedding and all: leave it out",
     "--embedding-init-method-std --init-method-xavier-uniform"),
    ("nothing is scaled by width: leave it out, and give --lr and --init-method-std for this "
     "width", "--use-mup --mup-*"),
    ("queries are not scaled by layer: leave it out; against overflow in fp16 give --bf16",
     "--apply-query-key-layer-scaling"),
    ("LLaMA's attention is softmax over all earlier tokens: leave it out",
     "--window-* --attention-output-gate --experimental-attention-variant --linear-attention-* "
     "--linear-conv-* --linear-key-* --linear-value-* --linear-num-* --dsa-* --no-dsa-* "
     "--disable-dsa-*"),
    ("LLaMA has no latent attention; for fewer keys and values give --group-query-attention",
     "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim "
     "--v-head-dim --cache-mla-latents --mla-down-proj-fusion"),
    ("LLaMA predicts one token: leave it out", "--mtp-*"),
    ("LLaMA is dense: leave it out", "--num-experts --moe-* --overlap-moe-expert-parallel-comm"),
    ("all LLaMA blocks have attention and an MLP: leave it out",
     "--is-hybrid-model --hybrid-layer-pattern --hybrid-override-pattern --spec "
     "--heterogeneous-* --mamba-* --gdp-*"),
    ("give --num-layers and --seq-length: there is no encoder",
     "--encoder-num-layers --encoder-seq-length --decoder-num-layers --decoder-seq-length"),
    ("--trainable says what trains: leave it out", "--freeze-all-layers"),
    ("the loss is computed in fp32 from logits in the type of computation: leave it out",
     "--fp16-lm-cross-entropy --output-logit-dtype"),
    ("matrix products are as torch has them by default: leave it out",
     "--disable-bf16-reduced-precision-matmul --batch-invariant-*"),
    ("fp8 has --fp8-format and --fp8-recipe tensorwise alone: leave it out",
     "--fp8-hybrid --fp8-e4m3 --fp8-param-gather --fp8-amax-* --fp8-quantizer-factory --fp8-margin "
     "--fp8-interval --no-fp8-wgrad --disable-fp8-wgrad --fp8-output-proj "
     "--first-last-layers-bf16 --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 "
     "--keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag --te-precision-config-file "
     "--use-kitchen-attention --kitchen-attention-backend"),
    ("--fp8-format is the narrowest there is: leave it out", "--fp4-*"),
    ("nothing is kept in the host's memory; to free the device's give --recompute-granularity "
     "full, or spread more with --paro-strategy GGG",
     "--optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload "
     "--overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-* --cpu-offloading-* --offload-modules "
     "--fine-grained-* --min-offloaded-tensor-size --delay-offload-until-cuda-graph "
     "--delta-offload-bytes-across-pp-ranks --activation-offload-fraction"),
    ("to save the memory of activations give --recompute-granularity full",
     "--mlp-chunks-for-training --distribute-saved-activations"),
    ("there is no tensor parallelism; gathers and reductions overlap by themselves, see "
     "--paro-prefetch-units", "--tp-comm-*"),
    ("there is no tensor parallelism; --paro-strategy GGG gathers the weights of a unit "
     "when they are needed",
     "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --gtp-*"),
    ("there is no pipeline; give --paro-strategy GGG to spread the model",
     "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
     "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
     "--pipeline-model-parallel-layout --account-for-embedding-in-pipeline-split "
     "--account-for-loss-in-pipeline-split"),
    ("every sample is spread over as many ranks: give --context-parallel-size",
     "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank"),
    ("give --paro-strategy GGG, or III to stay inside groups",
     "--use-torch-fsdp2 --enable-full-sharding-in-hsdp"),
    ("give --paro-strategy NGG, whose parameters stay whole between forward and backward",
     "--torch-fsdp2-no-reshard-after-forward"),
    ("give --paro-strategy NNN, NNG, NGG or GGG for no_shard, optim, optim_grads or "
     "optim_grads_params", "--use-megatron-fsdp --data-parallel-sharding-strategy"),
    ("gradients are sent in the type of computation; --accumulate-allreduce-grads-in-fp32 "
     "sends them in fp32",
     "--ddp-reduce-scatter-with-fp32-accumulation "
     "--ddp-param-name-patterns-for-fp32-local-accumulation"),
    ("give --flight-recorder-dir DIR", "--flight-recorder-dump-path"),
    ("give --dry-run --world-size N, which starts no process group", "--fake-process-group"),
    ("the process groups are made at the start: leave it out", "--lazy-mpu-init"),
    ("queries, keys and values are matrices of their own: leave it out", "--muon-no-split-qkv"),
    ("--optimizer has adam, which is AdamW, and muon: leave it out",
     "--sgd-momentum --lion-* --soap-* --adaptive-muon-*"),
    ("one learning rate serves all parameters: leave it out", "--decoupled-* --head-lr-mult"),
    ("the weights of norms are not decayed, all others are: leave it out",
     "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type"),
    ("--global-batch-size has to divide by --micro-batch-size and ranks: leave it out",
     "--decrease-batch-size-if-needed"),
    ("every iteration is trained: leave it out", "--iterations-to-skip"),
    ("nothing is made to fail on purpose: leave it out", "--error-injection-* --fault-injector-*"),
    ("data are files: leave it out", "--enable-msc --object-storage-cache-path"),
    ("a training has one blend from start to end", "--phase-transition-iterations"),
    ("training texts are whole: leave it out",
     "--fim-* --sample-rate --mask-prob --short-seq-prob"),
    ("give --make-vocab-size-divisible-by 1", "--no-pad-vocab-size --disable-pad-vocab-size"),
    ("a tokenizer is what its file says: leave it out",
     "--tokenizer-metadata --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
     "--no-tokenizer-sentencepiece-* --disable-tokenizer-sentencepiece-* --trust-remote-code "
     "--null-tokenizer-pad-id --chat-template"),
    ("give --tokenizer-type, which wins over the checkpoint's",
     "--no-use-tokenizer-model-from-checkpoint-args "
     "--disable-use-tokenizer-model-from-checkpoint-args"),
    ("give --save-interval, with --async-save to continue meanwhile and --save-retain-interval to "
     "keep few", "--non-persistent-global-ckpt-dir"),
    ("--paro-survive N keeps every state on N more nodes, from which a run recovers",
     "--replication --replication-*"),
    ("give it as --load, with --finetune", "--pretrained-checkpoint"),
    ("--ckpt-step chooses the iteration to resume from", "--override-ckpt-iteration"),
    ("tools/convert_checkpoint.py converts: leave it out",
     "--ckpt-convert-* --dist-ckpt-save-pre-mcore-014"),
    ("a checkpoint holds parameters and moments: leave it out",
     "--save-params-interval --save-activations-interval --save-tokens-per-expert-interval "
     "--save-wgrads-interval --save-dgrads-interval"),
    ("torchrun starts failed ranks again, and a run with --save and --load resumes; "
     "--heartbeat-file and --hang-dump-minutes report one that is stuck",
     "--enable-ft-package --calc-ft-timeouts --ft-* --inprocess-*"),
    ("give --exit-signal-handler or --exit-duration-in-mins, which save and leave",
     "--adlr-autoresume --adlr-autoresume-interval"),
    ("it belongs to distillation: leave it out",
     "--export-kd-* --export-te-mcore-model --logits-save-* --logits-load-*"),
    ("it belongs to fine-tuning on conversations: leave it out", "--sft --sft-*"),
    ("it belongs to reinforcement learning: leave it out",
     "--perform-rl-step --rl-* --no-rl-* --grpo-* --langrl-* --refit-method"),
    ("it belongs to inference; tools/generate.py continues texts: leave it out",
     "--inference-* --no-inference-*"),
    ("it belongs to BERT and to retrieval: leave it out",
     "--bert-* --ict-* --biencoder-* --retriever-* --retro-* --titles-data-path "
     "--evidence-data-path --block-data-path --indexer-*"),
    ("it belongs to models of images: leave it out",
     "--vision-* --img-* --dino-* --swin-* --num-classes --num-channels --mask-type"),
)
# fmt: on

# The words to give in place of a refused flag, with any value or by its value.
BECOMES: Mapping[str, str | Mapping[str, str]] = {
    "--main-grads-dtype": {"bf16": "--grad-reduce-in-bf16"},
    "--fp8-hybrid": "--fp8-format hybrid",
    "--fp8-e4m3": "--fp8-format e4m3",
    "--encoder-num-layers": "--num-layers {value}",
    "--encoder-seq-length": "--seq-length {value}",
    "--tensor-model-parallel-size": "--paro-strategy GGG",
    "--pipeline-model-parallel-size": "--paro-strategy GGG",
    "--use-torch-fsdp2": "--paro-strategy GGG",
    "--enable-full-sharding-in-hsdp": "--paro-strategy GGG",
    "--torch-fsdp2-no-reshard-after-forward": "--paro-strategy NGG",
    "--data-parallel-sharding-strategy": {
        "no_shard": "--paro-strategy NNN",
        "optim": "--paro-strategy NNG",
        "optim_grads": "--paro-strategy NGG",
        "optim_grads_params": "--paro-strategy GGG",
    },
    "--flight-recorder-dump-path": "--flight-recorder-dir {value}",
    "--no-pad-vocab-size": "--make-vocab-size-divisible-by 1",
    "--disable-pad-vocab-size": "--make-vocab-size-divisible-by 1",
    "--pretrained-checkpoint": "--load {value} --finetune",
    "--override-ckpt-iteration": "--ckpt-step {value}",
}
