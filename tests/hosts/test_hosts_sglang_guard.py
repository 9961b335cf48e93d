"""Whether this is the SGLang that was read: versions, signatures, patched functions."""

from __future__ import annotations

import functools
import logging
import sys
import types

import pytest

from npu_backend import PlanMismatchError
from npu_backend.hosts import sglang as host
from npu_backend.hosts.sglang.guard import check_host, check_patched, original_of, reason_of
from npu_backend.hosts.sglang.targets import HOOKED, KNOWN

NAME = "sglang.srt.some.function"


def function(parameters):
    scope = {}
    exec(f"def f({', '.join(parameters)}): pass", scope)
    return scope["f"]


def resolver(changes=()):
    known = {target: function(parameters) for target, parameters in HOOKED.items()}
    return (known | dict(changes)).__getitem__


def test_the_version_that_was_read_is_known():
    assert list(KNOWN) == ["0.5.23"]
    assert check_host("0.5.23", resolve=resolver()) == ()


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23.post1", "1.0", None])
def test_another_version_is_refused_with_the_known_one_and_the_way_round(version):
    with pytest.raises(PlanMismatchError) as caught:
        check_host(version, resolve=resolver())
    text = str(caught.value)
    assert str(version or "no version") in text
    assert "0.5.23" in text
    assert "NPU_BACKEND_SGLANG_ANY_VERSION=1" in text


def test_the_override_tells_what_it_lets_pass():
    target = next(iter(HOOKED))
    changed = {target: function(["m", "other"])}
    told = check_host("0.6.0", any_version=True, resolve=resolver(changed))
    assert told[0] == "SGLang is 0.6.0; read and known: 0.5.23"
    assert told[1].startswith(f"{target} takes (m, other), known is (")


def test_each_signature_is_held_against_the_known_one():
    for target, parameters in HOOKED.items():
        changed = {target: function([*parameters, "one_more"])}
        with pytest.raises(PlanMismatchError, match="one_more"):
            check_host("0.5.23", resolve=resolver(changed))


def test_a_function_that_is_not_there_is_named():
    def resolve(target):
        raise ImportError(f"no module for {target}")

    with pytest.raises(PlanMismatchError, match="is not there: ImportError"):
        check_host("0.5.23", resolve=resolve)


def test_signatures_are_read_below_wrappers():
    target, parameters = next(iter(HOOKED.items()))
    inner = function(parameters)

    @functools.wraps(inner)
    def wrapped(*args, **kwargs):
        return inner(*args, **kwargs)

    assert original_of(wrapped) is inner
    assert check_host("0.5.23", resolve=resolver({target: wrapped})) == ()


@pytest.fixture
def place(monkeypatch):
    """A module of SGLang's that holds something."""
    module = types.ModuleType("sglang.srt.models.holder")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def patched():
    original = function(["m"])

    @functools.wraps(original)
    def wrapped(*args):
        return original(*args)

    return original, wrapped


def test_a_patched_function_passes(place):
    _, wrapped = patched()
    place.bound = wrapped
    check_patched([NAME], resolve={NAME: wrapped}.__getitem__)


def test_one_that_is_not_patched_is_named():
    with pytest.raises(PlanMismatchError, match=f"{NAME} is not patched: it has no __wrapped__"):
        check_patched([NAME], resolve={NAME: function(["m"])}.__getitem__)


@pytest.mark.parametrize(
    "hold",
    [lambda f: f, functools.partial, lambda f: {"way": f}],
    ids=["name", "partial", "table"],
)
def test_what_still_calls_it_as_it_was_is_named(place, hold):
    original, wrapped = patched()
    place.held = hold(original)
    with pytest.raises(PlanMismatchError, match=r"sglang\.srt\.models\.holder\.held"):
        check_patched([NAME], resolve={NAME: wrapped}.__getitem__)


def test_other_people_s_modules_are_not_looked_at(monkeypatch):
    original, wrapped = patched()
    module = types.ModuleType("elsewhere")
    module.held = original
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    check_patched([NAME], resolve={NAME: wrapped}.__getitem__)


def test_a_foreign_error_is_told_with_its_type():
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert reason_of(PlanMismatchError("a", whom="b", why="c", remedy="d")).startswith("a\n")


# --- register -------------------------------------------------------------------------------------


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.name == host.__name__]


def test_off_by_its_variable_says_so_once_and_imports_nothing(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("NPU_BACKEND_SGLANG", "0")
    monkeypatch.setattr(host, "import_module", lambda name: pytest.fail(f"imported {name}"))
    host.register()
    (line,) = told(caplog)
    assert "off by NPU_BACKEND_SGLANG" in line


@pytest.mark.parametrize("how", ["another device", "no driver"])
def test_off_an_npu_says_so_once_and_sets_no_hook(monkeypatch, caplog, modules, how):
    caplog.set_level(logging.INFO)
    utils = types.ModuleType("sglang.srt.utils")

    def is_npu():
        if how == "no driver":
            raise RuntimeError("torch_npu found, but no NPU detected")
        return False

    utils.is_npu = is_npu
    modules(utils=utils)
    monkeypatch.delenv("NPU_BACKEND_SGLANG", raising=False)
    host.register()
    (line,) = told(caplog)
    assert "no NPU" in line
    assert ("no NPU detected" in line) == (how == "no driver")
