"""Chains and static trees against plain loops; EAGLE-2's dynamic trees against EAGLE's own code and a slow rule."""

import heapq
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, NewTokens
from draftsmith.decoder.growth import chain_token_by_token, child_uniforms, growth, start_beam
from draftsmith.decoder.sampling import DRAFT, Sampling, draw, probs, uniforms
from draftsmith.decoder.trees import PUBLISHED, DynamicTree, StaticTree
from draftsmith.errors import UserError
from draftsmith.heads.eagle.base import EagleDrafter
from draftsmith.heads.formats.recognise import load_head
from draftsmith.target.target import load_target

FIXTURE = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures" / "eagle_dynamic_tree"


@pytest.mark.full
@pytest.mark.skipif(not FIXTURE.is_dir(), reason="the reference runs (../shared/fixtures) are not here")
@pytest.mark.parametrize("setting", range(3))
def test_every_round_is_that_of_eagles_own_code(setting: int) -> None:
    """Same output and same accepted count in every round that ends before EOS and the limit, which EAGLE overshoots."""
    expected = json.loads((FIXTURE / "expected.json").read_text())["settings"][setting]
    target = load_target(str(FIXTURE / "target"), dtype="float32")
    head = load_head(FIXTURE / "head", target)
    # EAGLE's depth counts expansions after the first.
    tree = DynamicTree(expected["depth"] + 1, expected["top_k"], expected["total_token"])
    for run in expected["runs"]:
        request = Request("p", "a", tuple(run["prompt"]), len(run["output"]))
        (found,) = decode_batch(target, EagleDrafter(head, tree.depth, tree=tree), [request], Sampling()).generations
        eos = [i for i, token in enumerate(run["output"]) if token in target.eos_ids]
        assert found.output_ids == run["output"][: eos[0] + 1 if eos else None]
        compared = 0
        for ours, theirs in zip(found.rounds, run["accepted_per_round"], strict=False):
            # Our first token comes from the prefill, where EAGLE's first round begins.
            if ours.root + theirs + 1 >= len(found.output_ids) - tree.depth:
                break
            assert ours.accepted == theirs
            assert ours.drafted == min(expected["total_token"], tree.max_nodes) - 1
            compared += 1
        assert compared >= 0.8 * len(run["accepted_per_round"]) - 4
    assert sum(len(run["accepted_per_round"]) for run in expected["runs"]) > 100


def slow_tree(probs: dict[tuple[int, ...], Tensor], tree: DynamicTree, limit: int) -> set[tuple[int, ...]]:
    """Return the paths of ids that are kept. distribution: log-probabilities after each path."""
    if tree.rule != "dynamic":
        return slow_best_first(probs, tree, limit)
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    for _ in range(tree.depth):
        level = []
        for path, score in beam:
            ranked = sorted(range(len(probs[path])), key=lambda i: -float(probs[path][i]))[: tree.branching]
            level += [((*path, i), score + float(probs[path][i])) for i in ranked]
        candidates += [c for c in level if len(c[0]) <= limit]
        beam = sorted(level, key=lambda c: -c[1])[: tree.branching]
    return {path for path, _ in sorted(candidates, key=lambda c: -c[1])[: tree.total_tokens - 1]}


def slow_best_first(probs: dict[tuple[int, ...], Tensor], tree: DynamicTree, limit: int) -> set[tuple[int, ...]]:
    """The same by a heap: the best node is taken, or (accum_logp) all its children are."""
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    kept: list[tuple[int, ...]] = []
    while heap and len(kept) < tree.total_tokens - 1:
        minus, path = heapq.heappop(heap)
        if tree.rule == "best_first" and path:
            kept.append(path)
        if len(path) < min(tree.depth, limit):
            ranked = sorted(range(len(probs[path])), key=lambda i: -float(probs[path][i]))[: tree.branching]
            if tree.rule == "accum_logp":
                kept += [(*path, i) for i in ranked[: tree.total_tokens - 1 - len(kept)]]
            for i in ranked:
                heapq.heappush(heap, (minus - float(probs[path][i]), (*path, i)))
    return set(kept)


