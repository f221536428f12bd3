"""Trees that follow the draft's own probabilities: simulated in one pass for every size and depth, and decoded with each."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import PUBLISHED, DynamicTree
from draftsmith.errors import UserError
from draftsmith.eval.conformance.recorded_drafts import figures
from draftsmith.eval.conformance.spec import Spec, tiny_target
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate import texts as simulated_texts
from draftsmith.heads.dflash import DFlashOptions
from draftsmith.heads.dflash2 import DFlash2Options

pytestmark = pytest.mark.full
MEDUSA_63 = PUBLISHED["medusa_63"]
BUDGETS = (2, 8, 40)
DEPTH = 5


@cache
def spec(method: str) -> Spec:
    block: Any = {"block_size": DEPTH + 1, "num_layers": 1, "mask_token_id": 0, "anchors": 6}
    pairs: Any = {"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 5}
    options = DFlashOptions([1, 2], 48, **block) if method == "dflash" else DFlash2Options([1, 2], 48, **block, **pairs)
    return Spec(method, options, tiny_target(), torch.arange(0, 96, 2), num_speculative_tokens=DEPTH)


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
@pytest.mark.parametrize("rule", ["best_first", "accum_logp"])
@pytest.mark.parametrize("sampling", [Sampling(), pytest.param(Sampling(1.0), marks=pytest.mark.slow)], ids=str)
def test_one_simulation_is_exact_for_every_size_and_depth(
    method: str, rule: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds, accepted tokens by position and drafted nodes are those of decoding, at any temperature: no node is drawn."""
    monkeypatch.setattr(simulated_texts, "_CHUNK_CANDIDATES", 2000)  # some chunks, the last one shorter
    head, target = spec(method).deployed, spec(method).verifier
    for budget, depth in [*((budget, DEPTH) for budget in BUDGETS), (8, 2)]:
        system = head_system("", head, DEPTH, DEPTH, tree=DynamicTree(DEPTH, 4, budget, rule), budgets=BUDGETS)
        found = decode_batch(target, system.make(depth), spec(method).requests, sampling, rows=7).generations
        assert system.simulate is not None
        simulated = system.simulate(target, found, sampling, DEPTH)
        decoded = figures(total((tally_generation(g, depth) for g in found), depth))
        ours = figures(total((by_k[depth - 1] for by_k in simulated.tallies), depth))
        assert torch.allclose(ours, decoded, atol=1e-6)
        if depth == DEPTH:
            ours = figures(total((one[BUDGETS.index(budget)] for one in simulated.by_budget), depth))
            assert torch.allclose(ours, decoded, atol=1e-6)
            assert system.budgets == BUDGETS


def test_sizes_are_those_asked_for_and_the_trees_own() -> None:
    tree = DynamicTree(DEPTH, 4, 40, "best_first")
    assert head_system("", spec("dflash").deployed, DEPTH, DEPTH, tree=tree).budgets == (8, 16, 32, 40)
    assert head_system("", spec("dflash").deployed, DEPTH, DEPTH, tree=tree, budgets=[64, 9]).budgets == (9, 40, 64)


def test_answers_of_one_token_have_no_rounds() -> None:
    """All those of a pass, as the shortest answers share one."""
    head, target = spec("dflash").deployed, spec("dflash").verifier
    tree = DynamicTree(DEPTH, 4, 8, "best_first")
    system = head_system("", head, DEPTH, DEPTH, tree=tree)
    asked = [replace(request, max_new_tokens=1) for request in spec("dflash").requests[:8]]
    found = decode_batch(target, TargetAlone(), asked, Sampling()).generations
    assert system.simulate is not None
    assert all(one.rounds == 0 for by_k in system.simulate(target, found, Sampling(), DEPTH).tallies for one in by_k)


@pytest.mark.parametrize("tree", [None, MEDUSA_63, DynamicTree(DEPTH, 4, 8, "best_first")], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_whose_logits_are_no_numbers_has_no_tau(tree: Any, temperature: float) -> None:
    head, target = deepcopy(spec("dflash").deployed), spec("dflash").verifier
    head.norm.weight.data[0] = torch.nan
    system = head_system("", head, DEPTH, DEPTH, tree=tree)
    found = decode_batch(target, TargetAlone(), spec("dflash").requests[:4], Sampling(temperature)).generations
    assert system.simulate is not None
    with pytest.raises(
        UserError, match=r"logits are no numbers \(NaN or infinite\): its weights are damaged or it overflows"
    ):
        system.simulate(target, found, Sampling(temperature), DEPTH)
