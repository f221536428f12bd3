"""The bench: a sample of mutants of the core, each held against the tests nearest to it.

Works in a copy of the checkout's last commit, on one core. A mutant that no test notices is a survivor; EQUIVALENT names those
that change nothing that can be noticed, each with its reason.
"""

import argparse
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from draftsmith.eval.measure.machine import environment
from draftsmith.files import write_json
from scripts.bench.mutants.mutate import Mutant, mutants
from scripts.bench.mutants.nearest import ROOT, load_libraries, survey, verdict

CORE: dict[str, tuple[str, ...]] = {
    "eval/decode/verify.py": ("tests/eval/decode/test_verify.py", "tests/eval/decode/test_verify_distributions.py"),
    "eval/decode/cache.py": ("tests/eval/decode/test_cache.py",),
    "eval/decode/loop.py": ("tests/eval/decode/test_loop.py",),
    "eval/decode/growth.py": ("tests/eval/decode/test_growth.py",),
    "eval/decode/sampling.py": ("tests/eval/decode/test_sampling.py", "tests/eval/decode/test_penalty.py"),
    "eval/decode/trees.py": ("tests/eval/decode/test_trees.py",),
    "eval/simulate/acceptance.py": ("tests/eval/simulate",),
    "heads/losses/divergences.py": ("tests/heads/losses/test_divergences.py",),
    "heads/losses/head_loss.py": ("tests/heads/losses/test_head_loss.py", "tests/heads/losses/test_spec.py"),
    "heads/layers/row_plan.py": ("tests/heads/layers/test_row_plan.py",),
    "data/packing.py": ("tests/data/test_packing.py",),
    "data/features/store.py": ("tests/data/features/test_store.py",),
    "data/conversations/masks.py": ("tests/data/conversations/test_masks.py",),
    "data/conversations/spans.py": ("tests/data/conversations/test_spans.py",),
    "train/schedule.py": ("tests/train/test_schedule.py",),
}
"""The core's files, and the tests nearest to each."""
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "eval/decode/verify.py",
        "open_B = (child_B < 0) & (node_B >= 0)",
        "open_B = (child_B < 0) & (node_B > 0)",
    ): "node 0 is the root, which is no child",
    (
        "eval/decode/verify.py",
        "return Children(node_BC.masked_fill(padding_BC, -1), token_BC, uniform_BC)",
        "return Children(node_BC.masked_fill(padding_BC, -2), token_BC, uniform_BC)",
    ): "any number below 0 is padding",
    (
        "eval/decode/cache.py",
        "target.forward(torch.zeros(1, 1, dtype=torch.long, device=target.device), past_key_values=cache)",
        "target.forward(torch.zeros(2, 1, dtype=torch.long, device=target.device), past_key_values=cache)",
    ): "two rows have the shapes of one",
    (
        "eval/decode/cache.py",
        "self.is_initialized = True",
        "self.is_initialized = False",
    ): "the buffers are there from the start, and no model asks",
    (
        "eval/decode/loop.py",
        "ids_bL = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)",
        "ids_bL = torch.tensor([[*p, *[1] * (longest - len(p))] for p in prompts], device=device)",
    ): "what stands in the padding of a prompt is read by no token that counts",
    (
        "eval/decode/growth.py",
        "return Beam(tree, root_B, limit_B, root_B[:, None], score_B1, zeros_B1 - 1, zeros_B1, nothing_B10)",
        "return Beam(tree, root_B, limit_B, root_B[:, None], score_B1, zeros_B1 - 2, zeros_B1, nothing_B10)",
    ): "any number below 0 is the root",
    (
        "heads/layers/row_plan.py",
        "place = torch.full((past + 1,), len(self.rows), device=device)",
        "place = torch.full((past + 2,), len(self.rows), device=device)",
    ): "a place more than is read",
    (
        "eval/decode/sampling.py",
        "_BLOCK = 64",
        "_BLOCK = 65",
    ): "the size of a block decides speed alone",
    (
        "eval/decode/sampling.py",
        "return torch.where(logits < 0, logits * penalty, logits / penalty)",
        "return torch.where(logits <= 0, logits * penalty, logits / penalty)",
    ): "0 is 0 either way",
    (
        "eval/decode/growth.py",
        "uniform_BN = uniforms(state.keys_B, state.length_B, DRAFT, (len(tree.choices) + 1) * children)",
        "uniform_BN = uniforms(state.keys_B, state.length_B, DRAFT, (len(tree.choices) + 2) * children)",
    ): "each number is a hash of its own index, and those past the last node are not read",
    (
        "eval/simulate/acceptance.py",
        "np.add.at(visits_ST, (index_S, end_S), np.where(left_S > 0, arrive_S, 0.0))",
        "np.add.at(visits_ST, (index_S, end_S), np.where(left_S >= 0, arrive_S, 0.0))",
    ): "nothing arrives where no token is left",
    (
        "eval/simulate/acceptance.py",
        "c_STK = np.zeros((len(answers), max(int(tokens_S.max()), 1), num_speculative_tokens))",
        "c_STK = np.zeros((len(answers), max(int(tokens_S.max()), 2), num_speculative_tokens))",
    ): "places past an answer's end are not read",
    (
        "data/packing.py",
        "at = bisect_left(space, (lengths[sample], -1))",
        "at = bisect_left(space, (lengths[sample], -2))",
    ): "both are below every row's number",
    (
        "data/features/store.py",
        "SHARD_BYTES = 512 * 2**20",
        "SHARD_BYTES = 512 + 2**20",
    ): "a default that recipes may change: a store is right with shards of any size",
    (
        "data/features/store.py",
        'aux=torch.cat(streams, dim=-1) if streams else part["last"][:, :0],',
        'aux=torch.cat(streams, dim=1) if streams else part["last"][:, :0],',
    ): "the last of two dimensions",
    (
        "data/conversations/spans.py",
        "return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)",
        "return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=True)",
    ): "the text is searched for white space and think marks alone, which the cleaning leaves as they are",
}
"""Mutants that nobody can notice, by file and line of code, without and with the fault: why that is so."""


