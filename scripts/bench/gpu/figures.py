"""The figures of gpu_check.json, read from what tests, stages and evaluations wrote; standard library only."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

MEASURES = ("prompts", "tokens", "rounds", "tau", "tau_interval", "tau_simulated", "acceptance_rate", "acceptance_at",
            "decode_tok_s", "baseline_tok_s", "speedup", "speedup_spread", "ideal_speedup", "ttft_s", "ms_per_round",
            "peak_memory_bytes", "peak_memory_baseline_bytes", "lossless", "looping")  # fmt: skip


def read_tests(path: Path) -> dict[str, Any] | None:
    """Count a JUnit file's tests and name those that failed."""
    if not path.exists():
        return None
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def read_stages(path: Path) -> dict[str, Any]:
    """Return the figures that a run directory's finished stages reported, with tokens per second."""
    if not path.exists():
        return {}
    found = {}
    for name, record in json.loads(path.read_text(encoding="utf-8")).items():
        facts = dict(record["facts"])
        tokens = facts.get("output_tokens", facts.get("tokens"))
        if tokens and facts.get("seconds"):
            facts["tokens_per_second"] = tokens / facts["seconds"]
        found[name] = {"state": record["state"], **facts}
    return found


def summarize_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return what matters of a result.json: the settings, and each drafter overall and by slice."""

    def drafter(entry: dict[str, Any]) -> dict[str, Any]:
        overall = {key: entry["overall"].get(key) for key in MEASURES}
        slices = {
            name: {key: m[key] for key in ("tau", "tau_simulated", "speedup")} for name, m in entry["slices"].items()
        }
        return {"overall": overall, "slices": slices}

    drafters = {name: drafter(entry) for name, entry in result["drafters"].items()}
    return {"settings": result["settings"], "drafters": drafters, "costs": result["costs"]}
