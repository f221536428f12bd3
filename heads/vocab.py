"""The draft vocabulary: the target's tokens that a head can draft (docs/algorithms.md, rule 7).

Shapes: V target vocab, W draft vocab, L tokens of a sample.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.data.batch import Features, Tokenized
from draftsmith.errors import UserError

LOW_COVERAGE = 0.95
CHUNK_TOKENS = 1 << 20


Sample = Tokenized | Features


def count_tokens(samples: Iterable[Sample], vocab_size: int) -> Tensor:
    """Return [V] int64: how often each token is to be learned. Raises UserError for ids outside the target's
    vocabulary."""
    total = torch.zeros(vocab_size, dtype=torch.int64)
    waiting: list[Tensor] = []
    tokens = 0
    for sample in samples:
        waiting.append(sample.ids[sample.mask.bool()])
        tokens += len(waiting[-1])
        if tokens >= CHUNK_TOKENS:
            total += _bincount(waiting, vocab_size)
            waiting, tokens = [], 0
    return total + _bincount(waiting, vocab_size)


def count_by_slice(samples: Iterable[Sample], vocab_size: int) -> dict[str, Tensor]:
    """Return `count_tokens` of each slice of the data, sorted by name."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.slice, []).append(sample)
    return {name: count_tokens(groups[name], vocab_size) for name in sorted(groups)}


def choose_draft_vocab(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """Return [W] int64 ascending target ids: those of `always` (special and end ids) and the most frequent others.

    counts: [V]. Ties go to the lower id. Raises UserError where `size` is larger than V or smaller than `always`.
    """
    kept = sorted(set(always))
    if size > len(counts):
        raise UserError(
            f"head.draft_vocab_size is {size}, but the target has {len(counts)} tokens: choose a smaller one, or null."
        )
    if len(kept) > size:
        raise UserError(
            f"head.draft_vocab_size is {size}, less than the {len(kept)} special and end tokens that are always in it: "
            "choose a larger one."
        )
    if kept and not 0 <= kept[0] <= kept[-1] < len(counts):
        raise UserError(
            f"The tokenizer's special ids {kept[0]}..{kept[-1]} do not fit the target's {len(counts)} tokens."
        )
    rank = counts.clone()
    rank[torch.tensor(kept, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def check_draft_vocab(draft_vocab: Tensor, vocab_size: int, file: Path) -> None:
    """Raise UserError unless `draft_vocab` [W], from the weights in `file`, is a list of the target's token ids, ascending and each
    once: drafts would be other tokens than the head was trained for."""
    wrong = None
    if (
        draft_vocab.ndim != 1
        or not len(draft_vocab)
        or draft_vocab.is_floating_point()
        or draft_vocab.dtype == torch.bool
    ):
        wrong = f"is no list of token ids ({draft_vocab.dtype} {list(draft_vocab.shape)})"
    elif not 0 <= int(draft_vocab.min()) <= int(draft_vocab.max()) < vocab_size:
        outside = draft_vocab[(draft_vocab < 0) | (draft_vocab >= vocab_size)]
        wrong = f"holds {int(outside[0])}, and the target's tokens are 0 to {vocab_size - 1}"
    elif bool((draft_vocab.diff() <= 0).any()):
        wrong = "is not ascending, or holds a token twice"
    if wrong is not None:
        raise UserError(f"{file}: the draft vocabulary {wrong}: restore the head, fetch it again or train it again.")


@dataclass(frozen=True)
class Coverage:
    """The share of the tokens to learn that a draft vocabulary holds.

    training: in the answers that train the head, which it is usually chosen from, so that this share flatters. heldout,
    heldout_by_slice: in the answers kept out of training, which says what traffic will meet.
    """

    training: float
    heldout: float
    heldout_by_slice: dict[str, float]


def measure_coverage(draft_vocab: Tensor, training: Iterable[Sample], heldout: Iterable[Sample], size: int) -> Coverage:
    """Return what `draft_vocab` [W] covers of training and held-out answers; `size` is V."""
    by_slice = count_by_slice(heldout, size)
    return Coverage(
        coverage(count_tokens(training, size), draft_vocab),
        coverage(sum(by_slice.values(), torch.zeros(size, dtype=torch.int64)), draft_vocab),
        {name: coverage(counts, draft_vocab) for name, counts in by_slice.items()},
    )


def coverage(counts: Tensor, draft_vocab: Tensor) -> float:
    """Return the share of the tokens counted in `counts` [V] that the draft vocabulary holds; 1.0 where none is
    counted."""
    total = int(counts.sum())
    return int(counts[draft_vocab].sum()) / total if total else 1.0


def coverage_warnings(covered: Coverage, size: int, fix: str) -> list[str]:
    """Return a sentence, ending in the `fix`, for all held-out answers together and for each slice of them where a draft
    vocabulary of `size` tokens covers less than 95%."""
    shares = {"held-out answers": covered.heldout}
    if len(covered.heldout_by_slice) > 1:  # the same words again otherwise
        shares |= {f"held-out answers of slice {name}": share for name, share in covered.heldout_by_slice.items()}
    return [
        f"The draft vocabulary of {size} tokens covers only {share:.1%} of the tokens in the {name}: every other token is a "
        f"certain rejection; {fix}."
        for name, share in shares.items()
        if round(share, 3) < LOW_COVERAGE  # as it is shown
    ]


def _bincount(pieces: list[Tensor], vocab_size: int) -> Tensor:
    if not pieces:
        return torch.zeros(vocab_size, dtype=torch.int64)
    ids = torch.cat(pieces)
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"The answers hold token id {low if low < 0 else high}, but the target has {vocab_size} tokens: they were made with "
            "another tokenizer; regenerate them with this target."
        )
    return torch.bincount(ids, minlength=vocab_size)
