"""Cross-entropy of a linear output layer, in chunks of tokens, with its gradients on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model.config import loss_chunk_tokens


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over tokens of weight times cross-entropy of `x @ weight.T`.

    Where gradients are wanted they are made in forward, chunk by chunk, while the logits are
    there: logits are computed once, and fp32 logits of all tokens never exist. Backward multiplies
    them by the gradient that arrives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        token_weights_T: Tensor,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        num_tokens = x_TD.shape[0]
        chunk = loss_chunk_tokens(x_TD.device.type)
        grad_x_TD = torch.empty_like(x_TD) if needs_x else None
        grad_weight_VD: Tensor | None = None
        loss = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        for begin in range(0, num_tokens, chunk):
            part = slice(begin, begin + chunk)
            labels_T1, weights_T = labels_T[part, None], token_weights_T[part].float()
            # A token without weight counts nothing, not even where its logits would overflow.
            chunk_TD = x_TD[part].masked_fill((weights_T == 0.0)[:, None], 0.0)
            logits_TV = (chunk_TD @ weight_VD.t()).float()
            label_logits_T = logits_TV.gather(1, labels_T1).squeeze(1)
            highest_T = logits_TV.amax(-1)
            probabilities_TV = torch.softmax(logits_TV, dim=-1)
            del logits_TV
            # exp(highest - log-sum-exp) is the largest probability, which is at least 1 / V.
            log_norm_T = highest_T - probabilities_TV.amax(-1).log_()
            loss += torch.dot(log_norm_T - label_logits_T, weights_T)
            if not needs_x and not needs_weight:
                continue
            # The gradient of the logits, but for the weights: those multiply what is smaller.
            minus_T1 = torch.full_like(label_logits_T, -1.0)[:, None]
            grad_TV = probabilities_TV.scatter_add_(1, labels_T1, minus_T1).to(x_TD.dtype)
            del probabilities_TV
            if grad_x_TD is not None:
                torch.mm(grad_TV, weight_VD, out=grad_x_TD[part])
                grad_x_TD[part].mul_(weights_T[:, None])
            if needs_weight:
                weighted_TD = (chunk_TD * weights_T[:, None]).to(x_TD.dtype)
                grad_weight_VD = _add_product(grad_weight_VD, grad_TV, weighted_TD, num_tokens)
            del grad_TV
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        ctx.gradients = grad_x_TD, grad_weight_VD
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        assert ctx.gradients is not None, "the loss was given to backward twice"
        grad_x_TD, grad_weight_VD = ctx.gradients
        ctx.gradients = None  # large, and scaled below
        for gradient in (grad_x_TD, grad_weight_VD):
            if gradient is not None:
                gradient.mul_(grads[0].view(1, 1))  # without dimensions it would be rounded first
        return grad_x_TD, grad_weight_VD, None, None


def _add_product(total_VD: Tensor | None, grad_TV: Tensor, x_TD: Tensor, num_tokens: int) -> Tensor:
    """`total + grad.T @ x`; several chunks add up in fp32, whatever the type of the model."""
    if total_VD is not None and total_VD.dtype == grad_TV.dtype:
        return torch.addmm(total_VD, grad_TV.t(), x_TD, out=total_VD)
    product_VD = grad_TV.t() @ x_TD
    if total_VD is not None:
        return total_VD.add_(product_VD)
    return product_VD if x_TD.shape[0] == num_tokens else product_VD.float()


def linear_cross_entropy(
    x_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, token_weights_BS: Tensor
) -> Tensor:
    """The fp32 scalar sum over tokens of weight times cross-entropy."""
    if not torch.is_grad_enabled():  # forward asks its inputs what to make, not the mode
        x_BSD, weight_VD = x_BSD.detach(), weight_VD.detach()
    loss: Tensor = _LinearCrossEntropy.apply(
        x_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), token_weights_BS.flatten()
    )
    return loss
