"""Where npu-backend cannot plan, SGLang runs as if it were not installed, and hears why once."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_world.model import Runner, attentions, build, config_of, published
from sglang_world.start import NPU_MODULE

from npu_backend.errors import PlanMismatchError
from npu_backend.hosts.sglang import guard
from npu_backend.hosts.sglang.route import route_of
from npu_backend.hosts.sglang.updates import EXPORT_REFUSAL, REFUSAL

FUSED = {"SGLANG_NPU_USE_MLAPO": "1"}
Told = Callable[[], list[str]]


@pytest.fixture
def runner(world: Any) -> Iterator[Runner]:
    with published(disaggregation_mode="decode"):
        yield Runner(build(config_of(layers=1)))


def state(runner: Runner) -> dict[str, Any]:
    """Everything that SGLang can see of its attention: names, addresses, strides, values."""
    (attention,) = attentions(runner.model).values()
    tensors = dict(attention.named_parameters()) | {
        name: getattr(attention, name) for name in ("w_kc", "w_vc")
    }
    return {
        "attributes": set(vars(attention)),
        "tensors": {
            name: (type(t), t.data_ptr(), t.stride(), t.untyped_storage().nbytes(), t.cpu().clone())
            for name, t in tensors.items()
        },
    }


def assert_untouched(runner: Runner, before: dict[str, Any]) -> None:
    after = state(runner)
    (attention,) = attentions(runner.model).values()
    assert after["attributes"] == before["attributes"]
    assert route_of(attention) is None
    assert not {REFUSAL, EXPORT_REFUSAL} & set(vars(attention))
    for name, (*what, values) in before["tensors"].items():
        assert list(after["tensors"][name][:-1]) == what, name
        assert torch.equal(after["tensors"][name][-1], values), name


def reached_originals(runner: Runner) -> bool:
    """Whether SGLang's own function runs: it asks for things that this batch does not have."""
    (attention,) = attentions(runner.model).values()
    functions = import_module(NPU_MODULE)
    original = guard.original_of(functions.forward_mla_prepare_npu)
    seen: list[str] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is original.__code__:
            seen.append(event)

    sys.setprofile(watch)
    # It has nothing to work on; that it was reached is the point.
    with suppress(Exception):
        functions.forward_mla_prepare_npu(attention, None, None, None, None, False)
    sys.setprofile(None)
    return bool(seen)


def warned_once(told: Told, *words: str) -> None:
    aside = [text for text in told() if "as if npu-backend were not installed" in text]
    assert len(aside) == 1, aside
    for word in words:
        assert word in aside[0]


