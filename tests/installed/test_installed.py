"""Wheels of the project, the example, a generated plugin and broken ones in fresh environments."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import ROOT, Venv, build, make_wheel

EXAMPLE = ROOT / "plugins" / "vendor-bmm-example"
# 128 heads over two ranks: (B, K, N) of v_up is (64, 512, 128).
SERVED = ("plan", "deepseek-v3", "--role", "decode", "--attn-tp-size", "2", "--soc", "A3",
          "--cann", "9.1.0")  # fmt: skip
ELSEWHERE = ("plan", "deepseek-v3", "--role", "decode", "--attn-tp-size", "1", "--soc", "A3",
             "--cann", "9.1.0")  # fmt: skip


@pytest.fixture(scope="module")
def generated_wheel(venv: Venv, wheel_folder: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    made = venv.json("new-plugin", "acme-npu", "--directory", str(folder))
    assert made["files"] == sorted(made["files"])
    return build(Path(made["folder"]), wheel_folder)


def without(plan: dict, *parts: str) -> dict:
    plan = json.loads(json.dumps(plan))
    for name in ("plugins", "fingerprint"):
        plan.pop(name)
    for layer in plan["layers"]:
        for part in parts:
            layer.pop(part)
    return plan


@pytest.mark.parametrize(
    "wheel, strategy, provider",
    [
        ("example_wheel", "vendor_bmm", "vendor_bmm (vendor-bmm-example 1.0.0)"),
        ("generated_wheel", "acme_npu", "acme_npu (acme-npu 0.1.0)"),
    ],
)
def test_a_vendor_changes_the_v_up_entries_and_nothing_else(
    venv, request, wheel, strategy, provider
):
    before, elsewhere = venv.json(*SERVED), venv.json(*ELSEWHERE)
    venv.install(request.getfixturevalue(wheel))
    dist = provider.split("(")[1].split()[0]
    try:
        after, elsewhere_too = venv.json(*SERVED), venv.json(*ELSEWHERE)
        # What is not told apart by v_up is as it was: paths, weights and their bytes, totals.
        assert without(after, "v_up", "declined") == without(before, "v_up", "declined")
        assert after["fingerprint"] != before["fingerprint"]
        assert [p for p in after["plugins"] if p not in before["plugins"]] == [
            {
                "name": provider.split()[0],
                "dist": dist,
                "version": provider.split()[-1].rstrip(")"),
                "status": "active",
            }
        ]
        for old, new in zip(before["layers"], after["layers"], strict=True):
            first, second = new["v_up"]
            assert (first["strategy"], first["provider"], first["tokens"]) == (
                strategy,
                provider,
                [1, 128],
            )
            assert second == {**old["v_up"][0], "tokens": [129, None]}
        # Where it declines: another shape. The decisions are the same, so is the fingerprint.
        assert without(elsewhere_too, "declined") == without(elsewhere, "declined")
        assert elsewhere_too["fingerprint"] == elsewhere["fingerprint"]
        reasons = [
            r
            for d in elsewhere_too["layers"][0]["declined"]
            if d["provider"] == provider
            for r in d["reasons"]
        ]
        assert reasons
        assert "(128, 512, 128)" in reasons[0]["message"]
    finally:
        venv.uninstall(dist)
    assert venv.run("npu-backend", *SERVED, "--json").stdout == json.dumps(before, indent=1) + "\n"


def test_the_example_is_sixty_lines_of_code_or_fewer():
    code = [
        line
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml", ".ini") and ".tox" not in path.parts
        for line in path.read_text("utf-8").splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    assert 0 < len(code) <= 60


BROKEN = {
    "not-importable": ({"na_broken.py": "import not_there_at_all\n"}, "na_broken"),
    "bad-signature": (
        {
            "bs_broken.py": "from npu_backend import hookimpl\n"
            "@hookimpl\ndef select_bmm_kernel(bmm, deployments): ...\n"
        },
        "bs_broken",
    ),
    "raises-in-hook": (
        {
            "rh_broken.py": "from npu_backend import hookimpl\n"
            "@hookimpl\ndef select_bmm_kernel(bmm):\n    raise OSError('no licence')\n"
        },
        "rh_broken",
    ),
}


@pytest.fixture
def broken(venv: Venv, tmp_path: Path):
    wheels = [
        make_wheel(tmp_path, name, files, {"broken": module})
        for name, (files, module) in BROKEN.items()
    ]
    venv.install(*wheels)
    yield
    venv.uninstall(*BROKEN)


def test_installed_plugins_that_are_broken_harm_nobody_and_are_told_by_name(venv, broken):
    done = venv.run("npu-backend", *SERVED, "--json")
    plan = json.loads(done.stdout)
    status = {p["dist"]: p["status"] for p in plan["plugins"]}
    assert status["not-importable"] == status["bad-signature"] == "failed"
    for name, why in {
        "not-importable": "No module named 'not_there_at_all'",
        "bad-signature": "did you mean 'deployment'?",
        "raises-in-hook": "no licence",
    }.items():
        assert re.search(rf"warning: broken \({name} 1\.0, entry point", done.stderr), name
        assert why in done.stderr
    failed = [
        d for d in plan["layers"][0]["declined"] if d["provider"].startswith("broken (raises")
    ]
    assert failed[0]["reasons"][0]["code"] == "plugin.failed"
    checked = venv.json("plugins", "--check", code=1)
    assert any("no licence" in f for row in checked["check"] for f in row["failures"])
    assert venv.run("npu-backend", *SERVED, code=2, NPU_BACKEND_STRICT="1").stdout == ""


def test_broken_plugins_leave_the_decisions_as_they_are(venv, tmp_path):
    before = venv.json(*SERVED)
    wheels = [
        make_wheel(tmp_path, name, files, {"broken": module})
        for name, (files, module) in BROKEN.items()
    ]
    venv.install(*wheels)
    try:
        assert venv.json(*SERVED)["fingerprint"] == before["fingerprint"]
    finally:
        venv.uninstall(*BROKEN)


def test_a_plugin_for_another_major_api_is_refused_by_name_and_none_of_it_runs(venv, tmp_path):
    files = {"from_the_future.py": "raise SystemExit('this ran')\n"}
    wheel = make_wheel(
        tmp_path, "future-npu", files, {"future": "from_the_future"},
        version="7.1", group="npu_backend.plugins.v2",
    )  # fmt: skip
    before = venv.json(*SERVED)
    venv.install(wheel)
    try:
        done = venv.run("npu-backend", *SERVED, "--json")
        assert json.loads(done.stdout)["fingerprint"] == before["fingerprint"]
        assert 'future (future-npu 7.1, entry point "future = from_the_future")' in done.stderr
        assert "is built for plugin API 2" in done.stderr
        assert "this npu-backend has plugin API 1" in done.stderr
        assert "this ran" not in done.stderr
        (record,) = [p for p in venv.json("plugins")["plugins"] if p["dist"] == "future-npu"]
        assert record["status"] == "failed"
        assert record["reason"].startswith("is built for plugin API 2: this npu-backend")
        assert venv.run("npu-backend", "plugins", "--check", code=1)
        venv.run("npu-backend", *SERVED, code=2, NPU_BACKEND_STRICT="1")
    finally:
        venv.uninstall("future-npu")


VENDOR = """
from npu_backend import Offer, hookimpl

