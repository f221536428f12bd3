"""Check this machine: `python scripts/doctor.py`. Works before anything is installed, and with broken links."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    doctor = Path(__file__).resolve().parent.parent / "draftsmith" / "doctor.py"
    sys.exit(runpy.run_path(str(doctor), run_name="draftsmith_doctor")["run_doctor"]())