def test_a_version_that_is_not_known(
    install: Any, runner: Runner, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_backend.hosts.sglang.adapter.sglang_version", lambda: "0.5.24")
    adapter = install(**FUSED)
    assert len(adapter.hooks()) == 1, "only the hook by which its group hears of it"
    before = state(runner)
    adapter.after_load(None, runner)
    adapter.after_load(None, runner)
    assert_untouched(runner, before)
    assert reached_originals(runner)
    warned_once(told, "SGLang is 0.5.24", "0.5.23", "NPU_BACKEND_SGLANG_ANY_VERSION=1")


def test_the_version_is_overridden_by_the_environment(
    install: Any, runner: Runner, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_backend.hosts.sglang.adapter.sglang_version", lambda: "0.5.24")
    adapter = install(**FUSED, NPU_BACKEND_SGLANG_ANY_VERSION="1")
    adapter.after_load(None, runner)
    assert id(runner.model) in adapter.sessions
    assert any("used all the same" in text and "0.5.24" in text for text in told())


def test_a_signature_that_is_not_known(
    install: Any, runner: Runner, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward_mla_core_npu(m: Any, q_pe: Any, k_pe: Any) -> None:
        raise AssertionError("never called")

    monkeypatch.setattr(import_module(NPU_MODULE), "forward_mla_core_npu", forward_mla_core_npu)
    adapter = install(**FUSED)
    before = state(runner)
    adapter.after_load(None, runner)
    assert_untouched(runner, before)
    warned_once(told, "forward_mla_core_npu takes (m, q_pe, k_pe), known is (m, q_pe, k_pe, q_nope")


def test_a_context_that_is_not_published(install: Any, world: Any, told: Told) -> None:
    with published(disaggregation_mode="decode"):
        runner = Runner(build(config_of(layers=1)))
    adapter = install(**FUSED)
    before = state(runner)
    adapter.after_load(None, runner)
    assert_untouched(runner, before)
    assert reached_originals(runner)
    warned_once(told, "its context is not published")


def test_a_hook_that_sglang_could_not_set(
    install: Any, runner: Runner, told: Told, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = registry.HookRegistry._apply_target.__func__

    def failing(cls: Any, target: str, hooks: list[Any]) -> None:
        if target.endswith("forward_dsa_core_npu"):
            raise RuntimeError("no such place")
        apply(cls, target, hooks)

    monkeypatch.setattr(registry.HookRegistry, "_apply_target", classmethod(failing))
    adapter = install(**FUSED)
    before = state(runner)
    adapter.after_load(None, runner)
    assert_untouched(runner, before)
    assert reached_originals(runner)
    warned_once(told, "forward_dsa_core_npu is not patched: it has no __wrapped__")


@pytest.mark.parametrize("how", ["name", "partial", "table"])
def test_a_caller_that_kept_the_function_as_it_was(
    registry: Any, runner: Runner, told: Told, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from x import y`` is followed by SGLang; a partial, a table or a later import is not."""
    import functools

    adapters = import_module("npu_backend.hosts.sglang.adapter")
    original = import_module(NPU_MODULE).forward_mla_core_npu
    module = types.ModuleType("sglang.srt.models.some_model")
    held = {"name": original, "partial": functools.partial(original), "table": {"a": original}}
    adapter = adapters.make_adapter(dict(FUSED))
    adapter.register(registry.HookRegistry, registry.HookType)
    registry.HookRegistry.apply_hooks()
    module.kept = held[how]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = state(runner)
    adapter.after_load(None, runner)
    assert_untouched(runner, before)
    warned_once(told, "sglang.srt.models.some_model.kept")


def test_names_that_were_imported_before_are_followed(install: Any, world: Any) -> None:
    install(**FUSED)
    functions, model = import_module(NPU_MODULE), import_module("sglang.srt.models.deepseek_v2")
    for name in ("forward_mla_prepare_npu", "forward_dsa_core_npu"):
        assert hasattr(getattr(functions, name), "__wrapped__")
        assert getattr(model, name) is getattr(functions, name)


def test_weights_that_come_after_the_pool(install: Any, runner: Runner, told: Told) -> None:
    adapter = install(**FUSED)
    runner.startup_weight_load = object()
    before = state(runner)
    adapter.after_load(None, runner)
    assert_untouched(runner, before)
    warned_once(told, "startup weight load")


def test_a_layer_that_cannot_be_prepared(
    install: Any, runner: Runner, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows before anything is freed; strides are as SGLang's own release needs them."""
    session = import_module("npu_backend.hosts.sglang.session")
    bind = session.bind

    def failing(*args: Any, **options: Any) -> Any:
        bound = bind(*args, **options)
        prepare = bound.prepare

        def later() -> None:
            prepare()
            raise RuntimeError("the device is out of memory")

        bound.prepare = later
        return bound

    monkeypatch.setattr(session, "bind", failing)
    adapter = install(**FUSED)
    before = {name: what[2:] for name, what in state(runner)["tensors"].items()}
    adapter.after_load(None, runner)
    after = {name: what[2:] for name, what in state(runner)["tensors"].items()}
    for name, (strides, size, values) in before.items():
        assert after[name][:2] == (strides, size), name
        assert torch.equal(after[name][2], values), name
    assert reached_originals(runner)
    warned_once(told, "RuntimeError: the device is out of memory")


def test_strict_stops_instead(
    install: Any, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = install(**FUSED, NPU_BACKEND_STRICT="1")
    runner.startup_weight_load = object()
    with pytest.raises(PlanMismatchError, match="startup weight load"):
        adapter.after_load(None, runner)


def test_a_model_without_such_attention_is_left_alone(install: Any, world: Any, told: Told) -> None:
    adapter = install(**FUSED)
    with published():
        runner = Runner(build(config_of(layers=1)))
        runner.model = torch.nn.Linear(2, 2)
        runner.model.config = types.SimpleNamespace(num_hidden_layers=1)
        adapter.after_load(None, runner)
    assert not adapter.sessions
    assert any("no attention of this model" in text for text in told())


# --- in a process of its own: what SGLang's plugin loader does ------------------------------------

LOADER = """
import logging, sys
sys.path.insert(0, {here!r})
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
{before}
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print("HOOKS", len(HookRegistry._hooks), len(HookRegistry._patched))
print("LOADED", "npu_backend.hosts.sglang.adapter" in sys.modules)
"""
WORLD = "from sglang_world.start import start; start()"


def loaded(before: str, **environ: str) -> subprocess.CompletedProcess[str]:
    code = LOADER.format(here=str(Path(__file__).parents[1]), before=before)
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environ}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_entry_point_is_found_by_sglang_and_sets_all_hooks() -> None:
    done = loaded(WORLD)
    assert done.returncode == 0, done.stderr
    hooked, patched = done.stdout.split("HOOKS ")[1].splitlines()[0].split()
    assert hooked == patched == str(len(guard.HOOKED)), done.stderr


def test_a_blocked_plugin_is_never_imported() -> None:
    done = loaded(WORLD, SGLANG_PLUGINS="something_else")
    assert "HOOKS 0 0" in done.stdout, done.stderr
    assert "LOADED False" in done.stdout
    assert done.stderr.count("Skipping plugin npu_backend") == 1


def test_off_by_its_variable_it_sets_no_hook_and_says_so_once() -> None:
    done = loaded(WORLD, NPU_BACKEND_SGLANG="0")
    assert "HOOKS 0 0" in done.stdout, done.stderr
    assert "LOADED False" in done.stdout
    assert done.stderr.count("off by NPU_BACKEND_SGLANG") == 1


def test_off_an_npu_it_sets_no_hook_and_says_so_once() -> None:
    done = loaded("from sglang_world.start import stand_in; stand_in()")
    assert "HOOKS 0 0" in done.stdout, done.stderr
    assert "LOADED False" in done.stdout
    assert done.stderr.count("npu-backend: no NPU") == 1
