"""The loop's bookkeeping: continuous batches, and a cache that is always that of the committed text."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.decoder import loop
from draftsmith.decoder.answers import Request
from draftsmith.decoder.cache import KVCache
from draftsmith.decoder.decode import decode, decode_batch
from draftsmith.decoder.draft import Draft, Drafter, TargetAlone
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.slots import run_draft
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.errors import UserError
from draftsmith.heads.eagle.base import EagleDrafter
from draftsmith.heads.layers.decoder_layer import EagleAttention
from draftsmith.target.target import Target
from tests.decoder.test_decode import GREEDY, known, make_requests, make_target, trained
from tests.models import KINDS

pytestmark = pytest.mark.full

TREE = StaticTree.of("small", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0, 0]])
SHAPES = {
    "chain": {},
    "static": {"tree": TREE},
    "drawn": {"tree": TREE, "drawn": True},
    "dynamic": {"tree": DynamicTree(4, 3, 12)},
}


class Branching:
    """Drafts trees: two chains of a known text, the first one spoiled in its middle."""

    name = "branching"
    layer_ids: tuple[int, ...] = ()
    max_nodes = 8
    num_speculative_tokens = 4

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.start, self.admit, self.select = drafter.start, drafter.admit, drafter.select

    def propose(self, state) -> Draft:
        chain = self.drafter.propose(state)
        first, rest = chain.tokens_BN[:, 1:4], chain.tokens_BN[:, 1:5]
        twin = rest.clone()
        twin[:, 0] = (rest[:, 0] + 1) % 100
        if state.length_B[0] % 2:
            first, twin = (first + 1) % 100, rest
        # Nodes by depth: a1 b1 a2 b2 a3 b3 b4.
        nodes = [first[:, 0], twin[:, 0], first[:, 1], twin[:, 1], first[:, 2], twin[:, 2], twin[:, 3]]
        parents = torch.tensor([-1, 0, 0, 1, 2, 3, 4, 6])
        reach = torch.tensor([1, 3, 5, 7, 8])
        nodes_B = torch.where(chain.nodes_B > 4, 8, reach[chain.nodes_B.clamp(max=5) - 1])
        nodes_B = torch.minimum(nodes_B, reach[state.limit_B.clamp(0, 4)])
        return Draft(torch.stack([state.root_B, *nodes], 1), parents.expand(len(nodes[0]), -1), nodes_B)


# Beside the five usual kinds: compressed keys and values, shared ones, attention sinks.
MORE_KINDS = ("deepseek", "gemma3n", "gpt_oss")


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("branching", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_cache_equals_a_fresh_prefill_after_every_round(kind: str, branching: bool, rows: int) -> None:
    """Keys and values of every layer, and the states that a drafter is shown, with rows that come and go."""
    target = make_target(kind)
    requests = [replace(r, max_new_tokens=n) for r, n in zip(make_requests(5), (9, 14, 4, 11, 7), strict=True)]
    drafter = known(target, requests, 0.6)
    run = Loop(target, Branching(drafter) if branching else drafter, requests, GREEDY, None, rows)
    rounds = accepted = 0
    while run.fill():
        run.round()
        rounds += 1
        for row, answer in enumerate(run.rows):
            accepted += answer.rounds[-1].accepted
            text = [*answer.request.prompt_ids, *answer.output_ids][: int(run.cache.lengths_B[row])]
            if not answer.finish_reason:
                # The last token is the next root, which the target has not read.
                assert len(text) == len(answer.request.prompt_ids) + len(answer.output_ids) - 1
            check_row(target, run, row, text)
    assert rounds > 5
    assert accepted > 5


def check_row(target: Target, run: Loop, row: int, text: list[int]) -> None:
    fresh_cache = KVCache.for_target(target, 1, len(text))
    ids = torch.tensor([text])
    states = run_draft(target, fresh_cache, Draft.chain(ids[:, 0], ids[:, 1:]), longest=0).last[0]
    for kind, buffer in run.cache.buffers.items():
        torch.testing.assert_close(
            buffer[:, row, :, : len(text)], fresh_cache.buffers[kind][:, 0], atol=2e-5, rtol=1e-4
        )
    count = int(run.state.new_tokens.count_B[row])
    if not run.rows[row].finish_reason:
        torch.testing.assert_close(run.state.new_tokens.last_BnD[row, :count], states[-count:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "sampled"])
def test_waiting_prompts_take_the_rows_of_finished_ones(shape: str, sampling: Sampling) -> None:
    """Nine answers of 1 to 24 tokens on three rows: text and rounds are those that each has alone."""
    target, head = trained()
    base, limits = make_requests(6), [1, 24, 2, 9, 24, 17, 5, 1, 12]
    requests = [replace(base[i % 6], max_new_tokens=n, sample_id=str(i), key=i) for i, n in enumerate(limits)]

    def drafter() -> EagleDrafter:
        return EagleDrafter(head, 4, **SHAPES[shape])

    together = decode_batch(target, drafter(), requests, sampling, rows=3).generations
    for request, found in zip(requests, together, strict=True):
        (alone,) = decode_batch(target, drafter(), [request], sampling).generations
        assert found.output_ids == alone.output_ids
        assert found.rounds == alone.rounds
        assert found.ttft_s > 0
    if sampling.greedy:
        assert max(r.accepted for g in together for r in g.rounds) == 4, "drafts are accepted at every depth"
        plain = decode_batch(target, TargetAlone(), requests, sampling, rows=2).generations
        assert [g.output_ids for g in plain] == [g.output_ids for g in together]


def test_more_rows_than_requests_and_none_at_all() -> None:
    target = make_target()
    assert len(decode_batch(target, TargetAlone(), make_requests(2), GREEDY, rows=8).generations) == 2
    assert decode_batch(target, TargetAlone(), [], GREEDY).generations == []


def test_a_tree_larger_than_the_context_is_refused() -> None:
    target, head = trained()
    drafter = EagleDrafter(head, 4, tree=DynamicTree(4, 10, 300))
    with pytest.raises(UserError, match=r"draft of 300 tokens is larger than the target's context of 256"):
        decode_batch(target, drafter, make_requests(1), GREEDY)


@pytest.mark.parametrize("layer", [0, 3])
def test_numbers_that_are_none_stop_with_position_and_layer(layer: int) -> None:
    target, (request,) = make_target(), make_requests(1)
    mlp = target.model.model.layers[layer].mlp.down_proj

    def spoil(_module: object, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Only one token in the vocabulary is poisonous: the first one that is emitted.
        return torch.where(poisonous["now"], torch.nan, output)

    poisonous = {"now": torch.zeros(1, 1, 1, dtype=torch.bool)}
    mlp.register_forward_hook(spoil)
    (first, *_) = decode_batch(target, TargetAlone(), [request], GREEDY).generations[0].output_ids

    def watch(_module: object, args: tuple[Tensor, ...]) -> None:
        poisonous["now"] = (args[0] == first)[..., None]

    target.model.get_input_embeddings().register_forward_pre_hook(watch)
    place = len(request.prompt_ids)
    with pytest.raises(UserError, match=rf"p0 are not finite: .* at position {place}, in layer {layer};"):
        decode_batch(target, TargetAlone(), [request], GREEDY)


def test_a_prompt_that_gives_no_numbers_is_named() -> None:
    target, requests = make_target(), make_requests(2)
    target.head.weight[7, 3] = torch.inf
    with pytest.raises(UserError, match=r"p\d are not finite: .* at position \d+, in the output projection"):
        decode_batch(target, TargetAlone(), [Request("p7", "a", r.prompt_ids, 4) for r in requests], GREEDY)


def test_rows_that_wait_stay_within_the_context() -> None:
    """GPT-2 has a table of positions, and none behind the last one."""
    config = AutoConfig.for_model(
        "gpt2", n_embd=32, n_head=2, n_layer=2, n_positions=32, vocab_size=150, bos_token_id=1
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    target = Target(model, path="tiny", fingerprint="0")
    target.model.generation_config.eos_token_id = None
    requests = [
        Request(f"p{i}", "a", tuple(range(5 + i, 5 + i + length)), 32 - 4 - length)
        for i, length in enumerate((20, 19, 18, 17, 16, 3))
    ]
    drafter = known(target, requests, 1.0)
    found = decode_batch(target, drafter, requests, GREEDY).generations
    assert [g.output_ids for g in found] == [list(drafter.answers[r.prompt_ids]) for r in requests]


def test_drawn_children_do_not_depend_on_the_rows_beside() -> None:
    """A row with little room cuts its tree, the one beside it does not."""
    target, head = trained()
    tree = StaticTree.of("wide below", [[0], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 2]])
    base = make_requests(4)
    requests = [replace(base[i % 4], max_new_tokens=3 + 9 * (i % 2), sample_id=str(i), key=i) for i in range(12)]
    together = decode_batch(target, EagleDrafter(head, 3, tree=tree, drawn=True), requests, Sampling(1.0)).generations
    for request, found in zip(requests, together, strict=True):
        drafter = EagleDrafter(head, 3, tree=tree, drawn=True)
        assert found.output_ids == decode_batch(target, drafter, [request], Sampling(1.0)).generations[0].output_ids


@pytest.mark.parametrize("tree", [TREE, DynamicTree(2, 3, 50), DynamicTree(2, 1, 50)], ids=lambda t: t.name)
def test_a_tree_decides_its_own_depth(tree: StaticTree | DynamicTree) -> None:
    target, head = trained()
    for k in (tree.depth, 9):
        found = decode_batch(target, EagleDrafter(head, k, tree=tree), make_requests(2), GREEDY).generations
        assert max(len(r.levels) or r.drafted for g in found for r in g.rounds) == tree.depth


@pytest.mark.parametrize("shape", SHAPES)
def test_many_prompts_are_read_in_several_passes(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = trained()
    drafter = EagleDrafter(head, 4, **SHAPES[shape])
    whole = decode_batch(target, drafter, make_requests(6), GREEDY).generations
    monkeypatch.setattr(loop, "_TOKENS_PER_PASS", 40)
    parts = decode_batch(target, drafter, make_requests(6), GREEDY).generations
    assert [(g.output_ids, g.rounds) for g in parts] == [(g.output_ids, g.rounds) for g in whole]


def test_answers_come_as_they_are_done_and_mistakes_at_once() -> None:
    target, limits = make_target(), (9, 2, 5, 1)
    requests = [replace(r, max_new_tokens=n) for r, n in zip(make_requests(4), limits, strict=True)]
    found = list(decode(target, TargetAlone(), requests, GREEDY, 2))
    assert {g.request.sample_id for g in found} == {r.sample_id for r in requests}
    assert found[0].request is requests[1]
    expected = {
        g.request.sample_id: g.output_ids for g in decode_batch(target, TargetAlone(), requests, GREEDY).generations
    }
    assert {g.request.sample_id: g.output_ids for g in found} == expected
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        decode(target, TargetAlone(), [replace(requests[0], max_new_tokens=0)], GREEDY, 2)


def test_joined_projections_follow_their_parts() -> None:
    attention = EagleAttention(trained()[1].config, 128, qkv_bias=True)
    x = torch.randn(2, 128)
    with torch.no_grad():
        for part in (None, attention.v_proj.weight, attention.q_proj.bias, attention.k_proj.bias):
            if part is not None:
                part.add_(1)
            turning, values = attention.together(x)
            keys, expected = attention.key_value(x)
            torch.testing.assert_close(values, expected)
            torch.testing.assert_close(turning, torch.cat([attention.query(x), keys], -2))
        attention = attention.to(torch.bfloat16)
        assert attention.together(x.bfloat16())[0].dtype == torch.bfloat16


def test_every_part_of_a_round_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(loop.Stopwatch, "lap", lambda _, name: names.append(name))
    requests = [replace(r, max_new_tokens=n) for r, n in zip(make_requests(3), (9, 9, 2), strict=True)]
    run = Loop(make_target(), TargetAlone(), requests, GREEDY, None, 3)
    run.round()
    assert run.fill()
    assert names == ["ttft", "draft", "other", "draft", "verify", "commit", "other"], (
        "the last: a row that is done has left"
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_a_reader_waits_once_a_round_and_for_the_whole_answer(rows: int) -> None:
    target, requests = make_target(), make_requests(5)
    answers = decode_batch(target, known(target, requests, 0.8), requests, GREEDY, rows=rows).generations
    assert any(0 in answer.waits for answer in answers), "accepted drafts"
    for answer in answers:
        waits = answer.waits
        assert len(waits) == len(answer.output_ids) - 1
        assert sum(wait > 0 for wait in waits) == len(answer.rounds)
        assert [i for i, wait in enumerate(waits) if wait > 0] == [round_.root for round_ in answer.rounds]
        assert sum(waits) == pytest.approx(answer.emitted_at[-1] - answer.emitted_at[0])
