"""The recipes and launch files that are installed with draftsmith, found by name: "eagle3/tiny", "accelerate/ddp-8gpu"."""

import os
import re
from itertools import takewhile
from pathlib import Path

import draftsmith
from draftsmith.errors import UserError, did_you_mean, one_line

FOLDER = Path(draftsmith.__file__).parent / "recipes"


def shipped_names() -> dict[str, str]:
    """Return what is installed by name, and how the comment at its top begins: up to the first colon, semicolon or full stop."""
    names = {}
    for path in sorted(FOLDER.glob("*/*.yaml")):
        lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        about = re.sub(r" \([^)]*\)", "", " ".join(line.strip("# ") for line in lines))
        names[path.relative_to(FOLDER).with_suffix("").as_posix()] = re.split(r"[.:;](?: |$)", about)[0]
    return names


def find_file(name: str) -> str:
    """Return the file of that name, else the installed one, whose name may begin with "recipes/" and lack its ending; a name that is
    neither comes back as it is."""
    inside = name.removeprefix("recipes/")
    if os.path.exists(name) or not inside or os.path.isabs(inside) or ".." in Path(inside).parts:
        return name
    return next((str(FOLDER / one) for one in (inside, f"{inside}.yaml") if os.path.isfile(FOLDER / one)), name)


def shipped_text(name: str) -> str:
    """Return what the installed file of that name holds. Raises UserError where there is none."""
    known = shipped_names()
    short = name.removeprefix("recipes/").removesuffix(".yaml")
    if short not in known:
        raise UserError(
            f"There is no recipe {one_line(name)}{did_you_mean(short, known)}: `draftsmith recipes` lists them."
        )
    return (FOLDER / f"{short}.yaml").read_text(encoding="utf-8")