@pytest.mark.parametrize("limits", [(4, 4), (9, 2), (1, 3)], ids=str)
@pytest.mark.parametrize(
    "tree",
    [
        DynamicTree(4, 3, 10),
        DynamicTree(4, 2, 60),
        DynamicTree(1, 3, 3),
        *(
            DynamicTree(*sizes, rule)
            for rule in ("best_first", "accum_logp")
            for sizes in ((4, 3, 10), (4, 5, 40), (3, 2, 2), (4, 8, 41))
        ),
    ],
    ids=lambda t: t.name,
)
def test_the_best_candidates_are_kept(tree: DynamicTree, limits: tuple[int, int]) -> None:
    """Two rows of different limits, over distributions that depend on the whole path."""
    generator = torch.Generator().manual_seed(0)
    draft_probs: list[dict[tuple[int, ...], Tensor]] = [{}, {}]

    def probs(row: int, path: tuple[int, ...]) -> Tensor:
        if path not in draft_probs[row]:
            draft_probs[row][path] = (2 * torch.randn(5, generator=generator)).log_softmax(-1)
        return draft_probs[row][path]

    beam, paths = start_beam(tree, torch.tensor([90, 91]), torch.tensor(limits)), [[()], [()]]
    run: list[list[tuple[int, ...]]] = [[], []]
    for _ in range(tree.depth):
        logits = torch.stack([torch.stack([probs(row, path) for path in paths[row]]) for row in range(2)])
        beam = beam.extend(logits, lambda ids: ids + 10)
        paths = [
            [(*paths[row][parent], token - 10) for parent, token in zip(parents, tokens, strict=True)]
            for row, (parents, tokens) in enumerate(zip(beam.parent_Bm.tolist(), beam.tokens_Bm.tolist(), strict=True))
        ]
        for row in range(2):
            run[row] += paths[row]
            above = [[path[: len(other)] == other for other in run[row]] for path in paths[row]]
            assert beam.ancestors_BmT[row].tolist() == above
    draft = beam.draft()
    assert draft.tokens_BN[:, 0].tolist() == [90, 91]
    assert draft.parents_BN[:, 0].tolist() == [-1, -1]
    assert not draft.is_chain
    assert draft.tokens_BN.shape[1] <= tree.max_nodes
    for row in range(2):
        found: list[tuple[int, ...]] = [()]
        for node in range(1, int(draft.nodes_B[row])):
            parent = int(draft.parents_BN[row, node])
            assert parent < node
            found.append((*found[parent], int(draft.tokens_BN[row, node]) - 10))
        assert set(found[1:]) == slow_tree(draft_probs[row], tree, limits[row])
        assert len(found) == len(set(found))


@pytest.mark.parametrize("budget", [16, 64, 128, 256])
def test_nodes_one_at_a_time_are_worth_more_than_all_children_of_the_best(budget: int) -> None:
    """Expected tokens of a round under the draft's own probabilities: 15 depths, 7 candidates, a mean top-1 of 0.7."""
    generator = torch.Generator().manual_seed(0)
    top = torch.rand(50, 15, 1, generator=generator) * 0.58 + 0.41
    rest = 0.7 ** torch.arange(6)
    log_q = torch.cat([top, (1 - top) * rest / rest.sum()], -1).log()
    assert float(top.mean()) == pytest.approx(0.7, abs=0.01)
    worth = {}
    for rule in ("best_first", "accum_logp"):
        beam = start_beam(DynamicTree(15, 7, budget, rule), torch.zeros(50).long(), torch.full((50,), 15), run=False)
        for depth in range(15):
            beam = beam.extend(log_q[:, depth, None], lambda ids: ids)
        draft = beam.draft()
        assert draft.nodes_B.tolist() == [budget] * 50
        rows = torch.arange(50)[:, None]
        node_BN = log_q[rows, (draft.depth_BN - 1).clamp(min=0), draft.tokens_BN] * (draft.depth_BN > 0)
        path_BN = (draft.ancestors_BNN.float() @ node_BN[..., None])[..., 0]
        worth[rule] = float(path_BN.exp().sum(1).mean())
    assert 1.13 < worth["best_first"] / worth["accum_logp"] < 1.28


def test_equal_scores_never_part_a_child_from_its_parent() -> None:
    """A distribution that is certain gives children the score of their parents: ties go to the earlier one."""
    tree = DynamicTree(5, 2, 4)
    beam = start_beam(tree, torch.tensor([0]), torch.tensor([9]))
    for level in range(5):
        certain = torch.tensor([[[50.0, 0.0, 0.0]]]).expand(1, 1 if level == 0 else 2, -1)
        beam = beam.extend(certain, lambda ids: ids)
    draft = beam.draft()
    assert draft.parents_BN.tolist() == [[-1, 0, 1, 2]]
    assert draft.tokens_BN.tolist() == [[0, 0, 0, 0]]


def test_a_beam_of_one_is_a_chain() -> None:
    beam = start_beam(DynamicTree(3, 1, 9), torch.tensor([7, 8]), torch.tensor([9, 2]))
    for level in range(3):
        logits = torch.eye(5)[torch.tensor([[level], [level + 1]])]
        beam = beam.extend(logits, lambda ids: ids)
    draft = beam.draft()
    assert draft.is_chain
    assert draft.tokens_BN.tolist() == [[7, 0, 1, 2], [8, 1, 2, 3]]
    assert draft.nodes_B.tolist() == [4, 3]


def state(sampling: Sampling, limits: tuple[int, ...] = (9, 2, 0)) -> DecodeState:
    """Three rows of different lengths and limits."""
    root, length = torch.tensor([5, 1, 3]), torch.tensor([20, 7, 11])
    nothing = NewTokens(root[:, None], torch.zeros(3, 1, 0), torch.zeros(3, 1, 0), torch.ones(3).long())
    return DecodeState(root, length, torch.tensor(limits), torch.tensor([11, 22, 33]), nothing, sampling)


