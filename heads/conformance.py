"""What every drafter must hold, ours or another package's: one function per promise, run by `run_conformance(spec)`.

    from draftsmith.heads.conformance import Spec, run_conformance, tiny_target
    run_conformance(Spec("mymethod", MyOptions(), tiny_target()))

Where it finds that too few drafts are accepted, the head has learned too little in `Spec.steps` steps at
`Spec.learning_rate`: a table of logits, for one, takes 0.1 where a network takes the default.

A check returns, or raises an AssertionError of one sentence. It takes the head through the same doors as training, the
simulator and the decoder do, and knows nothing of what is inside. Shapes: B rows, L tokens, K drafted tokens, W draft vocab.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from draftsmith.data.batch import Tokenized
from draftsmith.errors import UserError
from draftsmith.eval.contender import make_contender
from draftsmith.eval.decode import decode_batch
from draftsmith.eval.draft import TargetAlone
from draftsmith.eval.sampling import Sampling, law
from draftsmith.eval.tally import Tally, tally_generation, total
from draftsmith.eval.teacher_forced import simulate_generations
from draftsmith.eval.trees import DynamicTree, StaticTree
from draftsmith.heads.base import DraftHead, agree, supervised_rows
from draftsmith.heads.checkpoint import load_head, save_head
from draftsmith.heads.conformance_spec import Spec, pack, tiny_target, train_briefly
from draftsmith.heads.export import LAYOUTS, export_head, layouts_for
from draftsmith.heads.losses import head_loss
from draftsmith.heads.recorded_drafts import Drafted, record
from draftsmith.heads.registry import find_method

__all__ = ["CHECKS", "Spec", "run_conformance", "tiny_target"]

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
_CLOSE = 1e-4
"""Laws may differ by this in total variation: float32 rounds differently in a pass over a text and in a cached one."""
_FEW = 20
"""A comparison of fewer rounds or drafts than this would mean nothing."""
_LEARN = ": raise Spec.learning_rate or Spec.steps if the head has learned too little"
_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0))


def check_decoding_equals_training(spec: Spec) -> None:
    """What is drafted in the middle of an answer follows the training pass's laws for the same text, row by row."""
    head = spec.head
    for sampling in (GREEDY, SAMPLED):
        _, answers = record(spec.verifier, spec.drafter(), spec.requests[:10], sampling, rows=4)
        rounds = [drafted for answer in answers for drafted in answer if drafted.tokens]
        _require(len(rounds) >= _FEW, f"only {len(rounds)} rounds drafted anything at {sampling}{_LEARN}")
        for drafted, logits_kW in zip(rounds, _training_logits(spec, rounds), strict=True):
            for k, token in enumerate(drafted.tokens):
                if drafted.laws_kW is None:
                    ids = head.target_ids(torch.arange(logits_kW.shape[1]))
                    gap = float(logits_kW[k].max() - logits_kW[k][ids == token].sum())
                    _require(
                        gap < 1e-3, f"draft token {k + 1} is not the training pass's most likely one (by {gap:.3g})"
                    )
                else:
                    apart = float((law(logits_kW[k], sampling) - drafted.laws_kW[k]).abs().sum()) / 2
                    _require(
                        apart < _CLOSE,
                        f"draft token {k + 1} was drawn from another law than training's, {apart:.3g} off",
                    )
            if drafted.laws_kW is not None:
                same = _equal(drafted.vocab_W, head.draft_vocab)
                _require(same, "a draft's laws are over other tokens than the head's draft vocabulary")


def check_drawn_from_its_law(spec: Spec) -> None:
    """Sampled drafts are drawn from the laws they name: losslessness above temperature 0 rests on it."""
    _, answers = record(spec.verifier, spec.drafter(), spec.requests, SAMPLED)
    excess = variance = 0.0
    drafts = [drafted for answer in answers for drafted in answer if drafted.laws_kW is not None and drafted.tokens]
    for drafted in drafts:
        assert drafted.laws_kW is not None
        laws_kW, tokens_k = drafted.laws_kW.double(), torch.tensor(drafted.tokens)
        column_k = tokens_k if drafted.vocab_W is None else torch.searchsorted(drafted.vocab_W.cpu(), tokens_k)
        log_kW = laws_kW.clamp_min(1e-300).log()
        mean_k = (laws_kW * log_kW).sum(-1)
        excess += float((log_kW.gather(1, column_k[:, None])[:, 0] - mean_k).sum())
        variance += float(((laws_kW * log_kW**2).sum(-1) - mean_k**2).sum())
    # Tokens drawn from q have log q of mean -H(q), so that the sum of the differences is a few deviations at most.
    _require(abs(excess) <= 4.5 * variance**0.5 + 1e-6, "the sampled drafts are not drawn from the laws they name")


