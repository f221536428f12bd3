"""Muon (Jordan et al. 2024) as torch has it, but orthogonalised in fp32 on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Muon", "orthogonalise"]


class Muon(torch.optim.Muon):
    """torch's Muon, whose products are in bf16 on a GPU and in fp32 on a CPU.

    torch makes them in bf16 everywhere, and a processor without instructions for it (all before AVX512-BF16 and AMX)
    multiplies ten times as slowly in it as in fp32: half of the time of training a small head. State and arguments are torch's,
    so that checkpoints fit either.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with all parameters that have a gradient; they are on one kind of device."""
        if any(p.device.type != "cpu" for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, parameters, gradients, buffers)
            for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
                _update(parameter, gradient, buffer, group)
        return loss


def _update(parameter: Tensor, gradient: Tensor, buffer: Tensor, group: dict[str, Any]) -> None:
    """One parameter's step: what torch does with `adjust_lr_fn` left out."""
    assert group["adjust_lr_fn"] in (None, "original"), "other ways to adjust the rate are torch's alone"
    buffer.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
    update = orthogonalise(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rows, columns = parameter.shape
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return `matrix` [m, n] with singular values near 1, by Newton-Schulz iteration in fp32."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float().T if tall else matrix.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
