"""Hydra: the training pass against loops over single rows, drafting against the training pass, and the simulator."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaModel

from draftsmith.data.features.extract import compute_features
from draftsmith.data.packing import collate
from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.noise import DROP, kept
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.conformance.suite import CHECKS, Spec, tiny_target
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate.texts import simulate_generations, to_sample
from draftsmith.heads.base import drafting, supervised_rows
from draftsmith.heads.hydra import head as hydra
from draftsmith.heads.hydra import head as hydra_head
from draftsmith.heads.hydra.drafter import HydraDrafter, PrefixCache
from draftsmith.heads.hydra.head import HydraHead, HydraOptions, PrefixLayer, build
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.decoding import assert_same, decode_like_alone
from tests.models import tiny_model

pytestmark = pytest.mark.full

BUSH = StaticTree.of("bush", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]])
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


def reversed_tokens(patch: pytest.MonkeyPatch) -> None:
    """The last token stands in front of those before it."""
    real = HydraHead.extend

    def extend(self: HydraHead, path: Tensor, tokens: Tensor) -> Tensor:
        H, grown = self.hidden_size, real(self, path, tokens)
        return torch.cat([grown[..., :H], grown[..., -H:], grown[..., H:-H]], -1)

    patch.setattr(HydraHead, "extend", extend)


def shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    """Heads see the tokens one place further on: the one that they predict among them."""
    real = hydra.shift_left
    patch.setattr(hydra, "shift_left", lambda x, steps, fill: real(x, steps + 1, fill))


def no_root(patch: pytest.MonkeyPatch) -> None:
    """Heads see the tokens one place behind."""
    real = hydra.shift_left
    patch.setattr(hydra, "shift_left", lambda x, steps, fill: real(x, steps - 1, fill))


def untied(patch: pytest.MonkeyPatch) -> None:
    """The blocks after the first are applied once."""
    patch.setattr(HydraHead, "_applied", lambda self, i: iter(self.hydra_mlp[i]))


def leak(patch: pytest.MonkeyPatch) -> None:
    """Documents of a row see those before them."""
    real = hydra_head.plan_rows
    patch.setattr(hydra_head, "plan_rows", lambda document, rows: real(document.clamp(max=0), rows))


def no_norm(patch: pytest.MonkeyPatch) -> None:
    """The weights of the prefix layer's final norm are left out."""
    real = PrefixLayer.rows
    patch.setattr(PrefixLayer, "rows", lambda self, batch, needed: real(self, batch, needed) / self.norm.weight)


WRONG_TRAINING: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (reversed_tokens, "hydra"),
    (shifted_by_one, "hydra"),
    (no_root, "hydra"),
    (untied, "tied"),
    (leak, "hydra++"),
    (no_norm, "hydra++"),
]


@pytest.mark.parametrize(("mutant", "kind"), WRONG_TRAINING, ids=[m.__name__ for m, _ in WRONG_TRAINING])
def test_a_wrong_training_pass_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_against_loops(**KINDS[kind])


@pytest.mark.parametrize("original", [False, True])
def test_new_heads_repeat_the_targets_own_prediction(original: bool) -> None:
    target = make_target()
    head = build(HydraOptions(3, 2, original_lm_head=original), target, None)
    batch = pack(target, documents_of(target), ())
    for step in head(batch, 3).steps:
        expected = target.head.logits(batch.last.flatten(0, 1)[step.rows])
        torch.testing.assert_close(step.logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_training_trains_the_heads_alone(kind: str) -> None:
    target = make_target()
    head = make_head(target, **KINDS[kind])
    batch = pack(target, documents_of(target), ())
    head_loss(head(batch, 3), batch, target.head, None, LossSpec()).loss_sum.backward()
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and bool(p.grad.any()) for p in trained.values())
    assert "embed_tokens.weight" not in trained
    assert all(p.grad is None for p in target.model.parameters())
    assert any(name.startswith("hydra_lm_head.0.weight") for name in trained) is not head.options.original_lm_head
    per_head = [sum(name.startswith(f"hydra_mlp.{i}.") and name.endswith("linear.weight") for name in trained) for i in range(3)]  # fmt: skip
    assert per_head == [2 if head.options.tie_blocks else head.options.num_layers] * 3


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


