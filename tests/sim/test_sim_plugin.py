"""The pytest plugin: fixtures, the marker, and a process of its own where settings differ."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest_plugins = "pytester"

ROOT = Path(__file__).parents[2]
needs_torch_npu = pytest.mark.skipif(
    find_spec("torch_npu") is None, reason="torch-npu is not installed"
)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NPU_BACKEND_SIM_CANN", "9.1.0")
    pytester.makeini("[pytest]\naddopts = --strict-markers\n")

    def run(code: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(code)
        return pytester.runpytest_subprocess(*_plugin(), *arguments)

    return run


def _plugin() -> tuple[str, ...]:
    """Load the plugin by name unless the installed distribution's entry point does it."""
    from importlib.metadata import entry_points

    names = {entry.value for entry in entry_points(group="pytest11")}
    return () if "npu_backend.testing.plugin" in names else ("-p", "npu_backend.testing.plugin")


@needs_torch_npu
def test_settings_of_the_marker_hold_in_a_process_of_its_own(run) -> None:
    result = run(
        """
        import os
        import pytest

        PIDS = []

        def test_unmarked(npu_device):
            import torch
            assert (torch.ones(2, device=npu_device) + 1).tolist() == [2, 2]

        @pytest.mark.npu(cann="9.1.0")
        def test_equal_settings_share_the_process(npu_sim):
            import sys
            assert npu_sim.settings.cann == "9.1.0"
            assert "--npu-sim-report" not in sys.argv

        @pytest.mark.npu(cann="9.0.0", soc="Ascend910B2")
        @pytest.mark.parametrize("n", [1, 2])
        def test_other_settings_get_a_child(npu_sim, n):
            import sys
            import torch
            assert "--npu-sim-report" in sys.argv
            PIDS.append(os.getpid())
            assert len(PIDS) == n  # both in one child
            assert torch.npu.get_device_name() == "Ascend910B2"
            assert npu_sim.settings.cann == "9.0.0"

        @pytest.mark.npu(isolated=True)
        def test_isolated_on_request(npu_sim):
            import sys
            assert "--npu-sim-report" in sys.argv

        def test_after(npu_sim):
            assert npu_sim.settings.cann == "9.1.0"
        """,
        "-v",
    )
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*::test_other_settings_get_a_child?1? PASSED*"])


@needs_torch_npu
def test_failures_skips_and_crashes_come_back_with_their_text(run) -> None:
    result = run(
        """
        import pytest

        pytestmark = pytest.mark.npu(cann="9.0.0")

        @pytest.fixture
        def broken():
            raise ValueError("fixture broke")

        def test_fails(npu_sim):
            print("printed in the child")
            left = {"cann": npu_sim.settings.cann}
            assert left == {"cann": "7.7"}

        def test_error(broken):
            pass

        def test_skips():
            pytest.skip("because")

        @pytest.mark.xfail(reason="known")
        def test_xfails():
            assert False

        def test_crashes():
            import os, sys
            print("last words", file=sys.stderr)
            os.abort()

        def test_after_the_crash(npu_sim):
            assert npu_sim.settings.cann == "9.0.0"
        """,
        "-rs",
    )
    result.assert_outcomes(passed=1, failed=2, errors=1, skipped=1, xfailed=1)
    text = result.stdout.str()
    assert "{'cann': '9.0.0'} == {'cann': '7.7'}" in text
    assert "printed in the child" in text
    assert "ValueError: fixture broke" in text
    assert "the test's process was ended by SIGABRT" in text
    assert "simulated NPU, in a process of its own" in text
    assert "cann=9.0.0" in text
    assert "because" in text


@needs_torch_npu
def test_shared_fixtures_of_other_modules_are_torn_down_in_order(run, pytester) -> None:
    pytester.makepyfile(
        test_a="""
        import pytest

        @pytest.fixture(scope="module", autouse=True)
        def around():
            yield
            print("closed a")

        def test_first():
            pass

        @pytest.mark.npu(cann="9.0.0")
        def test_isolated():
            pass
        """
    )
    result = run(
        """
        def test_in_another_module():
            pass
        """
    )
    result.assert_outcomes(passed=3)


@needs_torch_npu
@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("npu(chip='A3')", "the npu marker takes the keywords soc, cann, memory, devices"),
        ("npu('A3')", "the npu marker takes the keywords"),
        ("npu(soc='Ascend000')", "Ascend000"),
        ("npu(cann='6.0')", "older than the catalog"),
    ],
)
def test_a_wrong_marker_is_an_error_of_the_collection(run, marker: str, text: str) -> None:
    result = run(f"import pytest\n\n@pytest.mark.{marker}\ndef test_it():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert text in result.stderr.str() + result.stdout.str()


def test_without_torch_npu_tests_are_skipped_with_the_reason(run, pytester) -> None:
    pytester.makeconftest(
        """
        import npu_backend.testing.plugin as plugin

        plugin._has_torch_npu = lambda: False
        """
    )
    result = run(
        """
        import pytest

        def test_fixture(npu_device):
            pass

        @pytest.mark.npu(cann="9.0.0")
        def test_marker():
            pass

        def test_neither():
            pass
        """,
        "-rs",
    )
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["*torch-npu is not installed: the simulated NPU runs the real one on stand-ins for CANN*"]
    )


def test_the_plugin_imports_no_torch_unless_a_test_uses_it(run) -> None:
    result = run(
        """
        import sys

        def test_it():
            assert "torch" not in sys.modules
            assert "torch_npu" not in sys.modules
        """
    )
    result.assert_outcomes(passed=1)


def test_the_marker_is_registered(run) -> None:
    result = run("def test_it(): pass", "--markers")
    result.stdout.fnmatch_lines(["*npu(soc=None, cann=None, memory=None, devices=None*"])
