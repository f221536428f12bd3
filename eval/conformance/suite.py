"""Check the promises of a draft head (see `DraftHead`), ours or another package's: one function per promise.

    from draftsmith.eval.conformance.suite import Spec, run_conformance, tiny_target
    run_conformance(Spec("mymethod", MyOptions(), tiny_target()))

Where a check says that too few drafts were accepted, the head has learned too little in `Spec.steps` steps at
`Spec.learning_rate`: a table of logits, for example, needs 0.1 where a network needs the default.

A check returns, or raises an AssertionError of one sentence. It calls the head as training, the simulator and the
decoder do, and knows nothing of its insides. Shapes: B rows, L tokens, K drafted tokens, W draft vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from draftsmith.data.batch import Tokenized
from draftsmith.decoder.answers import tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import LengthRule, TargetAlone
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.conformance.recorded_drafts import (
    CLOSE,
    FEW,
    GREEDY,
    LEARN,
    SAMPLED,
    drawn_from,
    equal,
    figures,
    record,
    record_trees,
    require,
    require_training_probs,
)
from draftsmith.eval.conformance.spec import Spec, pack, tiny_target, train_briefly
from draftsmith.eval.drafters.system import head_system, with_window
from draftsmith.eval.simulate.acceptance import chances
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.base import DraftHead, drafting, supervised_rows
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.export.export import agree, export_head
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.registry import find_method

__all__ = ["CHECKS", "Spec", "run_conformance", "tiny_target"]

_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))


def check_decoding_equals_training(spec: Spec) -> None:
    """Check that drafts, or the probabilities they are drawn from, are those of the training pass on the same text."""
    for sampling in (GREEDY, SAMPLED):
        _, answers = record(spec.verifier, spec.drafter(), spec.requests[:10], sampling, rows=4)
        rounds = [drafted for answer in answers for drafted in answer if drafted.tokens]
        require(len(rounds) >= FEW, f"only {len(rounds)} rounds drafted anything at {sampling}{LEARN}")
        require_training_probs(spec, rounds, sampling)


def check_drawn_as_named(spec: Spec) -> None:
    """Check that sampled drafts are drawn from the probabilities that they name: lossless sampling rests on it."""
    _, answers = record(spec.verifier, spec.drafter(), spec.requests, SAMPLED)
    drafts = [drafted for answer in answers for drafted in answer if drafted.probs_MW is not None and drafted.tokens]
    draws = [draw for drafted in drafts for draw in drafted.draws()]
    require(not draws or drawn_from(draws), "sampled drafts are not drawn from the probabilities that they name")


def check_ends(spec: Spec) -> None:
    """Check that drafts end where a rule says so by the training pass, in some places and not in others; heads whose drafter takes no
    rule pass."""
    if not find_method(spec.method).ends_chains:
        return
    batch, head = pack(spec, [[sample] for sample in spec.samples]), spec.deployed
    with torch.no_grad():
        output = head(batch, spec.length)
        steps = [
            (step, chances(step, torch.arange(len(step.rows)), step.logits, LengthRule(()))) for step in output.steps
        ]
    reached, floors = torch.ones(batch.ids.numel()), list[float]()
    for step, chance_R in steps:
        reached[step.rows] *= chance_R
        middle = len(step.rows) // 2
        # Between two of them, so that rounding moves none.
        floors.append(float(reached[step.rows].sort().values[middle - 1 : middle + 1].mean()))
    require(max(floors) < 1, f"every token is certain to be accepted{LEARN}")
    check_simulation(spec, LengthRule(tuple(floors)))


def check_window(spec: Spec) -> None:
    """Check that a window changes what a head drafts, in decoding as in the training pass; heads whose attention takes none pass."""
    head, least = spec.deployed, spec.deployed.least_window
    if least is None:
        return
    narrow, batch = with_window(head, max(least, spec.length)), pack(spec, [[sample] for sample in spec.samples])
    with torch.no_grad(), drafting(head, narrow):
        pairs = zip(head(batch, spec.length).steps, narrow(batch, spec.length).steps, strict=True)
        require(not all(agree(a.logits, b.logits) for a, b in pairs), "a narrow window changes no logits")
    check_simulation(spec, head=narrow)


def check_simulation(spec: Spec, rule: LengthRule | None = None, head: DraftHead | None = None) -> None:
    """Check that the acceptance computed from the training pass is the decoder's: exactly at temperature 0, within the
    sampling error at 1. rule: ends drafts early; how many tokens those have is predicted for heads that draft by the text
    alone. head: with a window, None for the head as it is."""
    where = " with a window" if head is not None else "" if rule is None else " where a rule ends drafts"
    k, head = spec.length, head or spec.deployed
    requests = spec.requests[:: 3 if where else 1]
    system = head_system("", head, k, k, rule=rule)
    for sampling in (GREEDY, SAMPLED):
        drafter = system.make(k)
        generations = decode_batch(spec.verifier, drafter, requests, sampling, rows=16).generations
        decoded = [tally_generation(g, k) for g in generations]
        found = head_simulator(head, rule=rule)(spec.verifier, generations, sampling, k).tallies
        simulated = [t[k - 1] for t in found]
        enough = bool(where) or bool(total(decoded, k).accepted_K[0] >= FEW)
        require(enough, f"fewer than {FEW} drafts were accepted at {sampling}{LEARN}")
        if sampling.greedy:
            sums = [total(x, k) for x in (simulated, decoded)]
            ours, theirs = (figures(x if system.counts_drafts else replace(x, drafted=0)) for x in sums)
            message = f"simulated and decoded rounds differ at temperature 0{where}"
            require(torch.allclose(ours, theirs, atol=1e-6), message)
            continue
        errors = [d.rounds - s.rounds for d, s in zip(decoded, simulated, strict=True)]
        spread = sum(e * e for e in errors) ** 0.5
        message = f"simulated and decoded rounds differ at temperature 1{where}"
        require(abs(sum(errors)) <= 4 * spread + 1e-6, message)


def check_packing(spec: Spec) -> None:
    """Check that documents packed into rows have the same loss and gradients as documents alone, also with the noise
    and the sampled rows of training; dropout, which draws from torch's generator, is left out."""
    samples = spec.samples[:7]
    packed = [[samples[:3], samples[3:4], samples[4:6]], [samples[6:]]]
    alone = [[[sample]] for sample in samples]
    for training in (False, True):
        head = spec.head.train(training)
        for module in head.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        ours, theirs = (_loss_and_gradients(spec, head, batches) for batches in (packed, alone))
        for name, value in ours.items():
            scale = float(theirs[name].abs().max()) + 1e-6
            apart = float((value - theirs[name]).abs().max()) / scale
            where = "in training, " * training + "between documents packed and alone"
            require(apart < 1e-3, f"{name} differs by {apart:.2g} of its size {where}")
    head.eval()


