"""For which classes of targets engines draft: targets.json, by the names that config.json has for them in `architectures`.

A draft may need of its target what enters its layers (`states`: EAGLE-3, P-EAGLE, DFlash, DSpark) or its embeddings and output
projection (`ends`: EAGLE-1 in SGLang), and engines give these for some classes alone. `python -m scripts.bench.engines.targets`
renews the file from engines that are installed, or from their sources.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("targets.json")
LISTS: dict[str, dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
"""By engine: its `version`, how it was `asked`, and by need the classes with it (`yes`), those without (`no`) and what holds for
`others`, null where that is not known."""


def drafts_for(engine: str, needs: str, architectures: Sequence[str] | None) -> bool | None:
    """Return whether an engine gives drafts what they need of a target of one of these classes, None where that is not known.

    needs: a key of the engine's list; empty for drafts that need nothing of the class.
    """
    if not needs:
        return True
    classes = LISTS.get(engine, {}).get(needs)
    if classes is None or not architectures:
        return None
    if any(name in classes["yes"] for name in architectures):
        return True
    return False if all(name in classes["no"] for name in architectures) else classes["others"]
