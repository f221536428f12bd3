"""Static trees: their checks, their tensors, and verification of a tree without a model."""

import itertools
import json
from math import exp
from pathlib import Path

import pytest
import torch

from draftsmith.decoder import trees
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.sampling import Noise, Sampling
from draftsmith.decoder.trees import PUBLISHED, DynamicTree, StaticTree, load_tree, read_origin, save_found
from draftsmith.decoder.verify import Typical, Verdict, verify
from draftsmith.errors import UserError

BUSH = StaticTree.of("bush", [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1], [0, 0, 0]])


def test_nodes_are_ordered_by_depth_and_know_their_ancestors() -> None:
    shape = BUSH.on(torch.device("cpu"))
    assert BUSH.choices == ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1))
    assert shape.parents_N.tolist() == [-1, 0, 0, 1, 1, 2, 3, 3]
    assert shape.depth_N.tolist() == [0, 1, 1, 2, 2, 2, 3, 3]
    assert shape.rank_N.tolist() == [0, 0, 1, 0, 2, 0, 0, 1]
    assert (BUSH.depth, BUSH.ranks, BUSH.levels) == (3, 3, (2, 3, 2))
    # The slow way: follow the parents.
    plain = Draft(torch.zeros(1, 8, dtype=torch.long), shape.parents_N[None], torch.tensor([8]))
    assert torch.equal(shape.ancestors_NN, plain.ancestors_BNN[0])
    assert torch.equal(shape.depth_N, plain.depth_BN[0])


def test_a_tree_can_be_cut_at_a_depth() -> None:
    assert BUSH.cut(2).choices == BUSH.choices[:5]
    assert BUSH.cut(3) is BUSH
    assert BUSH.cut(1).levels == (2,)


def test_the_published_tree_has_63_nodes_at_four_depths() -> None:
    tree = PUBLISHED["medusa_63"]
    assert (len(tree.choices), tree.levels, tree.ranks) == (63, (10, 28, 23, 2), 10)
    # mc_sim_7b_63 of FasterDecoding/Medusa, medusa/model/medusa_choices.py, in another order: digits are ranks.
    published = """0 1 2 3 4 5 6 7 8 9  00 01 02 03 04 05 06 07 08 09  10 11 12 13 14 15 16  20 21 22  30 31  40 50 60 70 80 90
        000 001 002 003 004 005 006 007 008 009  010 011 012  020 021  030 040 050 060 070  100 101  200  0000 0001"""
    assert sorted(tree.choices) == sorted(tuple(map(int, path)) for path in published.split())


def test_trees_come_from_json(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    for content in ([[1], [0], [0, 0]], {"choices": [[0], [0, 0], [1]], "nodes": 3}):
        file.write_text(json.dumps(content))
        tree = load_tree(str(file))
        assert tree == StaticTree("mine", ((0,), (1,), (0, 0)))
    assert load_tree("chain") is None
    assert load_tree("medusa_63") is PUBLISHED["medusa_63"]


def test_a_tree_may_be_as_large_as_the_limits_and_no_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_NODES", 5)
    monkeypatch.setattr(trees, "MOST_LEVELS", 3)
    file = tmp_path / "large.json"
    for content in ([[0], [1], [2], [3], [4]], [[0], [0, 0], [0, 0, 0]], [[2**31 - 1]]):
        file.write_text(json.dumps(content))
        assert len(load_tree(str(file)).choices) == len(content)
    for content in ([[0], [1], [2], [3], [4], [5]], [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"has {len(content)} nodes and {len(content[-1])} levels"):
            load_tree(str(file))
    file.write_text("[[0]" + " " * 2**21 + "]")
    assert load_tree(str(file)).choices == ((0,),)
    for content in ([[2**31]], [[0], [1.5]], [[0], 1], "x"):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match="list of paths of whole numbers"):
            load_tree(str(file))


def test_a_saved_tree_is_read_again_and_by_people(tmp_path: Path) -> None:
    file, origin = (
        tmp_path / "mine.json",
        {"head": "é" * 9, "tau": [round(1 + n / 8, 3) for n in range(40)], "best": {"t": 1}},
    )
    save_found(file, BUSH, origin)
    assert load_tree(str(file)) == StaticTree("mine", BUSH.choices)
    assert read_origin(file) == origin
    lines = file.read_text(encoding="utf-8").splitlines()
    assert "é" * 9 in lines[3]
    assert lines[:3] == ["{", f'  "choices": {json.dumps([list(path) for path in BUSH.choices])},', '  "origin": {']
    assert lines[5] == "      1.0,", "a long list takes a line for each part"
    assert lines[-3:] == ['    "best": {"t": 1}', "  }", "}"], "a short one takes one line"
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_found(file, BUSH, {"tau": float("nan")})
    for text in ('{"origin": {"a": 1}}', '{"choices": [[0]], "origin": 3}', "[[0]]", "no JSON"):
        file.write_text(text)
        assert read_origin(file) is None


@pytest.mark.parametrize(("margin", "one_line"), [("", True), (" ", False)])
def test_a_line_has_160_characters_at_most(margin: str, one_line: bool) -> None:
    value = ["x" * 156]
    assert (trees._lines(value, margin) == json.dumps(value)) == one_line


@pytest.mark.parametrize("tree", [DynamicTree(1, 3, 99), DynamicTree(3, 2, 99), DynamicTree(4, 3, 9)], ids=str)
def test_a_dynamic_tree_counts_its_most_nodes(tree: DynamicTree) -> None:
    """Level by level: as many children as `branching` of each of the `branching` best nodes."""
    nodes = 1
    for level in range(tree.depth):
        nodes += tree.branching * (tree.branching if level else 1)
    assert tree.max_nodes == min(nodes, tree.total_tokens)
    assert DynamicTree(1, 1, 2).max_nodes == 2


def test_an_unknown_tree_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="There is no tree 'medusa_64': take chain, medusa_63, or a JSON file"):
        load_tree("medusa_64")


