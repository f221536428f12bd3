"""Decode with several systems in turns, group by group, so that drifts of the machine hit all alike; keep what is done.

Groups hold one slice, so that seconds belong to a slice.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from draftsmith.decoder.answers import Decoded, Request
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.drafters.baselines import GenerateSystem
from draftsmith.eval.drafters.system import SystemUnderTest, Way
from draftsmith.eval.simulate.answers import pack_decoded, unpack_decoded
from draftsmith.foreign.records import Journal
from draftsmith.machine import Clocks, ClockWatch
from draftsmith.progress import Bar
from draftsmith.target.target import Target

FEW = 2
"""Prompts of each slice that are also answered by what takes only some turns: planned draft lengths, and `generate`."""
_WAITING = 3
"""Groups are this many batches longer than the batch, so that rows which finish early are taken over."""

_System = SystemUnderTest | GenerateSystem
_Way = Way | GenerateSystem

_Turn = tuple[dict[str, Decoded], Clocks]
"""What all systems made of one group, by name."""
Repeats = list[list[Decoded]]
"""What one system decoded: of each repeat its groups of requests, slice by slice."""


@dataclass(frozen=True)
class Turns:
    """What was decoded. by_name: the target alone is "". clocks: of all turns."""

    by_name: dict[str, Repeats]
    clocks: Clocks


def run_systems(
    target: Target,
    systems: Sequence[_System],
    requests_by_repeat: Sequence[Sequence[Request]],
    sampling: Sampling,
    *,
    batch: int,
    picks: Sequence[_System] = (),
    journal: Journal | None = None,
) -> Turns:
    """Decode every repeat's requests with the target alone and with every drafter, in turns.

    A drafter with a target of its own is verified by that one. batch: requests decoded at once. It is continuous, as in
    serving engines: a request that is done makes room for the next of its group. picks: take their turns on the first groups of each
    slice only. journal: what it holds is not decoded again. Shows a bar.
    """
    ways: dict[str, _Way] = {"": Way(target, TargetAlone())}
    ways |= {s.name: s.way(target) for s in (*systems, *picks)}
    journal = journal or Journal()
    partly, warm = {s.name for s in picks}, False
    decoded: dict[str, Repeats] = {name: [[] for _ in requests_by_repeat] for name in ways}
    clocks: list[Clocks] = []
    total, title = sum(map(len, requests_by_repeat)), f"decoding at T={sampling.temperature:g}"
    with Bar(total=total, desc=title, unit="prompt") as bar:
        for repeat, requests in enumerate(requests_by_repeat):
            seen: Counter[str] = Counter()
            for number, group in enumerate(_groups(requests, batch if batch == 1 else (1 + _WAITING) * batch)):
                seen[group[0].slice] += 1
                first = seen[group[0].slice] <= (FEW if batch == 1 else 1)
                taking = {name: way for name, way in ways.items() if first or name not in partly}
                name = f"{repeat}/{number}"
                if (turn := _kept(journal.get(name), group, taking)) is not None:
                    bar.skip(len(group))
                else:
                    if not warm:  # a few tokens every way, as first passes are slow
                        some = requests_by_repeat[0][:batch]
                        short = [replace(asked, max_new_tokens=min(16, asked.max_new_tokens)) for asked in some]
                        for one in ways.values():
                            one.decode(short, sampling, batch)
                        warm = True
                    turn = _take(taking, group, sampling, batch)
                    packed = {system: pack_decoded(one) for system, one in turn[0].items()}
                    journal.add(name, {"by_name": packed, "clocks": asdict(turn[1])})
                    bar.update(len(group))
                by_name, clock = turn
                for way in taking:
                    decoded[way][repeat].append(by_name[way])
                clocks.append(clock)
    return Turns(decoded, Clocks.together(clocks))


def _take(ways: dict[str, _Way], group: list[Request], sampling: Sampling, batch: int) -> _Turn:
    """Decode a group every way."""
    watch, by_name = ClockWatch(), {}
    for name, way in ways.items():
        device = way.target.device
        if on_gpu := device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        decoded = way.decode(group, sampling, batch)
        by_name[name] = replace(decoded, peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None)
    return by_name, watch.read()


def _groups(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Split requests by slice, then into groups of at most `size`."""
    by_slice: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        by_slice[request.slice].append(request)
    return [group[i : i + size] for group in by_slice.values() for i in range(0, len(group), size)]


def _kept(value: Any, group: Sequence[Request], ways: dict[str, _Way]) -> _Turn | None:
    """Return the turn that a journal holds, None where it holds none or not every system's."""
    if value is None or not ways.keys() <= value["by_name"].keys():
        return None
    kept = {name: unpack_decoded(decoded, group) for name, decoded in value["by_name"].items()}
    return kept, Clocks(**value["clocks"])
