"""Bringing the simulated device up: order, settings, and an error for each way it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from npu_backend.catalog import load_catalog
from npu_backend.testing.sim import Settings, SimStartError, build_standins

SOURCES = Path(__file__).parents[2] / "npu_backend" / "testing" / "sim"
START = "from npu_backend.testing import sim\n"
REPORT = (
    "import sys\n"
    "try:\n"
    "    sim.start({})\n"
    "except sim.SimError as err:\n"
    "    print(type(err).__name__, err)\n"
    "else:\n"
    "    print('up')\n"
)

pytestmark = pytest.mark.usefixtures("torch_npu_installed")


def test_importing_the_simulation_imports_no_torch(run_python) -> None:
    done = run_python(
        "import sys, npu_backend.testing, npu_backend.testing.plugin\n"
        "from npu_backend.testing import sim\n"
        "from npu_backend.testing.sim import validators\n"
        "print('torch' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


def test_start_brings_up_the_chip_cann_and_memory_asked_for(run_python) -> None:
    done = run_python(
        START + "s = sim.start(soc='Ascend910B3', cann='8.5.0', memory=1 << 30, devices=2)\n"
        "import os, torch, torch_npu\n"
        "assert sim.start() is s is sim.current()\n"
        "assert sim.start(soc='Ascend910B3', memory=1 << 30) is s\n"
        "print(torch.npu.get_device_name(), torch.npu.device_count(),\n"
        "      torch.npu.mem_get_info()[1],\n"
        "      torch_npu.npu.utils.get_cann_version(), torch_npu.npu.utils.get_soc_version(),\n"
        "      (torch.ones(3, device='npu:1') + 1).device,\n"
        "      os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    )
    # What torch_npu says because there is no CANN to find is no news here.
    assert "ASCEND_HOME_PATH" not in done.stderr
    # Nothing but the test's own line: standard output may be a machine's.
    assert done.stdout == "Ascend910B3 2 1073741824 8.5.0 223 npu:1 0\n", done.stderr


@pytest.mark.parametrize(
    "family",
    [
        # torch_npu knows A5 from line 26.0 on.
        pytest.param(f, marks=[pytest.mark.needs_line("26.0")] if f == "A5" else [])
        for f in sorted(load_catalog().versions.socs)
    ],
)
def test_every_chip_family_of_the_catalog_comes_up(run_python, family) -> None:
    done = run_python(
        START + f"s = sim.start(soc={family!r})\n"
        "import torch\nfrom npu_backend.catalog import load_catalog\n"
        "from torch_npu.npu.utils import get_soc_version\n"
        "told = load_catalog().versions.soc_of_version(get_soc_version())\n"
        "print(s.settings.family, told.family,\n"
        "      (torch.ones(2, 2, device='npu') @ torch.ones(2, 2, device='npu')).sum().item())"
    )
    assert done.stdout == f"{family} {family} 8.0\n", done.stderr


@pytest.mark.needs_line("7.1")  # torch_npu 2.5.1 looks it up at its end, and ends the process
def test_a_function_looked_up_late_that_is_missing_is_a_named_error(run_python, tmp_path) -> None:
    # torch_npu looks it up on 310P, 310B and 910 only, when the first stream is used.
    for path in SOURCES.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    text = (tmp_path / "queue.c").read_text()
    name = "aclrtSetStreamOverflowSwitch"
    assert name in text
    (tmp_path / "queue.c").write_text(text.replace(f"SUCCEEDS({name}, void)\n", ""))
    folder = build_standins(tmp_path).folder
    done = run_python(
        START
        + "from pathlib import Path\n"
        + REPORT.format(f"soc='310P', standins=Path({str(folder)!r})")
    )
    assert "device 0 does not come up on the stand-ins" in done.stdout, done.stderr
    assert f"why: Failed to find function {name}" in done.stdout
    assert "Ascend310P1" in done.stdout


def test_settings_come_from_the_environment(run_python) -> None:
    done = run_python(
        START + "print(sim.start().settings)",
        NPU_BACKEND_SIM_SOC="Ascend910_9372",
        NPU_BACKEND_SIM_CANN="9.0.0",
        NPU_BACKEND_SIM_MEMORY="123456789",
    )
    expected = "Settings(soc='Ascend910_9372', cann='9.0.0', memory=123456789, devices=1)\n"
    assert done.stdout == expected, done.stderr


def test_arguments_beat_the_environment_and_families_name_a_chip() -> None:
    env = {"NPU_BACKEND_SIM_SOC": "A2", "NPU_BACKEND_SIM_CANN": "8.2.RC1"}
    assert Settings.resolve(environ=env).soc == "Ascend910B1"
    assert Settings.resolve(environ=env).cann == "8.2.RC1"
    assert Settings.resolve(soc="A3", environ=env).soc == "Ascend910_9391"
    assert Settings.resolve(soc="A5", environ=env).soc.startswith("Ascend950")
    assert Settings.resolve(soc="A5", environ=env).family == "A5"


def test_the_environment_of_a_child_gives_equal_settings() -> None:
    settings = Settings.resolve(soc="A2", cann="9.0.0", memory=1 << 20, devices=3)
    assert Settings.resolve(environ=settings.environ()) == settings


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        ({"soc": "Ascend999"}, {}, "Ascend999"),
        ({"cann": "7.0"}, {}, "older than the catalog"),
        ({"cann": "nine"}, {}, "is not a CANN version"),
        ({"devices": 17}, {}, "1 to 16 devices"),
        ({"memory": -1}, {}, "0 bytes or more"),
        ({}, {"NPU_BACKEND_SIM_MEMORY": "64G"}, "'64G' is not a whole number"),
    ],
)
def test_settings_that_cannot_be_simulated_are_refused(arguments, environ, text) -> None:
    with pytest.raises(SimStartError, match=text):
        Settings.resolve(**arguments, environ=environ)


def test_other_settings_in_the_same_process_are_refused(run_python) -> None:
    code = START + "sim.start(cann='9.0.0')\n" + REPORT.format("cann='9.1.0'")
    done = run_python(code)
    assert "a simulated NPU with other settings is already up" in done.stdout, done.stderr
    assert "cann='9.0.0'" in done.stdout
    assert "cann='9.1.0'" in done.stdout
    assert "@pytest.mark.npu" in done.stdout


def test_a_foreign_libascendcl_is_named(run_python, tmp_path: Path) -> None:
    foreign = tmp_path / "libascendcl.so"
    shutil.copy(build_standins().others[0], foreign)
    main = build_standins().main
    load = f"import ctypes\nctypes.CDLL({str(main)!r})\nctypes.CDLL({str(foreign)!r})\n"
    done = run_python(load + START + REPORT.format(""))
    assert "another libascendcl is already loaded" in done.stdout, done.stderr
    assert str(foreign) in done.stdout


def test_torch_npu_imported_before_is_refused(run_python) -> None:
    done = run_python(
        "import sys, types\nsys.modules['torch_npu'] = types.ModuleType('torch_npu')\n"
        "import importlib.machinery as m\n"
        "sys.modules['torch_npu'].__spec__ = next(iter(\n"
        "    [m.PathFinder.find_spec('torch_npu')]))\n" + START + REPORT.format("")
    )
    assert "torch_npu is already imported" in done.stdout, done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in done.stdout


def test_without_torch_npu_the_error_says_what_to_install(run_python) -> None:
    done = run_python(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch_npu' else real(name, *a)\n"
        + START
        + REPORT.format("")
    )
    assert "torch-npu is not installed" in done.stdout, done.stderr
    assert 'pip install "npu-backend[sim]"' in done.stdout


def test_a_missing_symbol_is_named_before_anything_is_imported(run_python, tmp_path) -> None:
    for path in SOURCES.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    text = (tmp_path / "refused.c").read_text()
    (tmp_path / "refused.c").write_text(text.replace("REFUSED(aclmdlSetDump)\n", ""))
    folder = build_standins(tmp_path).folder
    done = run_python(
        START
        + "from pathlib import Path\n"
        + REPORT.format(f"standins=Path({str(folder)!r})")
        + "print('torch' in sys.modules)"
    )
    assert "torch_npu needs CANN symbols that the stand-ins do not define" in done.stdout
    assert "why: aclmdlSetDump\n" in done.stdout
    assert done.stdout.endswith("False\n")


def test_an_ascend_home_that_does_not_exist_is_named(run_python) -> None:
    done = run_python(START + REPORT.format(""), ASCEND_HOME_PATH="/no/such/folder")
    assert "ASCEND_HOME_PATH names a folder that does not exist" in done.stdout, done.stderr


def test_a_folder_without_libraries_is_refused(run_python, tmp_path: Path) -> None:
    code = START + "from pathlib import Path\n" + REPORT.format(f"standins=Path({str(tmp_path)!r})")
    assert "the folder holds no stand-in libraries" in run_python(code).stdout


def test_a_child_of_a_simulated_process_can_import_torch(run_python) -> None:
    done = run_python(
        START + "sim.start()\nimport subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'import torch; print(torch.ones(1))'],\n"
        "      capture_output=True, text=True).stdout)"
    )
    assert "tensor([1.])" in done.stdout, done.stderr
