"""Builds the stand-in libraries with the machine's C compiler, once per content.

The result is cached by a hash of sources, flags, compiler and architecture. A build happens in a
temporary folder beside its final place and is renamed into it, so two processes that build at once
each end up with a complete folder, and nobody ever loads a half-written library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from npu_backend.testing.sim.errors import SimBuildError

__all__ = ["SONAMES", "Standins", "build_standins", "cache_folder"]

ENV_CACHE = "NPU_BACKEND_SIM_CACHE"

MAIN = "libnpu_backend_sim.so"
# The seven libraries that torch_npu's are linked against, and one that some lines dlopen.
SONAMES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
    "libopapi.so",
)
_FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
_WHO = "the stand-in libraries of the simulated NPU"


@frozen
class Standins:
    """The built libraries: ``main`` holds all code, ``others`` only a SONAME and a dependency."""

    folder: Path

    @property
    def main(self) -> Path:
        return self.folder / MAIN

    @property
    def others(self) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in SONAMES)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder: ``NPU_BACKEND_SIM_CACHE``, or one below the user's cache."""
    env = os.environ if environ is None else environ
    if env.get(ENV_CACHE):
        return Path(env[ENV_CACHE])
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "npu-backend" / "sim"


def _compiler() -> list[str]:
    wanted = os.environ.get("CC")
    for candidate in [wanted] if wanted else ["gcc", "cc"]:
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    raise SimBuildError(
        "no C compiler was found",
        whom=_WHO,
        why=f"CC={wanted} is not a program on PATH" if wanted else "neither gcc nor cc is on PATH",
        remedy="install gcc, or set CC to a C compiler; one build takes less than a second",
    )


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimBuildError(
            f"the C compiler failed with exit code {done.returncode}",
            whom=_WHO,
            why=[shlex.join(command), *done.stderr.strip().splitlines()[:20]],
            remedy="check that the compiler can build a shared library here (CC selects another)",
        )


def _identity(compiler: Sequence[str]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{shlex.join(compiler)} {done.stdout.partition(chr(10))[0]} {platform.machine()}"


def _compile(compiler: Sequence[str], sources: Sequence[Path], folder: Path) -> None:
    code = [str(path.resolve()) for path in sources if path.suffix == ".c"]
    _run([*compiler, *_FLAGS, f"-Wl,-soname,{MAIN}", "-o", MAIN, *code, "-lpthread"], folder)
    empty = folder / "empty.c"
    # A file without a declaration is not valid C; one name per library keeps it valid and empty.
    empty.write_text("extern int npu_backend_sim_refers_to_main;\n", encoding="ascii")
    for name in SONAMES:
        # Without --no-as-needed the linker drops the dependency, and with it every symbol.
        link = [f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-L.", f"-l:{MAIN}"]
        _run([*compiler, "-fPIC", "-shared", "-o", name, empty.name, *link], folder)
    empty.unlink()


def build_standins(sources: Path | None = None) -> Standins:
    """Return the stand-in libraries, building them if the cache has none for this content.

    Args:
        sources: Folder with the C sources; the package's own by default.

    Raises:
        SimBuildError: No compiler, no usable cache folder, or the compiler failed.
    """
    source_folder = sources or Path(__file__).parent
    files = sorted(p for p in source_folder.iterdir() if p.suffix in (".c", ".h"))
    compiler = _compiler()
    digest = hashlib.sha256(repr((_identity(compiler), _FLAGS, SONAMES)).encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    cache = cache_folder()
    target = cache / digest.hexdigest()[:24]
    if target.is_dir():
        return Standins(target)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    except OSError as err:
        raise SimBuildError(
            "the cache folder cannot be used",
            whom=_WHO,
            why=f"{cache}: {err.strerror}",
            remedy=f"set {ENV_CACHE} to a folder that can be written",
        ) from err
    try:
        _compile(compiler, files, scratch)
        try:
            scratch.rename(target)
        except OSError:
            # Another process was first. Its folder is complete, because it was renamed as well.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Standins(target)
