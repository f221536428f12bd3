"""An output projection of low rank: two thin matrices in place of a wide one.

Shapes: H hidden, W draft vocab, r rank.
"""

import torch
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """A projection [..., H] -> [..., W] without a bias that goes through r numbers: r * (H + W) weights, not H * W."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., W]."""
        return self.up(self.down(x))

    @torch.no_grad()
    def product(self) -> Tensor:
        """Return the one matrix [W, H] that computes the same, to rounding."""
        return self.up.weight @ self.down.weight

    @torch.no_grad()
    def approximate(self, weight_WH: Tensor) -> None:
        """Take the product of this rank that is closest to `weight_WH` by the sum of squares (Eckart and Young, 1936).

        Its rows are projected onto the r directions in which they are largest: eigenvectors of the [H, H] matrix of their
        products, since a decomposition of all W rows would take W / H times as long.
        """
        weight_WH = weight_WH.to(self.up.weight)
        largest_Hr = torch.linalg.eigh(weight_WH.T @ weight_WH).eigenvectors[:, -self.down.out_features :]
        self.down.weight.copy_(largest_Hr.T)
        self.up.weight.copy_(weight_WH @ largest_Hr)
