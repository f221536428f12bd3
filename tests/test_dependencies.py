"""An audit of what is installed: nothing is broken, all of it is pinned, and nobody asked for less than what is pinned.

Known vulnerabilities are told by a database that tests may not ask: CONTRIBUTING.md has the command.
"""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
}
EXTRAS = {"", "dev", "deepspeed", "quant", "gguf", "lm-eval", "trackers"}
OF_TORCH = re.compile(r"nvidia-|cuda-|triton$")
"""What torch pins itself, and CPU builds do not have."""


def asked_for(name: str, extras: set[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Yield all installed packages that a package needs, directly or by way of others."""
    for line in metadata.requires(name) or ():
        needed = Requirement(line)
        if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        found = canonicalize_name(needed.name)
        try:
            metadata.version(found)
        except metadata.PackageNotFoundError:
            continue
        if (found, frozenset(needed.extras)) not in seen:
            seen.add((found, frozenset(needed.extras)))
            yield found
            yield from asked_for(found, set(needed.extras), seen)


def needed() -> set[str]:
    """Return the installed packages that draftsmith and its extras need."""
    found = {name for name in asked_for("draftsmith", EXTRAS, set()) if not OF_TORCH.match(name)}
    assert len(found) > 50
    return found


def test_no_requirement_is_broken() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_needed_is_pinned_at_the_version_that_is_installed() -> None:
    # A local version, such as 2.13.0+cpu, is a build of the one that is pinned.
    found = {name: Version(metadata.version(name)) for name in needed()}
    wrong = {name: str(version) for name, version in found.items() if str(PINS.get(name)) != version.public}
    assert not wrong


def test_every_pin_is_needed() -> None:
    # Of this environment: other tests may have put more on sys.path.
    places = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    installed = {canonicalize_name(one.metadata["Name"]) for one in metadata.distributions(path=places)}
    assert sorted(PINS.keys() & installed - needed()) == []
