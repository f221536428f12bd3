"""The bench: a sample of mutants of the core, each held against the tests nearest to it.

Works in a copy of the checkout's last commit, on one core. A mutant that no test notices is a survivor; EQUIVALENT names those
that change nothing that can be noticed, each with its reason.
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftsmith.foreign.json import read_object
from draftsmith.machine import environment, hardware
from draftsmith.storage import write_json
from scripts.bench.mutants.mutate import Mutant, mutants
from scripts.bench.mutants.nearest import ROOT, load_libraries, survey, verdict

CORE: dict[str, tuple[str, ...]] = {
    "draftsmith/decoder/verify.py": ("tests/decoder/test_verify.py", "tests/decoder/test_verify_distributions.py"),
    "draftsmith/decoder/cache.py": ("tests/decoder/test_cache.py",),
    "draftsmith/decoder/loop.py": ("tests/decoder/test_loop.py",),
    "draftsmith/decoder/growth.py": ("tests/decoder/test_growth.py",),
    "draftsmith/decoder/sampling.py": ("tests/decoder/test_sampling.py", "tests/decoder/test_penalty.py"),
    "draftsmith/decoder/trees.py": ("tests/decoder/test_trees.py",),
    "eval/simulate/acceptance.py": ("tests/eval/simulate",),
    "heads/losses/divergences.py": ("tests/heads/losses/test_divergences.py",),
    "heads/losses/head_loss.py": ("tests/heads/losses/test_head_loss.py", "tests/heads/losses/test_spec.py"),
    "heads/layers/row_plan.py": ("tests/heads/layers/test_row_plan.py",),
    "data/packing.py": ("tests/data/test_packing.py",),
    "data/features/store.py": ("tests/data/features/test_store.py",),
    "data/conversations/masks.py": ("tests/data/conversations/test_masks.py", "tests/data/conversations/test_spans.py"),
    "data/conversations/spans.py": (
        "tests/data/conversations/test_spans.py",
        "tests/data/conversations/test_families.py",
    ),
    "data/conversations/ends.py": (
        "tests/data/conversations/test_spans.py",
        "tests/data/conversations/test_families.py",
    ),
    "data/conversations/tools.py": ("tests/data/conversations/test_families.py",),
    "train/schedule.py": ("tests/train/test_schedule.py",),
}
"""The core's files, and the tests nearest to each."""
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "draftsmith/decoder/verify.py",
        "open_B = (child_B < 0) & (node_B >= 0)",
        "open_B = (child_B < 0) & (node_B > 0)",
    ): "node 0 is the root, which is no child",
    (
        "draftsmith/decoder/verify.py",
        "return Children(node_BC.masked_fill(padding_BC, -1), token_BC, uniform_BC)",
        "return Children(node_BC.masked_fill(padding_BC, -2), token_BC, uniform_BC)",
    ): "any number below 0 is padding",
    (
        "draftsmith/decoder/cache.py",
        "target.forward(torch.zeros(1, 1, dtype=torch.long, device=target.device), past_key_values=cache)",
        "target.forward(torch.zeros(2, 1, dtype=torch.long, device=target.device), past_key_values=cache)",
    ): "two rows have the shapes of one",
    (
        "draftsmith/decoder/cache.py",
        "self.is_initialized = True",
        "self.is_initialized = False",
    ): "the buffers are there from the start, and no model asks",
    (
        "draftsmith/decoder/loop.py",
        "ids_bL = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)",
        "ids_bL = torch.tensor([[*p, *[1] * (longest - len(p))] for p in prompts], device=device)",
    ): "what stands in the padding of a prompt is read by no token that counts",
    (
        "draftsmith/decoder/growth.py",
        "return Beam(tree, root_B, limit_B, root_B[:, None], score_B1, zeros_B1 - 1, zeros_B1, nothing_B10)",
        "return Beam(tree, root_B, limit_B, root_B[:, None], score_B1, zeros_B1 - 2, zeros_B1, nothing_B10)",
    ): "any number below 0 is the root",
    (
        "heads/layers/row_plan.py",
        "place = torch.full((past + 1,), len(self.rows), device=device)",
        "place = torch.full((past + 2,), len(self.rows), device=device)",
    ): "a place more than is read",
    (
        "draftsmith/decoder/sampling.py",
        "_BLOCK = 64",
        "_BLOCK = 65",
    ): "the size of a block decides speed alone",
    (
        "draftsmith/decoder/sampling.py",
        "return torch.where(logits < 0, logits * penalty, logits / penalty)",
        "return torch.where(logits <= 0, logits * penalty, logits / penalty)",
    ): "0 is 0 either way",
    (
        "draftsmith/decoder/growth.py",
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
        'aux=torch.cat(streams, dim=-1) if streams else part["last"][:, :0],',
        'aux=torch.cat(streams, dim=1) if streams else part["last"][:, :0],',
    ): "the last of two dimensions",
    (
        "data/conversations/ends.py",
        "start += _count_forced(tokenizer, ids[start : min(end, start + 32)])",
        "start += _count_forced(tokenizer, ids[start : max(end, start + 32)])",
    ): "an empty think block is shorter than 32 tokens, and what follows an answer is none",
    (
        "data/conversations/turns.py",
        "return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)",
        "return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=True)",
    ): "the text is searched for white space and think marks alone, which the cleaning leaves as they are",
    (
        "draftsmith/decoder/cache.py",
        "skip: int = 0",
        "skip: int = 1",
    ): "the default stands only in the range of a new cache, which is replaced before anything is written",
    (
        "draftsmith/decoder/loop.py",
        "_TOKENS_PER_PASS = 1 << 15",
        "_TOKENS_PER_PASS = 2 << 15",
    ): "the limit decides memory alone",
    (
        "draftsmith/decoder/loop.py",
        "_TOKENS_PER_PASS = 1 << 15",
        "_TOKENS_PER_PASS = 1 << 16",
    ): "the limit decides memory alone",
    (
        "draftsmith/decoder/loop.py",
        "if len(self.finished) > finished:",
        "if len(self.finished) >= finished:",
    ): "a rollback to the length that a row has changes nothing; without it a round is quicker",
    (
        "draftsmith/decoder/sampling.py",
        "cdf_BV = weights_BV.cumsum(-1, dtype=torch.float64)",
        "cdf_BV = weights_BV.cumsum(1, dtype=torch.float64)",
    ): "the last of two dimensions",
    (
        "eval/simulate/acceptance.py",
        "c[step.rows, step.offset] = (node[step.rows] >= 0).double()",
        "c[step.rows, step.offset] = (node[step.rows] > 0).double()",
    ): "node 0 is the root, which is no child",
    (
        "heads/losses/divergences.py",
        "return torch.minimum(log_q_RW.exp(), teacher.p).sum(-1)",
        "return torch.minimum(log_q_RW.exp(), teacher.p).sum(1)",
    ): "the last of two dimensions",
    (
        "heads/layers/row_plan.py",
        "before_BL = torch.nn.functional.pad(document_BL[:, :-1], (1, 0), value=-2)",
        "before_BL = torch.nn.functional.pad(document_BL[:, :-1], (1, 0), value=-3)",
    ): "any number below -1 is no document and no padding",
    (
        "data/conversations/ends.py",
        "counts = range(1, len(ids) + 1)",
        "counts = range(1, len(ids) + 2)",
    ): "a slice past the end is the whole",
}
"""Mutants that nobody can notice, by file and line of code, without and with the fault: why that is so."""