def check_simulation(spec: Spec) -> None:
    """The acceptance computed from the training pass is the decoder's: exactly at T=0, within its error at T=1."""
    k = spec.length
    for sampling in (GREEDY, SAMPLED):
        found = decode_batch(spec.verifier, spec.drafter(), spec.requests, sampling, rows=16).generations
        decoded = [tally_generation(g, k) for g in found]
        simulated = [t[k - 1] for t in simulate_generations(spec.verifier, spec.deployed, found, sampling, k).tallies]
        _require(
            bool(total(decoded, k).accepted_K[0] >= _FEW),
            f"fewer than {_FEW} drafts were accepted at {sampling}{_LEARN}",
        )
        if sampling.greedy:
            ours, theirs = _figures(total(simulated, k)), _figures(total(decoded, k))
            _require(torch.allclose(ours, theirs, atol=1e-6), "simulated and decoded rounds differ at temperature 0")
            continue
        errors = [d.rounds - s.rounds for d, s in zip(decoded, simulated, strict=True)]
        spread = sum(e * e for e in errors) ** 0.5
        _require(abs(sum(errors)) <= 4 * spread + 1e-6, "simulated and decoded rounds differ at temperature 1")


def check_packing(spec: Spec) -> None:
    """Documents packed into rows give the loss and the gradients that they give alone, also with the noise and the sample
    of rows that training draws; dropout, which draws from torch's generator, is left out."""
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
            _require(apart < 1e-3, f"{name} differs by {apart:.2g} of its size {where}")
    head.eval()


def check_rows_that_count(spec: Spec) -> None:
    """A step's logits are those of the rows that rule 1 names, in ascending order, and of as many steps as asked; in
    training those of some of them, the same at every call."""
    head, batch = spec.head.train(), pack(spec, [spec.samples[:2], spec.samples[2:3]])
    with torch.no_grad():
        some = head(batch, head.train_steps).steps
        masks = [*islice(head.supervised(batch.without_states()), len(some))]  # as training counts them
        steps = head.eval()(batch, spec.length).steps
    for step, mask_BL in zip(some, masks, strict=True):
        rows = mask_BL.flatten().nonzero().flatten()
        told = f"step {step.offset} of training gives logits of other rows"
        _require(_equal(step.rows, rows), f"{told} than `supervised` names")
        _require(not bool((mask_BL & ~supervised_rows(batch, step.offset)).any()), f"{told} than those that may count")
    offsets = [step.offset for step in steps]
    _require(offsets == list(range(spec.length)), f"{spec.length} steps were asked for, and offsets {offsets} came")
    width = spec.target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    for step in steps:
        expected = supervised_rows(batch, step.offset).flatten().nonzero().flatten()
        _require(_equal(step.rows, expected), f"step {step.offset} gives logits of other rows than those that count")
        shape = (len(expected), width)
        _require(
            tuple(step.logits.shape) == shape, f"step {step.offset} has logits of shape {tuple(step.logits.shape)}"
        )


def check_seeds(spec: Spec) -> None:
    """The same seed trains the same head, bit by bit."""
    first, again = (train_briefly(spec, steps=3).state_dict() for _ in range(2))
    differing = [name for name, value in first.items() if not torch.equal(value, again[name])]
    _require(not differing, f"two trainings with the same seed differ in {', '.join(differing[:3])}")


def check_checkpoint(spec: Spec) -> None:
    """A checkpoint holds everything: the head that is loaded again is the same, bit by bit."""
    with TemporaryDirectory() as folder:
        save_head(spec.head, Path(folder) / "head", spec.target)
        again = load_head(Path(folder) / "head", spec.target)
    _require(again.method == spec.method, f"a head of {spec.method} calls itself {again.method}")
    _same_head(spec, spec.head, again, "a head that is saved and loaded again")
    _require(
        again.describe() == spec.head.describe(), "a head that is saved and loaded again describes itself otherwise"
    )


def check_exports(spec: Spec) -> None:
    """Each layout of the method that takes this head gives it back with the same logits; one must take it, if any are."""
    taken = []
    for layout in (names := layouts_for(spec.method)):
        with TemporaryDirectory() as folder:
            try:
                path = export_head(spec.deployed, spec.verifier, Path(folder) / "out", layout=layout, dtype="float32")
            except UserError:
                continue  # what an engine would not compute of this head is refused
            again = LAYOUTS[layout].load(path, spec.verifier)
        taken.append(layout)
        _same_logits(spec, spec.deployed.served(), again, f"the export {layout}")
    _require(bool(taken) or not names, f"none of the layouts {', '.join(names)} takes this head")


def check_rows_are_independent(spec: Spec) -> None:
    """A row drafts in a batch what it drafts alone: tokens, laws and answers, also where rows come and go."""
    requests = spec.requests[:5]
    for sampling in (GREEDY, SAMPLED):
        together, drafted = record(spec.verifier, spec.drafter(), requests, sampling, rows=2)
        for place, request in enumerate(requests):
            alone, (drafted_alone,) = record(spec.verifier, spec.drafter(), [request], sampling)
            same = together.generations[place].output_ids == alone.generations[0].output_ids
            _require(same, f"an answer at {sampling} is another one in a batch than alone")
            for ours, theirs in zip(drafted[place], drafted_alone, strict=True):
                _require(ours.tokens == theirs.tokens, f"a draft at {sampling} is another one in a batch than alone")
                if ours.laws_kW is not None and theirs.laws_kW is not None:
                    apart = float((ours.laws_kW - theirs.laws_kW).abs().sum(-1).max()) / 2 if ours.tokens else 0.0
                    _require(apart < _CLOSE, f"a draft's law is another one in a batch than alone, {apart:.3g} off")


