"""After training: what a head fits to the held-out answers once its weights are fixed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.batch import TrainBatch
from draftsmith.data.features.store import FeatureSource
from draftsmith.data.packing import Batch, collate
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.heads.base import drafting
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.target.target import Target


def calibrate_best(
    folder: Path,
    target: Target,
    source: FeatureSource,
    batches: Sequence[Batch],
    row_tokens: int,
    sampling: Sampling,
) -> dict[str, Any]:
    """Let the head in `folder` calibrate its confidence on the held-out answers, and keep it; return what it tells of that,
    nothing where it does not know better than before. sampling: that of the answers."""
    head = load_head(folder, target).to(target.device)

    def packed() -> Iterator[TrainBatch]:
        for plan in batches:
            samples = [source.get_many(row, head.layer_ids) for row in plan]
            yield collate(samples, row_tokens).to(target.device)

    with drafting(head):
        facts = head.calibrate(packed(), target.head, sampling)
    if not facts:
        return {}
    save_head(head, folder, target)
    return {"calibration": facts}
