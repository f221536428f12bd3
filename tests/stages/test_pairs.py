"""A table of small runs, from answers to the export, in which every pair of features meets: method, loss, tree, precision, source of
hidden states and optimizer. Each run is decoded and simulated, and both must agree. What is new need not meet everything: a method
needs one row, a loss none, and what stands in one row meets what that row has."""

import json
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.cli.main import main
from draftsmith.eval.results.result import read_result
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.heads.losses.divergences import LOSSES
from draftsmith.heads.registry import methods
from tests.train.runs import HEADS
from tests.workplace import make_workplace, options

FEATURES = ("method", "loss", "tree", "precision", "source", "optimizer")
TABLE = """
    dflash       hard_ce     chain    bf16  online  muon
    dflash       jsd         bush     bf16  online  adamw
    dflash       kl          chain    bf16  online  muon
    dflash       tv          chain    no    store   adamw
    dflash2      argmax_ce   chain    bf16  online  adamw
    domino       hard_ce     chain    bf16  store   adamw
    draft_model  hard_ce     chain    bf16  online  adamw
    draft_model  jsd         chain    no    online  muon
    draft_model  lk_alpha    chain    no    online  muon
    draft_model  soft_ce     chain    bf16  store   adamw
    dspark       hard_ce     chain    bf16  store   muon
    dspark       lk_hybrid   chain    no    online  adamw
    dspark       reverse_kl  chain    bf16  online  adamw
    dspark       soft_ce     chain    no    store   adamw
    eagle1       hard_ce     chain    no    store   adamw
    eagle1       jsd         dynamic  no    store   adamw
    eagle1       kl          dynamic  no    store   muon
    eagle1       lk_alpha    dynamic  no    online  muon
    eagle1       reverse_kl  dynamic  no    store   muon
    eagle1       soft_ce     bush     bf16  online  muon
    eagle1       tv          dynamic  bf16  online  muon
    eagle3       hard_ce     dynamic  no    online  adamw
    eagle3       jsd         bush     no    online  muon
    eagle3       lk_alpha    chain    no    store   adamw
    eagle3       lk_hybrid   dynamic  bf16  store   muon
    eagle3       soft_ce     dynamic  no    store   muon
    hydra        hard_ce     bush     no    store   adamw
    hydra        kl          chain    bf16  online  adamw
    hydra        lk_hybrid   bush     no    online  adamw
    hydra        reverse_kl  chain    bf16  store   muon
    jetspec      kl          bush     bf16  online  muon
    medusa       hard_ce     chain    no    online  muon
    medusa       jsd         chain    no    store   adamw
    medusa       kl          bush     no    store   adamw
    medusa       tv          bush     bf16  online  muon
    medusa2      hard_ce     bush     bf16  online  adamw
    medusa2      kl          bush     no    online  muon
    medusa2      lk_alpha    chain    no    store   muon
    medusa2      reverse_kl  bush     no    online  adamw
    mtp          hard_ce     dynamic  bf16  online  muon
    peagle       hard_ce     chain    no    online  muon
    peagle       jsd         chain    no    online  adamw
    peagle       lk_alpha    bush     bf16  online  adamw
    peagle       soft_ce     chain    no    store   muon
    xpress       tv          chain    bf16  online  muon
"""
RUNS = [dict(zip(FEATURES, line.split(), strict=True)) for line in TABLE.strip().splitlines()]
FAMILIES = {
    "kl": "forward",
    "soft_ce": "forward",
    "jsd": "both ways",
    "reverse_kl": "both ways",
    "hard_ce": "label",
    "argmax_ce": "label",
}
"""What a loss compares; the others are about acceptance. A method meets one loss of each family, everything else meets all."""
TREES = {
    "eagle1": "chain bush dynamic",
    "eagle3": "chain bush dynamic",
    "mtp": "chain bush dynamic",
    **dict.fromkeys(("dflash2", "domino", "draft_model", "dspark", "xpress"), "chain"),
}
"""What a method drafts; the others chains and bushes."""
BUSH = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def pairs(run: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
    """Return the pairs of features that meet in a run."""
    family = ("family", FAMILIES.get(run["loss"], "acceptance"))
    found = set(combinations(sorted(run.items()), 2)) - {(("loss", run["loss"]), ("method", run["method"]))}
    return found | {(family, ("method", run["method"]))}


def test_every_pair_of_features_meets_in_a_run() -> None:
    assert {run["method"] for run in RUNS} == set(methods())
    assert {run["loss"] for run in RUNS} <= set(LOSSES)
    assert all(run["tree"] in TREES.get(run["method"], "chain bush").split() for run in RUNS)
    often = [{name for name, count in Counter(run[key] for run in RUNS).items() if count > 1} for key in FEATURES]
    possible = set()
    for method, loss, *rest in product(*often[:2], *often[3:]):
        for tree in TREES.get(method, "chain bush").split():
            possible |= pairs(dict(zip(FEATURES, (method, loss, tree, *rest), strict=True)))
    assert set().union(*map(pairs, RUNS)) >= possible


@pytest.fixture(name="workplace", scope="module")
def _workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace, and a run `data` with answers and the hidden states that every head reads."""
    torch.set_num_threads(1)
    folder = make_workplace(tmp_path_factory.mktemp("pairs"))
    (folder / "bush.json").write_text(json.dumps(BUSH))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["features"]["layer_ids"] = recipe.pop("head")["layer_ids"]
    recipe["data"] |= {"limit": 24, "heldout": 6}
    recipe["train"] |= {"max_steps": 4, "evaluations": 1}
    recipe["evaluate"] |= {"repeats": 1, "per_slice": 1, "max_new_tokens": 10, "generate": False, "temperatures": [0.0]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["extract", *options(folder, folder / "data"), "--head.layer_ids", "[2,4,6]"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(run.values()))
def test_a_run(run: dict[str, str], workplace: Path, tmp_path: Path) -> None:
    tree = {
        "bush": {"tree": str(workplace / "bush.json")},
        "dynamic": {"tree": "dynamic", "depth": 3, "total_tokens": 8},
    }
    keys = {f"head.{key}": value for key, value in HEADS[run["method"]].items()}
    keys |= {"method": run["method"], "train.loss.kind": run["loss"], "train.precision": run["precision"]}
    keys |= {"features.source": run["source"], "train.optimizer": run["optimizer"], "data_dir": str(workplace / "data")}
    keys["evaluate.drafts"] = [tree.get(run["tree"], {"tree": "chain"})]
    words = [
        word
        for key, value in keys.items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
    assert main(["run", *options(workplace, tmp_path), *words]) == 0
    (drafter,) = read_result(tmp_path / "evaluation" / "t0" / "result.json").drafters.values()
    measured = drafter.overall
    assert measured.lossless is not None
    assert measured.lossless.equal == measured.lossless.checked == 2
    assert (measured.tau or 0) >= 1
    if run["tree"] != "dynamic":
        assert measured.tau == pytest.approx(measured.tau_simulated, abs=1e-9)
    assert bool(list((tmp_path / "export").glob("*/README.md"))) == bool(layouts_of(run["method"]))