def check_greedy_text(spec: Spec) -> None:
    """Greedy answers with the drafter are the target's own."""
    alone = decode_batch(spec.verifier, TargetAlone(), spec.requests[:16], GREEDY).generations
    drafted = decode_batch(spec.verifier, spec.drafter(), spec.requests[:16], GREEDY, rows=5).generations
    wrong = sum(a.output_ids != b.output_ids for a, b in zip(alone, drafted, strict=True))
    _require(not wrong, f"{wrong} of {len(alone)} greedy answers are other ones than the target's alone")


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
        _require(not wrong, f"{wrong} of {len(alone)} greedy answers with a {kind} tree are not the target's alone")
        if contender.simulate is not None:
            decoded = total([tally_generation(g, depth) for g in found], depth)
            simulated = contender.simulate(spec.verifier, found, GREEDY, depth).tallies
            same = torch.allclose(_figures(total([t[-1] for t in simulated], depth)), _figures(decoded), atol=1e-6)
            _require(same, f"simulated and decoded rounds differ with a {kind} tree")
        decode_batch(spec.verifier, contender.make(depth), requests[:4], SAMPLED, rows=2)


CHECKS: dict[str, Callable[[Spec], None]] = {
    "decoding equals training": check_decoding_equals_training,
    "drafts are drawn from their laws": check_drawn_from_its_law,
    "simulated equals decoded": check_simulation,
    "packed equals alone": check_packing,
    "rows that count": check_rows_that_count,
    "seeds reproduce": check_seeds,
    "checkpoints hold everything": check_checkpoint,
    "exports give the head back": check_exports,
    "rows are independent": check_rows_are_independent,
    "greedy text is the target's": check_greedy_text,
    "trees are as the method says": check_trees,
}


def run_conformance(spec: Spec) -> None:
    """Run all checks. Raises AssertionError, one sentence that says what does not hold, at the first that fails."""
    for check in CHECKS.values():
        check(spec)


def _require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with the sentence, also where Python leaves assertions out."""
    if not holds:
        raise AssertionError(f"{otherwise[0].upper()}{otherwise[1:]}.")


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a.cpu(), b.cpu())


def _figures(tally: Tally) -> Tensor:
    return torch.tensor([tally.tokens, tally.rounds, tally.drafted, *tally.accepted_K, *tally.reached_K])


@torch.no_grad()
def _training_logits(spec: Spec, rounds: Sequence[Drafted]) -> list[Tensor]:
    """Return the training pass's logits [k, W] of each round's drafted tokens, the draft being the text."""
    batch = pack(spec, [[drafted.sample] for drafted in rounds])
    steps, length = spec.head.eval()(batch, spec.length).steps, batch.ids.shape[1]
    table = [dict(zip(step.rows.tolist(), step.logits.float().cpu(), strict=True)) for step in steps]
    roots = [row * length + len(drafted.text) - 2 for row, drafted in enumerate(rounds)]
    return [torch.stack([table[k][root] for k in range(len(d.tokens))]) for root, d in zip(roots, rounds, strict=True)]


def _loss_and_gradients(
    spec: Spec, head: DraftHead, batches: Sequence[Sequence[Sequence[Tokenized]]]
) -> dict[str, Tensor]:
    """Return the loss summed over batches of rows of documents, and the gradient of every trained parameter."""
    head.zero_grad()
    losses = torch.zeros(())
    for rows in batches:
        batch = pack(spec, rows)
        loss = head_loss(head(batch, head.train_steps), batch, spec.target.head, head.draft_vocab, spec.loss).loss_sum
        loss.backward()
        losses = losses + loss.detach().cpu()
    found = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    return {"the loss": losses} | {f"the gradient of {name}": value for name, value in found.items()}


def _same_head(spec: Spec, head: DraftHead, again: DraftHead, what: str) -> None:
    tensors = [dict([*one.named_parameters(), *one.named_buffers()]) for one in (head, again)]
    _require(tensors[0].keys() == tensors[1].keys(), f"{what} has other tensors")
    differing = [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])]
    _require(not differing, f"{what} has another {', '.join(differing[:3])}")
    same = (again.layer_ids, again.train_steps) == (head.layer_ids, head.train_steps)
    _require(same and _equal(again.draft_vocab, head.draft_vocab), f"{what} reads or drafts something else")
    _same_logits(spec, head, again, what)


@torch.no_grad()
def _same_logits(spec: Spec, head: DraftHead, again: DraftHead, what: str) -> None:
    batch = pack(spec, [spec.samples[:2], spec.samples[2:3]])
    outputs = [one.eval()(batch, spec.length).steps for one in (head, again)]
    same = all(agree(a.logits, b.logits) for a, b in zip(*outputs, strict=True))
    _require(same, f"{what} gives other logits")
