"""Reading result.json files of earlier versions: what they did not measure becomes null."""

from copy import deepcopy
from typing import Any

_NEW_MEASURES = ("perplexity", "perplexity_baseline", "peak_memory_bytes", "peak_memory_baseline_bytes")


def upgrade(value: Any) -> Any:
    """Return the JSON of a result with schema version 1 as version 2 has it; anything else as it is.

    Version 2 adds how each drafter drafts, the tokens of a tree's pass, perplexities and peak memory. What is malformed
    stays so, for the reader to name.
    """
    if not isinstance(value, dict) or value.get("schema_version") != 1:
        return value
    value = deepcopy(value) | {"schema_version": 2}
    if isinstance(value.get("costs"), dict):
        value["costs"].setdefault("nodes", {})
    drafters = value.get("drafters")
    for drafter in drafters.values() if isinstance(drafters, dict) else ():
        if not isinstance(drafter, dict):
            continue
        drafter.setdefault("draft", None)
        slices = drafter.get("slices")
        for measures in (drafter.get("overall"), *(slices.values() if isinstance(slices, dict) else ())):
            if isinstance(measures, dict):
                for name in _NEW_MEASURES:
                    measures.setdefault(name, None)
    return value