def test_dropout_is_the_same_however_documents_are_packed() -> None:
    target = make_target()
    head = make_head(target, dropout=0.3, prefix_attention=True).train()
    documents = documents_of(target)
    flat = [ids for row in documents for ids in row]
    together, alone = pack(target, documents, ()), [pack(target, [[ids]], ()) for ids in flat]
    seed = torch.zeros_like(together.ids)
    for number, (b, d) in enumerate((b, d) for b, row in enumerate(documents) for d in range(len(row))):
        seed[b, together.document[b] == d] = 100 + number
    ours = head(replace(together, seed=seed), 3).steps
    theirs = [head(replace(one, seed=torch.full_like(one.ids, 100 + n)), 3).steps for n, one in enumerate(alone)]
    for i, step in enumerate(ours):
        torch.testing.assert_close(step.logits, torch.cat([steps[i].logits for steps in theirs]))


def requests(count: int, new_tokens: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 150, (4 + i % 13,), generator=generator).tolist() for i in range(count)]
    return [Request.seeded(f"p{i}", "ab"[i % 2], prompt, new_tokens, 0) for i, prompt in enumerate(prompts)]


@cache
def trained(prefix_attention: bool, temperature: float = 0.0) -> tuple[Target, HydraHead]:
    """Heads fitted to some of the target's answers, so that drafts are accepted at every depth."""
    target = make_target(num_hidden_layers=2, initializer_range=0.06 if temperature else 0.15)
    answers = decode_batch(target, TargetAlone(), requests(8 if temperature == 0 else 16), Sampling(temperature))
    features = compute_features(target, [to_sample(g) for g in answers.generations], (), target.dtype)
    batch = collate([[f] for f in features], max(len(f.ids) for f in features))
    torch.manual_seed(0)
    head = build(HydraOptions(4, 2, prefix_attention=prefix_attention), target, None)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(30 if temperature == 0 else 12):
        scored = head_loss(head(batch, 4), batch, target.head, None, LossSpec(kind="hard_ce"))
        optimizer.zero_grad()
        (scored.loss_sum / scored.rows).backward()
        optimizer.step()
    return target, head.eval()


@pytest.mark.parametrize("tree", [None, BUSH], ids=["chain", "bush"])
@pytest.mark.parametrize("prefix", [False, True], ids=["hydra", "hydra++"])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_drafts_are_lossless_and_simulated_exactly(batch: int, prefix: bool, tree: StaticTree | None) -> None:
    """Rows end at different times, so that rows leave the batch and deep levels are cut."""
    target, head = trained(prefix)
    c = head_system("hydra", head, 4, 8, tree=tree)
    k = c.num_speculative_tokens
    found = decode_like_alone(target, lambda: c.make(k), requests(6), batch)
    decoded = total([tally_generation(g, k) for g in found], k)
    simulated = simulate_generations(target, head, found, Sampling(), k, tree=tree).tallies
    assert decoded.accepted_K[-1] > 0
    assert_same(decoded, total([t[k - 1] for t in simulated], k))


@pytest.mark.parametrize("prefix", [False, True], ids=["hydra", "hydra++"])
@pytest.mark.parametrize("tree", [None, BUSH], ids=["chain", "bush"])
def test_simulation_predicts_sampled_decoding(tree: StaticTree | None, prefix: bool) -> None:
    target, head = trained(prefix, temperature=1.0)
    c = head_system("hydra", head, 3, 3, tree=tree)
    found = decode_batch(target, c.make(3), requests(40), Sampling(1.0), rows=16).generations
    decoded = [tally_generation(g, 3) for g in found]
    simulated = [t[2] for t in simulate_generations(target, head, found, Sampling(1.0), 3, tree=tree).tallies]
    assert total(decoded, 3).accepted_K[0] > 20, "too few accepted drafts to mean something"
    if tree is not None:
        # Given the text it is certain which node was accepted.
        assert_same(total(decoded, 3), total(simulated, 3))
    else:
        errors = [d.rounds - s.rounds for d, s in zip(decoded, simulated, strict=True)]
        assert 0 < abs(sum(errors)) < 3 * sum(e * e for e in errors) ** 0.5


