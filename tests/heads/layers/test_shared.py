"""Products, rotations and gates of a training pass against torch's own operations; sums of gradients in fp32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from draftsmith.heads.layers.decoder_layer import rotate
from draftsmith.heads.layers.shared import Rows, Shared, SharedLinear, gated, turn

STEPS = 7


def layers(biases: bool = False) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, size, bias=biases) for size in (8, 4, 4)]


def gradients(linears: list[nn.Linear], *others: Tensor) -> list[Tensor]:
    tensors = [*(p for one in linears for p in one.parameters()), *others]
    found = [x.grad.clone() if x.grad is not None else torch.zeros_like(x) for x in tensors]
    for x in tensors:
        x.grad = None
    return found


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("outputs", [slice(None), slice(0, 8), slice(8, None), slice(8, 12)])
def test_products_are_those_of_the_layers(biases: bool, outputs: slice) -> None:
    linears, x = layers(biases), torch.randn(5, 6, requires_grad=True)
    shared, weights = SharedLinear(*linears), torch.randn(2, 5, 16)[..., outputs]
    for scale in (1.0, 2.0):
        (shared(scale * x, outputs) * weights[0]).sum().backward(retain_graph=scale == 1.0)
    ours = gradients(linears, x)
    for scale in (1.0, 2.0):
        (torch.cat([one(scale * x) for one in linears], -1)[..., outputs] * weights[0]).sum().backward()
    torch.testing.assert_close(ours, gradients(linears, x))


def test_biases_of_some_layers_alone_are_no_product() -> None:
    with pytest.raises(AssertionError, match="biases of all layers, or of none"):
        SharedLinear(nn.Linear(6, 8), nn.Linear(6, 4, bias=False))


@pytest.mark.parametrize("outputs", [slice(None), slice(8, None)])
def test_a_table_of_a_part_of_the_input_gives_the_product_of_all_of_it(outputs: slice) -> None:
    linears, known = layers(), torch.randn(9, 2, requires_grad=True)
    index, x = torch.tensor([[1, 4, 8], [2, 5, 8]]), torch.randn(2, 3, 4, requires_grad=True)
    shared = SharedLinear(*linears)
    table = Shared(shared(known, columns=slice(2)))
    steps = zip(x, index, strict=True)
    ours = torch.cat([shared(part, outputs, slice(2, None), Rows(table, rows)) for part, rows in steps])
    plain = torch.cat([one(torch.cat([known[index.flatten()], x.flatten(0, 1)], -1)) for one in linears], -1)
    torch.testing.assert_close(ours, plain[:, outputs])
    grad = torch.randn_like(ours)
    ours.backward(grad)
    found = gradients(linears, known, x)
    plain[:, outputs].backward(grad)
    torch.testing.assert_close(found, gradients(linears, known, x))


def test_a_use_that_no_loss_depends_on_takes_nothing_from_the_gradient() -> None:
    linears, x = layers(), torch.randn(5, 6)
    shared = SharedLinear(*linears)
    first, _ = shared(x), shared(2 * x)
    first.sum().backward()
    ours = gradients(linears)
    torch.cat([one(x) for one in linears], -1).sum().backward()
    torch.testing.assert_close(ours, gradients(linears))


def in_bf16(use: Callable[[Tensor], Tensor], inputs: Tensor, weight: Tensor, steps: range) -> Tensor:
    """Return the gradient of the weight from some of the steps."""
    torch.stack([(use(inputs[k]).float() * inputs[k, :, :4]).sum() for k in steps]).sum().backward()
    assert weight.grad is not None
    found, weight.grad = weight.grad.double(), None
    return found


def test_gradients_of_all_steps_are_summed_in_fp32_under_autocast() -> None:
    """Autograd alone sums them in bf16."""
    linear = nn.Linear(6, 4, bias=False)
    inputs = torch.randn(STEPS, 50, 6)
    with torch.autocast("cpu", torch.bfloat16):
        single = [in_bf16(SharedLinear(linear), inputs, linear.weight, range(k, k + 1)) for k in range(STEPS)]
        ours = in_bf16(SharedLinear(linear), inputs, linear.weight, range(STEPS))
        plain = in_bf16(linear, inputs, linear.weight, range(STEPS))
    exact = torch.stack(single).sum(0)
    assert (ours - exact).norm() < 1e-6 * exact.norm()
    assert (plain - exact).norm() > 1e-3 * exact.norm()


@pytest.mark.parametrize("sizes", [(4, 2, 2), (4, 0, 0), (0, 2, 2)])
def test_turned_heads_are_rotated_ones(sizes: tuple[int, int, int]) -> None:
    heads = torch.randn(5, sum(sizes), 6, requires_grad=True)
    cos, sin = torch.randn(2, 5, 6)
    queries, keys, values = heads.split(sizes, -2)
    plain = (rotate(queries, cos, sin), rotate(keys, cos, sin), values)
    ours = turn(heads, cos, sin, sizes)
    torch.testing.assert_close(ours, plain)
    grads = [torch.randn_like(x) for x in plain]
    found = [torch.autograd.grad(out, heads, grads)[0] for out in (ours, plain)]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gates_are_those_of_the_feed_forward_layer(name: str) -> None:
    both, grad = torch.randn(5, 12, requires_grad=True), torch.randn(5, 6)
    activation = ACT2FN[name]
    gate, up = both.chunk(2, -1)
    ours, plain = gated(both, activation), activation(gate) * up
    torch.testing.assert_close(ours, plain)
    found = [torch.autograd.grad(out, both, grad)[0] for out in (ours, plain)]
    torch.testing.assert_close(found[0], found[1])
