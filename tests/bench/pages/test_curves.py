"""The training curves in the docs are those of the committed runs."""

from pathlib import Path

from scripts.bench.pages.curves import PICTURES, RUNS, draw


def test_pictures_in_the_docs_are_drawn_from_the_committed_runs(tmp_path: Path) -> None:
    runs = sorted(RUNS.iterdir())
    assert {f"shared-target-{run.name}.svg" for run in runs} == {picture.name for picture in PICTURES.iterdir()}
    for run in runs:
        picture = f"shared-target-{run.name}.svg"
        draw(run / "metrics.jsonl", tmp_path / picture)
        assert (tmp_path / picture).read_bytes() == (PICTURES / picture).read_bytes(), (
            "run python -m scripts.bench.pages.curves"
        )
