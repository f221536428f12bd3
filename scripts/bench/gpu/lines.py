"""A plugin of pytest that writes a line for every test as it ends, so that tests which are cut off keep what they found."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --lines FILE."""
    parser.addoption("--lines", type=Path, required=True, help="file of lines: passed, failed or skipped, and the test")


class Lines:
    """Append the outcome of every test to a file, that of its worst phase."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.worst: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase (setup, call, teardown); write the test's line after the last one."""
        if report.outcome != "passed" or report.nodeid not in self.worst:
            self.worst[report.nodeid] = report.outcome
        if report.when == "teardown":
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{self.worst.pop(report.nodeid)} {report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Write in the process that hands out tests, which hears of all of them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(config.getoption("lines")))
