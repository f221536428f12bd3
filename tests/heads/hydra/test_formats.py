"""Hydra's published files: what the published architecture computes from them is what the head computes; heads in, heads
out, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaModel

from draftsmith.errors import UserError
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.hydra.head import HydraHead
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.exports import folded_state, make_target
from tests.heads.hydra.test_head import make_head
from tests.models import tiny_model

PUBLISHED: dict[str, dict[str, Any]] = {
    "hydra": {},
    "two blocks": {"num_layers": 2},
    "hydra++": {"num_layers": 4, "tie_blocks": True, "prefix_attention": True, "dropout": 0.2},
    "one head": {"num_heads": 1, "prefix_attention": True},
    "the target's projection": {"original_lm_head": True, "prefix_attention": True},
    "no biases": {"lm_head_bias": False},
    "the target's projection, no biases": {"original_lm_head": True, "lm_head_bias": False},
}


class Block(nn.Module):
    """The published block, by its parameters' names."""

    def __init__(self, width: int, H: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, H)
        self.res_connection = nn.Linear(width, H) if width > H else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class Published(nn.Module):
    """The published architecture: sequences of modules, all blocks after a head's first one and the same."""

    def __init__(self, config: dict[str, Any], target: Target) -> None:
        super().__init__()
        H, V = target.hidden_size, target.vocab_size
        self.heads, layers = config["hydra_num_heads"], config["hydra_num_layers"]
        self.prefixed = config["hydra_head_arch"] == "prefix-mlp"
        drops = [nn.Dropout(0.0)] if self.prefixed else []
        if self.prefixed:
            one = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 1})
            self.prefix_embeding_layer = LlamaModel(one)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(*drops, Block((i + 2) * H, H), *([*drops, Block(H, H)] * (layers - 1)))
            for i in range(self.heads)
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Sequential(*drops, nn.Linear(H, V)) if self.prefixed else nn.Linear(H, V) for _ in range(self.heads)
        )
        self.input_embed_fn = target.model.get_input_embeddings()

    def forward(self, last_LH: Tensor, ids_L: Tensor) -> list[Tensor]:
        """Logits [L, V] of every head, on all rows of one document; tokens past the end are its first ones."""
        state = last_LH
        if self.prefixed:
            state = self.prefix_embeding_layer(inputs_embeds=last_LH[None]).last_hidden_state[0]
        after = [self.input_embed_fn(ids_L.roll(-1 - i)) for i in range(self.heads)]
        return [
            self.hydra_lm_head[i](self.hydra_mlp[i](torch.cat([state, *after[: i + 1]], -1))) for i in range(self.heads)
        ]


def published_file(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "hydra_lm_head.pt", weights_only=True)


