"""Build the section on how the head came to be: what it learned from, its held-out curve, and what more data would bring.

Pure; see eval/report/page_model.py for the values and eval/report/report.py for the printing.
"""

from draftsmith.eval.report.cells import number, percent
from draftsmith.eval.report.page_model import Figure, Row, Section, Table, View
from draftsmith.eval.report.plots import Series, line_panel
from draftsmith.eval.training.history import tell


def section(view: View) -> Section:
    """The training of the run's head."""
    past = view.history
    title, about = (
        "How the head came to be",
        (
            "Held-out tau is the simulated accepted length on answers that the head did not learn from. While it rises, more data or more "
            "epochs still help."
        ),
    )
    if past is None:
        return Section("training", title, about, missing="The training of this head is not in the run.")
    points = past.points
    labels = [f"{p.tokens / 1e6:.2g}M" for p in points]
    taus = tuple(p.tau for p in points)
    k = "" if past.num_speculative_tokens is None else f", K = {past.num_speculative_tokens}"
    panel = line_panel(
        f"held-out tau{k}",
        labels,
        [Series("tau", 0, taus)],
        x_title="tokens read",
        show=number,
        y_range=(1.0, max(2.0, *taus)),
    )
    rows = tuple(Row((f"{p.step}", f"{p.tokens:,}", number(p.tau)), p == past.best) for p in points)
    tables = [Table("Held-out evaluations", ("step", "tokens", "τ"), rows, folded=True)]
    if past.coverage is not None and past.coverage.heldout_by_slice:
        covered = tuple(Row((name, percent(share))) for name, share in past.coverage.heldout_by_slice.items())
        tables.append(
            Table(
                "Tokens of held-out answers that the draft vocabulary has", ("slice", "covered"), covered, folded=True
            )
        )
    warned = {f"warning: {text}" for result in view.results for text in result.warnings}  # which the page says above
    lines = (line for line in tell(past) if line not in warned)
    return Section(
        "training",
        title,
        about,
        (Figure("Held-out tau over the training; the best head is kept.", (panel,)),),
        tuple(tables),
        tuple(line[0].upper() + line[1:].rstrip(".") + "." for line in lines),
    )