def check_supervised_rows(spec: Spec) -> None:
    """Check that the logits of every step asked for belong to the rows of docs/algorithms.md, rule 1, in ascending order; in training to
    the rows that `supervised` samples from them, which are the same at every call."""
    head, batch = spec.head.train(), pack(spec, [spec.samples[:2], spec.samples[2:3]])
    with torch.no_grad():
        some = head(batch, head.trains.steps).steps
        masks = [*islice(head.supervised(batch.without_states()), len(some))]  # as training counts them
        steps = head.eval()(batch, spec.length).steps
    for step, mask_BL in zip(some, masks, strict=True):
        rows = mask_BL.flatten().nonzero().flatten()
        message = f"step {step.offset} of training gives logits of other rows"
        require(equal(step.rows, rows), f"{message} than `supervised` names")
        beyond_BL = mask_BL & ~supervised_rows(batch, step.offset)
        require(not bool(beyond_BL.any()), f"{message} than docs/algorithms.md, rule 1, allows")
    offsets = [step.offset for step in steps]
    message = f"forward was asked for {spec.length} steps, but returned the offsets {offsets}"
    require(offsets == list(range(spec.length)), message)
    width = spec.target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    for step in steps:
        expected = supervised_rows(batch, step.offset).flatten().nonzero().flatten()
        message = f"step {step.offset} gives logits of other rows than those of docs/algorithms.md, rule 1"
        require(equal(step.rows, expected), message)
        shape = (len(expected), width)
        require(tuple(step.logits.shape) == shape, f"step {step.offset} has logits of shape {tuple(step.logits.shape)}")


def check_seeds(spec: Spec) -> None:
    """Check that two trainings from the same seed give the same head, bit by bit. A GPU need not keep that, see DraftHead."""
    first, again = (train_briefly(spec, steps=3).state_dict() for _ in range(2))
    differing = [name for name, value in first.items() if not torch.equal(value, again[name])]
    require(not differing, f"two trainings with the same seed differ in {', '.join(differing[:3])}")


