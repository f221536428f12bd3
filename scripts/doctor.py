"""Check this machine: `python scripts/doctor.py`. Works before anything is installed, and with broken links.

With `--head FOLDER --target PATH` it says whether a head belongs to a target, as `draftsmith doctor` does.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def check_fit(words: list[str]) -> int:
    """Hand the options to `draftsmith doctor`, which needs draftsmith's packages."""
    sys.path.insert(0, str(ROOT))
    try:
        from draftsmith.cli.main import main

        return main(["doctor", *words])
    except ImportError as error:
        print(
            f"doctor: {error}; run python scripts/doctor.py without options, which says what to mend.", file=sys.stderr
        )
        return 2


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(check_fit(sys.argv[1:]))
    doctor = ROOT / "draftsmith" / "cli" / "doctor.py"
    sys.exit(runpy.run_path(str(doctor), run_name="draftsmith_doctor")["run_doctor"]())
