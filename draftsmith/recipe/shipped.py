"""The recipes and launch files that are installed with draftsmith, found by name: "eagle3/tiny", "accelerate/ddp-8gpu"."""

import os
from pathlib import Path

import draftsmith
from draftsmith.errors import UserError, did_you_mean, shown_path

FOLDER = Path(draftsmith.__file__).parent / "recipes"


def shipped_names() -> dict[str, str]:
    """Return what is installed by name, and what its first comment says of it."""
    found = {}
    for path in sorted(FOLDER.glob("*/*.yaml")):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        found[path.relative_to(FOLDER).with_suffix("").as_posix()] = first.lstrip("# ").rstrip()
    return found


def find_file(name: str) -> str:
    """Return the file of that name, else the installed one, whose name may begin with "recipes/" and lack its ending; a name that is
    neither comes back as it is."""
    inside = name.removeprefix("recipes/")
    if os.path.exists(name) or not inside or os.path.isabs(inside) or ".." in Path(inside).parts:
        return name
    return next((str(FOLDER / one) for one in (inside, f"{inside}.yaml") if os.path.isfile(FOLDER / one)), name)


def find_shipped(name: str) -> Path:
    """Return the installed file of that name. Raises UserError where there is none."""
    known = shipped_names()
    short = name.removeprefix("recipes/").removesuffix(".yaml")
    if short not in known:
        raise UserError(
            f"There is no recipe {shown_path(name)}{did_you_mean(short, known)}: `draftsmith recipes` lists them."
        )
    return FOLDER / f"{short}.yaml"