def check_checkpoint(spec: Spec) -> None:
    """Check that a head that is saved and loaded again is the same, bit by bit."""
    require(spec.head.method == spec.method, f"a head of {spec.method} calls itself {spec.head.method}")
    with TemporaryDirectory() as folder:
        save_head(spec.head, Path(folder) / "head", spec.target)
        again = load_head(Path(folder) / "head", spec.target)
    _same_head(spec, spec.head, again, "a head that is saved and loaded again")
    require(again.describe() == spec.head.describe(), "a head that is saved and loaded again has another `describe`")


def check_exports(spec: Spec) -> None:
    """Check that every layout that can hold this head gives it back with the same logits, and that one can, if there
    are any."""
    names = [*layouts_of(spec.method)]
    require(bool(check_layouts(spec)) or not names, f"none of the layouts {', '.join(names)} can hold this head")


def check_layouts(spec: Spec) -> list[str]:
    """Export the head to every layout of its method and load it again; return the layouts that can hold it."""
    taken = []
    for layout, known in layouts_of(spec.method).items():
        with TemporaryDirectory() as folder:
            try:
                out, k = Path(folder) / "out", spec.length
                path = export_head(
                    spec.deployed, spec.verifier, out, layout=layout, dtype="float32", num_speculative_tokens=k
                )
            except UserError:
                continue  # the layout refuses what its engines would not compute
            again = known.load(path, spec.verifier)
        taken.append(layout)
        _same_logits(spec, spec.deployed.served(), again, f"the export {layout}")
    return taken


def check_rows_are_independent(spec: Spec) -> None:
    """Check that a row drafts the same tokens, with the same probabilities, in a batch whose rows come and go as
    alone."""
    requests = spec.requests[:5]
    for sampling in (GREEDY, SAMPLED):
        together, drafted = record(spec.verifier, spec.drafter(), requests, sampling, rows=2)
        for index, request in enumerate(requests):
            alone, (drafted_alone,) = record(spec.verifier, spec.drafter(), [request], sampling)
            same = together.generations[index].output_ids == alone.generations[0].output_ids
            require(same, f"an answer at {sampling} differs between a batch and alone")
            for ours, theirs in zip(drafted[index], drafted_alone, strict=True):
                require(ours.tokens == theirs.tokens, f"a draft at {sampling} differs between a batch and alone")
                if ours.probs_MW is not None and theirs.probs_MW is not None:
                    apart = float((ours.probs_MW - theirs.probs_MW).abs().sum(-1).max()) / 2 if ours.tokens else 0.0
                    require(apart < CLOSE, f"a draft's probabilities differ by {apart:.3g} between a batch and alone")


def check_greedy_text(spec: Spec) -> None:
    """Check that greedy answers with the drafter are the target's own."""
    alone = decode_batch(spec.verifier, TargetAlone(), spec.requests[:16], GREEDY).generations
    drafted = decode_batch(spec.verifier, spec.drafter(), spec.requests[:16], GREEDY, rows=5).generations
    wrong = sum(a.output_ids != b.output_ids for a, b in zip(alone, drafted, strict=True))
    require(not wrong, f"{wrong} of {len(alone)} greedy answers differ from the target's own")


def check_trees(spec: Spec) -> None:
    """Check, for every kind of tree that the method names, that greedy answers are the target's own, and where it is simulated
    that simulated acceptance is decoded acceptance."""
    method, requests = find_method(spec.method), spec.requests[:16]
    alone = decode_batch(spec.verifier, TargetAlone(), requests, GREEDY).generations
    for kind in sorted(method.trees_of(spec.deployed.options)):
        depth, drawn = min(3, spec.length), kind == "drawn"
        growing = kind in ("dynamic", "best_first")
        tree = DynamicTree(depth, 2, 6, kind) if growing else StaticTree.of("small", _TREE).cut(depth)
        system = head_system("", spec.deployed, depth, depth, tree=tree, drawn=drawn)
        try:
            drafter = system.make(depth)
        except TypeError as error:
            raise AssertionError(f"The method names {kind} trees, but its drafter takes none ({error}).") from error
        generations = decode_batch(spec.verifier, drafter, requests, GREEDY, rows=5).generations
        wrong = sum(a.output_ids != b.output_ids for a, b in zip(alone, generations, strict=True))
        require(not wrong, f"{wrong} of {len(alone)} greedy answers with a {kind} tree differ from the target's own")
        if system.simulate is not None:
            decoded = total([tally_generation(g, depth) for g in generations], depth)
            simulated = system.simulate(spec.verifier, generations, GREEDY, depth).tallies
            same = torch.allclose(figures(total([t[-1] for t in simulated], depth)), figures(decoded), atol=1e-6)
            require(same, f"simulated and decoded rounds differ with a {kind} tree")