def main(argv: list[str] | None = None) -> int:
    """Run the bench; exit code 1 where fewer than 95% of the mutants that can be noticed are."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="mutants, as many of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", action="append", choices=CORE, help="only mutants of this file; again for more")
    parser.add_argument("--again", type=Path, help="an earlier result: only its survivors, once tests are mended")
    parser.add_argument("--output", type=Path, default=Path("docs/results/mutants.json"))
    own = parser.parse_args(argv)
    earlier = None if own.again is None else read_object(own.again, "name a result of this bench")
    command = f"python -m scripts.bench.mutants --count {own.count} --seed {own.seed}"
    command += "".join(f" --file {file}" for file in own.file or ())
    begun = environment() | {"hardware": asdict(hardware()), "command": command}
    if earlier is not None:
        begun["command"] = f"{earlier['command'].partition(';')[0]}; then its survivors, --again"
        begun["first"] = earlier.get("first", {key: earlier[key] for key in ("commit", "counts", "score")})
        begun |= {key: earlier[key] for key in ("earlier_samples",) if key in earlier}
    copy = Path("runs/mutants").absolute()
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(copy)], check=True)
    every = {file: mutants((copy / file).read_text(encoding="utf-8")) for file in own.file or CORE}
    drawn = draw(every, own.count, own.seed) if earlier is None else survivors_of(earlier, every, copy)
    before = {} if earlier is None else earlier["counts"]
    counts = Counter({says: count for says, count in before.items() if says != "survived"})
    alive = {
        file: [one for one in some if (file, *_lines(copy, file, one)) not in EQUIVALENT]
        for file, some in drawn.items()
    }
    counts["equivalent"] += sum(map(len, drawn.values())) - sum(map(len, alive.values()))
    return _report(
        copy, alive, counts, begun | {"drawn_from": {file: len(some) for file, some in every.items()}}, own.output
    )


def draw(every: dict[str, list[Mutant]], count: int, seed: int) -> dict[str, list[Mutant]]:
    """Draw `count` mutants, as many of each file."""
    random_order, share = random.Random(seed), -(-count // len(every))
    drawn = {file: random_order.sample(some, min(share, len(some))) for file, some in every.items()}
    return {file: sorted(some, key=lambda one: one.start) for file, some in drawn.items()}


def survivors_of(earlier: dict[str, Any], every: dict[str, list[Mutant]], copy: Path) -> dict[str, list[Mutant]]:
    """Find the survivors of an earlier result; their lines may have moved, but must be there."""
    found: dict[str, list[Mutant]] = {}
    for name in earlier["survivors"]:
        file, line, change = re.fullmatch(r"([^:]+):(\d+): (.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        same = [one for one in every[file] if " -> ".join(_lines(copy, file, one)) == change]
        # Of lines that say the same, the one that has not moved.
        same = [one for one in same if one.line == int(line)] or same
        assert len(same) == 1, f"the line of {name} has changed: run the whole again"
        found.setdefault(file, []).extend(same)
    return found


def _report(
    copy: Path, drawn: dict[str, list[Mutant]], counts: Counter[str], begun: dict[str, Any], output: Path
) -> int:
    """Run the tests of every mutant, write the result and return the exit code."""
    load_libraries()
    files = [file for file, some in drawn.items() if some]
    surveys = {file: survey(copy, file, CORE[file]) for file in tqdm(files, desc="tests without a mutant", unit="file")}
    if broken := [file for file, known in surveys.items() if known is None]:
        print(f"The tests of {', '.join(broken)} fail without a mutant.", file=sys.stderr)
        return 2
    survivors = []
    pairs = [(file, one) for file in files for one in drawn[file]]
    for file, mutant in tqdm(pairs, desc="mutants", unit="mutant"):
        known = surveys[file]
        assert known is not None
        says = verdict(copy, file, mutant, CORE[file], known)
        counts[says] += 1
        if says == "survived":
            survivors.append(f"{file}:{mutant.line}: {' -> '.join(_lines(copy, file, mutant))}")
            tqdm.write(survivors[-1])
    killed, can_be = counts["killed"] + counts["too slow"], counts.total() - counts["equivalent"]
    score = killed / max(1, can_be)
    write_json(output, begun | {"counts": dict(counts), "score": score, "survivors": survivors})
    print(f"{killed} of {can_be} mutants are noticed ({score:.0%})")
    return int(score < 0.95)


def _lines(copy: Path, file: str, mutant: Mutant) -> tuple[str, str]:
    return mutant.lines((copy / file).read_text(encoding="utf-8"))
