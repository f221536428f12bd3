"""Looks at the machine and says what is fine, what is not, and how to mend it.

Only the standard library is imported here at the top, and nothing of draftsmith: scripts/doctor.py loads this
file by its path, so that it also works where the links of the rooms are missing or nothing is installed yet.
"""

import importlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent
ROOMS = ("data", "heads", "train", "eval", "recipes")
TESTED_TRANSFORMERS = ((5, 17), (5, 23))
OLDEST_TORCH = (2, 11)
FROM_CHECKOUT = (CHECKOUT / "scripts" / "doctor.py").is_file()
"""An installed package has neither scripts nor pinned versions."""
INSTALL = (
    'bash scripts/quickstart.sh, or: pip install -e ".[dev]" -c constraints.txt'
    if FROM_CHECKOUT
    else "pip install --upgrade draftsmith"
)
_OPTIONAL = (
    ("deepspeed", "deepspeed", "ZeRO"),
    ("torchao", "quant", "models quantized with it"),
    ("gguf", "gguf", "targets in GGUF files"),
    *((name, "trackers", "its dashboard") for name in ("tensorboard", "trackio", "mlflow-skinny")),
)
"""Distributions, the extras that bring them, and what they are for."""
LINK_COMMAND = "for room in data heads train eval recipes; do ln -sfn ../$room draftsmith/$room; done"
GB = 1024**3


@dataclass(frozen=True)
class Check:
    """One line of the table: state is "ok", "note" (works, worth knowing) or "bad"; fix says what to do, or ""."""

    name: str
    state: str
    detail: str
    fix: str = ""


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as "2.13.0+cpu"."""
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0


def check_python() -> Iterator[Check]:
    """Python 3.11 or newer, on a system that draftsmith works on."""
    fix = "" if sys.version_info >= (3, 11) else "use Python 3.11 or newer"
    fix = "draftsmith works on Linux and macOS: on Windows use WSL (wsl --install)" if sys.platform == "win32" else fix
    yield Check("Python", "bad" if fix else "ok", f"{platform.python_version()} at {sys.executable}", fix)


def check_rooms(package: Path = PACKAGE) -> Iterator[Check]:
    """The rooms inside the package are links to the folders beside it (or real folders, once installed)."""
    lost = [room for room in ROOMS if not (package / room).is_dir()]
    if lost:
        detail = f"{', '.join(lost)}: not a folder; an archive was unpacked without links"
        yield Check("Rooms", "bad", detail, f"in the repository: {LINK_COMMAND}")
    elif not (package.parent / "pyproject.toml").exists():
        yield Check("Rooms", "ok", "folders of the installed package")
    else:
        copies = [room for room in ROOMS if (package / room).resolve() != (package.parent / room).resolve()]
        if copies:
            detail = f"{', '.join(copies)}: a copy, so edits of the top-level folder have no effect"
            fix = f"in the repository: (cd draftsmith && rm -r {' '.join(copies)}); {LINK_COMMAND}"
            yield Check("Rooms", "bad", detail, fix)
        else:
            yield Check("Rooms", "ok", "links to the top-level folders")


def check_packages() -> Iterator[Check]:
    """Every required package is there."""
    try:
        lines = metadata.requires("draftsmith") or []
    except metadata.PackageNotFoundError:
        yield Check("draftsmith", "bad", "not installed in this Python", INSTALL)
        return
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    lost = [name for name in names if installed(name) is None]
    if lost:
        yield Check("Packages", "bad", f"missing: {', '.join(lost)}", INSTALL)
    else:
        yield Check("Packages", "ok", f"draftsmith {installed('draftsmith')} and all {len(names)} it needs")


def check_torch() -> Iterator[Check]:
    """Version of torch, and what its GPUs can do."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Check("torch", "bad", f"cannot be imported: {str(error).splitlines()[0]}", INSTALL)
        return
    version = str(torch.__version__)
    old = release(version) < OLDEST_TORCH
    wanted = ".".join(map(str, OLDEST_TORCH))
    yield Check("torch", "bad" if old else "ok", version, f"install torch {wanted} or newer" if old else "")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            bf16 = device.major >= 8 or torch.version.hip is not None
            detail = f"{device.name}, {device.total_memory / GB:.0f} GB, bf16 {'yes' if bf16 else 'no'}"
            fix = "" if bf16 else "train and decode in float32 or float16"
            yield Check(f"GPU {index}", "ok" if bf16 else "note", detail, fix)
    elif torch.version.cuda:
        detail = f"none that this CUDA {torch.version.cuda} build can use"
        yield Check("GPU", "note", detail, "check the driver with nvidia-smi; everything also runs on the CPU")
    elif shutil.which("nvidia-smi"):
        wheels = "https://download.pytorch.org/whl/cu130"
        fix = (
            f"TORCH_INDEX={wheels} bash scripts/quickstart.sh"
            if FROM_CHECKOUT
            else f"pip install torch --index-url {wheels}"
        )
        yield Check("GPU", "note", "there may be one, but this torch is a CPU build", fix)
    else:
        yield Check("GPU", "note", "none; everything runs on the CPU, slower")


