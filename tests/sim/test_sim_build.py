"""The stand-in libraries: built once per content, never half, with errors that help."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from npu_backend.testing.sim import SimBuildError, build_standins
from npu_backend.testing.sim.build import SONAMES, cache_folder
from npu_backend.testing.sim.elf import cann_symbols_missing, symbols

SOURCES = Path(__file__).parents[2] / "npu_backend" / "testing" / "sim"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("NPU_BACKEND_SIM_CACHE", str(folder))
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    for path in SOURCES.glob("*.[ch]"):
        shutil.copy(path, folder)
    return folder


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + "\n" + line + "\n")


def test_all_sonames_are_built_and_lead_to_the_one_library_with_code(cache: Path) -> None:
    standins = build_standins()
    assert standins.main.is_file()
    assert [path.name for path in standins.others] == list(SONAMES)
    for path in standins.others:
        data = path.read_bytes()
        assert path.name.encode() in data
        assert standins.main.name.encode() in data  # DT_NEEDED kept


def test_a_second_build_of_equal_content_compiles_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_standins()
    stamp = first.main.stat().st_mtime_ns
    monkeypatch.setattr("npu_backend.testing.sim.build._compile", pytest.fail)
    assert build_standins() == first
    assert first.main.stat().st_mtime_ns == stamp
    assert [p.name for p in cache.iterdir()] == [first.folder.name]


def test_changed_sources_are_built_beside_the_old(cache: Path, sources: Path) -> None:
    first = build_standins(sources)
    append(sources / "device.c", "/* changed */")
    assert build_standins(sources).folder != first.folder
    assert first.main.exists()


def test_two_processes_that_build_at_once_both_get_complete_libraries(
    cache: Path, run_python, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    code = "from npu_backend.testing.sim import build_standins; print(build_standins().folder)"
    results: list = []
    threads = [threading.Thread(target=lambda: results.append(run_python(code))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {r.returncode for r in results} == {0}, [r.stderr for r in results]
    assert len({r.stdout for r in results}) == 1
    assert len(list(cache.iterdir())) == 1


def test_losing_the_race_uses_the_winners_libraries(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from npu_backend.testing.sim.build import _compile

    winner: list[Path] = []

    def slow(compiler, files, folder):
        _compile(compiler, files, folder)
        if not winner:
            winner.append(folder)
            monkeypatch.setattr("npu_backend.testing.sim.build._compile", _compile)
            winner.append(build_standins(sources).folder)

    monkeypatch.setattr("npu_backend.testing.sim.build._compile", slow)
    assert build_standins(sources).folder == winner[1]
    assert list(cache.iterdir()) == [winner[1]]


def test_without_a_compiler_the_error_names_gcc_and_CC(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SimBuildError) as caught:
        build_standins()
    text = str(caught.value)
    assert "no C compiler was found" in text
    assert "for: the stand-in libraries of the simulated NPU" in text
    assert "why: neither gcc nor cc is on PATH" in text
    assert "do:  install gcc, or set CC" in text


def test_a_CC_that_does_not_exist_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(SimBuildError, match="CC=no-such-compiler -m64 is not a program on PATH"):
        build_standins()


def test_a_cache_path_that_is_a_file_is_named(cache: Path) -> None:
    cache.write_text("not a folder")
    with pytest.raises(SimBuildError) as caught:
        build_standins()
    assert "the cache folder cannot be used" in str(caught.value)
    assert str(cache) in str(caught.value)
    assert "set NPU_BACKEND_SIM_CACHE to a folder that can be written" in str(caught.value)


def test_a_compile_failure_shows_command_and_diagnostics_and_leaves_nothing(
    cache: Path, sources: Path
) -> None:
    append(sources / "queue.c", "this is not C")
    with pytest.raises(SimBuildError) as caught:
        build_standins(sources)
    assert "the C compiler failed with exit code" in str(caught.value)
    assert "queue.c" in str(caught.value)
    assert "-fPIC" in str(caught.value)
    assert list(cache.iterdir()) == []


def test_the_cache_folder_follows_the_environment() -> None:
    assert cache_folder({"NPU_BACKEND_SIM_CACHE": "/a"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/npu-backend/sim")
    assert cache_folder({}) == Path.home() / ".cache" / "npu-backend" / "sim"


def test_the_stand_ins_export_the_runtime_and_nothing_private(cache: Path) -> None:
    defined, _ = symbols(build_standins().main)
    assert {"aclrtMalloc", "HcclSend", "rtKernelLaunch", "aclsysGetCANNVersion"} <= defined
    assert not {name for name in defined if name.startswith("standin_")}


def test_a_symbol_that_the_stand_ins_lack_is_found_in_the_libraries(
    cache: Path, sources: Path, torch_npu_installed: None
) -> None:
    from npu_backend.testing.sim.device import _torch_npu_libraries

    libraries = _torch_npu_libraries()
    assert cann_symbols_missing(build_standins().main, libraries) == []
    text = (sources / "refused.c").read_text()
    (sources / "refused.c").write_text(text.replace("REFUSED(aclopCompileAndExecute)\n", ""))
    assert cann_symbols_missing(build_standins(sources).main, libraries) == [
        "aclopCompileAndExecute"
    ]


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"MZ" + bytes(100))
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        symbols(tmp_path / "x.so")
