"""The bench of passes: every way takes the products that it is named after."""

import pytest

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
    found = passes.measure({"plain": model, "packed": model, "half": rounded}, repeats=1)
    assert [row["tokens"] for row in found] == [1, 30]
    assert all(row[f"{way}_ms"] >= 0 for row in found for way in passes.WAYS)
    layer, other = model.model.layers[0].mlp.up_proj.weight, rounded.model.layers[0].mlp.up_proj.weight
    assert kernels._packed[layer].full is not None
    assert kernels._packed[other].full is not None
    if kernels._has_fbgemm():
        assert kernels._packed[other].halves is not None
    kernels._packed.clear()
    passes.measure({"plain": model}, repeats=1)
    assert not len(kernels._packed)
