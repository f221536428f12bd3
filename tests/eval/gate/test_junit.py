"""JUnit XML: what CI systems read of it, and that every name can be written."""

from dataclasses import replace
from xml.etree import ElementTree

from draftsmith.eval.gate.gate import check_results, parse_thresholds
from draftsmith.eval.gate.junit import to_junit
from tests.eval.gate.test_gate import RESULTS, result

ODD = 'a "head" <of> Tom & Jerry\x00\x1b[31m\ud800\ufffe\n'


def test_a_case_per_threshold_drafter_and_setting_in_a_suite_per_result() -> None:
    checks = check_results(RESULTS, parse_thresholds(["tau=2.5,eagle3:code.v2.tau.low@T1=3.5"]))
    text = to_junit(checks)
    assert text.startswith("<?xml ")
    assert "time" not in text, "so that the same checks give the same text"
    root = ElementTree.fromstring(text)
    counts = ("name", "tests", "failures", "errors", "skipped")
    assert root.tag == "testsuites"
    assert [root.get(key) for key in counts] == ["draftsmith", "5", "2", "0", "0"]
    assert [[suite.get(key) for key in counts] for suite in root] == [
        ["a", "2", "0", "0", "0"],
        ["b", "3", "2", "0", "0"],
    ]
    for suite in root:
        assert len(suite.findall("testcase")) == int(suite.get("tests", ""))
        assert len(suite.findall("testcase/failure")) == int(suite.get("failures", ""))
    lossy = "medusa medusa_63, typical (lossy)"
    assert [(case.get("classname"), case.get("name"), len(case)) for case in root[1]] == [
        ("eagle3", "tau@T1", 0),
        (lossy, "tau@T1", 1),
        ("eagle3", "code.v2.tau.low@T1", 1),
    ]
    (failure,) = root[1][2]
    assert failure.get("type") == "threshold"
    assert (
        failure.get("message") == failure.text == "eagle3 at T=1: code.v2.tau.low 3.25 is below the threshold 3.5 (b)."
    )


def test_names_are_escaped_and_what_xml_cannot_hold_is_left_out() -> None:
    odd = result(0.0, {ODD: 3.0})
    drafter = odd.drafters[ODD]
    odd = replace(odd, drafters={ODD: replace(drafter, slices={"\x07<b>&": drafter.overall})})
    checks = check_results({"\x1f'r'.json": odd}, parse_thresholds(["tau=2,\x07<b>&.tau=4"]))
    text = to_junit(checks)
    text.encode("utf-8")
    (suite,) = ElementTree.fromstring(text)
    assert suite.get("name") == "'r'.json"
    assert {case.get("classname") for case in suite} == {'a "head" <of> Tom & Jerry[31m\n'}
    assert [case.get("name") for case in suite] == ["tau@T0", "<b>&.tau@T0"]
    assert "is below the threshold 4" in (suite[1][0].text or "")
