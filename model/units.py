"""The units of a LLaMA: parameters, FLOPs, how they are cut into slices, recomputation groups."""

# The model, its sharding, the planner and the converters read this list. A slice of the weights is
# cut by heads in attention (query heads together with the key and value heads that they use), by
# columns in the MLP, by rows of the vocabulary. It gives a partial result and reads norms whole.

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from model.config import LlamaConfig, Shape, down_name, up_name

BY_VOCABULARY = ("embedding.weight", "head.weight")  # their rows are those of the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """A method of a unit's module that can be computed one slice of its weights at a time.

    `join_METHOD(slices, *args)` of the module equals `METHOD(*args)`: it calls each of `slices`
    once, in order. Each call runs `of_slice` with a weight slice in place of the whole weight;
    `starts` of the module then says where the slices begin. Parameters are named as in the module.
    """

    method: str
    of_slice: str
    cuts: Mapping[str, int]  # matrix or bias of the part: the dim along which it is cut
    replicated: tuple[str, ...] = ()  # norms and adapters of the part, replicated on every rank
    shares: int | None = None  # number of indivisible shares (head groups); None: cut anywhere


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """A unit: a module whose parameters are gathered while it runs; `name` is the module's path."""

    name: str
    shapes: Mapping[str, Shape]  # parameter name in the module: shape
    parts: tuple[PartSpec, ...] = ()
    borrows: tuple[str, ...] = ()  # names of units whose parameters this unit reads (a tied head)
    backward_needs_weight: bool = True
    recomputed_from: int | None = None  # index of the first unit of its recomputation; None: none

    @cached_property
    def parameters(self) -> dict[str, Shape]:
        """The shapes of its parameters by their names in the model."""
        return {f"{self.name}.{name}": shape for name, shape in self.shapes.items()}

    @property
    def holder(self) -> str:
        """The name of the unit whose module has the matrices of this unit's parts."""
        return self.borrows[0] if self.borrows else self.name

    def cuts_of(self, part: PartSpec) -> dict[str, int]:
        """Return the dims along which the part's matrices are cut, by their names in the model."""
        return {f"{self.holder}.{name}": dim for name, dim in part.cuts.items()}

    def label_of(self, part: PartSpec) -> str:
        """Return a common name of the part's matrices."""
        return self.holder if len(self.parts) == 1 else f"{self.name}.{part.method}"


@lru_cache(maxsize=64)
def unit_specs(config: LlamaConfig) -> tuple[UnitSpec, ...]:
    """Return the units in forward order: embedding, blocks, head."""
    rows: dict[str, Shape] = {"weight": (config.vocab_size, config.hidden_size)}
    cuts = {"weight": 0}
    tied = config.tie_embeddings_and_output_weights
    look_up = (PartSpec(method="look_up", of_slice="look_up_slice", cuts=cuts),)
    loss = PartSpec(method="loss", of_slice="score_slice", cuts=cuts, replicated=("norm",))
    # The embedding's backward sums gradients by token id and reads no weight.
    embedding = UnitSpec(name="embedding", shapes=rows, parts=look_up, backward_needs_weight=False)
    head = UnitSpec(
        name="head",
        shapes={"norm": (config.hidden_size,), **({} if tied else rows)},
        parts=(loss,),
        borrows=("embedding",) if tied else (),
    )
    block = UnitSpec(name="", shapes=_block_shapes(config), parts=_block_parts(config))
    blocks = []
    for layer in range(config.num_layers):
        first = config.recompute.first_layer(layer) if config.recompute is not None else None
        since = None if first is None else 1 + first  # the embedding is before the blocks
        blocks.append(replace(block, name=f"blocks.{layer}", recomputed_from=since))
    return embedding, *blocks, head


