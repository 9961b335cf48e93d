"""Each planted fault is found, by the test that is there for it; what is sound passes."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOUND_BY = {
    "WrongPerm": "test_numerics",
    "WrongScale": "test_numerics",
    "TooWide": "test_envelope_rows",
    "UndeclaredRead": "test_readers",
    "MutatesInput": "test_inputs_stay",
    "ViewOfInput": "test_result_is_its_own",
    "WrongDtype": "test_numerics",
    "NonDeterministic": "test_deterministic",
    "AllocatesInStep": "test_allocations",
    "GraphBreak": "test_compiles",
    "IgnoresStrides": "test_strides",
    "LiesAboutCann": "test_stable_under_cann",
}
"""The twelve of the contract."""
ALSO_FOUND_BY = {
    "ClaimsMoreThanItOffers": "test_claims",
    "OffersMoreThanItClaims": "test_claims",
    "NeedlessRead": "test_readers",
    "OneBuffer": "test_result_is_its_own",
    "Hoards": "test_allocations",
    "ChangesWeight": "test_inputs_stay",
    "WideNeighbour": "test_envelope_shapes",
    "OffersNothing": "test_claims",
    "Raises": "test_claims",
    "PathWrongScale": "test_numerics",
    "PathWrongRope": "test_numerics",
    "PathWrongDtype": "test_shapes_and_dtypes",
    "PathUndeclaredRead": "test_readers",
    "PathMutatesInput": "test_inputs_stay",
    "PathWritesElsewhere": "test_inputs_stay",
    "PathViewOfInput": "test_result_is_its_own",
    "PathNonDeterministic": "test_deterministic",
    "PathAllocates": "test_allocations",
    "PathGraphBreak": "test_compiles",
    "PathIgnoresStrides": "test_shapes_and_dtypes",
    "PathTooWide": "test_envelope_rows",
    "PathServesTheRefused": "test_refused_layers",
    "FreesWhatIsRead": "test_what_is_read_is_not_let_go",
    "ForgetsExport": "test_what_is_read_is_not_let_go",
    "ByNumber": "test_answers_are_stable",
    "Slip": "test_votes_name_the_layer_s_weights",
    "Silent": "test_claims",
}
SOUND = ("Sound", "SoundPath", "SoundPolicy")
ALONE = (
    "AllocatesInStep",
    "GraphBreak",
    "OneBuffer",
    "WideNeighbour",
    "LiesAboutCann",
    "PathAllocates",
)
"""Faults of which every other test is run as well, and passes."""
# Seen where an op's limits are, and where there is another CANN: on the simulated NPU only.
NEEDS_SIM = ("TooWide", "LiesAboutCann")
HAS_SIM = find_spec("torch_npu") is not None


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return by suite the tests that failed, and those that ran."""
    report = tmp_path_factory.mktemp("faults") / "report.xml"
    whole = [*SOUND, *ALONE]
    nodes = [f"faulty_plugins.py::Test{suite}" for suite in whole]
    nodes += [
        f"faulty_plugins.py::Test{fault}::{test}"
        for fault, test in {**FOUND_BY, **ALSO_FOUND_BY}.items()
        if fault not in whole
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
         "--show-capture=no", f"--junitxml={report}", *nodes],
        cwd=HERE, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    failed, ran, texts = defaultdict(set), defaultdict(set), defaultdict(str)
    for case in ET.parse(report).getroot().iter("testcase"):
        suite = case.get("classname", "").rpartition(".Test")[2]
        test = case.get("name", "").partition("[")[0]
        if case.find("skipped") is None:
            ran[suite].add(test)
        for kind in ("failure", "error"):
            for node in case.findall(kind):
                failed[suite].add(test)
                texts[suite] += node.text or ""
    return failed, ran, texts


@pytest.mark.parametrize("fault", [*FOUND_BY, *ALSO_FOUND_BY])
def test_a_planted_fault_is_found_by_its_test(outcomes, fault):
    if fault in NEEDS_SIM and not HAS_SIM:
        pytest.skip("torch-npu is not installed")
    failed, ran, _ = outcomes
    expected = {**FOUND_BY, **ALSO_FOUND_BY}[fault]
    assert expected in ran[fault]
    assert expected in failed[fault], failed[fault]


def test_there_are_the_twelve_of_the_contract():
    assert len(FOUND_BY) == 12


@pytest.mark.parametrize("suite", SOUND)
def test_what_is_sound_passes_every_test(outcomes, suite):
    failed, ran, texts = outcomes
    assert ran[suite]
    assert not failed[suite], texts[suite]


@pytest.mark.parametrize("fault", ALONE)
def test_a_fault_turns_its_own_test_red_and_no_other(outcomes, fault):
    if fault in NEEDS_SIM and not HAS_SIM:
        pytest.skip("torch-npu is not installed")
    expected = {**FOUND_BY, **ALSO_FOUND_BY}[fault]
    assert outcomes[0][fault] == {expected}


def test_a_failure_names_plugin_matmul_and_figures(outcomes):
    text = outcomes[2]["WrongScale"]
    assert "planted of planted (planted unknown), v_up-4x128x64-bfloat16-contiguous" in text
    assert "a row is off by 0.02" in text
    assert "tolerated is 0.0039" in text