@pytest.mark.parametrize("vocab", [None, [0, 2, 4, 5, 7, 8]], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [(Sampling(), False), (Sampling(1.0), False), (Sampling(0.7, top_k=3), False), (Sampling(1.0), True)],
    ids=str,
)
def test_chains_are_drawn_token_by_token(sampling: Sampling, greedy: bool, vocab: list[int] | None) -> None:
    """One row at a time, from a table of what follows each token at each place."""
    asked, length, width = state(sampling), 3, 9 if vocab is None else len(vocab)
    table = 2 * torch.randn(length, 9, width, generator=torch.Generator().manual_seed(0))
    vocab_W = None if vocab is None else torch.tensor(vocab)
    places = []

    def next_logits(k: int, tokens_B: Tensor) -> Tensor:
        places.append(k)
        return table[k, tokens_B]

    found = chain_token_by_token(asked, length, next_logits, greedy=greedy, vocab_W=vocab_W)
    assert places == [0, 1, 2]
    uniform = uniforms(asked.keys_B, asked.length_B, DRAFT, length)
    for row in range(3):
        token = int(asked.root_B[row])
        assert int(found.tokens_BN[row, 0]) == token
        for k in range(length):
            logits = table[k, token]
            if greedy or sampling.greedy:
                column = int(logits.argmax())
            else:
                q = probs(logits, sampling)
                column = int(draw(q[None], uniform[row, None, k])[0])
                assert torch.equal(found.draft_probs_BMW[row, k], q)
            token = column if vocab is None else vocab[column]
            assert int(found.tokens_BN[row, k + 1]) == token
    assert found.nodes_B.tolist() == [4, 3, 1]
    assert (found.draft_probs_BMW is None) == (greedy or sampling.greedy)
    assert found.is_chain


SMALL = StaticTree.of("small", [[0], [1], [3], [0, 0], [0, 2], [3, 1], [0, 2, 0], [0, 2, 1], [3, 1, 0], [0, 2, 1, 4]])


@pytest.mark.parametrize("tree", [SMALL, PUBLISHED["medusa_63"], StaticTree.of("one", [[2]])], ids=lambda t: t.name)
def test_the_plan_of_a_static_tree_gives_it_back(tree: StaticTree) -> None:
    """Level by level: the paths that follow from the plan are those of the tree, and what else it says is true of them."""
    plan = growth(tree, torch.device("cpu"))
    nodes = [(), *tree.choices]
    parents = [path for path in nodes if any(other[:-1] == path for other in tree.choices)]
    assert [nodes[i] for i in plan.inner_T.tolist()] == parents
    assert len(plan.probs_M) == nodes.index(parents[-1]) + 1
    for path, place in zip(nodes, plan.probs_M.tolist(), strict=False):
        assert place == (parents.index(path) if path in parents else 0)
    families = [[other[-1] for other in tree.choices if other[:-1] == path] for path in parents]
    assert plan.children == max(len(ranks) for ranks in families)
    assert plan.ranks == max(max(ranks) for ranks in families) + 1
    above: list[tuple[int, ...]] = [()]
    run: list[tuple[int, ...]] = []
    for depth, level in enumerate(plan.levels, 1):
        assert level.above == len(above)
        ranks = level.rank_n.tolist()
        paths = [(*above[parent], rank) for parent, rank in zip(level.parent_n.tolist(), ranks, strict=True)]
        assert paths == [path for path in tree.choices if len(path) == depth]
        for path, number in zip(paths, level.sibling_n.tolist(), strict=True):
            assert families[parents.index(path[:-1])].index(path[-1]) == number
        above = [paths[i] for i in level.inner_m.tolist()]
        assert above == [path for path in parents if len(path) == depth]
        run += above
        assert level.ancestors_mT.tolist() == [[path[: len(other)] == other for other in run] for path in above]
        assert level.ancestors_mT.shape == (len(above), len(run))
    assert len(plan.levels) == max(map(len, tree.choices))


def test_children_have_uniforms_of_their_own_however_deep_the_round() -> None:
    asked, numbers = state(Sampling(1.0)), torch.tensor([0, 5, 9])
    found = child_uniforms(asked, SMALL, numbers)
    every = uniforms(asked.keys_B, asked.length_B, DRAFT, 11 * 3)
    assert found.tolist() == [[[float(row[node * 3 + c]) for c in range(3)] for node in (0, 5, 9)] for row in every]


@pytest.mark.parametrize(("values", "word"), [((0, 3, 9), "depth 0"), ((2, 0, 9), "branching 0"), ((2, 3, 1), "total")])
def test_settings_are_checked(values: tuple[int, int, int], word: str) -> None:
    with pytest.raises(UserError, match=word):
        DynamicTree(*values)
