"""Bugs of other trainers and engines that nothing says and acceptance pays for, each by its name, of every method that could have it.

A window that is one block too wide is in tests/heads/dflash2/test_head.py, what reads a published head otherwise than it was trained in
tests/heads/block/test_formats.py: a fill-in head as one that samples from its anchor, a causal one both ways; a GRU with the reset gate before the
product in tests/heads/domino/test_head.py; in tests/heads/xpress a mean over another block than the trained one, and a mixer read above its
diagonal.
"""

from dataclasses import replace

import pytest
import torch

from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.formats.recognise import load_head
from tests.batches import documents_of, pack, turns
from tests.exports import PLAIN, make_target

STEPS = 3


@pytest.mark.parametrize("method", PLAIN)
def test_a_draft_that_leaks_into_the_next_document(method):
    """Neither its logits nor its labels know what follows the document, also where prompts are learned."""
    target = make_target()
    head = PLAIN[method](target)
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    batch = replace(batch, mask=batch.document >= 0)
    later = batch.document > 0
    other = replace(
        batch,
        ids=torch.where(later, (batch.ids + 7) % target.vocab_size, batch.ids),
        aux=torch.where(later[..., None], batch.aux.flip(-1), batch.aux),
        last=torch.where(later[..., None], batch.last.flip(-1), batch.last),
    )
    document = batch.document.flatten()
    for k, (step, changed) in enumerate(zip(head(batch, STEPS).steps, head(other, STEPS).steps, strict=True)):
        assert torch.equal(document[step.rows + 2 + k], document[step.rows]), "a label of the next document"
        first = document[step.rows] == 0
        assert first.any()
        torch.testing.assert_close(step.logits[first], changed.logits[first], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", PLAIN)
def test_the_unshifted_mask_that_leaves_the_first_row_untrained(method):
    """The first row's root is the answer's first token, and its last row predicts the last one."""
    target = make_target()
    head = PLAIN[method](target)
    batch = pack(target, documents_of(target, [(14,)]), head.reads.layer_ids)
    answers = turns(14)
    for k, step in enumerate(head(batch, STEPS).steps):
        expected = [t for t in range(14 - 2 - k) if answers[t + 1 : t + 3 + k].all()]
        assert sorted(set(step.rows.tolist())) == expected
    assert answers.tolist().index(True) - 1 == min(head(batch, 1).steps[0].rows.tolist())


@pytest.mark.parametrize("name", layouts())
def test_random_embeddings_after_an_export(name, tmp_path):
    """What an engine fills in from the target is what the head was trained with."""
    layout, target = layouts()[name], make_target()
    head = PLAIN[layout.method](target)
    export_head(head, target, tmp_path / name, layout=name, num_speculative_tokens=STEPS)
    again = load_head(tmp_path / name, target)
    own = again.state_dict().get(EMBEDDING)
    if own is not None:
        assert torch.equal(own, head.state_dict()[EMBEDDING].to(own))
