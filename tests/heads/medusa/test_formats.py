"""The Medusa layouts: equal logits after a reload, and from what their readers make of the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.medusa.head import MedusaHead
from draftsmith.target.target import Target
from tests.exports import make_medusa, make_target, replace_layout

CASES = [
    (layout, layers, shared)
    for layout in ("medusa", "medusa_tgi", "medusa_vllm")
    for layers in (1, 2)
    for shared in (False, True)
    if layers == 1 or layout == "medusa_vllm" or (layout == "medusa_tgi" and not shared)
]


def write(folder: Path, layout: str, target: Target | None = None, **options) -> tuple[Target, MedusaHead]:
    target = target or make_target()
    head = make_medusa(target, **options)
    export_head(head, target, folder, layout=layout)
    return target, head


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors, as an engine finds them: the original code looks for a pickle alone."""
    tensors = torch.load(pickle) if (pickle := folder / "medusa_lm_head.pt").is_file() else load_file(weights(folder))
    return json.loads((folder / "config.json").read_text()), tensors


def weights(folder: Path) -> Path:
    (found,) = [*folder.glob("*.safetensors"), *folder.glob("*.pt")]
    return found


def keep(tensors: dict[str, Tensor], file: Path) -> None:
    (save_file if file.suffix == ".safetensors" else torch.save)(tensors, file)


def our_logits(head: MedusaHead, y: Tensor) -> list[Tensor]:
    return [head.logits(i, y) for i in range(head.options.num_heads)]


class ResBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def original_medusa(config: dict[str, Any], tensors: dict[str, Tensor], lm_head: nn.Module, y: Tensor) -> list[Tensor]:
    """What FasterDecoding/Medusa computes: a Sequential per head; without projections, the target's own module."""
    V, H = lm_head.weight.shape
    last = f"0.{config['medusa_num_layers']}.weight" in tensors
    heads = nn.ModuleList(
        nn.Sequential(
            *([ResBlock(H)] * config["medusa_num_layers"]),  # one module, as the original has it
            *([nn.Linear(H, V, bias=False)] if last else []),
        )
        for _ in range(config["medusa_num_heads"])
    )
    heads.load_state_dict(tensors)
    return [head(y) if last else lm_head(head(y)) for head in heads]


def tgi(config: dict[str, Any], tensors: dict[str, Tensor], lm_head: Tensor, y: Tensor) -> list[Tensor]:
    """What TGI computes: MedusaHeadV1, or MedusaHeadV2 where that does not load. A shard of one."""
    assert "architectures" not in config
    heads, layers = range(config["medusa_num_heads"]), config["medusa_num_layers"]
    try:
        logits = []
        for i in heads:
            x = y
            for j in range(layers):
                x = x + F.silu(F.linear(x, tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]))
            logits.append(F.linear(x, tensors[f"{i}.{layers}.weight"]))
        return logits
    except KeyError:
        assert layers == 1
        weight, bias = (torch.cat([tensors[f"{i}.0.linear.{kind}"] for i in heads]) for kind in ("weight", "bias"))
        blocks = F.silu(F.linear(y, weight, bias)).unflatten(-1, (len(heads), -1))
        return list(F.linear(y[:, None] + blocks, lm_head).unbind(1))


def vllm(config: dict[str, Any], tensors: dict[str, Tensor], y: Tensor) -> list[Tensor]:
    """What vLLM 0.32 computes (models/medusa.py), with the defaults of its MedusaConfig; unknown tensors are dropped."""
    config = {("num_heads" if "num" in k and "heads" in k else k): v for k, v in config.items()}
    heads, layers = config.get("num_heads", 5), config.get("num_hidden_layers", 1)
    shared, bias = config.get("original_lm_head", False), config.get("medusa_fc_bias", False)
    scale, H = config.get("logit_scale", 1.0), config.get("hidden_size", 4096)
    logits = []
    for i in range(heads):
        x = y
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}"
            assert tensors[f"{name}.weight"].shape == (H, H)
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"] if bias else None))
        projection = tensors["lm_heads.0.weight" if shared else f"lm_heads.{i}.weight"]
        assert len(projection) == config.get("vocab_size", 32001)
        logits.append(F.linear(x, projection) * scale)
    return logits


