"""Before any decoding: does our cache, with our masks, give this target's own states?

A tree of tokens is run through the cache in one pass and compared with plain forwards of its root-to-node
paths, on two rows of different length. Architectures whose attention goes by slot instead of position, or
that keep a state which cannot be rolled back, differ here and are refused instead of decoded wrongly.
Shapes: B rows, N nodes, D hidden.
"""

import torch

from draftsmith.errors import UserError
from draftsmith.eval.cache import KVCache
from draftsmith.eval.draft import Draft
from draftsmith.eval.passes import run_draft
from draftsmith.heads.target import Target

_LENGTHS = (6, 4)
_PARENTS = (-1, 0, 0, 2)
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


@torch.no_grad()
def check_decoding(target: Target) -> None:
    """Raise UserError where the decoder would not serve `target` exactly; takes a handful of tokens."""
    why = "its states differ from those of a plain forward"
    try:
        error = _tree_error(target)
    except _FAILURES as failure:
        error, why = float("inf"), " ".join(str(failure).split())[:120] or type(failure).__name__
    # In bf16 and fp16 two ways of computing the same state differ by rounding, and more so through many layers.
    if not error < (1e-3 if target.dtype == torch.float32 else 0.2):
        raise UserError(
            f"A target of type {target.model_type!r} cannot be decoded with a draft: {why}; choose another target, or "
            "another attn_implementation (sdpa, eager) in the recipe."
        )


def _tree_error(target: Target) -> float:
    """Return the relative difference between tree pass and path forward: the largest in fp32, else the median over nodes."""
    generator = torch.Generator().manual_seed(0)
    width = max(_LENGTHS)
    ids = torch.randint(0, target.vocab_size, (len(_LENGTHS), width + len(_PARENTS)), generator=generator)
    ids_BL = ids.to(target.device)
    lengths_B = torch.tensor(_LENGTHS, device=target.device)
    cache = KVCache.for_target(target, len(_LENGTHS), width + len(_PARENTS))
    run_draft(target, cache, Draft.chain(ids_BL[:, 0], ids_BL[:, 1:width]))
    cache.lengths_B = lengths_B
    parents_BN = torch.tensor(_PARENTS, device=target.device).expand(len(_LENGTHS), -1)
    nodes_BN = ids_BL[:, width:]
    tree = Draft(nodes_BN, parents_BN, torch.full_like(lengths_B, len(_PARENTS)))
    states_BND = run_draft(target, cache, tree).last
    errors = []
    for row, length in enumerate(_LENGTHS):
        for node in range(len(_PARENTS)):
            path = tree.ancestors_BNN[row, node].nonzero()[:, 0]
            text = torch.cat([ids_BL[row, :length], nodes_BN[row, path]])
            plain_D = target.forward(text[None]).last[0, -1].float()
            errors.append(float((states_BND[row, node].float() - plain_D).norm() / plain_D.norm().clamp(min=1e-6)))
    # In a mixture of experts rounding may send one token to another expert: the median forgives that alone.
    return sorted(errors)[len(errors) // 2] if target.dtype != torch.float32 else max(errors)