def check_transformers() -> Iterator[Check]:
    """transformers lies in the tested range."""
    version = installed("transformers")
    if version is None:
        return  # "Packages" says so already
    oldest, newest = TESTED_TRANSFORMERS
    tested = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    if oldest <= release(version) <= newest:
        yield Check("transformers", "ok", f"{version} (tested: {tested})")
    else:
        yield Check("transformers", "bad", f"{version}, outside the tested range {tested}", INSTALL)


def caches() -> dict[str, Path]:
    """The folders that grow: here, draftsmith's cache, the Hub's cache."""
    hub = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    own = os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith"
    # Not Path.expanduser, which raises where an account has no home: then ~ is a folder that cannot be made.
    return {
        "This folder": Path.cwd(),
        "draftsmith's cache": Path(os.path.expanduser(own)),
        "Hub cache": Path(os.path.expanduser(hub)),
    }


def check_disk() -> Iterator[Check]:
    """Every folder that grows can be written and has room."""
    variables = {"draftsmith's cache": "DRAFTSMITH_CACHE", "Hub cache": "HF_HOME"}
    for name, folder in caches().items():
        fix = f"set {variables[name]} to another folder" if name in variables else "work in another folder"
        there = next(one for one in (folder, *folder.parents) if one.exists())
        try:
            with tempfile.NamedTemporaryFile(dir=there):
                pass
        except OSError as error:
            yield Check(name, "bad", f"{folder} cannot be written: {error.strerror}", fix)
            continue
        free = shutil.disk_usage(there).free / GB
        state, fix = "ok" if free >= 10 else "note" if free >= 2 else "bad", f"free some space, or {fix}"
        yield Check(name, state, f"{free:.0f} GB free in {folder}", "" if state == "ok" else fix)


def check_hardware() -> Iterator[Check]:
    """At least 4 GB of memory, cores, and whether they are faster in bf16."""
    limit = None
    if hasattr(os, "sysconf"):
        limit = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        container = Path("/sys/fs/cgroup/memory.max")
        text = container.read_text(encoding="utf-8").strip() if container.is_file() else ""
        limit = min(limit, float(text)) if text.isdigit() else limit
    fix = "" if limit is None or limit >= 4 * GB else "the embedded default needs about 3 GB; close other programs"
    detail = "unknown on this system" if limit is None else f"{limit / GB:.1f} GB"
    yield Check("Memory", "note" if fix or limit is None else "ok", detail, fix)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("CPU", "ok" if cores >= 2 else "note", f"{cores} cores", "" if cores >= 2 else "expect twice the time")
    try:
        torch, machine = (importlib.import_module(name) for name in ("torch", "draftsmith.machine"))
        faster = machine.faster_in_bf16(torch.device("cpu"))
    except (ImportError, OSError, AttributeError):  # another check says what is missing, broken or too old
        return
    fix = "" if faster else "its instructions for bf16 are missing or slower: prefer float32 in recipes"
    yield Check("CPU bf16", "ok" if faster else "note", f"{'faster' if faster else 'no faster'} than float32", fix)


