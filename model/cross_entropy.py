"""Fused linear layer and cross-entropy, in chunks of tokens; gradients are computed in forward."""

# [Note: the output weight's gradient]
# If the output weight has a gradient sink, forward's matmuls write the gradient into the sink: no
# tensor of the weight's size is saved for backward, and none is scaled. That is right because
# backward starts from this loss, and token weights include all factors. Several chunks are summed
# in fp32, and a 16-bit sink gets the sum at the end. A slice of the weight adds chunks in the sink.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from model.config import loss_chunk
from model.matmul import GradSink, sink_of, store_grad, write_weight_grad


@dataclass(slots=True)
class ZLoss:
    """The penalty `weight * log(Z)^2` of a token, for its softmax's denominator Z, and its sum.

    It keeps logits from drifting (PaLM, arXiv 2204.02311, section 5). Losses are returned without
    it; gradients include it.
    """

    weight: float
    total: Tensor  # of all tokens so far, times their weights, an fp32 scalar

    def add(self, log_norm_T: Tensor, token_weights_T: Tensor) -> Tensor:
        """Add the penalties of tokens to the total, and return their weighted sum."""
        penalty = self.weight * torch.dot(log_norm_T.square(), token_weights_T)
        self.total += penalty.detach()
        return penalty


def _fused_losses(
    x_TD: Tensor, weight_VD: Tensor, labels_T1: Tensor, *, needs_grads: bool, z_weight: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return losses, log-sum-exps and gradients of logits by Triton, without fp32 logits."""
    from model.kernels import cross_entropy

    logits_TV, labels_T = x_TD @ weight_VD.t(), labels_T1.squeeze(1)
    both_T = cross_entropy(logits_TV, labels_T, needs_grads=needs_grads, z_weight=z_weight or 0.0)
    return *both_T, logits_TV if needs_grads else None


def _losses(
    x_TD: Tensor, weight_VD: Tensor, labels_T1: Tensor, *, needs_grads: bool, z_weight: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each token's loss, its log-sum-exp, and the gradient of its logits, where needed.

    The gradient, which includes z-loss, has the type of `x`. Without z-loss, for `z_weight` None,
    the log-sum-exp is empty.
    """
    losses_T, log_norm_T, probabilities_TV = _losses_and_probabilities(
        x_TD, weight_VD, labels_T1, log_norms=z_weight is not None
    )
    if not needs_grads:
        return losses_T, log_norm_T, None
    if z_weight is not None:
        probabilities_TV.mul_((1.0 + 2.0 * z_weight * log_norm_T)[:, None])
    minus_T1 = torch.full_like(losses_T, -1.0)[:, None]
    grad_TV = probabilities_TV.scatter_add_(1, labels_T1, minus_T1).to(x_TD.dtype)
    return losses_T, log_norm_T, grad_TV


def _losses_and_probabilities(
    x_TD: Tensor, weight_VD: Tensor, labels_T1: Tensor, *, log_norms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scores_TV = _logits(x_TD, weight_VD)
    # Not on a GPU, where reading a value would make the host wait.
    if scores_TV.device.type == "cpu" and not log_norms:
        torch.softmax(scores_TV, dim=-1, out=scores_TV)
        of_label_T = scores_TV.gather(1, labels_T1).squeeze(1)
        if float(of_label_T.min()) >= torch.finfo(torch.float32).tiny:  # false for NaN
            return of_label_T.log_().neg_(), of_label_T.new_empty(0), scores_TV
        del scores_TV  # before there is another
        scores_TV = _logits(x_TD, weight_VD)
    label_logit_T = scores_TV.gather(1, labels_T1).squeeze(1)
    log_norm_T = _log_sum_exp_softmax_(scores_TV)
    return log_norm_T - label_logit_T, log_norm_T, scores_TV


def _logits(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return (x_TD @ weight_VD.t()).float()


def _log_sum_exp_softmax_(logits_TV: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, and replace the logits by probabilities."""
    highest_T = logits_TV.amax(-1)
    torch.softmax(logits_TV, dim=-1, out=logits_TV)  # in place: it reads an element first
    # exp(highest - log-sum-exp) is the largest probability, which is at least 1 / V.
    return highest_T - logits_TV.amax(-1).log_()


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over tokens of token weight times cross-entropy of `x @ weight.T`.

    Needed gradients are computed in forward, chunk by chunk, while the chunk's logits exist. So
    logits are computed once, and fp32 logits of all tokens are never held at the same time.
    Backward scales the stored gradients by the incoming one, but not a gradient in a sink.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        token_weights_T: Tensor,
        fused: bool,
        z_loss: ZLoss | None,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.sink = sink_of(weight_VD) if needs_weight else None
        compute_losses = _fused_losses if fused else _losses
        weight_VD = weight_VD.to(x_TD.dtype)
        num_tokens = x_TD.shape[0]
        chunk = loss_chunk(weight_VD.shape[0], x_TD.element_size(), fused=fused)
        several = num_tokens > chunk
        weight_grad = _WeightGrad(ctx.sink, several=several) if needs_weight else None
        grad_x_TD = torch.empty_like(x_TD) if needs_x else None
        needs_grads = needs_x or needs_weight
        z_weight = None if z_loss is None else z_loss.weight
        loss = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        for part in _chunks(num_tokens, chunk):
            labels_T1, weights_T = labels_T[part, None], token_weights_T[part].float()
            chunk_TD = _masked(x_TD[part], weights_T)
            # Gradient of the logits without the token weights: these scale the smaller tensors.
            losses_T, log_norm_T, grad_TV = compute_losses(
                chunk_TD, weight_VD, labels_T1, needs_grads=needs_grads, z_weight=z_weight
            )
            loss += torch.dot(losses_T, weights_T)
            if z_loss is not None:
                z_loss.add(log_norm_T, weights_T)
            if grad_TV is None:
                continue
            if grad_x_TD is not None:
                torch.mm(grad_TV, weight_VD, out=grad_x_TD[part])
                grad_x_TD[part].mul_(weights_T[:, None])
            if weight_grad is not None:
                weight_grad.add(grad_TV, (chunk_TD * weights_T[:, None]).to(x_TD.dtype))
            del grad_TV
        grad_weight_VD = None if weight_grad is None else weight_grad.end(x_TD.dtype)
        ctx.gradients = grad_x_TD, grad_weight_VD
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the loss was given to backward twice"
        grad_x_TD, grad_weight_VD = ctx.gradients
        ctx.gradients = None  # free them: they are large, and scaled in place below
        factor_11 = grads[0].view(1, 1)  # keeps fp32; a 0-dim factor would be rounded to the type
        for grad in (grad_x_TD, grad_weight_VD):
            if grad is not None:
                grad.mul_(factor_11)
        if ctx.sink is not None:
            # On a GPU the factor is not read: reading would make the host wait for the device.
            is_one = factor_11.device.type != "cpu" or float(factor_11) == 1.0
            assert is_one, "the loss was scaled after its gradients had been written"
            ctx.sink.close()
        return grad_x_TD, grad_weight_VD, None, None, None, None


class _WeightGrad:
    """The weight's gradient summed over chunks of tokens, in a sink or in an own tensor."""

    def __init__(self, sink: GradSink | None, *, several: bool) -> None:
        self._several = several
        into: tuple[Tensor | None, bool] = (None, False) if sink is None else sink.open()
        self._into_VD, self._into_adds = into
        self._total_VD: Tensor | None = None
        if not several or (self._into_VD is not None and self._into_VD.dtype == torch.float32):
            self._total_VD = self._into_VD
        self._adds = self._into_adds

    def add(self, grad_TV: Tensor, x_TD: Tensor) -> None:
        """Add `grad.T @ x`; `several` chunks are summed in fp32, whatever the model's dtype."""
        if self._total_VD is None:
            kind = torch.float32 if self._several else x_TD.dtype
            self._total_VD = x_TD.new_empty((grad_TV.shape[1], x_TD.shape[1]), dtype=kind)
            self._adds = False
        write_weight_grad(grad_TV, x_TD, self._total_VD, adds=self._adds)
        self._adds = True

    def end(self, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient; None if the sink has the gradient."""
        assert self._total_VD is not None, "no tokens"
        if self._into_VD is None:
            return self._total_VD.to(dtype)
        if self._total_VD is not self._into_VD:
            store_grad(self._total_VD, self._into_VD, adds=self._into_adds)
        return None


def linear_cross_entropy(
    x_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    token_weights_BS: Tensor,
    *,
    fused: bool = False,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Return the sum over tokens of token weight times cross-entropy, an fp32 scalar.

    `fused`: Triton computes losses and gradients of logits. torch.compile must not trace it.
    `z_loss`, if given, gets the tokens' z-loss, and gradients include it.
    """
    # Traced, matmuls that write into parts of a buffer lose their results in torch 2.11.
    assert not torch.compiler.is_compiling(), "torch.compile must not look into the loss"
    if not torch.is_grad_enabled():  # forward looks at its inputs' requires_grad, not at the mode
        x_BSD, weight_VD = x_BSD.detach(), weight_VD.detach()
    inputs = x_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), token_weights_BS.flatten()
    return _LinearCrossEntropy.apply(*inputs, fused, z_loss)


class _SliceScores(torch.autograd.Function):
    """Log-sum-exp and label logit over a vocabulary slice; backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        token_weights_T: Tensor,
        first_row: int,
    ) -> tuple[Tensor, Tensor]:
        log_norm_T = torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)
        label_logit_T = torch.zeros_like(log_norm_T)
        local_T = labels_T - first_row
        ctx.save_for_backward(x_TD, weight_VD, local_T, token_weights_T, log_norm_T)
        ctx.sink = sink_of(weight_VD)
        weight_VD = weight_VD.to(x_TD.dtype)
        ctx.chunk = loss_chunk(weight_VD.shape[0], x_TD.element_size(), fused=False)
        for part in _chunks(x_TD.shape[0], ctx.chunk):
            logits_TV = _logits(_masked(x_TD[part], token_weights_T[part]), weight_VD)
            here_T, row_T = _rows(local_T[part], weight_VD.shape[0])
            label_logit_T[part] = logits_TV.gather(1, row_T[:, None]).squeeze(1) * here_T
            log_norm_T[part] = _log_sum_exp_softmax_(logits_TV)
            del logits_TV  # before there are others
        return log_norm_T, label_logit_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_VD, local_T, token_weights_T, log_norm_T = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        weight_VD = weight_VD.to(x_TD.dtype)
        # A token's loss is its joined log-sum-exp minus the label's logit, so both get gradients of
        # the same size. Multiply by the token's scale last, or two-byte types would underflow.
        scale_T = -grads[1]
        share_T = torch.where(scale_T == 0.0, 0.0, grads[0] / scale_T)
        grad_x_TD = torch.empty_like(x_TD) if needs_x else None
        sink = ctx.sink if needs_weight else None
        # Chunks are added in the sink's own type: an fp32 sum would be as large as two slices.
        several = sink is None and x_TD.shape[0] > ctx.chunk
        weight_grad = _WeightGrad(sink, several=several) if needs_weight else None
        for part in _chunks(x_TD.shape[0], ctx.chunk):
            chunk_TD = _masked(x_TD[part], token_weights_T[part])
            grad_TV = _logits(chunk_TD, weight_VD)
            grad_TV.sub_(log_norm_T[part, None]).exp_().mul_(share_T[part, None])
            here_T, row_T = _rows(local_T[part], weight_VD.shape[0])
            grad_TV.scatter_add_(1, row_T[:, None], -here_T.float()[:, None])
            logits_grad_TV = grad_TV.to(x_TD.dtype)
            del grad_TV
            if grad_x_TD is not None:
                torch.mm(logits_grad_TV, weight_VD, out=grad_x_TD[part])
                grad_x_TD[part].mul_(scale_T[part, None])
            if weight_grad is not None:
                weight_grad.add(logits_grad_TV, (chunk_TD * scale_T[part, None]).to(x_TD.dtype))
        grad_weight_VD = None if weight_grad is None else weight_grad.end(x_TD.dtype)
        if sink is not None:
            sink.close()
        return grad_x_TD, grad_weight_VD, None, None, None


def _chunks(num_tokens: int, size: int) -> Iterator[slice]:
    return (slice(begin, begin + size) for begin in range(0, num_tokens, size))


def _masked(x_TD: Tensor, token_weights_T: Tensor) -> Tensor:
    """Zero `x` where the token weight is 0, so that overflowing logits there add exactly 0."""
    return x_TD.masked_fill((token_weights_T == 0.0)[:, None], 0.0)


def _rows(local_T: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return which labels are in a slice of `num_rows` rows, and their rows (0 if not in it)."""
    here_T = (local_T >= 0) & (local_T < num_rows)
    return here_T, local_T.where(here_T, 0)


def slice_scores(
    x_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, token_weights_BS: Tensor, *, first_row: int
) -> tuple[Tensor, Tensor]:
    """Compute each token's log-sum-exp over a slice of the vocabulary, and its label's logit.

    The label's logit is 0 if the label is not in the slice. `weight` holds the rows from
    `first_row` on.
    """
    return _SliceScores.apply(
        x_BSD.flatten(0, 1), weight_VD, labels_BS.flatten(), token_weights_BS.flatten(), first_row
    )


def join_scores(
    scores: Iterable[tuple[Tensor, Tensor]], token_weights_BS: Tensor, z_loss: ZLoss | None = None
) -> Tensor:
    """Compute the loss of `linear_cross_entropy` from the scores of all slices, one by one."""
    log_norms, label_logits = zip(*scores, strict=True)
    log_norm_T, weights_T = reduce(torch.logaddexp, log_norms), token_weights_BS.flatten().float()
    loss = torch.dot(log_norm_T - reduce(torch.add, label_logits), weights_T)
    if z_loss is None:
        return loss
    penalty = z_loss.add(log_norm_T, weights_T)
    return loss + (penalty - penalty.detach())  # 0, with the penalty's gradient
