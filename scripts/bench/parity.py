"""Let known-bad engines answer the prompts of parity bundles, and write down what `draftsmith verify` says of each.

    python -m scripts.bench.parity --seeds 11 12 --output docs/results/parity/known-bad.json

Targets and heads are new ones of every seed: small Llamas of random weights, heads trained on their answers for a few steps. A bundle foretells
what faults give from one pass over each text; here our decoder really decodes with the spoiled head (`replayed`: where the fault is in
what the target hands over, the head drafts along the text instead).
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.conformance.spec import Spec, tiny_target
from draftsmith.eval.engines.agreement import EngineRound, trace_ours
from draftsmith.eval.engines.llama_cpp import UNSEEN
from draftsmith.eval.parity.bundle import Bundle, make_bundle
from draftsmith.eval.parity.diagnose import (
    BONUS,
    ENDS,
    OTHER_MODEL,
    QUANTIZED,
    RIGHT,
    SILENT,
    STATES,
    TEMPLATE,
    WEIGHTS,
    Seen,
    Verdict,
    diagnose,
    not_told,
)
from draftsmith.eval.parity.faults import FAULTS, spoiled
from draftsmith.eval.parity.replay import Engine, read_text, replay
from draftsmith.heads.registry import find_method
from draftsmith.progress import say
from draftsmith.storage import write_json
from draftsmith.target.target import Target
from scripts.bench.commands import facts_of

_BLOCK = {"layer_ids": [1, 2], "block_size": 5, "num_layers": 1, "mask_token_id": 0, "anchors": 6}
_SELECTOR = {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6}
METHODS: dict[str, tuple[dict[str, Any], bool, int]] = {
    "eagle3": ({"layer_ids": [0, 1, 2], "ttt_steps": 4, "draft_vocab_size": 64, "sliding_window": 9}, True, 4),
    "peagle": ({"layer_ids": [0, 1, 2], "draft_vocab_size": 64, "depths": 4, "num_hidden_layers": 2}, True, 4),
    "eagle1": ({"aligned_passes": 3}, False, 4),
    "mtp": ({}, False, 4),
    "medusa": ({"num_heads": 4}, False, 3),
    "hydra": ({"num_heads": 4, "prefix_attention": True}, False, 3),
    "dflash": (_BLOCK | {"layer_ids": [0, 1]}, False, 4),
    "dflash2": (_BLOCK | _SELECTOR | {"sliding_window": 9}, False, 3),
    "jetspec": (_BLOCK, False, 4),
    "dspark": (_BLOCK | {"draft_vocab_size": 64, "markov_rank": 4}, True, 4),
    "domino": (_BLOCK | {"gru_hidden_dim": 6, "emb_dim": 4}, False, 4),
    "xpress": (_BLOCK | {"xpress_rank": 6, "xpress_mlp_hidden": 10}, False, 4),
    "draft_model": ({"num_hidden_layers": 1, "hidden_size": 32}, False, 4),
}
"""By method the options of its head, whether it has a draft vocabulary, and the tokens that it drafts."""
LEVELS = ("drafted tokens", "rounds", "sums")
"""What an engine tells of its drafts."""


@dataclass(frozen=True)
class Case:
    """A method's target, head and bundle of one seed."""

    method: str
    seed: int
    target: Target
    head: Any
    bundle: Bundle


@dataclass(frozen=True)
class Row:
    """What was said of an engine. named: whether the fault is among the causes, None where nothing that the engine tells shows it.
    causes: all that give the same."""

    method: str
    seed: int
    fault: str
    tells: str
    replayed: bool
    named: bool | None
    stage: str
    difference: str
    causes: tuple[str, ...]


def make_case(method: str, seed: int) -> Case:
    """Train a head on a new target, and make its bundle."""
    options, narrow, tokens = METHODS[method]
    target = tiny_target(seed, max_position_embeddings=512)
    generator = torch.Generator().manual_seed(seed)
    vocab = (3 + torch.randperm(target.vocab_size - 3, generator=generator)[:64]).sort().values if narrow else None
    spec = Spec(method, find_method(method).options_class(**options), target, vocab, tokens, steps=60)
    head = spec.deployed
    # Some answers end: a token that the target likes to say is its end token from here on.
    said = [int(token) for sample in spec.samples for token in sample.ids[-6:]]
    target.model.generation_config.eos_token_id = [max(set(said), key=said.count)]
    bundle = make_bundle(spec.verifier, head, spec.requests[10:], spec.length, {}, "none")
    assert bundle is not None
    return Case(method, seed, spec.verifier, head, bundle)


