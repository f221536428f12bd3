"""Read result.json files of earlier versions: what they did not measure becomes null; and refuse figures that nothing can have."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from draftsmith.errors import UserError

_MOST = 1e15
"""More than any count, time or number of bytes that is measured."""
_ADDED = {
    2: ("perplexity", "perplexity_baseline", "peak_memory_bytes", "peak_memory_baseline_bytes"),
    4: ("agreement", "kl"),
    5: ("baseline_vs_generate",),
    6: ("tau_simulated_interval",),
    7: (
        "contexts",
        "training_split",
        "token_wait_s",
        "token_wait_baseline_s",
        "exact_match",
        "exact_match_baseline",
        "referenced",
    ),
    8: ("thinking", "valid_json", "valid_json_baseline", "json_answers"),
}
"""The measures that came with a version."""
_ADDED_SETTINGS = {3: ("min_p", "repetition_penalty"), 6: ("prompts",), 8: ("longest_text",)}
"""The settings that came with a version."""


def upgrade(value: Any) -> Any:
    """Return the JSON of a result of an earlier schema version as version 10 has it; anything else as it is.

    Version 2 adds how each drafter drafts, the tokens of a tree's pass, perplexities and peak memory; version 3 min-p and
    the repetition penalty, which were off; version 4 how a tuned target differs, of which there was none; version 5 the
    target alone over transformers' `generate`; version 6 the interval of simulated tau, which prompts they were, what was timed
    to check a plan, the clocks, and which layers a head reads; version 7 acceptance by context, the
    wait for each token, right answers, and what a head's weights are rounded to; version 8 the sizes of weights and caches, acceptance
    in thought, and valid JSON; version 9 what each prompt adds to tau; version 10 the vocabulary that a head
    drafts among. What is malformed stays so, for the reader to name.
    """
    version = value.get("schema_version") if isinstance(value, dict) else None
    if type(version) is not int or version not in range(1, 10):
        return value
    value = deepcopy(value)
    if version == 1 and isinstance(value.get("costs"), dict):
        value["costs"].setdefault("nodes", {})
    if isinstance(value.get("settings"), dict):
        value["settings"] = _missing(_ADDED_SETTINGS, version) | value["settings"]
    with_sizes(value)
    missing = _missing(_ADDED, version)
    for drafter, measures in _drafters(value):
        if version == 1:
            drafter.setdefault("draft", None)
        drafter.setdefault("prompts", {})
        if isinstance(drafter.get("draft"), dict):
            drafter["draft"] = {
                "tuned": False,
                "layer_ids": [],
                "num_heads": 0,
                "trained_length": None,
                "weights": None,
                "weight_bytes": None,
                "cache_bytes": None,
                "cache_slots": None,
                "vocabulary": None,
                **drafter["draft"],
            }
        for one in measures:
            one.update({**missing, **one})
    return {"picks": [], "clocks": None, **value, "schema_version": 10}


def with_sizes(value: dict[str, Any]) -> None:
    """Give the target of a result or of a table of costs null for its sizes, where it was written without them."""
    if isinstance(value.get("target"), dict):
        value["target"] = {"weight_bytes": None, "cache_bytes": None, **value["target"]}


def _missing(added: Mapping[int, Sequence[str]], version: int) -> dict[str, None]:
    """Return null for every name that came after a version."""
    return dict.fromkeys(name for later, names in added.items() if version < later for name in names)


def _drafters(value: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield each drafter and its measures, over everything and per slice, as far as they are objects."""
    drafters = value.get("drafters")
    for drafter in drafters.values() if isinstance(drafters, dict) else ():
        if isinstance(drafter, dict):
            slices = drafter.get("slices")
            found = (drafter.get("overall"), *(slices.values() if isinstance(slices, dict) else ()))
            yield drafter, [measures for measures in found if isinstance(measures, dict)]


def check_figures(measures: Any, where: str) -> None:
    """Raise UserError for counts, shares and times that nothing can have, and for an accepted length that no pass could have.

    measures: `Measures` of a result. where: names it, up to "says that".
    """
    again = "evaluate again, or restore the file"
    for key, value in vars(measures).items():
        numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int | float)]
        if key != "kl" and numbers and min(numbers) < 0:  # which rounding may bring below
            raise UserError(f"{where} {key} is {min(numbers):g}, below zero: {again}.")
        if numbers and max(numbers) > _MOST:
            raise UserError(f"{where} {key} is {max(numbers):g}, more than can be measured: {again}.")
    taus = [measures.tau, measures.tau_simulated, *(point.tau_simulated for point in measures.k_sweep or ())]
    if any(tau is not None and tau <= 0 for tau in taus):
        raise UserError(f"{where} an accepted length is zero or less, where every pass brings a token: {again}.")
