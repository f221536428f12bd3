"""Compare the rules of trees that grow, at every size:
python -m scripts.bench.trees --target T --conversations FOLDER --prompts FILE --output docs/results/trees.json

Trains a JetSpec head on the conversations' own answers for some minutes (or takes the one of --head, a head's folder or a run's), lets
the target alone answer the prompts, and simulates each rule on these, from one pass for all sizes. Intervals are over prompts, those
of differences over the same prompts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.cli.main import main as draftsmith_main
from draftsmith.decoder.answers import Tally
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree
from draftsmith.errors import UserError
from draftsmith.eval.results.intervals import bootstrap_tau
from draftsmith.eval.simulate.answers import answer_alone
from draftsmith.eval.simulate.texts import head_simulator, simulate_together
from draftsmith.foreign.records import Journal
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.registry import find_method
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.drafters import head_digest
from draftsmith.stages.evaluation import prompts_of
from draftsmith.stages.session import Session
from scripts.bench.commands import facts_of, keep

BUDGETS = (8, 16, 32, 64, 128, 256)
OURS, OTHERS = "best_first", ("accum_logp", "dynamic")
DEPTH = BRANCHING = 7
TRAINING = {
    "data.limit": 800,
    "data.heldout": 40,
    "answers.regenerate": "false",
    "head.layer_ids": [2, 4, 6],
    "head.anchors": 24,
    "head.mask_token_id": "null",
    "train.epochs": 3,
    "train.evaluations": 1,
    "evaluate.max_new_tokens": 64,
}


def told(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Return tau and its interval over prompts."""
    pairs = [(tally.tokens, tally.rounds) for tally in tallies]
    return {"tau": sum(n for n, _ in pairs) / sum(r for _, r in pairs), "interval": bootstrap_tau(pairs)}


def compared(ours: Sequence[Tally], theirs: Sequence[Tally]) -> dict[str, Any]:
    """Return the difference of tau and its interval, both on the same prompts."""
    after, before = ([(tally.tokens, tally.rounds) for tally in side] for side in (ours, theirs))
    return {"difference": told(ours)["tau"] - told(theirs)["tau"], "interval": bootstrap_tau(after, before)}


def measure(session: Session, temperature: float) -> dict[str, Any]:
    """Return what every rule gets accepted at one temperature, by size."""
    target, sampling = session.target, Sampling(temperature)
    head = load_head(session.head_folder, target, warn=session.warn).to(target.dtype)
    answers = answer_alone(target, prompts_of(session, target).repeat(0), sampling, Journal())
    rules = (OURS, *OTHERS)
    depth = head.clamp_draft_length(DEPTH)
    trees = [DynamicTree(depth, BRANCHING, max(BUDGETS), rule) for rule in rules]
    if "best_first" not in find_method(head.method).trees_of(head.options):
        raise UserError(
            f"--head {session.head_folder}: {head.method} heads, or this one, draft no such trees: name another."
        )
    simulators = [head_simulator(head), *(head_simulator(head, tree=tree, budgets=BUDGETS) for tree in trees)]
    chain, *grown = simulate_together(target, answers, sampling, [(one, depth) for one in simulators])
    by_rule = {rule: [*zip(*one.by_budget, strict=True)] for rule, one in zip(rules, grown, strict=True)}
    return {
        "answers": len(answers),
        "tokens": sum(len(answer.output_ids) - 1 for answer in answers),
        "chain": told([by_k[-1] for by_k in chain.tallies]),
        "rules": {
            rule: {str(n): told(tallies) for n, tallies in zip(BUDGETS, of, strict=True)}
            for rule, of in by_rule.items()
        },
        "differences": {
            rule: {str(n): compared(a, b) for n, a, b in zip(BUDGETS, by_rule[OURS], by_rule[rule], strict=True)}
            for rule in OTHERS
        },
    }


def main(argv: list[str]) -> int:
    """Run the bench; return 0, or what the training returned."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.trees", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/trees"))
    parser.add_argument("--output", type=Path)
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    # The tiny recipe of JetSpec, for another target.
    sources = json.dumps([str(path) for path in sorted(own.conversations.glob("*.jsonl"))])
    keys = {
        "name": "trees",
        "output_dir": own.folder / "run",
        "data_dir": own.folder / "data",
        "target.path": own.target,
    }
    keys |= {"data.sources": sources, "evaluate.prompts": json.dumps([str(own.prompts)]), **TRAINING}
    words = ["--recipe", "recipes/jetspec/tiny.yaml"]
    words += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    if own.head is None and (failed := draftsmith_main(["train", *words])):
        return failed
    session = Session(parse_recipe(words), head=own.head)
    facts = facts_of("trees", argv) | {"depth": DEPTH, "branching": BRANCHING, "head": head_digest(session.head_folder)}
    if own.head is None:
        facts["training"] = {key: str(value) for key, value in TRAINING.items()}
    facts["temperatures"] = {f"{temperature:g}": measure(session, temperature) for temperature in (0.0, 1.0)}
    return keep(own.output, facts)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
