"""Rules for Megatron's compute flags: kernels, fusions, number formats, memory saving."""

from __future__ import annotations

from paro.arguments.megatron_rules.rule import accepted, becoming, ignored, refused, values

_KERNEL = "scaled-dot-product attention chooses its kernel by itself"
_NO_FUSION = "there is no such fusion to turn off"
_NO_SUCH_FP8 = "fp8 has --fp8-format and --fp8-recipe tensorwise alone: leave it out"
_NO_FP4 = "--fp8-format is the narrowest there is: leave it out"
_STATES = "master parameters and moments are fp32"
_LESS_MEMORY = (
    "nothing is kept in the host's memory; to free the device's give --recompute-granularity full, "
    "or spread more with --paro-strategy GGG"
)
_LOSS = "the loss is computed in fp32 from logits in the type of computation: leave it out"

COMPUTE_RULES = (
    *accepted("there is one implementation", "--use-mcore-models"),
    *values(
        "--transformer-impl",
        "local transformer_engine",
        "there is one implementation",
        "give local or transformer_engine; both mean the one implementation",
    ),
    *accepted(_KERNEL, "--use-flash-attn"),
    *values("--flash-attention-version", (2, 3, 4), _KERNEL, "give 2, 3 or 4, or leave it out"),
    *accepted("softmax accumulates in fp32", "--attention-softmax-in-fp32"),
    *accepted("cross-entropy runs in chunks of tokens", "--cross-entropy-loss-fusion"),
    *values(
        "--cross-entropy-fusion-impl",
        "native te",
        "cross-entropy runs in chunks of tokens",
        "give native or te; both mean the one implementation",
    ),
    *accepted("there is no fused softmax to turn off", "--no-masked-softmax-fusion"),
    *accepted(
        _NO_FUSION,
        "--no-bias-dropout-fusion --no-bias-gelu-fusion --disable-jit-fuser",
    ),
    *accepted("there is no such kernel to turn off", "--no-persist-layer-norm"),
    *accepted("gradients are accumulated by the unit", "--no-gradient-accumulation-fusion"),
    *ignored(
        "there is no such fused kernel",
        "--use-te-activation-func --use-transformer-engine-op-fuser --fused-residual-rmsnorm",
    ),
    *ignored(
        "no CUDA graph is captured",
        "--enable-cuda-graph --external-cuda-graph --cuda-graph-impl --cuda-graph-scope "
        "--cuda-graph-modules --cuda-graph-warmup-steps --optimizer-cuda-graph",
    ),
    *ignored("nothing that is experimental is switched off", "--enable-experimental"),
    *accepted("initial values are made on the CPU", "--use-cpu-initialization"),
    *accepted("a rank makes only what it holds", "--init-model-with-meta-device"),
    *accepted("nothing is drawn at random after the start", "--te-rng-tracker"),
    *ignored("initial values are always made", "--no-initialization"),
    *ignored("initial values depend on --seed alone", "--data-parallel-random-init"),
    *ignored(
        "ranks sum in a fixed order, a GPU's kernels choose theirs",
        "--deterministic-mode",
    ),
    *ignored("no step is run again to check it", "--rerun-mode --result-rejected-tracker-filename"),
    # Number formats.
    *accepted(_STATES, "--use-precision-aware-optimizer"),
    *values(
        "--main-params-dtype",
        "fp32",
        "master parameters are fp32",
        "master parameters are fp32: give fp32, and to spread them further --paro-strategy NNG",
    ),
    *becoming(
        {"bf16": "--grad-reduce-in-bf16"},
        values(
            "--main-grads-dtype",
            "fp32",
            "gradients are accumulated in fp32 unless --grad-reduce-in-bf16 is given",
            "give fp32; --grad-reduce-in-bf16 accumulates gradients in bf16",
        ),
    ),
    *values(
        "--exp-avg-dtype",
        "fp32",
        "moments are fp32",
        "moments are fp32: give fp32, and to spread them further --paro-strategy NNG",
    ),
    *values(
        "--exp-avg-sq-dtype",
        "fp32",
        "moments are fp32",
        "moments are fp32: give fp32, and to spread them further --paro-strategy NNG",
    ),
    *refused(_LOSS, "--fp16-lm-cross-entropy --output-logit-dtype"),
    *refused(
        "matrix products are as torch has them by default: leave it out",
        "--disable-bf16-reduced-precision-matmul --batch-invariant-mode --batch-invariant-backend",
    ),
    *values(
        "--fp8-recipe",
        "tensorwise",
        "--fp8-format has a scale per tensor, from its own largest value",
        "give tensorwise, the only recipe",
    ),
    *becoming("--fp8-format hybrid", refused(_NO_SUCH_FP8, "--fp8-hybrid")),
    *becoming("--fp8-format e4m3", refused(_NO_SUCH_FP8, "--fp8-e4m3")),
    *refused(
        _NO_SUCH_FP8,
        "--fp8-param-gather --fp8-amax-history-len "
        "--fp8-amax-compute-algo --fp8-quantizer-factory --fp8-margin --fp8-interval "
        "--no-fp8-wgrad --disable-fp8-wgrad --fp8-output-proj --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 --keep-fp8-transpose-cache "
        "--reuse-grad-buf-for-mxfp8-param-ag --te-precision-config-file --use-kitchen-attention "
        "--kitchen-attention-backend",
    ),
    *refused(
        _NO_FP4,
        "--fp4-format --fp4-recipe --fp4-quantizer-factory --fp4-param-gather",
    ),
    # Memory.
    *refused(
        _LESS_MEMORY,
        "--optimizer-cpu-offload --optimizer-offload-fraction "
        "--use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
        "--no-pin-cpu-grads --no-pin-cpu-params --cpu-offloading-num-layers "
        "--cpu-offloading-retain-pinned-cpu-buffers --fine-grained-activation-offloading "
        "--fine-grained-offloading-max-inflight-offloads --offload-modules "
        "--min-offloaded-tensor-size --delay-offload-until-cuda-graph "
        "--delta-offload-bytes-across-pp-ranks --activation-offload-fraction",
    ),
    *refused(
        "to save the memory of activations give --recompute-granularity full",
        "--mlp-chunks-for-training --distribute-saved-activations",
    ),
)
