"""Masked sums and means, and one normalizer per update."""

import torch
from torch import Tensor

from rlvr_cli.config.shared.optimization import LengthNormalization


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum of the elements with `mask == 1`, divided by a constant (the handout, section 4.2).

    Args:
        tensor: any shape.
        mask: the same shape, bool or 0/1. Masked-out elements contribute nothing, even if nan, and have gradient 0.
        normalize_constant: the divisor.
        dim: the dimension summed over; None sums over all of them.

    Returns:
        The normalized sum, without `dim`; a scalar for `dim=None`.
    """
    return _masked_sum(tensor, mask, dim) / normalize_constant


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements with `mask == 1` (the handout, section 7.2).

    Args:
        tensor: any shape.
        mask: the same shape, bool or 0/1. Masked-out elements contribute nothing, even if nan.
        dim: the dimension averaged over; None averages over all of them.

    Returns:
        The mean, without `dim`; a scalar for `dim=None`. A mean over no element is nan.
    """
    return _masked_sum(tensor, mask, dim) / mask.bool().sum(dim=dim)


def loss_denominators(
    response_mask: Tensor, *, normalization: LengthNormalization, normalize_constant: float | None = None
) -> Tensor:
    """The divisor of each row's summed token losses, for one optimizer update.

    `token_mean`        all response tokens of the update weigh the same. The divisor is the number of these tokens.
    `masked_mean`       all rows weigh the same: the mean over a row's tokens, averaged over the rows with a response token.
                        The divisor is the row's length times the number of such rows.
    `masked_normalize`  sum over a row's tokens / normalize_constant, averaged over all rows. The divisor is the constant
                        times the number of rows. With constant 1 this is the handout's SFT loss.

    Args:
        response_mask: (batch, seq), of the whole update: all its micro-batches, on all its devices.
        normalization: one of the three.
        normalize_constant: only for `masked_normalize`. A configured number, such as the longest response allowed; never
            the padded width, which differs from batch to batch.

    Returns:
        (batch, 1) float64, never 0, not even for a row without response tokens.
    """
    needs_constant = normalization == "masked_normalize"
    assert (normalize_constant is not None) == needs_constant, (normalization, normalize_constant)
    tokens = response_mask.bool().sum(dim=1, keepdim=True).double()  # (batch, 1)
    match normalization:
        case "token_mean":
            return tokens.sum().clamp(min=1).expand_as(tokens)
        case "masked_mean":
            return tokens.clamp(min=1) * (tokens > 0).sum().clamp(min=1)
        case "masked_normalize":
            return torch.full_like(tokens, normalize_constant * len(tokens))  # type: ignore[operator]


def masked_loss(per_token_loss: Tensor, mask: Tensor, denominator: Tensor | float) -> Tensor:
    """Sum over rows and masked tokens of per_token_loss / denominator.

    Args:
        per_token_loss: (batch, seq).
        mask: (batch, seq), the response tokens.
        denominator: a number for all rows, or (batch, 1) with one for each (`loss_denominators`).

    Returns:
        Scalar.
    """
    denominator = torch.as_tensor(denominator, dtype=per_token_loss.dtype, device=per_token_loss.device)
    return _masked_sum(per_token_loss / denominator, mask, None)


def _masked_sum(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    """Sum with masked_fill instead of multiplying by the mask: 0 * nan is nan."""
    assert tensor.shape == mask.shape, (tensor.shape, mask.shape)
    return tensor.masked_fill(~mask.bool(), 0).sum(dim=dim)
