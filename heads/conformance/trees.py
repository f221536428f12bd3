"""What a drafter that takes trees must hold, beside the checks of heads/conformance/suite.py."""

import torch

from draftsmith.eval.decode.answers import tally_generation, total
from draftsmith.eval.decode.decode import decode_batch
from draftsmith.eval.decode.draft import TargetAlone
from draftsmith.eval.decode.trees import DynamicTree, StaticTree
from draftsmith.eval.drafters.contender import make_contender
from draftsmith.heads.conformance.recorded_drafts import record_trees
from draftsmith.heads.conformance.spec import Spec
from draftsmith.heads.conformance.tools import (
    FEW,
    GREEDY,
    SAMPLED,
    drawn_from,
    figures,
    require,
    require_training_probs,
)
from draftsmith.heads.registry import find_method

_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0))


def check_trees(spec: Spec) -> None:
    """With every kind of tree that the method names, greedy answers are the target's own; of a static tree the simulated
    rounds are the decoded ones."""
    method, requests = find_method(spec.method), spec.requests[:16]
    alone = decode_batch(spec.verifier, TargetAlone(), requests, GREEDY).generations
    for kind in sorted(method.trees):
        depth, drawn = min(2, spec.length), kind == "drawn"
        tree = DynamicTree(depth, 2, 5) if kind == "dynamic" else StaticTree.of("small", _TREE).cut(depth)
        contender = make_contender("", spec.deployed, depth, depth, tree=tree, drawn=drawn)
        try:
            drafter = contender.make(depth)
        except TypeError as error:
            raise AssertionError(f"The method names {kind} trees, but its drafter takes none ({error}).") from error
        found = decode_batch(spec.verifier, drafter, requests, GREEDY, rows=5).generations
        wrong = sum(a.output_ids != b.output_ids for a, b in zip(alone, found, strict=True))
        require(not wrong, f"{wrong} of {len(alone)} greedy answers with a {kind} tree are not the target's alone")
        if contender.simulate is not None:
            decoded = total([tally_generation(g, depth) for g in found], depth)
            simulated = contender.simulate(spec.verifier, found, GREEDY, depth).tallies
            same = torch.allclose(figures(total([t[-1] for t in simulated], depth)), figures(decoded), atol=1e-6)
            require(same, f"simulated and decoded rounds differ with a {kind} tree")


def check_drawn_trees(spec: Spec) -> None:
    """Above temperature 0 the children of a drawn tree's node are drawn, in their order and without replacement, from the
    distribution that the training pass has for the text and the node's path; a dynamic tree drafts there too."""
    trees, depth = find_method(spec.method).trees, min(2, spec.length)
    if "dynamic" in trees:
        dynamic = make_contender("", spec.deployed, depth, depth, tree=DynamicTree(depth, 2, 5), drawn=False)
        decode_batch(spec.verifier, dynamic.make(depth), spec.requests[:4], SAMPLED, rows=2)
    if "drawn" not in trees:
        return
    tree = StaticTree.of("small", _TREE).cut(depth)
    drafter = make_contender("", spec.deployed, depth, depth, tree=tree, drawn=True).make(depth)
    found = record_trees(spec.verifier, drafter, spec.requests, SAMPLED, rows=8)
    require(len(found) >= FEW, f"only {len(found)} drawn trees were drafted")
    draws = [draw for tree in found for draw in tree.draws()]
    require(drawn_from(draws), "the nodes of drawn trees are not drawn from the distributions they name")
    require_training_probs(spec, [branch for tree in found[: 3 * FEW] for branch in tree.branches()], SAMPLED)
