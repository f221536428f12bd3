"""Made-up results and costs to plan with, whose every figure is known."""

from dataclasses import replace

from draftsmith.eval.clocks.cost_table import ALONE, CostPoint, CostTable, TimedServer
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.planner.plan import Plan
from draftsmith.eval.results.result import DrafterResult, Measures, Result, Settings, SweepPoint, TargetInfo
from draftsmith.machine import Hardware

TARGET = TargetInfo("target", "f1", 1000, 2, 8, 100)
HARDWARE = Hardware("a CPU", 2, 1, 24.0, None)
KS = (1, 2, 3, 4)


def measures(alpha: float) -> Measures:
    taus = [1 + sum(alpha**i for i in range(1, k + 1)) for k in KS]
    return Measures(20, k_sweep=tuple(SweepPoint(k, tau) for k, tau in zip(KS, taus, strict=True)))


def result(temperature: float, alphas: dict[str, float], k: int = 4, name: str = "eagle3") -> Result:
    """alphas: by slice; "overall" among them."""
    slices = {slice_name: measures(alpha) for slice_name, alpha in alphas.items() if slice_name != "overall"}
    draft = DraftInfo("eagle3", k, k)
    settings = Settings(temperature, None, None, k, 1, "float32", 0, 3)
    drafters = {name: DrafterResult(measures(alphas["overall"]), slices, draft)}
    return Result("c", None, "2026-01-01", HARDWARE, {}, None, TARGET, settings, drafters)


def table(
    draft_ms: float = 1.0, *, batches: tuple[int, ...] = (1, 4, 16), name: str = "eagle3", admit_ms: float = 30.0
) -> CostTable:
    """A pass over n tokens of b rows takes 10 ms up to 16 tokens in all and then grows with them; a drafted token `draft_ms`."""
    points = []
    for batch in batches:
        for context in (64, 128, 256):
            verify = {str(n): 10.0 * max(1.0, n * batch / 16) for n in range(1, 9)}
            draft = {str(k): draft_ms * k for k in KS}
            points.append(CostPoint(batch, context, verify, {name: draft}, {name: admit_ms}, {ALONE: 0.5, name: 1.0}))
    return CostTable(TARGET, "float32", tuple(points), {}, 10**9, 2e11, HARDWARE, {}, "c", None, "2026-01-01")


def served_table(rounds: dict[int, float], *, alone_ms: float = 10.0, batches: tuple[int, ...] = (1, 4)) -> CostTable:
    """Of servers that draft the numbers in `rounds`, whose whole rounds take so many ms, at every batch."""
    whole = {ALONE: {"0": alone_ms}, "eagle3": {str(k): ms for k, ms in rounds.items()}}
    points = tuple(CostPoint(batch, 128, {}, {}, {"eagle3": 5.0}, {}, whole) for batch in batches)
    servers = tuple(TimedServer(f"http://k{k}", "vLLM 1", "m", k) for k in (0, *rounds))
    return CostTable(TARGET, None, points, {}, None, None, None, {}, "c", None, "2026-01-01", servers)


def plan(*results: Result, costs: CostTable | None = None) -> Plan:
    return Plan(results, costs or table())


def busier(result: Result, batch: int) -> Result:
    return replace(result, settings=replace(result.settings, batch=batch))