@pytest.mark.parametrize("options", [{"greedy_drafts": True}, {"tree": BUSH, "drawn": True}], ids=["greedy", "drawn"])
def test_other_ways_to_draft_follow_the_targets_distribution(options: dict[str, Any]) -> None:
    """Drafts of argmaxes are simulated; drawn trees are accepted more often than a chain."""
    target, head = trained(True, temperature=1.0)
    found = decode_batch(target, HydraDrafter(head, 3, **options), requests(40), Sampling(1.0), rows=16).generations
    decoded = total([tally_generation(g, 3) for g in found], 3)
    if "tree" in options:
        chain = decode_batch(target, HydraDrafter(head, 3), requests(40), Sampling(1.0), rows=16).generations
        assert decoded.rounds < total([tally_generation(g, 3) for g in chain], 3).rounds
    else:
        tallies = simulate_generations(target, head, found, Sampling(1.0), 3, greedy_drafts=True).tallies
        assert_same(decoded, total([t[2] for t in tallies], 3))


def stale_state(patch: pytest.MonkeyPatch) -> None:
    """Drafts are made from the first of several accepted tokens instead of the last."""
    real = HydraDrafter._state
    patch.setattr(
        HydraDrafter,
        "_state",
        lambda self, state: real(
            self, replace(state, new_tokens=replace(state.new_tokens, count_B=state.new_tokens.count_B * 0))
        ),
    )


def wrong_rotary(patch: pytest.MonkeyPatch) -> None:
    """The prefix layer counts positions in twos."""
    real = PrefixLayer.step
    patch.setattr(PrefixLayer, "step", lambda self, last, position, *more: real(self, last, 2 * position, *more))


def forgotten_prompt(patch: pytest.MonkeyPatch) -> None:
    """The prefix layer does not read prompts."""
    patch.setattr(HydraDrafter, "admit", lambda self, prompts: None)


def wrong_rows(patch: pytest.MonkeyPatch) -> None:
    """When rows leave, the prefix layer keeps the keys of the first ones."""
    real = PrefixCache.select
    patch.setattr(PrefixCache, "select", lambda self, rows: real(self, torch.arange(len(rows))))


WRONG_DRAFTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], bool]] = [
    ("decoding has the probabilities of training", stale_state, False),
    ("decoding has the probabilities of training", wrong_rotary, True),
    ("decoding has the probabilities of training", forgotten_prompt, True),
    ("decoding has the probabilities of training", wrong_rows, True),
]


@pytest.mark.parametrize(("check", "mutant", "prefix"), WRONG_DRAFTS, ids=[m.__name__ for _, m, _ in WRONG_DRAFTS])
@pytest.mark.slow
def test_a_wrong_drafter_is_found(
    check: str, mutant: Callable[[pytest.MonkeyPatch], None], prefix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Spec("hydra", HydraOptions(3, prefix_attention=prefix), tiny_target())
    assert made.head.method == "hydra"
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=r"differ from the training pass|not the training pass"):
        CHECKS[check](made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 0}, r"head\.num_heads is 0: it must be from 1 to 64"),
        ({"num_layers": 0}, r"head\.num_layers is 0"),
        ({"dropout": 1.0}, r"head\.dropout is 1\.0: it must be from 0 to below 1"),
        ({"tie_blocks": True, "num_layers": 2}, r"with head\.num_layers 2 a head has no two blocks to tie"),
        ({"head_dim": 8}, r"head\.head_dim is 8, which is about the prefix layer"),
        ({"prefix_attention": True, "head_dim": 0}, r"head\.head_dim is 0: it must be from 1 to"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        HydraOptions(**options)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="do not fit a hidden size of 64"):
        build(HydraOptions(prefix_attention=True, num_attention_heads=3), make_target(), None)
