"""Check a target: whether our cache and masks give its own states, and where its numbers stop being finite.

Before any decoding, a tree of tokens is run through the cache in one pass and compared with plain forwards of its paths
from the root, on two rows of different length; so is a chain where a kernel of its own attends to chains. Architectures whose attention counts slots instead of positions, or that
keep a state which cannot be rolled back, differ there and are refused. Sliding windows are cut to a few tokens
meanwhile, so that a short text reaches past them.

Shapes: B rows, N nodes, L tokens, D hidden, k layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from draftsmith.decoder.cache import KVCache
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.slots import is_chain, run_draft
from draftsmith.errors import UserError
from draftsmith.target.target import Target

_LENGTHS = (6, 4)
_TREE = (-1, 0, 0, 2)
_PREFIXES = (2, 5, 8)
_WINDOW = 3
_LONGEST_LOCAL = 1024
"""Windows built into a model cannot be cut; up to this length a text past them takes little time."""
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


@torch.no_grad()
def check_decoding(target: Target) -> None:
    """Raise UserError where the decoder would not serve `target` exactly; runs a handful of tokens."""
    why, limit = "its states differ from those of a plain forward", 0.0
    try:
        with _short_window(target.config):
            error, limit = _error(target), _limit(target)
    except _FAILURES as failure:
        error, why = float("inf"), " ".join(str(failure).split())[:120] or type(failure).__name__
    if not error < limit:
        raise UserError(
            f"A target of type {target.model_type!r} cannot be decoded with a draft: {why}; choose another target, or "
            "another target.attn_implementation (sdpa, eager)."
        )


@contextmanager
def _short_window(config: Any) -> Iterator[None]:
    """Cut the sliding window that masks are built from to a few tokens."""
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int):
        yield
        return
    config.sliding_window = min(window, _WINDOW)
    try:
        yield
    finally:
        config.sliding_window = window


def _limit(target: Target) -> float:
    """Return the largest difference of states that rounding explains.

    In bf16 and fp16 two ways of computing the same state differ, more so through many layers. How much is measured on a
    text that is read in two passes instead of one, or only up to some token, where nothing but rounding differs (some
    processors multiply few rows with other kernels than many). The second pass is under a mask: an error of the kernel for
    chains must not widen the limit that it is held to.
    """
    if target.dtype == torch.float32:
        return 1e-3
    ids_1L = _ids(target, 1, 12)
    cache = KVCache.for_target(target, 1, 12)
    run_draft(target, cache, Draft.chain(ids_1L[:, 0], ids_1L[:, 1:8]), longest=0)
    cache.append(8)
    rest, row_1 = Draft.chain(ids_1L[:, 8], ids_1L[:, 9:]), torch.zeros_like(ids_1L[:, 0])
    states = run_draft(target, cache, rest, rows_b=row_1, longest=8).last[0]
    whole_LD = target.forward(ids_1L).last[0]
    differences = _differences(states, whole_LD[8:])
    for length in _PREFIXES:
        differences += _differences(target.forward(ids_1L[:, :length]).last[0, -1:], whole_LD[length - 1 : length])
    return max(0.01, 5 * max(differences))


def _error(target: Target) -> float:
    """Return how far states of a pass differ from plain forwards, relatively: the largest in fp32, else the median of a draft."""
    local = getattr(target.config, "window_size", None)  # of a window that is built into the model
    behind = local if isinstance(local, int) and local <= _LONGEST_LOCAL else 0
    lengths = [length + behind for length in _LENGTHS]
    width = max(lengths)
    ids_BL = _ids(target, len(lengths), width + len(_TREE))
    lengths_B = torch.tensor(lengths, device=target.device)
    nodes_BN = ids_BL[:, width:]
    parents_BN = torch.tensor(_TREE, device=target.device).expand(len(lengths), -1)
    drafts = [Draft(nodes_BN, parents_BN, torch.full_like(lengths_B, len(_TREE)))]
    chain = Draft.chain(nodes_BN[:, 0], nodes_BN[:, 1:])
    if target.device.type == "cuda" and target.plain_pass is not None and is_chain(target, chain):
        drafts.append(chain)
    # In a mixture of experts rounding may send a token to another expert, which the median tolerates.
    summary = median if target.dtype != torch.float32 else max
    return max(summary(_draft_errors(target, ids_BL[:, :width], lengths_B, draft)) for draft in drafts)


def _draft_errors(target: Target, ids_BL: Tensor, lengths_B: Tensor, draft: Draft) -> list[float]:
    """Return the differences at the nodes of a draft behind the first `lengths_B` tokens of rows."""
    (rows, width), nodes = ids_BL.shape, draft.tokens_BN.shape[1]
    cache = KVCache.for_target(target, rows, width + nodes)
    run_draft(target, cache, Draft.chain(ids_BL[:, 0], ids_BL[:, 1:]), longest=0)
    cache.append(lengths_B)
    states_BND = run_draft(target, cache, draft, longest=width).last
    errors = []
    for row, length in enumerate(lengths_B.tolist()):
        for node in range(nodes):
            path = draft.ancestors_BNN[row, node].nonzero()[:, 0]
            text = torch.cat([ids_BL[row, :length], draft.tokens_BN[row, path]])
            errors += _differences(states_BND[row, node : node + 1], target.forward(text[None]).last[0, -1:])
    return errors


def _ids(target: Target, rows: int, length: int) -> Tensor:
    ids = torch.randint(0, target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    return ids.to(target.device)


def _differences(ours_LD: Tensor, theirs_LD: Tensor) -> list[float]:
    """Return the relative differences of states, one per token."""
    ours_LD, theirs_LD = ours_LD.float(), theirs_LD.float()
    return ((ours_LD - theirs_LD).norm(dim=1) / theirs_LD.norm(dim=1).clamp(min=1e-6)).tolist()


@torch.no_grad()
def explain_not_finite(target: Target, sample_id: str, text: list[int]) -> UserError:
    """Return the error for non-finite logits after `text`; one plain pass over it finds the first position and layer."""
    layers = tuple(range(target.num_layers))
    output = target.forward(torch.tensor([text], device=target.device), layer_ids=layers)
    streams_kLH = output.aux[0].unflatten(-1, (target.num_layers, -1)).transpose(0, 1)
    # Layer k's output is the stream that enters layer k + 1, the last one's is seen through the final norm.
    bad_kL = ~torch.cat([streams_kLH, output.last]).isfinite().all(-1)
    if bool(bad_kL.any()):
        # The layer first: through attention's zero weights its NaN reaches every position of the next.
        first = int(bad_kL.any(1).int().argmax())
        position = int(bad_kL[first].int().argmax())
        where = "in the embedding" if first == 0 else f"in layer {first - 1}"
    else:
        position, where = len(text) - 1, "in the output projection"
        if bool(target.head.logits(output.last[0, -1]).isfinite().all()):
            where = "in the pass over the draft alone (a plain pass over the same text has none)"
    return UserError(
        f"The target's logits for {sample_id} are not finite: NaN or infinity first appears at position {position}, "
        f"{where}; decode in a wider dtype, or check the target's weights."
    )
