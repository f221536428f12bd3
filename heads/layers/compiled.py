"""Elementwise parts of a training pass, compiled by torch: each is then one kernel on a GPU, beside the products that it holds.

They are functions of tensors, without graph breaks. Nothing larger is compiled, since around them stand sums of gradients over the steps
(shared.py) and flash kernels. Numbers of rows are dynamic, so no batch is padded to a bucket, and none of another length compiles again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.progress import say

P = ParamSpec("P")
T = TypeVar("T")
_GRAPHS = 64
"""Most graphs of a part: one for each dtype, for one row and for several, with and without gradients, ...; torch's own limit is 8."""
_on = False


def is_compiling() -> bool:
    """Whether parts are compiled now."""
    return _on


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function of tensors run compiled within `compiling`, and as it is written elsewhere. The first dimension of its tensors may
    change from call to call, and the second of those with four."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _on:
            return function(*args, **kwargs)
        for x in args:
            if isinstance(x, Tensor):
                torch._dynamo.maybe_mark_dynamic(x, [0, 1] if x.dim() == 4 else [0])
        return _compile(function, torch.compile)(*args, **kwargs)  # type: ignore[no-any-return]

    return run


@cache
def _compile(function: Callable[..., Any], compiler: Any) -> Any:
    # As an argument it holds in the threads of backward passes on a GPU, too; torch 2.11 and 2.12 do not know it.
    limit = {"recompile_limit": _GRAPHS} if "recompile_limit" in signature(compiler).parameters else {}
    return compiler(function, fullgraph=True, **limit)


@contextmanager
def compiling(wanted: bool | None, device: torch.device) -> Iterator[None]:
    """Compile parts within; wanted None: on a GPU, where a small one compiles, which is tried first. Raises UserError where it does
    not and `wanted` is true."""
    global _on
    if not (device.type == "cuda" if wanted is None else wanted):
        yield
        return
    with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
        try:
            _on = True
            try:
                with foreign_code(
                    f"torch cannot compile for {device}", "install a C compiler, or set train.compile to false"
                ):
                    x = torch.linspace(-2, 2, 15, device="cpu").view(5, 3).to(device).requires_grad_()
                    (found,) = torch.autograd.grad(compiled(_small)(x).sum(), x)
                    (expected,) = torch.autograd.grad(_small(x).sum(), x)
                    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
                        raise RuntimeError("a small sum has another gradient")
            except UserError as error:
                if wanted:
                    raise
                _on = False
                say(f"warning: the training pass runs without train.compile, in more kernels: {error}")
            yield
        finally:
            _on = False


def _small(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * x.exp().sum(-1, keepdim=True)
