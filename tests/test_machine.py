"""What is said of a machine, and its memory: freed memory is kept, so that the second large tensor costs no page faults, but kept memory does not grow without end."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith import machine
from draftsmith.machine import faster_in_bf16

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    faster_in_bf16.cache_clear()
    yield
    faster_in_bf16.cache_clear()


@pytest.mark.parametrize("slower", [torch.float32, torch.bfloat16])
def test_bf16_is_taken_where_its_products_are_faster(slower: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)

    def product(x: Tensor, weight: Tensor) -> None:
        assert x.dtype == weight.dtype
        time.sleep(0.02 if x.dtype == slower else 0.002)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    assert faster_in_bf16(CPU) == (slower == torch.float32)


def test_what_emulates_it_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    assert not faster_in_bf16(CPU)


def test_what_a_container_has_taken_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that it has read are: they give way."""
    monkeypatch.setattr(machine, "_CONTAINER", tmp_path)
    plain = machine.available_memory(CPU)
    for name, text in (
        ("max", "1000000"),
        ("current", "900000"),
        ("stat", "anon 5\nactive_file 7\ninactive_file 200"),
    ):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert machine.memory_of(CPU) == 1000000
    assert machine.available_memory(CPU) == 100207
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory(CPU) == pytest.approx(plain, rel=0.5)


of_glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings belong to glibc")

FAULTS = """
import resource, sys
import torch
from draftsmith.machine import keep_freed_memory
accepted = keep_freed_memory() if sys.argv[1] == "keep" else None

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(48 * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    faults()  # the heap grows to what is needed
print(accepted, faults())
"""

GROWTH = """
import sys
import psutil
import torch
from draftsmith.machine import HeldMemory, keep_freed_memory
accepted, held = keep_freed_memory(), HeldMemory()
given_back = [held.step_ended()]
# All are there at once, so that none lies where another one did, whatever holes the imports have left.
step = [torch.ones(size * 2**20, dtype=torch.uint8) for size in range(50)]
del step
if sys.argv[1] == "bounded":
    given_back += [held.step_ended(), held.step_ended()]
print(accepted, psutil.Process().memory_info().rss, given_back.count(True))
"""


def run(program: str, mode: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program, mode], capture_output=True, text=True, check=True)
    accepted, *figures = done.stdout.split()
    if accepted == "False":
        pytest.skip("this C library has no mallopt")
    return figures


@pytest.mark.full
@of_glibc
def test_large_tensors_reuse_their_pages() -> None:
    (kept,), (fresh,) = run(FAULTS, "keep"), run(FAULTS, "leave")
    # Huge pages may make faults few, but never none.
    assert int(kept) < 0.1 * int(fresh)


@pytest.mark.full
@of_glibc
def test_tensors_of_changing_sizes_do_not_fill_the_memory() -> None:
    (unbounded, _), (bounded, given_back) = run(GROWTH, "free"), run(GROWTH, "bounded")
    assert int(given_back) == 1  # and not again, as what is left is what the next step is measured by
    assert int(bounded) < 0.7 * int(unbounded)
