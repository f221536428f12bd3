"""Rates that make an engine accept as a hypothetical head would, so that a better head can be timed before it is trained.

vLLM (config/speculative.py, v1/sample/rejection_sampler.py) and llama.cpp (common/speculative.cpp) take the share of all rounds that
accept the i-th drafted token, never rising, one for each; so tau is 1 plus their sum. SGLang (speculative/spec_utils.py) takes tau alone.
Texts are then worth nothing: drafted tokens stay whatever the target says. vLLM 0.32's CPU build refuses (utils/cpu_triton_utils.py);
llama.cpp never accepts a drafted end of text (tools/server/server-context.cpp).
"""

import json
from collections.abc import Sequence
from itertools import pairwise

from draftsmith.errors import UserError

_DIGITS = 6


def rates_for(tau: float, shape: Sequence[float]) -> tuple[float, ...]:
    """Return the share of rounds that accept each drafted token, 1 + their sum is `tau`: those of `shape`, all raised to one power.

    shape: shares that never rise; of 0.5, 0.25, 0.125, ... come those of a head that accepts every token with the same probability. Raises
    UserError for a tau that no power gives.
    """
    low, high = 0.0, 1.0  # the power is middle / (1 - middle), so that all from 0 to infinity are between
    for _ in range(50):
        middle = (low + high) / 2
        raised = [share ** (middle / (1 - middle)) if share else 0.0 for share in shape]
        low, high = (middle, high) if 1 + sum(raised) > tau else (low, middle)
    falling = all(after <= before for before, after in pairwise((1.0, *shape)))
    if not falling or abs(1 + sum(raised) - tau) > 1e-6:
        most = 1 + sum(share > 0 for share in shape)
        why = (
            f"with {most - 1} drafted tokens it is from 1 to {most}"
            if falling
            else "the report's shares of positions rise"
        )
        raise UserError(f"tau {tau:g} cannot be injected, as {why}: name another --tau, or another --draft-length.")
    return tuple(round(share, _DIGITS) for share in raised)


def start_lines(tau: float, rates: Sequence[float]) -> dict[str, str]:
    """Return by engine what is added where it is started with a draft."""
    shown, k = [float(f"{rate:.{_DIGITS}f}") for rate in rates], len(rates)
    vllm = {"num_speculative_tokens": k, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": shown}
    return {
        "vLLM": f"in --speculative-config: {json.dumps(vllm)[1:-1]}",
        "llama.cpp": f"--spec-draft-n-max {k} --spec-draft-n-min 0 --spec-draft-p-min 0 --spec-synth-rates {','.join(f'{r:g}' for r in shown)}",
        "SGLang": f"in the environment: SGLANG_SIMULATE_ACC_LEN={tau:g} SGLANG_SIMULATE_ACC_METHOD=match-expected (its own rates)",
    }
