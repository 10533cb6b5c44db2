"""FLOPs of a LLaMA's forward and backward."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from model.config import LlamaConfig
from model.lora_config import Shape, down_name, up_name
from model.units import parameter_shapes, unit_specs


def flops_per_token(
    config: LlamaConfig, seq_length: int, trained: Collection[str] | None = None, *, causal: bool
) -> float:
    """Count FLOPs of forward and backward for one token: matmuls only, a multiply-add is two.

    - Forward: 2 per weight of every linear layer and of the output layer, plus attention's two
      matmuls over all `seq_length` positions (half of them if `causal`, as Megatron-LM counts;
      PaLM, appendix B, counts all).
    - Backward: twice the forward if all parameters train. If only the parameters named in `trained`
      do: weight gradients of these, and input gradients down to the first of them; kernels compute
      attention's gradients as a whole.
    - Not counted: embedding lookup, norms, rotary embedding, recomputation.
    """
    if trained is None:
        trained = parameter_shapes(config)
    width = config.num_attention_heads * config.kv_channels
    core = 2 * width * (seq_length / 2 if causal else seq_length)
    forward, backward = 0.0, 0.0
    reached = "embedding.weight" in trained  # True: some parameter up to here trains
    for block in unit_specs(config)[1:-1]:
        own = {name for name in block.shapes if f"{block.name}.{name}" in trained}
        block_forward, block_backward = _block_products(block.shapes, own, core, reached=reached)
        forward, backward = forward + block_forward, backward + block_backward
        reached = reached or bool(own)
    logits = config.vocab_size * config.hidden_size
    tied = config.tie_embeddings_and_output_weights
    weight_trains = ("embedding.weight" if tied else "head.weight") in trained
    reached = reached or "head.norm" in trained
    return 2.0 * (forward + backward + logits * (1 + reached + weight_trains))


def _block_products(
    shapes: Mapping[str, Shape], trained: Collection[str], core: float, *, reached: bool
) -> tuple[float, float]:
    """Count multiply-adds of a block's forward and backward; `core`: of attention's two matmuls.

    `reached`: whether the block's input needs a gradient.
    """

    def products(*names: str) -> int:
        return sum(math.prod(shapes[name]) for name in names)

    def trains(*names: str) -> bool:
        return any(name in trained or up_name(name) in trained for name in names)

    def input_of(*names: str) -> int:
        """Count multiply-adds of the gradient with respect to the input of weights and adapters."""
        return products(*names, *(down_name(name) for name in names if down_name(name) in shapes))

    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    backward: float = products(*(name for name in matrices if name in trained))
    # The gradient of the output of an adapter's first matrix.
    backward += products(*(up_name(name) for name in shapes if down_name(name) in trained))
    through_norm = reached or "attention_norm" in trained
    through_core = through_norm or trains("wq", "wk", "wv", "bq", "bk", "bv", "q_norm", "k_norm")
    backward += through_norm * input_of("wq", "wk", "wv")
    backward += through_core * (2 * core + input_of("wo"))
    through_norm = through_core or trains("wo", "mlp_norm")
    backward += through_norm * input_of("w_gate", "w_up")
    backward += (through_norm or trains("w_gate", "w_up")) * input_of("w_down")
    return products(*matrices) + core, backward
