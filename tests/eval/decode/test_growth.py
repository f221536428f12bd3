"""EAGLE-2's dynamic trees, held against EAGLE's own code and against a slow rule."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.decode.answers import Request
from draftsmith.eval.decode.decode import decode_batch
from draftsmith.eval.decode.growth import start_beam
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.decode.trees import DynamicTree
from draftsmith.heads.eagle.drafter import EagleDrafter
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.target.target import load_target

pytestmark = pytest.mark.full

FIXTURE = Path(__file__).resolve().parents[3].parent / "shared" / "fixtures" / "eagle_dynamic_tree"


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


@pytest.mark.parametrize("limits", [(4, 4), (9, 2), (1, 3)], ids=str)
@pytest.mark.parametrize(
    "tree", [DynamicTree(4, 3, 10), DynamicTree(4, 2, 60), DynamicTree(1, 3, 3)], ids=lambda t: t.name
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
    for _ in range(tree.depth):
        logits = torch.stack([torch.stack([probs(row, path) for path in paths[row]]) for row in range(2)])
        beam = beam.extend(logits, lambda ids: ids + 10)
        paths = [
            [(*paths[row][parent], token - 10) for parent, token in zip(parents, tokens, strict=True)]
            for row, (parents, tokens) in enumerate(zip(beam.parent_Bm.tolist(), beam.tokens_Bm.tolist(), strict=True))
        ]
    draft = beam.draft()
    for row in range(2):
        found: list[tuple[int, ...]] = [()]
        for node in range(1, int(draft.count_B[row])):
            parent = int(draft.parents_BN[row, node])
            assert parent < node
            found.append((*found[parent], int(draft.tokens_BN[row, node]) - 10))
        assert set(found[1:]) == slow_tree(draft_probs[row], tree, limits[row])
        assert len(found) == len(set(found))


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


@pytest.mark.parametrize(("values", "word"), [((0, 3, 9), "depth 0"), ((2, 0, 9), "branching 0"), ((2, 3, 1), "total")])
def test_settings_are_checked(values: tuple[int, int, int], word: str) -> None:
    with pytest.raises(UserError, match=word):
        DynamicTree(*values)
