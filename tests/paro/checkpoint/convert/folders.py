"""Hugging Face folders of small random models, as saved by transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import LlamaConfig
from model.llama import Llama
from model.units import parameter_shapes
from paro.checkpoint.convert.source import ModelSource, lazy

VOCAB = 101  # divisible by no other size
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # three seeds for each


def random_fields(seed: int) -> dict[str, Any]:
    """A config.json: LLaMA 1, 2, 3 and 3.1, Mistral, Qwen2 and Qwen3 in small."""
    choose = random.Random(seed)
    model_type = FAMILIES[seed // 3 % len(FAMILIES)]
    groups = choose.choice((1, 2, 4))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": choose.choice((1e4, 5e5))}
    if seed % 3 == 2:
        rope |= {
            "rope_type": "llama3",
            "factor": choose.choice((8.0, 32.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if seed % 3 == 2 and seed > 2:
        rope |= {"low_freq_factor": 0.5, "high_freq_factor": 3.0}
        rope["original_max_position_embeddings"] = 32
    return {
        "model_type": model_type,
        **({"sliding_window": None} if model_type == "mistral" else {}),
        "num_hidden_layers": choose.randint(1, 3),
        "hidden_size": 16 * choose.randint(2, 4),
        "intermediate_size": choose.randint(40, 90),
        "num_attention_heads": groups * choose.choice((1, 2)),
        "num_key_value_heads": groups,
        "head_dim": choose.choice((8, 16, 24)),
        "max_position_embeddings": 16 * choose.randint(2, 9),
        "vocab_size": VOCAB + choose.randint(0, 30),
        "rms_norm_eps": choose.choice((1e-5, 1e-6)),
        "initializer_range": 0.2,
        "tie_word_embeddings": seed % 4 == 1,
        "rope_parameters": rope,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def hugging_face_model(fields: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of these sizes, with norms other than one, so that losing them shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.to(dtype).eval()


def save_folder(
    folder: Path,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    vocab_size: int | None = None,
    **options: Any,
) -> Any:
    fields = random_fields(seed)
    model = hugging_face_model({**fields, "vocab_size": vocab_size or fields["vocab_size"]}, dtype)
    model.save_pretrained(folder, **options)
    return model


def own_model(source: ModelSource) -> Llama:
    model = Llama(source.config)
    tensors = {name: tensor.rows(0, tensor.shape[0]) for name, tensor in source.tensors.items()}
    model.load_state_dict(tensors)
    return model.requires_grad_(False)


def logits_of(model: Any, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(tokens_BS)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def some_tokens(vocab_size: int, *, batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def random_tensors(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Values for every parameter of a model, under this project's names."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(shape, generator=generator).mul_(0.3).to(dtype)
        for name, shape in parameter_shapes(config).items()
    }


def source_of(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> ModelSource:
    """A model with the values of `random_tensors`."""
    tensors = random_tensors(config, dtype)
    return ModelSource(
        config=config, tensors={name: lazy(tensor) for name, tensor in tensors.items()}
    )


def assert_same(found: ModelSource, expected: ModelSource) -> None:
    """The configuration and, read in pieces, every bit of the tensors."""
    assert found.config == expected.config
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        pieces = [found.tensors[name].rows(*rows) for rows in found.tensors[name].row_ranges()]
        assert torch.equal(torch.cat(pieces), tensor.rows(0, tensor.shape[0])), name