@pytest.mark.parametrize(("layout", "layers", "shared"), CASES)
def test_readers_compute_our_logits_from_the_files(layout, layers, shared, tmp_path):
    target, head = write(tmp_path / "out", layout, num_layers=layers, original_lm_head=shared)
    config, tensors = read(tmp_path / "out")
    y = torch.randn(11, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if layout == "medusa":
            theirs = original_medusa(config, tensors, target.model.get_output_embeddings(), y)
        elif layout == "medusa_tgi":
            theirs = tgi(config, tensors, target.head.weight, y)
        else:
            theirs = vllm(config, tensors, y)
        torch.testing.assert_close(theirs, our_logits(head, y), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_scaled_target(shared, tmp_path):
    """vLLM scales the drafts' logits as the target scales its own, only where the heads share its projection."""
    target = make_target()
    target.head.scale = 0.25
    _, head = write(tmp_path / "out", "medusa_vllm", target, original_lm_head=shared)
    y = torch.randn(5, 64)
    with torch.no_grad():
        theirs = vllm(*read(tmp_path / "out"), y)
        torch.testing.assert_close(theirs, our_logits(head, y), atol=1e-5, rtol=1e-5)


def test_a_softcap_changes_no_rank(tmp_path):
    target = make_target()
    target.head.softcap = 5.0
    _, head = write(tmp_path / "out", "medusa_vllm", target, original_lm_head=True)
    y = torch.randn(5, 64)
    with torch.no_grad():
        for theirs, ours in zip(vllm(*read(tmp_path / "out"), y), our_logits(head, y), strict=True):
            assert torch.equal(theirs.topk(10).indices, ours.topk(10).indices)
            assert not torch.allclose(theirs, ours)


def test_a_biased_projection(tmp_path):
    """Only the original layout calls the target's own module; heads with projections of their own need no bias."""
    target = make_target()
    projection = target.model.get_output_embeddings()
    projection.bias = nn.Parameter(torch.randn(160), requires_grad=False)
    target.head.bias = projection.bias.detach()
    for layout, engine in (("medusa_tgi", "TGI"), ("medusa_vllm", "vLLM")):
        with pytest.raises(UserError, match=f"layout {layout} .* bias, and {engine} .*export the layout medusa"):
            write(tmp_path / layout, layout, target, original_lm_head=True)
        write(tmp_path / layout, layout, target)
    _, head = write(tmp_path / "out", "medusa", target, original_lm_head=True)
    y = torch.randn(5, 64)
    with torch.no_grad():
        theirs = original_medusa(*read(tmp_path / "out"), projection, y)
        torch.testing.assert_close(theirs, our_logits(head, y), atol=1e-5, rtol=1e-5)


def test_embeddings_are_none_of_medusas(tmp_path):
    target = make_target()
    with pytest.raises(UserError, match="include_embeddings is true, but the layout medusa holds no input embeddings"):
        convert_head(make_medusa(target), target, layout="medusa", include_embeddings=True)


def test_an_export_with_other_logits_is_not_kept(tmp_path, monkeypatch):
    """Each head counts, the last one too."""

    def swapped(path: Path, target: Target) -> MedusaHead:
        tensors = read(path)[1]
        tensors["4.1.weight"] = tensors["4.1.weight"].flip(0)
        keep(tensors, weights(path))
        return load(path, target)

    load = layouts()["medusa"].load
    replace_layout(monkeypatch, "medusa", load=swapped)
    with pytest.raises(AssertionError, match="other logits"):
        write(tmp_path / "out", "medusa", num_heads=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("medusa", lambda t, c: t.pop("2.1.weight"), r"lacks the tensor lm_heads\.2\.weight"),
        ("medusa", lambda t, c: t.pop("1.0.linear.bias"), r"lacks the tensor blocks\.1\.0\.linear\.bias"),
        ("medusa", lambda t, c: t.update({"1.1.linear.weight": t["0.0.linear.weight"].clone()}), r"lacks the tensor blocks\.0\.1\.linear"),
        ("medusa", lambda t, c: t.update({"2.5.weight": t.pop("2.1.weight")}), r"holds the projection 2\.5\.weight, but its heads have 1"),
        ("medusa", lambda t, c: t.update({"4.1.weight": t["2.1.weight"].clone()}), r"lacks the tensor blocks\.3\.0\.linear"),
        ("medusa", lambda t, c: [t.pop(name) for name in list(t) if "linear" in name], "holds no Medusa head"),
        ("medusa_tgi", lambda t, c: t.update({"surprise": t["2.1.weight"].clone()}), "unknown tensor surprise"),
        ("medusa_vllm", lambda t, c: t.pop("lm_heads.1.weight"), r"lacks the tensor lm_heads\.1\.weight"),
        ("medusa_vllm", lambda t, c: c.update(num_hidden_layers=2), "says num_hidden_layers 2, but model.safetensors holds 1"),
        ("medusa_vllm", lambda t, c: c.update(num_heads=5), "says num_heads 5, but model.safetensors holds 3"),
        ("medusa_vllm", lambda t, c: [t.pop(f"lm_heads.{i}.weight") for i in range(3)], "holds no projections, though"),
        ("medusa_vllm", lambda t, c: c.update(original_lm_head=True), "holds another projection than the target"),
        ("medusa_vllm", lambda t, c: (c.update(original_lm_head=True), t.pop("lm_heads.0.weight")), r"lacks the tensor lm_heads\.0\.weight, though"),
    ],
)  # fmt: skip
def test_a_bad_directory_is_one_sentence(layout, change, words, tmp_path):
    target, _ = write(tmp_path / "out", layout)
    config, tensors = read(tmp_path / "out")
    change(tensors, config)
    keep(tensors, weights(tmp_path / "out"))
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        layouts()[layout].load(tmp_path / "out", target)


def test_the_weights_must_be_there(tmp_path):
    target, _ = write(tmp_path / "out", "medusa_vllm")
    with pytest.raises(
        UserError, match=r"holds no weights \(none of medusa_lm_head\.safetensors, medusa_lm_head\.pt\)"
    ):
        layouts()["medusa"].load(tmp_path / "out", target)