def check_hub() -> Iterator[Check]:
    """Whether the Hub answers, where the Hugging Face libraries may ask it, and what W&B would do with a run."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    on = [name for name in names if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    if on:
        yield Check("Hub", "note", f"offline ({', '.join(on)})", "unset it to fetch models or data sets by name")
    else:
        try:
            why = importlib.import_module("draftsmith.foreign.code").why_offline()
        except (ImportError, OSError, AttributeError):  # another check says what is missing or broken
            yield Check("Hub", "note", "not asked, as its library cannot be loaded", INSTALL)
        else:
            fix = "mend the network or the proxy to fetch models or data sets by name; HF_HUB_OFFLINE=1 forbids it"
            detail = "online; set HF_HUB_OFFLINE=1 to forbid the network" if why is None else f"does not answer ({why})"
            yield Check("Hub", "note" if why else "ok", detail, fix if why else "")
    mode = os.environ.get("WANDB_MODE")
    yield Check("W&B", "ok", f"WANDB_MODE={mode}" if mode else "WANDB_MODE is not set; the recipe decides")


def check_accelerate() -> Iterator[Check]:
    """The default configuration of `accelerate launch`, and the kinds that start one process where several are asked for."""
    file = caches()["Hub cache"] / "accelerate" / "default_config.yaml"
    if not file.is_file():
        fix = "pass --launch accelerate/cpu, accelerate/one-gpu or accelerate/ddp-8gpu"
        yield Check("Accelerate", "note", f"no {file}", fix)
        return
    values = dict(re.findall(r"^(\w+): *['\"]?(\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE))
    kind, processes = values.get("distributed_type", "NO"), values.get("num_processes", "1")
    if processes != "1" and kind in ("NO", "MULTI_CPU"):
        detail = f"{file}: {processes} processes of {kind}, of which Accelerate starts one"
        yield Check("Accelerate", "bad", detail, "pass --launch accelerate/ddp-2cpu or accelerate/cpu")
    else:
        yield Check("Accelerate", "ok", f"{file}: {kind}, {processes} process(es)")


def check_optional() -> Iterator[Check]:
    """Packages and programs that only some tasks need."""
    for name, extra, use in _OPTIONAL:
        version = installed(name)
        package = f'-e ".[{extra}]" -c constraints.txt' if FROM_CHECKOUT else f'"draftsmith[{extra}]"'
        fix = "" if version else f"for {use}: pip install {package}"
        yield Check(name, "ok" if version else "note", version or "not installed", fix)
    if not shutil.which("git"):
        yield Check("git", "note", "not found", "without it result.json cannot name the commit")


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_python,
    check_rooms,
    check_packages,
    check_torch,
    check_transformers,
    check_disk,
    check_hardware,
    check_hub,
    check_accelerate,
    check_optional,
)


def table(checks: list[Check]) -> str:
    """One line per check, and its fix on a line of its own, so that a command can be copied whole."""
    width = max(len(check.name) for check in checks)
    lines = [f"{check.state:<4}  {check.name:<{width}}  {check.detail}" for check in checks]
    fixes = [f"\n      {'':<{width}}  -> {check.fix}" if check.fix else "" for check in checks]
    return "\n".join(line + fix for line, fix in zip(lines, fixes, strict=True))


def run_doctor() -> int:
    """Check the machine, print the table, and return the exit code: 0, or 1 if anything is bad."""
    checks = [check for look in CHECKS for check in look()]
    bad = sum(check.state == "bad" for check in checks)
    verdict = f"{bad} of {len(checks)} checks need a fix." if bad else f"Nothing to mend in {len(checks)} checks."
    print(f"{table(checks)}\n{verdict}")
    return int(bad > 0)