def test_nodes_below_a_rows_limit_are_padding() -> None:
    draft = Draft.static(torch.tensor([5, 5, 5]), torch.arange(7).expand(3, -1), BUSH, torch.tensor([0, 2, 9]))
    assert draft.nodes_B.tolist() == [1, 6, 8]


V = 9


def _tree_draft(rows: int) -> tuple[Draft, torch.Tensor]:
    """The same tree of distinct children in every row, and the target's logits, which depend on the path."""
    tokens = torch.tensor([3, 1, 4, 2, 0, 6, 7, 3])
    draft = Draft.static(tokens[:1].expand(rows), tokens[1:].expand(rows, -1), BUSH, torch.full((rows,), 9))
    logits = 1.3 * torch.randn(8, V, generator=torch.Generator().manual_seed(4))
    return draft, logits.expand(rows, -1, -1)


def _typical_by_hand(draft: Draft, logits: torch.Tensor, temperature: float, rule: Typical) -> tuple[list[int], int]:
    """The rule for one row, node by node."""
    p = (logits.double() / temperature).softmax(-1)
    best: tuple[int, float, list[int]] = (0, 0.0, [0])
    for node in range(1, int(draft.nodes_B[0])):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = int(draft.parents_BN[0, at])
        score, fine = 0.0, True
        for above, below in itertools.pairwise(path):
            entropy = -sum(float(x) * float(x.log()) for x in p[above] if x > 0)
            chance = float(p[above, draft.tokens_BN[0, below]])
            fine &= chance > min(rule.epsilon, rule.delta * exp(-entropy))
            score += torch.tensor(chance).log().item()
        if fine and (len(path) - 1, score) > (best[0], best[1] if best[0] else -1e9):
            best = (len(path) - 1, score, path)
    return best[2], int(p[best[2][-1]].argmax())


@pytest.mark.parametrize("rule", [Typical(), Typical(0.3, 0.9), Typical(0.02, 0.05), Typical(1.0, 1.0)], ids=str)
def test_typical_acceptance_takes_the_longest_typical_path(rule: Typical) -> None:
    lengths = set()
    for seed in range(40):
        draft, _ = _tree_draft(1)
        logits = 2.0 * torch.randn(1, 8, V, generator=torch.Generator().manual_seed(seed))
        verdict = verify(draft, logits, Sampling(0.8), _noise(1), rule)
        path, emitted = _typical_by_hand(draft, logits[0], 0.8, rule)
        assert [n for n in verdict.path_BD[0].tolist() if n >= 0] == path
        assert (int(verdict.accepted_B), int(verdict.next_B)) == (len(path) - 1, emitted)
        lengths.add(len(path) - 1)
    assert len(lengths) > 1


def test_typical_acceptance_never_takes_padding_and_is_exact_at_temperature_0() -> None:
    draft, _ = _tree_draft(1)
    short = Draft.static(draft.tokens_BN[:, 0], draft.tokens_BN[:, 1:], BUSH, torch.tensor([1]))
    logits = torch.randn(1, 8, V, generator=torch.Generator().manual_seed(1))
    assert int(verify(short, logits, Sampling(1.0), _noise(1), Typical(0.0, 0.0)).accepted_B) == 1

    def facts(verdict: Verdict) -> list[object]:
        return [verdict.path_BD.tolist(), verdict.accepted_B.tolist(), verdict.next_B.tolist()]

    greedy = Sampling()
    assert facts(verify(draft, logits, greedy, _noise(1), Typical())) == facts(verify(draft, logits, greedy, _noise(1)))


def test_typical_thresholds_are_checked() -> None:
    with pytest.raises(UserError, match=r"epsilon is 1\.5"):
        Typical(epsilon=1.5)


def _noise(rows: int) -> Noise:
    return Noise(torch.arange(rows), torch.zeros(rows, dtype=torch.long))
