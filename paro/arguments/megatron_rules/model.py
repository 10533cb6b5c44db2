"""Rules for Megatron's model flags: those that describe a LLaMA, and other architectures."""

from __future__ import annotations

from paro.arguments.megatron_rules.rule import accepted, becoming, refused, values

_SWIGLU = "LLaMA's MLP is SwiGLU: leave it out"
_STRETCH = (
    "YaRN is not supported; --use-rope-scaling stretches as LLaMA-3.1 does, and "
    "--rotary-seq-len-interpolation-factor divides positions"
)
_NO_ENCODER = "give --num-layers and --seq-length: there is no encoder"
_DENSE = "LLaMA is dense: leave it out"
_ONE_ATTENTION = "LLaMA's attention is softmax over all earlier tokens: leave it out"

MODEL_RULES = (
    *accepted("the MLP is SwiGLU", "--swiglu"),
    *accepted("linear layers have no bias but by --add-qkv-bias", "--disable-bias-linear"),
    *accepted("positions are rotary", "--use-rotary-position-embeddings"),
    *accepted("positions are rotary, none is learned", "--no-position-embedding"),
    *accepted("a norm's weight starts at 1 and is not decayed either way", "--apply-layernorm-1p"),
    *values("--normalization", "RMSNorm rmsnorm", "norms are RMSNorm", "LLaMA's norm is RMSNorm"),
    *values(
        "--position-embedding-type",
        "rope",
        "positions are rotary",
        "LLaMA's positions are rotary: give rope",
    ),
    *values("--rope-type", "rope", "positions are rotary", _STRETCH),
    *values(
        "--rotary-percent",
        (1.0,),
        "heads are rotated whole",
        "LLaMA rotates whole heads: give 1.0",
    ),
    *values(
        "--attention-dropout",
        (0.0,),
        "there is no dropout",
        "LLaMA trains without dropout: give 0",
    ),
    *values(
        "--hidden-dropout",
        (0.0,),
        "there is no dropout",
        "LLaMA trains without dropout: give 0",
    ),
    *values(
        "--softmax-type",
        "vanilla",
        "attention's softmax is the plain one",
        "LLaMA's softmax has no sink: give vanilla",
    ),
    *refused(
        "queries and keys are normalized by --qk-layernorm alone: leave it out",
        "--qk-l2-norm --qk-clip --qk-clip-alpha --qk-clip-threshold",
    ),
    *refused(
        _STRETCH,
        "--yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow "
        "--yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int "
        "--rotary-scaling-factor --mscale --mscale-all-dim",
    ),
    *refused("LLaMA rotates heads by halves: leave it out", "--rotary-interleaved"),
    *refused("LLaMA rotates in every block: leave it out", "--no-rope-freq"),
    *refused(
        "LLaMA's positions are rotary: leave it out",
        "--relative-attention-num-buckets --relative-attention-max-distance --mrope-section",
    ),
    *refused(
        _SWIGLU,
        "--squared-relu --openai-gelu --quick-geglu --glu-linear-offset "
        "--activation-func-clamp-value --use-fused-weighted-squared-relu",
    ),
    *refused(
        "LLaMA's blocks add to the residual what was there before the norm, in the type of "
        "computation: leave it out",
        "--apply-residual-connection-post-layernorm --fp32-residual-connection "
        "--enable-mhc-connections --mhc-num-residual-streams --mhc-sinkhorn-iterations "
        "--mhc-init-gating-factor --mhc-recompute-layer-num",
    ),
    *refused(
        "initial weights follow --init-method-std, embedding and all: leave it out",
        "--embedding-init-method-std --init-method-xavier-uniform",
    ),
    *refused(
        "nothing is scaled by width: leave it out, and give --lr and --init-method-std for this "
        "width",
        "--use-mup --mup-width-mult --mup-base-hidden-size --mup-embedding-mult --mup-output-mult "
        "--mup-base-head-dim --mup-attn-scale-power",
    ),
    *accepted("queries are not scaled by layer", "--no-query-key-layer-scaling"),
    *refused(
        "queries are not scaled by layer: leave it out; against overflow in fp16 give --bf16",
        "--apply-query-key-layer-scaling",
    ),
    *refused(_ONE_ATTENTION, "--window-size --window-attn-skip-freq --attention-output-gate"),
    *refused(
        _ONE_ATTENTION,
        "--experimental-attention-variant --linear-attention-freq --linear-conv-kernel-dim "
        "--linear-key-head-dim --linear-value-head-dim --linear-num-key-heads "
        "--linear-num-value-heads --dsa-indexer-n-heads --dsa-indexer-head-dim "
        "--dsa-indexer-topk --dsa-indexer-topk-freq --dsa-indexer-skip-topk-offset "
        "--dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss --dsa-kernel-backend "
        "--dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation "
        "--disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu "
        "--disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32",
    ),
    *refused(
        "LLaMA has no latent attention; for fewer keys and values give --group-query-attention",
        "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim "
        "--qk-pos-emb-head-dim --v-head-dim --cache-mla-latents --mla-down-proj-fusion",
    ),
    *refused(
        "LLaMA predicts one token: leave it out",
        "--mtp-num-layers --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads "
        "--mtp-hsm --mtp-hybrid-override-pattern --mtp-standalone",
    ),
    *refused(_DENSE, "--num-experts"),
    *refused(
        _DENSE,
        "--moe-layer-freq --moe-ffn-hidden-size --moe-shared-expert-intermediate-size "
        "--moe-shared-expert-gate --moe-shared-expert-overlap --use-grouped-gemm-for-shared-expert "
        "--use-grouped-gemm-for-dense-mlp --moe-shared-expert-glu-interleave-size "
        "--moe-mlp-glu-interleave-size --moe-latent-size --moe-use-upcycling "
        "--moe-upcycling-granularity --moe-router-topk --moe-router-load-balancing-type "
        "--moe-aux-loss-coeff --moe-z-loss-coeff --moe-router-dtype --moe-router-num-groups "
        "--moe-router-group-topk --moe-router-pre-softmax --moe-router-topk-scaling-factor "
        "--moe-router-score-function --moe-router-enable-expert-bias --moe-router-bias-update-rate "
        "--moe-router-quantile-balancing-ema --moe-router-force-load-balancing "
        "--moe-router-force-biased --moe-router-padding-for-quantization "
        "--moe-router-padding-for-fp8 --moe-router-fusion --moe-enable-routing-replay "
        "--moe-grouped-gemm --moe-use-grouped-tensor --moe-single-grouped-weight "
        "--moe-single-grouped-bias --moe-input-jitter-eps --moe-token-dispatcher-type "
        "--moe-enable-deepep --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms "
        "--moe-deepep-num-sms --moe-permute-fusion --moe-permute-fusion-into-hybridep "
        "--moe-hybridep-pad-uneven-dispatch-inputs --moe-hybridep-num-sms "
        "--moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute "
        "--moe-hybridep-num-sms-preprocessing --moe-ncclep-zero-copy --moe-dispatch-fwd-dtype "
        "--moe-combine-bwd-dtype --moe-expert-capacity-factor --moe-expert-rank-capacity-factor "
        "--moe-pad-expert-input-to-capacity --moe-pad-experts-for-cuda-graph-inference "
        "--moe-token-drop-policy --moe-layer-recompute --moe-apply-probs-on-input "
        "--moe-per-layer-logging --moe-paged-stash --moe-paged-stash-page-size "
        "--moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-buffer-size-factor-cpu "
        "--moe-routing-trace-path --moe-routing-trace-max-training-iters "
        "--moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states "
        "--moe-routing-trace-dump-weights --overlap-moe-expert-parallel-comm "
        "--overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release "
        "--high-priority-a2a-comm-stream",
    ),
    *refused(
        "all LLaMA blocks have attention and an MLP: leave it out",
        "--is-hybrid-model --hybrid-layer-pattern --hybrid-override-pattern --spec "
        "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json "
        "--mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads "
        "--disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype "
        "--mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype "
        "--gdp-num-householder --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute",
    ),
    *becoming("--num-layers {value}", refused(_NO_ENCODER, "--encoder-num-layers")),
    *becoming("--seq-length {value}", refused(_NO_ENCODER, "--encoder-seq-length")),
    *refused(_NO_ENCODER, "--decoder-num-layers --decoder-seq-length"),
    *refused("--trainable says what trains: leave it out", "--freeze-all-layers"),
)
