"""Write the checks of a gate as JUnit XML, which CI systems show as tests."""

import re
from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree

from draftsmith.eval.gate.gate import ThresholdCheck

# Outside the characters of XML 1.0 (its production 2), which cannot be escaped either.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

JUNIT_MARK = '<testsuites name="draftsmith"'
"""How a text of ours is known."""


def to_junit(checks: Sequence[ThresholdCheck]) -> str:
    """Return the checks as JUnit XML: a suite per result, in it a case per threshold and drafter, named as a threshold is
    written. No times, so that the same checks give the same text."""
    root = ElementTree.Element("testsuites", _counts("draftsmith", checks))
    for source, group in groupby(sorted(checks, key=lambda check: check.source), key=lambda check: check.source):
        cases = list(group)
        suite = ElementTree.SubElement(root, "testsuite", _counts(source, cases))
        for check in cases:
            name = {
                "classname": _clean(check.drafter),
                "name": _clean(f"{check.threshold.name}@T{check.temperature:g}"),
            }
            case = ElementTree.SubElement(suite, "testcase", name)
            if not check.passed:
                message = _clean(check.message)
                ElementTree.SubElement(case, "failure", {"type": "threshold", "message": message}).text = message
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counts(name: str, checks: Sequence[ThresholdCheck]) -> dict[str, str]:
    failures = sum(not check.passed for check in checks)
    counts = {"tests": len(checks), "failures": failures, "errors": 0, "skipped": 0}
    return {"name": _clean(name), **{key: str(value) for key, value in counts.items()}}


def _clean(text: str) -> str:
    """Leave out the characters that no XML file can hold."""
    return _NOT_XML.sub("", text)
