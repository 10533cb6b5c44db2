"""Token-by-token decoding of a batch of texts of different lengths, with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.attention import QKV, attend
from model.llama import Llama, TokenInfo
from model.rotary import rotations


class Decoder:
    """Decoder with an unsharded model and a KV cache: each token runs through it once.

    Row b of a batch holds `lengths[b]` tokens. Shorter texts are padded at the end, where causal
    attention does not look; later tokens overwrite the cache entries of the padding. The cache
    holds one pair of keys and values [B, K, T, H] per block; T doubles when it is full.
    """

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.lengths_B = torch.zeros(0, dtype=torch.long)
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def start(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Prefill the cache with non-empty texts; return the logits [B, V] of the next token."""
        assert texts, "no text"
        assert all(texts), "an empty text"
        device = self.model.embedding.weight.device
        self.lengths_B = torch.tensor([len(text) for text in texts], device=device)
        longest = int(self.lengths_B.max())
        rows = [[*text, *[text[-1]] * (longest - len(text))] for text in texts]
        self._kept = []
        info = TokenInfo(*self._rotations(longest), core=self._attend_from_start)
        x_BSD = self.model.embedding(torch.tensor(rows, device=device))
        for block in self.model.blocks:
            x_BSD = block(x_BSD, info)
        last = (self.lengths_B - 1)[:, None, None].expand(-1, 1, x_BSD.shape[-1])
        return self._logits(x_BSD.gather(1, last))

    @torch.no_grad()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every text; return the logits [B, V] of the next token."""
        positions_B = self.lengths_B
        longest = int(positions_B.max()) + 1
        self._make_room(longest)
        cos, sin = self._rotations(self._kept[0][0].shape[2])
        info = TokenInfo(cos[positions_B][:, None], sin[positions_B][:, None])
        seen = torch.arange(longest, device=positions_B.device) <= positions_B[:, None]
        x_BSD = self.model.embedding(tokens_B[:, None])
        for layer, block in enumerate(self.model.blocks):
            core = partial(self._attend, layer, seen[:, None, None])
            x_BSD = block(x_BSD, info._replace(core=core))
        self.lengths_B = positions_B + 1
        return self._logits(x_BSD)

    def _rotations(self, length: int) -> tuple[Tensor, Tensor]:
        weight = self.model.embedding.weight
        return rotations(self.model.config, length, weight.dtype, weight.device)

    def _logits(self, x_B1D: Tensor) -> Tensor:
        tied = self.model.config.tie_embeddings_and_output_weights
        tied_VD = self.model.embedding.weight if tied else None
        logits_B1V: Tensor = self.model.head(x_B1D, None, None, tied_VD)
        return logits_B1V[:, 0]

    def _attend_from_start(self, qkv: QKV, *_rest: object) -> Tensor:
        _, k_BSKH, v_BSKH = qkv
        self._kept.append((k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2)))
        return attend(qkv, self.model.config.attention_backend)

    def _attend(self, layer: int, seen_B11T: Tensor, qkv: QKV, *_rest: object) -> Tensor:
        q_B1NH, k_B1KH, v_B1KH = qkv
        keys_BKTH, values_BKTH = self._kept[layer]
        rows = torch.arange(len(self.lengths_B), device=self.lengths_B.device)
        keys_BKTH[rows, :, self.lengths_B] = k_B1KH[:, 0]
        values_BKTH[rows, :, self.lengths_B] = v_B1KH[:, 0]
        longest = seen_B11T.shape[-1]
        out_BN1H = F.scaled_dot_product_attention(
            q_B1NH.transpose(1, 2),
            keys_BKTH[:, :, :longest],
            values_BKTH[:, :, :longest],
            attn_mask=seen_B11T,
            enable_gqa=q_B1NH.shape[2] != k_B1KH.shape[2],
        )
        return out_BN1H.transpose(1, 2)

    def _make_room(self, length: int) -> None:
        if length <= self._kept[0][0].shape[2]:
            return
        self._kept = [
            (torch.cat([keys, torch.zeros_like(keys)], 2), torch.cat([values, values], 2))
            for keys, values in self._kept
        ]