def main(argv: list[str] | None = None) -> int:
    """Run the bench; exit code 1 where fewer than 95% of the mutants that can be noticed are."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="mutants, as many of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", action="append", choices=CORE, help="only mutants of this file; again for more")
    parser.add_argument("--output", type=Path, default=Path("docs/results/mutants.json"))
    own = parser.parse_args(argv)
    command = f"python -m scripts.bench.mutants --count {own.count} --seed {own.seed}"
    command += "".join(f" --file {file}" for file in own.file or ())
    started = environment() | {"command": command}
    copy = Path("runs/mutants").absolute()
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(copy)], check=True)
    load_libraries()
    files = own.file or list(CORE)
    surveys = {file: survey(copy, file, CORE[file]) for file in tqdm(files, desc="tests without a mutant", unit="file")}
    if broken := [file for file, known in surveys.items() if known is None]:
        print(f"The tests of {', '.join(broken)} fail without a mutant.", file=sys.stderr)
        return 2
    drawn: list[tuple[str, Mutant]] = []
    draw, share = random.Random(own.seed), -(-own.count // len(files))
    of_file = {file: mutants((copy / file).read_text(encoding="utf-8")) for file in files}
    for file, every in of_file.items():
        drawn += [(file, one) for one in sorted(draw.sample(every, min(share, len(every))), key=lambda one: one.start)]
    counts: Counter[str] = Counter()
    survivors = []
    for file, mutant in tqdm(drawn, desc="mutants", unit="mutant"):
        lines, known = mutant.lines((copy / file).read_text(encoding="utf-8")), surveys[file]
        assert known is not None
        says = "equivalent" if (file, *lines) in EQUIVALENT else verdict(copy, file, mutant, CORE[file], known)
        counts[says] += 1
        if says == "survived":
            survivors.append(f"{file}:{mutant.line}: {lines[0]} -> {lines[1]}")
            tqdm.write(survivors[-1])
    killed = counts["killed"] + counts["too slow"]
    score = killed / max(1, len(drawn) - counts["equivalent"])
    figures = {
        "drawn_from": {file: len(every) for file, every in of_file.items()},
        "counts": dict(counts),
        "score": score,
        "survivors": survivors,
    }
    write_json(own.output, started | figures)
    print(f"{killed} of {len(drawn) - counts['equivalent']} mutants are noticed ({score:.0%})")
    return int(score < 0.95)
