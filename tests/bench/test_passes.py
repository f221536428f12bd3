"""The bench of passes: every way takes the products that it is named after."""

import pytest

from draftsmith.errors import UserError
from draftsmith.target import kernels
from scripts.bench import passes
from tests.models import tiny_model


def test_every_way_multiplies_as_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SMALLEST", 1)
    monkeypatch.setattr(passes, "TOKENS", (1, 30))
    for name in ("ROWS", "HALF_ROWS"):  # put back behind the test
        monkeypatch.setattr(kernels, name, getattr(kernels, name))
    model, rounded = tiny_model("llama"), tiny_model("llama").bfloat16().float()
    for one in (model, rounded):
        kernels.pack_linears(one)
    ways = {"plain": model, "packed": model, "half": rounded}
    if not kernels._has_fbgemm():
        with pytest.raises(UserError, match="does not take all kinds of products"):
            passes.measure(ways, repeats=1)
        return
    found = passes.measure(ways, repeats=1)
    assert [row["tokens"] for row in found] == [1, 30]
    assert all(row[f"{way}_ms"] >= 0 for row in found for way in passes.WAYS)
    layer, other = model.model.layers[0].mlp.up_proj.weight, rounded.model.layers[0].mlp.up_proj.weight
    assert kernels._packed[layer].made.keys() == {kernels._laid_out}
    assert all(copy is not None for copy in kernels._packed[other].made.values())
    assert kernels._packed[other].made.keys() == {kernels._laid_out, kernels._halves}
    kernels._packed.clear()
    passes.measure({"plain": model}, repeats=1)
    assert not len(kernels._packed)
