"""Where suites run, and what they do with a real NPU, which is played by a stand-in here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npu_backend.catalog import load_catalog
from npu_backend.errors import NpuBackendError, PluginError
from npu_backend.testing import BmmKernelConformance, ReleasePolicyConformance
from npu_backend.testing.conformance import places
from npu_backend.testing.conformance.bmm import BmmCase
from npu_backend.testing.conformance.places import Place, everywhere, home_of, others_of
from npu_backend_builtin import transpose_bmm

A3 = [("A3", "9.2.0"), ("A3", "9.1.0"), ("A2", "9.1.0"), ("A2", "9.0.0"), ("310P", "9.0.0")]


def test_every_chip_and_release_of_the_catalog_is_asked_about_once():
    versions = load_catalog().versions
    assert len(everywhere()) == len(set(everywhere())) == len(versions.socs) * len(versions.cann)


def test_stability_is_run_on_each_release_of_one_chip_and_one_of_each_other_that_is_simulated():
    found = others_of(A3)
    assert [str(p) for p in found] == ["sim-A3-9.2.0", "sim-A3-9.1.0", "sim-A2-9.1.0"]


def test_a_real_npu_takes_the_place_of_the_simulated_one(monkeypatch):
    monkeypatch.setattr(places, "device_nodes", list)
    assert {p.device for p in home_of(A3, ("cpu", "sim", "npu"))} == {"cpu", "sim"}
    monkeypatch.setattr(places, "device_nodes", lambda: ["/dev/davinci0"])
    assert [p.device for p in home_of(A3, ("cpu", "sim", "npu"))] == ["cpu", "npu"]
    # The simulation has processes of its own then: CANN's libraries are loaded in this one.
    (mark,) = places.parameter(Place("sim", "A3", "9.2.0"), None, id="x").marks
    assert mark.kwargs["isolated"] is True


def test_a_real_npu_says_what_it_is(monkeypatch):
    monkeypatch.setattr(places, "bring_up", lambda: ("Ascend910B3", "9.0.0"))
    here = places.opened(Place("npu", "A3", "9.2.0"), None)
    assert (here.soc, here.cann) == ("A2", "9.0.0")


def test_nothing_offered_is_nowhere():
    assert home_of([], ("cpu", "sim")) == ()
    assert home_of([("310P", "9.0.0")], ("cpu",)) == ()


def test_a_suite_without_a_plugin_or_a_case_says_what_is_missing():
    class NoPlugin(BmmKernelConformance):
        shapes = ((4, 128, 64),)

    with pytest.raises(PluginError, match="the suite has no plugin"):
        NoPlugin.survey()

    class NoShapes(BmmKernelConformance):
        plugin = transpose_bmm

    with pytest.raises(NpuBackendError, match="has no case"):
        NoShapes.survey()

    class Several(BmmKernelConformance):
        plugin = transpose_bmm
        shapes = ((4, 128, 64),)

    with pytest.raises(NpuBackendError) as caught:
        Several.survey()
    assert "torch.bmm" in caught.value.why[0]
    assert "set `strategy`" in caught.value.remedy


def test_a_layer_of_a_case_has_the_matmul_that_is_asked_about():
    from npu_backend import Deployment, Phase
    from npu_backend.planner.kernels import bmm_spec

    for site in ("v_up", "q_absorb"):
        for layout in ("strided", "contiguous"):
            case = BmmCase(site, 6, 48, 80, "float16", layout)
            planned = bmm_spec(case.layer(), Deployment(), site, {Phase.DECODE: ((1, None),)})
            assert (planned.shape, planned.weight_layout) == ((6, 48, 80), layout)
            assert planned.input_layout == case.spec().input_layout


def test_the_builtin_policy_is_left_out_beside_a_policy_under_test():
    class Nobody(ReleasePolicyConformance):
        plugin = transpose_bmm

    registry = Nobody.subject().registry
    assert registry.call_order("release_weights") == ()


def test_importing_the_suites_names_imports_no_torch():
    code = (
        "import sys, npu_backend.testing as t; "
        "assert 'BmmKernelConformance' in dir(t); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
