"""The hooks are documented as plugin authors need them."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys

import pytest

from npu_backend import hookspecs
from npu_backend.offers import Decline, Forbid, Keep, Offer, Release
from npu_backend.registry.guard import HOOK_RECORDS
from npu_backend.registry.validate import HOOK_ARGUMENTS

HOOKS = {
    "select_preprocess_path": ("layer", "deployment"),
    "select_bmm_kernel": ("bmm", "deployment"),
    "release_weights": ("layer", "deployment", "readers"),
}


def test_there_are_exactly_three_hooks_with_the_arguments_of_the_design():
    marked = {name for name, f in vars(hookspecs).items() if hasattr(f, "npu_backend_spec")}
    assert marked == set(HOOKS)
    assert dict(HOOK_ARGUMENTS) == HOOKS
    for name, arguments in HOOKS.items():
        assert tuple(inspect.signature(getattr(hookspecs, name)).parameters) == arguments


def test_what_each_hook_may_return_is_what_its_annotation_says():
    for name, kinds in HOOK_RECORDS.items():
        text = inspect.signature(getattr(hookspecs, name)).return_annotation
        said = set(re.findall(r"\w+", text)) - {"Sequence", "None"}
        assert said == {kind.__name__ for kind in kinds}
    assert HOOK_RECORDS["release_weights"] == (Release, Keep)
    assert HOOK_RECORDS["select_bmm_kernel"] == (Offer, Decline, Forbid)


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_says_what_when_arguments_result_none_order_and_example(hook):
    doc = inspect.getdoc(getattr(hookspecs, hook))
    first, blank, *_ = doc.splitlines()
    assert first.endswith(".")
    assert blank == ""
    parts = ["\nCalled once ", "\nArgs:\n", "\nReturns:\n", "\nNone means:\n", "\nOrder:\n"]
    places = [doc.index(part) for part in [*parts, "\nExample:\n"]]
    assert places == sorted(places)
    for argument in HOOKS[hook]:
        assert f"\n    {argument}: " in doc


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_each_hook_runs(hook):
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(hookspecs, hook), hook, globs={})
    result = doctest.DocTestRunner().run(test)
    assert result.attempted >= 3
    assert result.failed == 0


def test_neither_hooks_nor_registry_load_torch_or_a_plugin():
    code = (
        "import sys, npu_backend.hookspecs, npu_backend.registry\n"
        "bad = [m for m in sys.modules if m.partition('.')[0] in "
        "('torch', 'torch_npu', 'npu_backend_builtin')]\n"
        "print(bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
