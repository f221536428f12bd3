"""Run vLLM through `vllm_runner.py` in vLLM's own Python, and read what it drafted and accepted.

Checked with vLLM 0.32.0 on a CPU.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.decoder.answers import Request
from draftsmith.errors import UserError, last_line
from draftsmith.eval.engines.agreement import EngineAnswer, EngineRound

RUNNER = Path(__file__).with_name("vllm_runner.py")


@dataclass(frozen=True)
class VllmSettings:
    """What vLLM is started with.

    home: the environment that holds it. model: folder of the target, or of a draft that names its target. speculative:
    --speculative-config, None where the folder says it all. context: of prompt and answer. eos_ids: end an answer.
    """

    home: Path
    model: Path
    speculative: dict[str, Any] | None
    context: int
    eos_ids: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class VllmRun:
    """answers: per temperature, with rounds as they ran, before the end of an answer is cut. counters: vLLM's own."""

    version: str
    answers: dict[float, list[EngineAnswer]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


def run_vllm(settings: VllmSettings, requests: Sequence[Request], folder: Path) -> VllmRun:
    """Answer `requests` at each temperature in one engine; the job, its result and vLLM's log stay in `folder`.

    Raises UserError with vLLM's own last error where it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, result, log = folder / "job.json", folder / "result.json", folder / "vllm.log"
    prompts = [{"id": r.sample_id, "ids": r.prompt_ids, "max_new_tokens": r.max_new_tokens} for r in requests]
    wanted = {
        "model": str(settings.model),
        "speculative_config": settings.speculative,
        "context": settings.context,
        "temperatures": settings.temperatures,
        "eos": settings.eos_ids,
        "prompts": prompts,
    }
    job.write_text(json.dumps(wanted), encoding="utf-8")
    result.unlink(missing_ok=True)
    command = [str(settings.home / "bin" / "python"), str(RUNNER), str(job), str(result)]
    # One thread that is not bound to a core, its own process's engine, and no network.
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Without Intel's OpenMP, which comes with it, its threads wait for each other most of the time.
    library = settings.home / "lib" / "libiomp5.so"
    if sys.platform == "linux" and library.exists():
        own["LD_PRELOAD"] = str(library)
    # The environment that draftsmith runs in is not vLLM's.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        with log.open("wb") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=kept | own, check=True)
    except OSError as error:
        raise UserError(f"Cannot start {command[0]}: {error.strerror}; name the environment of vLLM.") from error
    except subprocess.CalledProcessError as error:
        lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in log.read_text("utf-8", "replace").splitlines()]
        said = last_line("\n".join([line for line in lines if re.match(r"[\w.]*Error: ", line)] or lines))
        raise UserError(f"vLLM failed: {said} (see {log}).") from error
    answered = json.loads(result.read_text(encoding="utf-8"))
    answers = {
        float(temperature): [_answer(entry) for entry in entries]
        for temperature, entries in answered["answers"].items()
    }
    run = VllmRun(answered["version"], answers, answered["counters"])
    # The runner saw what vLLM's own counters say.
    rounds = [r for answers in run.answers.values() for a in answers for r in a.rounds if r.drafted]
    seen = {
        "vllm:spec_decode_num_drafts": len(rounds),
        "vllm:spec_decode_num_draft_tokens": sum(len(r.drafted) for r in rounds),
        "vllm:spec_decode_num_accepted_tokens": sum(r.accepted for r in rounds),
    }
    for name, value in run.counters.items():
        assert seen.get(name, value) == value, f"{name}: the runner saw {seen[name]}, vLLM counts {value}"
    return run


def _answer(entry: dict[str, Any]) -> EngineAnswer:
    # The first step reads the prompt and has no draft.
    rounds = [EngineRound(tuple(r["drafted"]), len(r["sampled"]) - 1) for r in entry["rounds"][1:]]
    return EngineAnswer(entry["id"], tuple(entry["ids"]), tuple(rounds))