def engines_of(case: Case) -> Iterator[tuple[str, bool, list[Seen]]]:
    """Yield every known-bad engine that the head can have: its fault, whether it was replayed, and what it gives."""
    bundle, target, head = case.bundle, case.target, case.head
    tokens = bundle.num_speculative_tokens
    right = _decoded(case, target, Engine.of(head, tokens))
    yield RIGHT, False, right
    for fault in FAULTS:
        if fault.name in (*bundle.faults, *bundle.unseen):
            engine = spoiled(fault, head, tokens, target)
            assert engine is not None
            fed = engine.layer_ids != head.reads.layer_ids and max(engine.layer_ids) == target.num_layers
            replayed = fed or engine.last is not Engine.last
            if not replayed:
                yield fault.name, False, _decoded(case, target, engine)
                continue
            texts = [read_text(target, p.prompt_ids, p.text_ids, p.answer_tokens) for p in bundle.prompts]
            pairs = zip(bundle.prompts, replay(engine, texts), strict=True)
            yield fault.name, True, [Seen(prompt.id, prompt.answer_ids, own.rounds) for prompt, own in pairs]
    counted = [tuple(EngineRound(r.drafted, r.accepted + 1) for r in one.rounds or ()) for one in right]
    yield BONUS, False, [replace(one, rounds=rounds) for one, rounds in zip(right, counted, strict=True)]
    yield SILENT, False, [replace(one, rounds=()) for one in right]
    longer = [len(prompt.prompt_ids) + 3 for prompt in bundle.prompts]
    yield TEMPLATE, False, [replace(one, prompt_tokens=n) for one, n in zip(right, longer, strict=True)]
    yield ENDS, False, _decoded(case, target, Engine.of(head, tokens), ignore_eos=True)
    yield QUANTIZED, False, _decoded(case, _quantized(target), Engine.of(head, tokens))
    other = tiny_target(case.seed + 1000, max_position_embeddings=512)
    other.model.generation_config.eos_token_id = list(target.eos_ids)
    yield OTHER_MODEL, False, _decoded(case, other, Engine.of(head, tokens))
    engine = Engine.of(head, tokens)
    if (held := getattr(engine.head, "embed_tokens", None)) is not None:
        generator = torch.Generator().manual_seed(case.seed)
        drawn = torch.randn(held.weight.shape, generator=generator) * held.weight.std()
        engine.head.embed_tokens = torch.nn.Embedding.from_pretrained(drawn)
        yield WEIGHTS, False, _decoded(case, target, engine)


def _decoded(case: Case, target: Target, engine: Any, *, ignore_eos: bool = False) -> list[Seen]:
    """Answer the prompts with our decoder as an engine does that drafts and accepts past the end of an answer."""
    more = engine.K + 1
    wanted = [prompt.request for prompt in case.bundle.prompts]
    longer = [replace(r, ignore_eos=True, max_new_tokens=r.max_new_tokens + more) for r in wanted]
    seen = []
    for request, answer in zip(wanted, trace_ours(target, engine, longer, Sampling(0.0)), strict=True):
        text = answer.output_ids[: request.max_new_tokens]
        ends = () if ignore_eos else target.eos_ids
        text = text[: next((n for n, token in enumerate(text, 1) if token in ends), len(text))]
        known, rounds = 1, []
        for own in answer.rounds:
            if known >= len(text):
                break
            rounds.append(own)
            known += own.accepted + 1
        seen.append(Seen(request.sample_id, text, tuple(rounds)))
    return seen


@torch.no_grad()
def _quantized(target: Target) -> Target:
    """Return the target with its matrices rounded to five bits, a scale for every row."""
    model = copy.deepcopy(target.model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            scale = parameter.abs().amax(1, keepdim=True).clamp_min(1e-9) / 15
            parameter.copy_((parameter / scale).round() * scale)
    return Target(model, path=target.path, fingerprint=f"{target.fingerprint} quantized")


def as_told(seen: Sequence[Seen], tells: str) -> list[Seen]:
    """Return what an engine gave as one shows it that tells so much of its drafts."""
    if tells == LEVELS[0]:
        return list(seen)
    hidden = [tuple(EngineRound((UNSEEN,) * len(r.drafted), r.accepted) for r in one.rounds or ()) for one in seen]
    if tells == LEVELS[1]:
        return [replace(one, rounds=rounds) for one, rounds in zip(seen, hidden, strict=True)]
    drafted = [(sum(len(r.drafted) for r in rounds), sum(r.accepted for r in rounds)) for rounds in hidden]
    return [replace(s, rounds=None, drafted=n, accepted=k) for s, (n, k) in zip(seen, drafted, strict=True)]


def judge(case: Case) -> Iterator[Row]:
    """Yield what is said of every engine, by what it tells."""
    for fault, replayed, seen in engines_of(case):
        for tells in LEVELS:
            told = as_told(seen, tells)
            verdict = diagnose(case.bundle, told)
            named = _named(case, fault, told, verdict)
            said = verdict.stage, verdict.difference, verdict.causes
            yield Row(case.method, case.seed, fault, tells, replayed, named, *said)


def _named(case: Case, fault: str, told: Sequence[Seen], verdict: Verdict) -> bool | None:
    """Whether a verdict names the fault; None where it says right, of what it could not see."""
    if fault == RIGHT:
        return verdict.right
    if verdict.right and fault in (*not_told(case.bundle, told), ENDS, QUANTIZED, WEIGHTS):
        return None
    # A target in another precision may say the same, and hand over other states.
    return fault in verdict.causes or (fault == QUANTIZED and STATES in verdict.causes)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the engines of every method and seed; return 1 where one is named wrongly."""
    parser = argparse.ArgumentParser(prog="scripts.bench.parity", description="What verify says of known-bad engines.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12], help="of targets and heads (11 12)")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help="these methods")
    parser.add_argument("--output", type=Path, help="a JSON file of the results")
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for seed in own.seeds:
        for method in own.only:
            found = list(judge(make_case(method, seed)))
            rows += found
            for row in (row for row in found if row.named is False):
                what = f"{row.fault} by {row.tells} is called {row.causes or RIGHT}"
                say(f"{method}, seed {seed}: {what}: {row.difference}")
            counts = [sum(row.named is answer for row in found) for answer in (True, False, None)]
            say(f"{method}, seed {seed}: {counts[0]} named, {counts[1]} named wrongly, {counts[2]} not to be seen")
    if own.output is not None:
        facts = facts_of("parity", sys.argv[1:] if argv is None else argv)
        write_json(own.output, facts | {"rows": [asdict(row) for row in rows]})
    return int(any(row.named is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
