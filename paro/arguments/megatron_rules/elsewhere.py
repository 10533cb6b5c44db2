"""Rules for flags of Megatron's other programs, which do not pre-train a LLaMA."""

from __future__ import annotations

from paro.arguments.megatron_rules.rule import refused

_RESTART = (
    "torchrun starts failed ranks again, and a run with --save and --load resumes; "
    "--heartbeat-file and --hang-dump-minutes report one that is stuck"
)

ELSEWHERE_RULES = (
    *refused(
        _RESTART,
        "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters --inprocess-restart "
        "--inprocess-max-iterations --inprocess-monitor-thread-interval "
        "--inprocess-monitor-process-interval --inprocess-progress-watchdog-interval "
        "--inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout "
        "--inprocess-heartbeat-timeout --inprocess-barrier-timeout --inprocess-completion-timeout "
        "--inprocess-last-call-wait --inprocess-termination-grace-time --inprocess-granularity "
        "--inprocess-active-world-size --inprocess-empty-cuda-cache",
    ),
    *refused(
        "give --exit-signal-handler or --exit-duration-in-mins, which save and leave",
        "--adlr-autoresume --adlr-autoresume-interval",
    ),
    *refused(
        "it belongs to distillation: leave it out",
        "--export-kd-cfg --export-kd-teacher-load --export-te-mcore-model --logits-save-top-k "
        "--logits-save-top-p --logits-save-top-p-min-k --logits-save-dir --logits-save-dtype "
        "--logits-load-dir --logits-load-decode-threads --logits-load-prefetch-factor "
        "--logits-load-msc-prefetch-depth --logits-load-kd-loss-alpha --logits-load-ignore-errors",
    ),
    *refused(
        "it belongs to fine-tuning on conversations: leave it out",
        "--sft --sft-tokenizer-prompt-format",
    ),
    *refused(
        "it belongs to reinforcement learning: leave it out",
        "--perform-rl-step --rl-prompts-per-eval --grpo-prompts-per-step --grpo-group-size "
        "--rl-generation-lag --rl-max-inflight-requests --rl-submission-granularity "
        "--rl-consumption-granularity --rl-durable-rollout-bank --rl-rollout-bank-dir "
        "--rl-rollout-bank-max-bytes --grpo-iterations --grpo-clamp-eps-lower "
        "--grpo-clamp-eps-upper --grpo-kl-beta --grpo-entropy-term-weight "
        "--grpo-filter-groups-with-same-reward --langrl-env-config --rl-default-temperature "
        "--rl-default-top-p --rl-default-top-k --rl-offload-optimizer-during-inference "
        "--rl-kv-cache-management-mode --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs "
        "--rl-partial-rollouts --no-rl-partial-rollouts --rl-inference-logprobs-is-correction "
        "--no-rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef "
        "--rl-use-sequence-packing --no-rl-use-sequence-packing "
        "--rl-sequence-packing-max-sequences-per-bin --rl-sequence-packing-algo "
        "--rl-training-cuda-graphs --no-rl-training-cuda-graphs "
        "--rl-inference-tensor-model-parallel-size --rl-inference-pipeline-model-parallel-size "
        "--rl-inference-expert-model-parallel-size "
        "--rl-inference-expert-tensor-model-parallel-size "
        "--rl-inference-model-unified-memory-level --rl-offload-inference-model-weights-when-idle "
        "--no-rl-offload-inference-model-weights-when-idle --refit-method "
        "--rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token "
        "--no-rl-skip-bos-token --rl-profile --rl-profile-dir --rl-inference-parsers",
    ),
    *refused(
        "it belongs to inference; tools/generate.py continues texts: leave it out",
        "--inference-batch-times-seqlen-threshold --max-tokens-to-oom --use-legacy-static-engine "
        "--inference-max-requests --inference-max-seq-length --inference-dynamic-batching "
        "--inference-dynamic-batching-buffer-size-gb "
        "--inference-dynamic-batching-paused-buffer-size-gb "
        "--inference-dynamic-batching-mamba-memory-ratio --inference-dynamic-batching-block-size "
        "--inference-dynamic-batching-max-requests --inference-dynamic-batching-max-tokens "
        "--inference-dynamic-batching-num-cuda-graphs "
        "--inference-dynamic-batching-track-paused-request-events "
        "--inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs "
        "--inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens "
        "--inference-cuda-graph-scope --inference-dynamic-batching-unified-memory-level "
        "--enable-chunked-prefill --num-speculative-tokens "
        "--inference-dynamic-batching-prefix-caching "
        "--no-inference-dynamic-batching-prefix-caching "
        "--inference-dynamic-batching-prefix-caching-eviction-policy "
        "--inference-dynamic-batching-prefix-caching-coordinator-policy "
        "--inference-dynamic-batching-prefix-caching-routing-alpha "
        "--inference-dynamic-batching-prefix-caching-mamba-gb "
        "--inference-dynamic-batching-cuda-graph-mixed-prefill-count "
        "--inference-dynamic-batching-cuda-graph-sizing-distribution "
        "--inference-dynamic-batching-sampling-backend --use-same-sampling-seed-across-dp-ranks "
        "--inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-logprobs-mode "
        "--inference-logging-step-interval --inference-text-gen-server-logging "
        "--no-inference-text-gen-server-logging --inference-wandb-logging "
        "--no-inference-wandb-logging --inference-coordinator-port "
        "--inference-use-synchronous-zmq-collectives "
        "--no-inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus "
        "--no-inference-disable-ep-consensus --inference-shards --inference-rng-tracker "
        "--inference-fuse-tp-communication --inference-disable-triton-nvls-kernels "
        "--inference-grouped-gemm-backend --inference-moe-disable-fused-quant-kernels "
        "--inference-moe-token-dispatcher-type --flash-decode --symmetric-ar-type "
        "--nccl-all-reduce-for-prefill --mlp-chunks-for-prefill --onnx-safe",
    ),
    *refused(
        "it belongs to BERT and to retrieval: leave it out",
        "--bert-no-binary-head --bert-load --output-bert-embeddings --bert-embedder-type "
        "--ict-head-size --ict-load --biencoder-projection-dim "
        "--biencoder-shared-query-context-model --titles-data-path --query-in-block-prob "
        "--use-one-sent-docs --evidence-data-path --retriever-report-topk-accuracies "
        "--retriever-score-scaling --block-data-path --embedding-path --indexer-batch-size "
        "--indexer-log-interval",
    ),
    *refused(
        "it belongs to models of images: leave it out",
        "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction "
        "--data-per-class-fraction --no-data-sharding --vision-pretraining "
        "--vision-pretraining-type --vision-backbone-type --swin-backbone-type --mask-type "
        "--mask-factor --iter-per-epoch --dino-local-img-size --dino-local-crops-number "
        "--dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer "
        "--dino-norm-last-layer --dino-warmup-teacher-temp --dino-teacher-temp "
        "--dino-warmup-teacher-temp-epochs",
    ),
)