def _block_shapes(config: LlamaConfig) -> dict[str, Shape]:
    hidden, ffn, head = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    query, key = config.num_attention_heads * head, config.num_query_groups * head
    shapes: dict[str, Shape] = {
        "attention_norm": (hidden,),
        "wq": (query, hidden),
        "wk": (key, hidden),
        "wv": (key, hidden),
        "wo": (hidden, query),
    }
    if config.add_qkv_bias:
        shapes |= {"bq": (query,), "bk": (key,), "bv": (key,)}
    if config.qk_layernorm:
        shapes |= {"q_norm": (head,), "k_norm": (head,)}
    shapes |= {
        "mlp_norm": (hidden,),
        "w_gate": (ffn, hidden),
        "w_up": (ffn, hidden),
        "w_down": (hidden, ffn),
    }
    return shapes if config.lora is None else shapes | config.lora.shapes(shapes)


def _block_parts(config: LlamaConfig) -> tuple[PartSpec, ...]:
    """Return attention, cut between groups of queries, and the MLP, cut between columns."""
    biases = {"bq": 0, "bk": 0, "bv": 0} if config.add_qkv_bias else {}
    of_heads = ("q_norm", "k_norm") if config.qk_layernorm else ()
    attention = PartSpec(
        method="attention",
        of_slice="attention",
        cuts={"wq": 0, "wk": 0, "wv": 0, "wo": 1} | biases,
        replicated=("attention_norm", *of_heads),
        shares=config.num_query_groups,
    )
    mlp = PartSpec(
        method="mlp",
        of_slice="mlp",
        cuts={"w_gate": 0, "w_up": 0, "w_down": 1},
        replicated=("mlp_norm",),
    )
    return _with_adapters(attention, config), _with_adapters(mlp, config)


def _with_adapters(part: PartSpec, config: LlamaConfig) -> PartSpec:
    """Return the part, whose slices read the adapters of its weights whole."""
    if config.lora is None:
        return part
    targets = [name for name in part.cuts if name in config.lora.targets]
    adapters = [of(name) for name in targets for of in (down_name, up_name)]
    return replace(part, replicated=(*part.replicated, *adapters))


def first_trained_unit(units: Sequence[UnitSpec], is_trained: Callable[[str], bool]) -> int:
    """Return the index of the first unit with a trainable parameter; number of units if none."""
    some_train = (any(map(is_trained, unit.parameters)) for unit in units)
    return next((index for index, trains in enumerate(some_train) if trains), len(units))


def recomputed_groups(units: Sequence[UnitSpec], first_trained: int) -> tuple[range, ...]:
    """Return the indices of the units that backward recomputes together, for each recomputation.

    Backward does not reach units below the first that trains, so none of them is recomputed.
    """
    groups: dict[int, range] = {}
    for index, unit in enumerate(units):
        if unit.recomputed_from is not None and index >= first_trained:
            first = max(unit.recomputed_from, first_trained)
            groups[first] = range(first, index + 1)
    return tuple(groups.values())


def parameter_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Return every parameter's shape by its name in the model, in model order."""
    return {name: shape for unit in unit_specs(config) for name, shape in unit.parameters.items()}


def name_in(names: Mapping[str, str], name: str) -> str:
    """Return a parameter's name by a table of `names`, in which * is the number of a block."""
    layer = name.split(".")[1]
    return names[name.replace(f".{layer}.", ".*.")].replace("*", layer)


def num_parameters(config: LlamaConfig) -> int:
    """Return the number of parameters; a tied weight counts once."""
    return sum(map(math.prod, parameter_shapes(config).values()))


def cut_dims(config: LlamaConfig) -> dict[str, int]:
    """Return the dim along which each sliced parameter is cut, by name in the model."""
    cuts = (unit.cuts_of(part) for unit in unit_specs(config) for part in unit.parts)
    return {name: dim for cut in cuts for name, dim in cut.items()}


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
        names = {name for name in block.shapes if f"{block.name}.{name}" in trained}
        block_forward, block_backward = _block_products(block.shapes, names, core, reached=reached)
        forward, backward = forward + block_forward, backward + block_backward
        reached = reached or bool(names)
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
