"""Hydra: the training pass against its formulas, and dropout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaModel

from draftsmith.decoder.sampling import DROP, kept
from draftsmith.errors import UserError
from draftsmith.heads.base import drafting, supervised_rows
from draftsmith.heads.hydra import head as hydra
from draftsmith.heads.hydra.head import HydraHead, HydraOptions, build
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.models import make_target

pytestmark = pytest.mark.full

KINDS: dict[str, dict[str, Any]] = {
    "hydra": {},
    "two blocks, no bias": {"num_layers": 2, "lm_head_bias": False},
    "hydra++": {"num_layers": 4, "prefix_attention": True, "dropout": 0.2},
    "tied": {"num_layers": 4, "tie_blocks": True, "prefix_attention": True},
    "the target's projection": {"original_lm_head": True},
    "of its own size": {"prefix_attention": True, "head_dim": 8, "num_key_value_heads": 4, "intermediate_size": 50},
}


def make_head(target: Target, **options: Any) -> HydraHead:
    """A head whose every tensor matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build(HydraOptions(**{"num_heads": 3, **options}), target, None)
        for name, parameter in head.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    return head.to(target.dtype).eval()


def slow_logits(head: HydraHead, target: Target, ids_L: Tensor, last_LH: Tensor) -> list[Tensor]:
    """Logits [L, V] of every head on one document, written out around transformers' own Llama of one layer; tokens past the end
    are its first ones."""
    path, found = last_LH, []
    if head.config is not None:
        llama = LlamaModel(type(head.config)(**{**head.config.to_dict(), "num_hidden_layers": 1})).double().eval()
        lacking = llama.load_state_dict(head.prefix_embedding_layer.state_dict(), strict=False)
        assert (lacking.missing_keys, lacking.unexpected_keys) == (["embed_tokens.weight"], [])
        path = llama(inputs_embeds=last_LH[None]).last_hidden_state[0]
    for i, own in enumerate(head.hydra_lm_head):
        path = torch.cat([path, head.embedding_scale * target.embedding[ids_L.roll(-1 - i)]], -1)
        x, blocks = path, list(head.hydra_mlp[i])
        for j in range(head.options.num_layers):
            block = blocks[1 if head.options.tie_blocks and j else j]
            way = F.linear(x, block.res_connection.weight, block.res_connection.bias) if j == 0 else x
            x = way + F.silu(F.linear(x, block.linear.weight, block.linear.bias))
        found.append(F.linear(x, target.head.weight if own.weight is None else own.weight, own.bias))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_are_those_of_the_formulas_on_each_document(kind: str) -> None:
    """Every row of every head, in float64 but for the attention and the target's projection, which are float32."""
    target = make_target(dtype=torch.float64, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    head = make_head(target, **KINDS[kind])
    batch = pack(target, documents_of(target), ())
    batch = replace(batch, last=batch.last.double())
    expected = torch.full((3, *batch.ids.shape, target.vocab_size), torch.nan, dtype=torch.float64)
    for b, number in {(b, n) for b, row in enumerate(batch.document.tolist()) for n in row if n >= 0}:
        here = batch.document[b] == number
        expected[:, b, here] = torch.stack(slow_logits(head, target, batch.ids[b][here], batch.last[b][here]))
    close = 1e-9 if head.config is None and not head.options.original_lm_head else 1e-4
    for i, step in enumerate(head(batch, 3).steps):
        assert torch.equal(step.rows, supervised_rows(batch, i).flatten().nonzero().flatten())
        assert len(step.rows) > 15
        torch.testing.assert_close(step.logits.double(), expected[i].flatten(0, 1)[step.rows], atol=close, rtol=close)


def test_dropout_is_for_training_alone() -> None:
    target = make_target()
    still, head = make_head(target, dropout=0.0), make_head(target, dropout=0.2)
    batch = pack(target, documents_of(target), ())
    batch = replace(batch, seed=torch.full_like(batch.ids, 3))
    plain, dropped = (one.train()(batch, 3).steps for one in (still, head))
    with drafting(head):
        quiet = head(batch, 3).steps
    for a, b, c in zip(plain, dropped, quiet, strict=True):
        assert torch.equal(a.logits, c.logits)
        assert float((a.logits - b.logits).detach().abs().mean()) > 0.01
        assert torch.equal(a.rows, b.rows)
    assert head.training


def test_dropout_leaves_out_what_it_says_and_keeps_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number with the same probability, at every place anew, in every head another, whoever is beside it."""
    keys, counters = torch.arange(200) * 7919, torch.arange(200)
    stay = kept(keys, counters, DROP, 0, 1000, 0.2)
    assert float(stay.float().mean()) == pytest.approx(0.8, abs=0.004)
    assert float(stay.float().mean(0).min()) > 0.65
    assert float(stay.float().mean(1).min()) > 0.72
    assert torch.equal(stay[3:5], kept(keys[3:5], counters[3:5], DROP, 0, 1000, 0.2))
    assert torch.equal(stay[:, 400:500], kept(keys, counters, DROP, 400, 100, 0.2))
    drops = [hydra.Dropper(0.2, keys, counters, number) for number in (0, 1)]
    one = torch.ones(200, 1000)
    drawn = [drops[0](one), drops[0](one), drops[1](one)]
    assert all(float(x.mean()) == pytest.approx(1.0, abs=0.01) for x in drawn)
    assert all(set(x.unique().tolist()) == {0.0, 1.25} for x in drawn)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert float((drawn[a] == drawn[b]).float().mean()) == pytest.approx(0.68, abs=0.01)  # .8 * .8 + .2 * .2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tie_blocks": True, "num_layers": 2}, r"with head\.num_layers 2 a head has no two blocks to tie"),
        ({"head_dim": 8}, r"head\.head_dim is 8, which is about the prefix layer"),
        ({"prefix_attention": True, "num_attention_heads": 3}, "do not fit a hidden size of 64"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(HydraOptions(**options), make_target(), None)