def check_drawn_trees(spec: Spec) -> None:
    """Check that above temperature 0 the children of a drawn tree's node are drawn, in their order and without
    replacement, from the probabilities that the training pass has for the text and the node's path; and that dynamic
    trees draft there too."""
    trees, depth = find_method(spec.method).trees_of(spec.deployed.options), min(3, spec.length)
    for kind in trees & {"dynamic", "best_first"}:
        dynamic = head_system("", spec.deployed, depth, depth, tree=DynamicTree(depth, 2, 6, kind), drawn=False)
        decode_batch(spec.verifier, dynamic.make(depth), spec.requests[:4], SAMPLED, rows=2)
    if "drawn" not in trees:
        return
    tree = StaticTree.of("small", _TREE).cut(depth)
    drafter = head_system("", spec.deployed, depth, depth, tree=tree, drawn=True).make(depth)
    drafted = record_trees(spec.verifier, drafter, spec.requests, SAMPLED, rows=8)
    require(len(drafted) >= FEW, f"only {len(drafted)} drawn trees were drafted")
    draws = [draw for tree in drafted for draw in tree.draws()]
    require(drawn_from(draws), "nodes of drawn trees are not drawn from the probabilities that they name")
    require_training_probs(spec, [branch for tree in drafted[: 3 * FEW] for branch in tree.branches()], SAMPLED)


CHECKS: dict[str, Callable[[Spec], None]] = {
    "decoding has the probabilities of training": check_decoding_equals_training,
    "drafts are drawn from the probabilities that they name": check_drawn_as_named,
    "simulated acceptance equals decoded acceptance": check_simulation,
    "drafts end where a rule says": check_ends,
    "a window narrows attention": check_window,
    "packed documents train like single ones": check_packing,
    "logits come for the supervised rows": check_supervised_rows,
    "the same seed trains the same head": check_seeds,
    "a checkpoint restores the head": check_checkpoint,
    "an export restores the head": check_exports,
    "rows of a batch are independent": check_rows_are_independent,
    "greedy text is the target's own": check_greedy_text,
    "trees keep greedy text and acceptance": check_trees,
    "drawn trees are drawn from the probabilities that they name": check_drawn_trees,
}
"""The promises of `DraftHead`, in the words of its documentation, and the check of each."""


def run_conformance(spec: Spec) -> None:
    """Run all checks. Raises AssertionError at the first that fails: one sentence with the promise and how it is
    broken."""
    for promise, check in CHECKS.items():
        try:
            check(spec)
        except AssertionError as error:
            raise AssertionError(f"The method {spec.method} breaks the promise {promise!r}: {error}") from error


def _loss_and_gradients(
    spec: Spec, head: DraftHead, batches: Sequence[Sequence[Sequence[Tokenized]]]
) -> dict[str, Tensor]:
    """Return the loss summed over batches of rows of documents, and the gradient of every trained parameter."""
    head.zero_grad()
    losses = torch.zeros(())
    for rows in batches:
        batch = pack(spec, rows)
        loss = head_loss(head(batch, head.trains.steps), batch, spec.target.head, head.draft_vocab, spec.loss).loss_sum
        loss.backward()
        losses = losses + loss.detach().cpu()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    return {"the loss": losses} | {f"the gradient of {name}": value for name, value in gradients.items()}


def _same_head(spec: Spec, head: DraftHead, again: DraftHead, what: str) -> None:
    tensors = [dict([*one.named_parameters(), *one.named_buffers()]) for one in (head, again)]
    require(tensors[0].keys() == tensors[1].keys(), f"{what} has other tensors")
    differing = [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])]
    require(not differing, f"{what} differs in {', '.join(differing[:3])}")
    for name in ("reads", "drafts", "trains"):
        require(getattr(again, name) == getattr(head, name), f"{what} has other `{name}`")
    require(equal(again.draft_vocab, head.draft_vocab), f"{what} has another draft vocabulary")
    _same_logits(spec, head, again, what)


@torch.no_grad()
def _same_logits(spec: Spec, head: DraftHead, again: DraftHead, what: str) -> None:
    batch = pack(spec, [spec.samples[:2], spec.samples[2:3]])
    outputs = [one.eval()(batch, spec.length).steps for one in (head, again)]
    for a, b in zip(*outputs, strict=True):
        require(agree(a.logits, b.logits), f"{what} gives other logits")
        if a.confidence is not None:
            same = b.confidence is not None and agree(a.confidence, b.confidence)
            require(same, f"{what} gives other confidences")
