"""Hydra: the training pass against loops over single rows, and dropout."""

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
from tests.models import tiny_model

pytestmark = pytest.mark.full

KINDS: dict[str, dict[str, Any]] = {
    "hydra": {},
    "two blocks, no bias": {"num_layers": 2, "lm_head_bias": False},
    "hydra++": {"num_layers": 4, "prefix_attention": True, "dropout": 0.2},
    "tied": {"num_layers": 4, "tie_blocks": True, "prefix_attention": True},
    "the target's projection": {"original_lm_head": True},
    "of its own size": {"prefix_attention": True, "head_dim": 8, "num_key_value_heads": 4, "intermediate_size": 50},
}


def make_target(dtype: torch.dtype = torch.float32, **overrides: object) -> Target:
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **overrides)
    return Target(model.to(dtype), path="tiny", fingerprint="0")


def make_head(target: Target, **options: Any) -> HydraHead:
    """A head whose every tensor matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build(HydraOptions(**{"num_heads": 3, **options}), target, None)
        for name, parameter in head.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    return head.to(target.dtype).eval()


def slow_states(head: HydraHead, last_LH: Tensor) -> Tensor:
    """What the heads read of one document: transformers' own Llama of one layer, all rows at once."""
    if head.config is None:
        return last_LH
    llama = LlamaModel(replaced_layers(head.config)).to(last_LH.dtype).eval()
    lacking = llama.load_state_dict(head.prefix_embedding_layer.state_dict(), strict=False)
    assert lacking.missing_keys == ["embed_tokens.weight"]
    assert not lacking.unexpected_keys
    return llama(inputs_embeds=last_LH[None]).last_hidden_state[0]


def replaced_layers(config: Any) -> Any:
    return type(config)(**{**config.to_dict(), "num_hidden_layers": 1})


def slow_logits(head: HydraHead, target: Target, i: int, state_H: Tensor, tokens: list[int]) -> Tensor:
    """Head i on one row: its blocks and its projection written out. tokens: x_{t+1}, .., x_{t+1+i}."""
    assert len(tokens) == i + 1
    x = torch.cat([state_H, *(head.embedding_scale * target.embedding[token] for token in tokens)])
    blocks = list(head.hydra_mlp[i])
    for j in range(head.options.num_layers):
        block = blocks[1 if head.options.tie_blocks and j else j]
        way = block.res_connection.weight @ x + block.res_connection.bias if j == 0 else x
        x = way + F.silu(block.linear.weight @ x + block.linear.bias)
    own = head.hydra_lm_head[i]
    logits = target.head.weight @ x if own.weight is None else own.weight @ x
    return logits if own.bias is None else logits + own.bias


@torch.no_grad()
def check_against_loops(**options: Any) -> None:
    """Every row of every head, in float64 but for the attention and the target's projection, which are float32."""
    target = make_target(torch.float64)
    head = make_head(target, **options)
    documents = documents_of(target)
    packed = pack(target, documents, ())
    batch = replace(packed, last=packed.last.double())
    for b, row in enumerate(documents):  # `pack` rounds to float32
        start = 0
        for ids in row:
            batch.last[b, start : start + len(ids)] = target.forward(ids[None]).last[0]
            start += len(ids)
    exact = head.config is None and not head.options.original_lm_head
    steps = head(batch, 3).steps
    states: dict[tuple[int, int], Tensor] = {}
    seen = 0
    for i, step in enumerate(steps):
        wanted = supervised_rows(batch, i).flatten().nonzero().flatten()
        assert torch.equal(step.rows, wanted)
        for row, logits_V in zip(step.rows.tolist(), step.logits, strict=True):
            b, t = divmod(row, batch.ids.shape[1])
            place = (b, int(batch.document[b, t]))
            if place not in states:
                states[place] = slow_states(head, batch.last[b][batch.document[b] == place[1]])
            tokens = batch.ids[b, t + 1 : t + 2 + i].tolist()
            expected = slow_logits(head, target, i, states[place][batch.position[b, t]], tokens)
            torch.testing.assert_close(
                logits_V.double(), expected, atol=1e-9 if exact else 1e-4, rtol=1e-9 if exact else 1e-4
            )
            seen += 1
    assert seen > 60


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_are_those_of_loops_over_rows(kind: str) -> None:
    check_against_loops(**KINDS[kind])


@pytest.mark.parametrize("original", [False, True])
def test_new_heads_repeat_the_targets_own_prediction(original: bool) -> None:
    target = make_target()
    head = build(HydraOptions(3, 2, original_lm_head=original), target, None)
    batch = pack(target, documents_of(target), ())
    for step in head(batch, 3).steps:
        expected = target.head.logits(batch.last.flatten(0, 1)[step.rows])
        torch.testing.assert_close(step.logits, expected)


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
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        HydraOptions(**options)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="do not fit a hidden size of 64"):
        build(HydraOptions(prefix_attention=True, num_attention_heads=3), make_target(), None)