@hookimpl{options}
def select_bmm_kernel(bmm):
    if bmm.site != "v_up":
        return None
    return Offer(strategy="{strategy}", impl="{module}:Kernel", reads=[bmm.weight])
"""


def vendor(folder: Path, name: str, strategy: str, options: str = "") -> Path:
    module = name.replace("-", "_")
    text = VENDOR.format(strategy=strategy, module=module, options=options)
    return make_wheel(folder, name, {f"{module}.py": text}, {"kernels": module})


def test_two_vendors_with_one_kernel_are_ordered_visibly_and_a_request_decides(venv, tmp_path):
    alder = vendor(tmp_path, "alder-npu", "swift_bmm")
    birch = vendor(tmp_path, "birch-npu", "swift_bmm")
    a, b = "kernels (alder-npu 1.0)", "kernels (birch-npu 1.0)"
    venv.install(birch, alder)
    try:
        runs = {
            venv.run("npu-backend", *SERVED, "--json", PYTHONHASHSEED=seed).stdout
            for seed in ("1", "2", "3")
        }
        (text,) = runs
        layer = json.loads(text)["layers"][0]
        # Sorted by distribution, and the last registered is asked first.
        assert [e["provider"] for e in layer["v_up"]] == [b]
        assert [(u["site"], u["strategy"]) for u in layer["unused"] if u["provider"] == a] == [
            ("v_up", "swift_bmm")
        ]
        told = venv.run("npu-backend", *SERVED).stdout
        assert re.search(
            rf"swift_bmm at v_up +{re.escape(a)} +legal; first is {re.escape(b)}", told
        )

        plugins = venv.json("plugins")
        assert plugins["call_order"]["select_bmm_kernel"][:2] == [b, a]
        (tie,) = plugins["ties"]
        assert (tie["hook"], tie["plugins"]) == ("select_bmm_kernel", [b, a])
        assert "last by distribution" in tie["by"]
        assert "tie in select_bmm_kernel" in venv.run("npu-backend", "plugins").stdout
        checked = venv.json("plugins", "--check")
        shadowed = [s for row in checked["check"] for s in row["shadowed"] if s["provider"] == a]
        assert shadowed
        assert all(s["by"] == [f"swift_bmm of {b}"] for s in shadowed)
        assert all("last by distribution" in s["why"] for s in shadowed)
        counts = {row["provider"]: row for row in checked["summary"]["plugins"]}
        assert counts[b]["serves"] > 0 == counts[a]["serves"]
        assert counts[a]["shadowed"] == counts[b]["serves"]

        for dist, provider in (("alder-npu", a), ("birch-npu", b)):
            wished = venv.json(*SERVED, "--request", f"v_up={dist}/swift_bmm")["layers"][0]
            assert [e["provider"] for e in wished["v_up"]] == [provider]
    finally:
        venv.uninstall("alder-npu", "birch-npu")


def test_two_vendors_with_names_of_their_own_and_a_flag(venv, tmp_path):
    venv.install(
        vendor(tmp_path, "alder-npu", "alder_bmm", "(tryfirst=True)"),
        vendor(tmp_path, "birch-npu", "birch_bmm"),
    )
    try:
        assert venv.json(*SERVED)["layers"][0]["v_up"][0]["strategy"] == "alder_bmm"
        for name in ("alder_bmm", "birch_bmm"):
            plan = venv.json(*SERVED, "--request", f"v_up={name}")
            assert {e["strategy"] for e in plan["layers"][0]["v_up"]} == {name}
        plugins = venv.json("plugins", "--check")
        assert plugins["ties"] == []
        why = {
            s["why"]
            for row in plugins["check"]
            for s in row["shadowed"]
            if s["strategy"] == "birch_bmm"
        }
        assert why == {"it is marked tryfirst"}
    finally:
        venv.uninstall("alder-npu", "birch-npu")


@pytest.fixture(scope="module")
def torch_venv(tmp_path_factory, core_wheel, core_needs):
    if find_spec("torch_npu") is None:
        pytest.skip("torch-npu is not installed: the suites run on the simulated NPU")
    needs = [*core_needs, "torch", "torch-npu", "numpy", "pyyaml", "setuptools", "pytest"]
    made = Venv(tmp_path_factory.mktemp("torch") / "v", needs)
    made.install(core_wheel)
    return made


def _all_passed(done) -> None:
    last = done.stdout.splitlines()[-1]
    assert re.match(r"\d+ passed", last), done.stdout[-2000:]
    assert "skipped" not in last


def test_the_tests_of_generated_plugins_pass_at_once(torch_venv, wheel_folder, tmp_path):
    """In one process, to share the simulated NPUs."""
    folders = []
    for kind in ("bmm", "path", "release"):
        made = torch_venv.json(
            "new-plugin", f"made-{kind}", "--kind", kind, "--directory", str(tmp_path)
        )
        folders.append(Path(made["folder"]))
        torch_venv.install(build(folders[-1], wheel_folder))
    done = torch_venv.run(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib",
        "--rootdir", str(tmp_path), "--durations=15",
        *(str(f / "tests") for f in folders), cwd=tmp_path,
    )  # fmt: skip
    _all_passed(done)
    impls = _impls(torch_venv)
    assert impls["made_bmm.kernel:Kernel"] == impls["made_path.path:Path"] == "ok"


def test_the_tests_of_the_example_pass(torch_venv, example_wheel, tmp_path):
    torch_venv.install(example_wheel)
    own = shutil.copytree(EXAMPLE, tmp_path / "example")
    _all_passed(torch_venv.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=own))
    assert _impls(torch_venv)["vendor_bmm_example.kernel:VendorBmm"] == "ok"


def _impls(venv: Venv) -> dict[str, str]:
    checked = venv.json("plugins", "--check")
    return {row["impl"]: row["status"] for row in checked["summary"]["impls"]}
