"""Reading result.json files of earlier versions: what they did not measure becomes null."""

from copy import deepcopy
from typing import Any

_NEW_MEASURES = ("perplexity", "perplexity_baseline", "peak_memory_bytes", "peak_memory_baseline_bytes")
_NEW_SETTINGS = ("min_p", "repetition_penalty")


def upgrade(value: Any) -> Any:
    """Return the JSON of a result of an earlier schema version as version 3 has it; anything else as it is.

    Version 2 adds how each drafter drafts, the tokens of a tree's pass, perplexities and peak memory; version 3 min-p and
    the repetition penalty, which were off. What is malformed stays so, for the reader to name.
    """
    if not isinstance(value, dict) or value.get("schema_version") not in (1, 2):
        return value
    value = deepcopy(value)
    if value["schema_version"] == 1:
        _to_version_2(value)
    if isinstance(value.get("settings"), dict):
        for name in _NEW_SETTINGS:
            value["settings"].setdefault(name, None)
    return value | {"schema_version": 3}


def _to_version_2(value: dict[str, Any]) -> None:
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