@torch.no_grad()
@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_published_architecture_computes_the_head(kind: str, tmp_path: Path) -> None:
    """It takes the file as it is; what the file may lack is what the target has."""
    target = make_target()
    head = make_head(target, **PUBLISHED[kind])
    folder = export_head(head, target, tmp_path / "out", dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    assert config["base_model_name_or_path"] == "models/tiny"
    assert config["grounded_heads"] is True
    reader = Published(config, target).eval()
    lacking = reader.load_state_dict(published_file(folder), strict=False)
    assert not lacking.unexpected_keys
    assert set(lacking.missing_keys) <= {"input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"}
    (ids,) = documents_of(target, [[25]])[0]
    batch = pack(target, [[ids]], ())
    theirs = reader(batch.last[0], ids)
    for step in head(batch, 3).steps:
        torch.testing.assert_close(step.logits, theirs[step.offset][step.rows], atol=1e-5, rtol=1e-5)


def test_biases_of_zero_stay_biases(tmp_path: Path) -> None:
    target = make_target()
    for biased in (True, False):
        head = make_head(target, lm_head_bias=biased)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.mul_(0.0 if re.fullmatch(r"hydra_lm_head\.\d+\.bias", name) else 1.0)
        again = load_head(export_head(head, target, tmp_path / str(biased), dtype="float32"), target)
        assert again.options.lm_head_bias is biased


def check_the_same(head: HydraHead, again: HydraHead, target: Target) -> None:
    ours, theirs = folded_state(head, again), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    batch = pack(target, documents_of(target), ())
    for a, b in zip(head(batch, 3).steps, again(batch, 3).steps, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_an_export_in_the_targets_dtype(tmp_path: Path) -> None:
    target = Target(tiny_model("llama").bfloat16(), path="models/tiny", fingerprint="0")
    head = make_head(target, original_lm_head=True, prefix_attention=True).float()
    folder = export_head(head, target, tmp_path / "out")
    assert {x.dtype for x in published_file(folder).values()} == {torch.bfloat16}
    assert load_head(folder, target).options.original_lm_head


def published(tmp_path: Path, head: HydraHead, target: Target) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """A folder as the published code writes it: without our key, with the embeddings that its modules hold."""
    folder = export_head(head, target, tmp_path / "out", dtype="float32")
    for extra in ("draftsmith.json", "README.md"):
        (folder / extra).unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["original_lm_head"]
    config |= {"transformers_version": "4.34.0"}
    tensors = published_file(folder) | {"input_embed_fn.weight": target.embedding.clone()}
    if head.options.prefix_attention:
        shape = target.embedding.shape
        tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.randn(shape)
        tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    return folder, config, tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "hydra_lm_head.pt")
    return folder


@pytest.mark.parametrize("kind", ["hydra", "hydra++"])
@pytest.mark.parametrize("heads", [3, 2])
def test_heads_as_they_are_published(heads: int, kind: str, tmp_path: Path) -> None:
    """The file says how many heads there are, whatever the configuration does."""
    target = make_target()
    head = make_head(target, **PUBLISHED[kind])
    folder, config, tensors = published(tmp_path, head, target)
    check_the_same(head, load_head(write(folder, config | {"hydra_num_heads": heads}, tensors), target), target)


def test_blocks_that_differ_are_blocks_of_their_own(tmp_path: Path) -> None:
    target = make_target()
    head = make_head(target, **PUBLISHED["hydra++"])
    folder, config, tensors = published(tmp_path, head, target)
    tensors["hydra_mlp.1.7.linear.bias"] = tensors["hydra_mlp.1.7.linear.bias"] + 1
    again = load_head(write(folder, config, tensors), target)
    assert not again.options.tie_blocks
    assert again.options.num_layers == 4
    assert torch.equal(again.hydra_mlp[1][3].linear.bias, head.hydra_mlp[1][1].linear.bias + 1)
    with pytest.raises(UserError, match=r"cannot hold this head: it has head\.num_layers above 2 without"):
        convert_head(again, target, layout="hydra")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "cross attention": (
        {"hydra_head_arch": "cross-attn"},
        "says hydra_head_arch 'cross-attn', but only 'mlp' and 'pre",
    ),
    "ungrounded": ({"grounded_heads": False}, "says grounded_heads False, but only True can be loaded"),
    "a prefix layer that is not there": (
        {"hydra_head_arch": "prefix-mlp"},
        "holds no prefix layer, but config.json says hydra_head_arch 'prefix-mlp'",
    ),
    "another layer's state": ({"hidden_state_offset": 1}, "says hidden_state_offset 1, but only 0"),
    "a projection that is not the target's": (
        {"original_lm_head": True},
        "another projection than the target in head 0",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_other_heads_of_the_published_code_are_refused(case: str, tmp_path: Path) -> None:
    target = make_target()
    folder, config, tensors = published(tmp_path, make_head(target), target)
    change, words = CONFIGS[case]
    with pytest.raises(UserError, match=words) as caught:
        load_head(write(folder, config | change, tensors), target)
    assert "\n" not in str(caught.value)


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def changed_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["input_embed_fn.weight"][3, 4] += 1


TENSORS: dict[str, tuple[Any, str]] = {
    "no bias": (without("hydra_mlp.1.1.linear.bias"), r"lacks the tensor hydra_mlp\.1\.0\.linear\.bias"),
    "no block": (lambda t: [t.pop(n) for n in list(t) if n.startswith("hydra_mlp.1.1.")], "lacks block 0 of head 1"),
    "no head": (lambda t: [t.pop(n) for n in list(t) if n.startswith("hydra_mlp.")], "holds no Hydra head"),
    "no norm": (without("prefix_embeding_layer.norm.weight"), r"lacks the tensor prefix_embedding_layer\.norm\.weight"),
    "one more": (lambda t: t.update(more=torch.ones(2)), "holds the unknown tensor more"),
    "a wrong place": (lambda t: t.update({"hydra_mlp.0.2.linear.weight": torch.ones(2)}), "where Hydra.. has no block"),
    "another shape": (
        lambda t: t.update({"hydra_lm_head.0.1.bias": torch.ones(2)}),
        r"tensor hydra_lm_head\.0\.bias has shape \[2\]",
    ),
    "other embeddings": (changed_embedding, r"read other input embeddings than those of the target models/tiny"),
    "a number for a matrix": (
        lambda t: t.update({"hydra_mlp.0.1.linear.weight": torch.tensor(1.0)}),
        "holds heads of width 0, but the target",
    ),
    "a misspelt block": (
        lambda t: t.update({"hydra_mlp.0.1.linear.wait": t.pop("hydra_mlp.0.1.linear.weight")}),
        "lacks block 0 of head 0",
    ),
    "a sparse matrix": (
        lambda t: t.update({"hydra_lm_head.0.1.weight": torch.eye(3).to_sparse()}),
        "holds no names with tensors",
    ),
    "not a number": (lambda t: t["hydra_lm_head.0.1.bias"].fill_(torch.nan), "holds NaN or infinity"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    target = make_target()
    folder, config, tensors = published(tmp_path, make_head(target, prefix_attention=True), target)
    change, words = TENSORS[case]
    change(tensors)
    with pytest.raises(UserError, match=words) as caught:
        load_head(write(folder, config, tensors), target)
    assert "\n" not in str(caught.value)


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    target = make_target()
    folder, config, tensors = published(tmp_path, make_head(target), target)
    tensors.pop("input_embed_fn.weight")
    other = make_target(hidden_size=32)
    with pytest.raises(UserError, match="holds heads of width 64, but the target models/tiny has 32 hidden units"):
        load_head(write(folder, config, tensors), other)
