"""Freed memory is kept: the second large tensor costs no page faults."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

PROGRAM = """
import resource, sys
import torch
from draftsmith.stages.device import keep_freed_memory
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


def count(mode: str) -> "tuple[str, int]":
    words = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    accepted, faults = words.stdout.split()
    return accepted, int(faults)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting belongs to glibc")
def test_large_tensors_reuse_their_pages() -> None:
    accepted, kept = count("keep")
    if accepted == "False":
        pytest.skip("this C library has no mallopt")
    _, new_tokens = count("leave")
    # Huge pages may make faults few, but never none.
    assert kept < 0.1 * new_tokens
