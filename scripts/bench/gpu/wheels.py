"""What the GPU check needs beyond torch and transformers, from wheels alone; standard library only."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from draftsmith.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
WHEELS = ROOT / "scripts" / "gpu_wheels.txt"


def missing_requirements() -> list[str]:
    """Return the lines of gpu_wheels.txt whose package is not installed, in any version."""
    lines = (line.partition("#")[0].strip() for line in WHEELS.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not _installed(line.partition("==")[0])]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def install_wheels(wheels: Path | None, packages: Path) -> Path:
    """Put what is not installed into the folder `packages`, from wheels alone. UserError names the missing ones."""
    needed = missing_requirements()
    files = [file.name.lower() for file in wheels.glob("*.whl")] if wheels else []
    absent = [line for line in needed if not any(_is_wheel_of(line, name) for name in files)]
    if absent:
        raise UserError(
            f"This python lacks {', '.join(absent)}, and {f'{wheels} holds no wheels of them' if wheels else 'no --wheels'}: "
            f"fetch them where there is a network, as {WHEELS.relative_to(ROOT)} says, and give their folder with --wheels."
        )
    if needed:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--find-links", str(wheels), "--upgrade", "--target", str(packages), *needed]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"pip could not install the wheels in {wheels}: {' '.join(done.stderr.split())[-400:]}.")
    return packages


def _is_wheel_of(requirement: str, file: str) -> bool:
    name, _, version = requirement.partition("==")
    return file.startswith(f"{name.lower().replace('-', '_')}-{version}-")
