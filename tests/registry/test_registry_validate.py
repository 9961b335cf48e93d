"""What a plugin must look like, and that it is registered as a whole or not at all."""

from __future__ import annotations

import functools
import types

import pytest

from npu_backend import Offer, Release, hookimpl
from npu_backend.errors import PluginError
from npu_backend.offers import Status
from npu_backend.registry import Registry


def plugin_of(**members):
    module = types.ModuleType("vendor")
    for name, member in members.items():
        setattr(module, name, member)
    return module


def refused(plugin):
    registry = Registry()
    with pytest.raises(PluginError) as caught:
        registry.register(plugin, name="vendor", dist="Vendor_Kit", version="2")
    assert caught.value.what.startswith("vendor (vendor-kit 2) ")
    for hook in ("select_preprocess_path", "select_bmm_kernel", "release_weights"):
        assert registry.call_order(hook) == (), "a refused plugin leaves no hook live"
    assert registry.plugins == ()
    return caught.value


def keyword_only(bmm, *, deployment): ...
def defaulted(bmm, deployment=None): ...
def unknown(bmm, deploymnt): ...
def star(bmm, *args): ...
def double_star(**kwargs): ...
def generator(bmm):
    yield


async def coroutine(bmm): ...
async def async_generator(bmm):
    yield


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (keyword_only, "argument 'deployment' is keyword-only and would never be passed"),
        (defaulted, "argument 'deployment' has a default, which would never count"),
        (unknown, "argument 'deploymnt' is unknown; did you mean 'deployment'?"),
        (star, "*args is never filled"),
        (double_star, "**kwargs is never filled"),
        (generator, "yields; return a list, or mark it wrapper=True"),
        (coroutine, "is async, and hooks are called without a loop"),
        (async_generator, "is async, and hooks are called without a loop"),
    ],
)
def test_a_function_that_pluggy_could_not_call_is_refused(function, reason):
    error = refused(plugin_of(select_bmm_kernel=hookimpl(function, specname="select_bmm_kernel")))
    (why,) = error.why
    assert why.startswith("select_bmm_kernel: ")
    assert reason in why


def test_an_old_style_wrapper_is_refused():
    @hookimpl(hookwrapper=True)
    def select_bmm_kernel(bmm):
        yield

    error = refused(plugin_of(select_bmm_kernel=select_bmm_kernel))
    assert "hookwrapper=True is the old style; use wrapper=True" in error.why[0]


def test_a_wrapper_that_does_not_yield_is_refused():
    @hookimpl(wrapper=True)
    def select_bmm_kernel(bmm):
        return []

    error = refused(plugin_of(select_bmm_kernel=select_bmm_kernel))
    assert "is marked wrapper=True and does not yield" in error.why[0]


def test_tryfirst_with_trylast_is_refused():
    @hookimpl(tryfirst=True, trylast=True)
    def select_bmm_kernel(bmm): ...

    error = refused(plugin_of(select_bmm_kernel=select_bmm_kernel))
    assert "tryfirst and trylast contradict each other" in error.why[0]


def test_an_unknown_hook_is_refused_with_a_suggestion():
    @hookimpl
    def select_bmm_kernl(bmm): ...

    error = refused(plugin_of(select_bmm_kernl=select_bmm_kernl))
    assert error.why == (
        "select_bmm_kernl: no hook is called 'select_bmm_kernl'; did you mean 'select_bmm_kernel'?",
    )


def test_an_unknown_hook_that_is_marked_optional_is_left_alone(offer):
    @hookimpl(optionalhook=True)
    def a_hook_of_tomorrow(layer): ...

    @hookimpl
    def select_bmm_kernel(bmm):
        return offer("x")

    registry = Registry()
    registry.register(
        plugin_of(a_hook_of_tomorrow=a_hook_of_tomorrow, select_bmm_kernel=select_bmm_kernel),
        name="vendor",
    )
    assert [h.hook for h in registry.plugins[0].hooks] == ["select_bmm_kernel"]


@hookimpl
class Marked:
    pass


class WithProperty:
    @property
    @hookimpl
    def select_bmm_kernel(self):
        raise AssertionError("a property was evaluated while looking for hooks")


class WithCachedProperty:
    @functools.cached_property
    @hookimpl
    def select_bmm_kernel(self):
        raise AssertionError("a property was evaluated while looking for hooks")


@pytest.mark.parametrize(
    ("plugin", "kind"),
    [
        (plugin_of(select_bmm_kernel=Marked), "type"),
        (plugin_of(select_bmm_kernel=hookimpl(functools.partial(print))), "partial"),
        (WithProperty(), "property"),
        (WithCachedProperty(), "cached_property"),
    ],
)
def test_a_marked_thing_that_is_no_function_is_refused(plugin, kind):
    error = refused(plugin)
    assert error.why == (f"select_bmm_kernel: is marked, but is a {kind} and no function",)


@hookimpl
def select_bmm_kernel(bmm): ...


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (None, "nothing in the NoneType carries @hookimpl"),
        ("absorb", "nothing in the str carries @hookimpl"),
        (plugin_of(), "nothing in the module carries @hookimpl"),
        (plugin_of(release_weights=print), "release_weights is there, but carries no @hookimpl"),
        (select_bmm_kernel, "it is the function select_bmm_kernel, not the module that holds it"),
        (WithProperty, "names a module or an object, and WithProperty is neither"),
    ],
)
def test_what_is_no_plugin_is_refused_with_a_reason(plugin, reason):
    assert reason in str(refused(plugin))


def test_all_faults_of_a_plugin_are_told_and_its_good_hooks_stay_out():
    error = refused(
        plugin_of(
            select_bmm_kernel=select_bmm_kernel,
            release_weights=hookimpl(lambda layer, reader: None),
            select_path=hookimpl(lambda layer: None),
        )
    )
    assert [why.partition(":")[0] for why in error.why] == ["release_weights", "select_path"]


def test_a_plugin_that_pluggy_refuses_half_way_is_rolled_back(monkeypatch, offer, bmm, deployment):
    registry = Registry()
    caller = type(registry._pm.hook.select_bmm_kernel)
    add = caller._add_hookimpl

    def add_or_fail(self, implementation):
        if self.name == "select_preprocess_path":
            raise RuntimeError("no room")
        add(self, implementation)

    plugin = plugin_of(
        select_bmm_kernel=hookimpl(lambda bmm: offer("half")),
        select_preprocess_path=hookimpl(lambda layer: offer("half")),
    )
    with monkeypatch.context() as patched:
        patched.setattr(caller, "_add_hookimpl", add_or_fail)
        with pytest.raises(PluginError, match="cannot be registered") as caught:
            registry.register(plugin, name="vendor")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert registry.ask_bmm(bmm, deployment) == ()
    assert registry.plugins == ()
    registry.register(plugin, name="vendor")
    assert len(registry.ask_bmm(bmm, deployment)) == 1, "the name is free again"


def test_an_object_that_fails_when_it_is_looked_at_is_refused():
    class Hostile:
        def __dir__(self):
            raise RuntimeError("go away")

    error = refused(Hostile())
    assert error.why == ("RuntimeError: go away",)


def test_a_plugin_is_registered_once(offer):
    plugin = plugin_of(select_bmm_kernel=hookimpl(lambda bmm: offer("x")))
    registry = Registry()
    info = registry.register(plugin, name="vendor")
    with pytest.raises(PluginError, match="is registered already") as caught:
        registry.register(plugin, name="again")
    assert caught.value.why == (f"it is the same object as {info}",)
    other = plugin_of(select_bmm_kernel=hookimpl(lambda bmm: offer("y")))
    with pytest.raises(PluginError, match="unknown/vendor is taken"):
        registry.register(other, name="vendor")


def test_plugins_that_compare_equal_are_two_plugins(offer, bmm, deployment):
    class Equal:
        def __init__(self, strategy):
            self.strategy = strategy

        def __eq__(self, other):
            return True

        __hash__ = None

        @hookimpl
        def select_bmm_kernel(self, bmm):
            return offer(self.strategy)

    registry = Registry()
    for name in ("a", "b"):
        registry.register(Equal(name), name=name)
    assert [a.records[0].strategy for a in registry.ask_bmm(bmm, deployment)] == ["b", "a"]


class Kinds:
    """Every kind of function that a class can hold."""

    @hookimpl
    @staticmethod
    def select_preprocess_path(deployment):
        return Offer(strategy=str(deployment.role), impl="vendor:Path")

    @classmethod
    @hookimpl
    def select_bmm_kernel(cls, deployment, bmm):
        return Offer(strategy=f"{cls.__name__}-{bmm.B}-{deployment.role}", impl="vendor:Kernel")

    @hookimpl(specname="release_weights")
    def votes(self, readers, layer):
        return [Release(w, f"layer {layer.layer_id}") for w in readers]


def test_functions_of_any_kind_get_the_arguments_that_they_name_in_any_order(
    layer, bmm, deployment
):
    registry = Registry()
    registry.register(Kinds(), name="vendor")
    (path,) = registry.ask_paths(layer, deployment)
    (kernel,) = registry.ask_bmm(bmm, deployment)
    (votes,) = registry.ask_release(layer, deployment, {"w_kc": ()})
    assert path.records[0].strategy == "decode"
    assert kernel.records[0].strategy == "Kinds-128-decode"
    assert votes.records == (Release("w_kc", "layer 3"),)


def test_a_function_without_arguments_and_one_behind_a_decorator_are_called(bmm, deployment, offer):
    def logged(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        return inner

    registry = Registry()
    registry.register(plugin_of(select_bmm_kernel=hookimpl(lambda: offer("none"))), name="none")

    @logged
    @hookimpl
    def select_bmm_kernel(deployment):
        return offer(f"logged-{deployment.role}")

    registry.register(plugin_of(select_bmm_kernel=select_bmm_kernel), name="logged")
    found = [a.records[0].strategy for a in registry.ask_bmm(bmm, deployment)]
    assert found == ["logged-decode", "none"]


def test_plugins_in_hand_come_last_and_obey_the_lists(load, offer, bmm, deployment, record_of):
    plugin = plugin_of(select_bmm_kernel=hookimpl(lambda bmm: offer("in_hand")))
    registry = load("works", extra={"mine": plugin}, third_party=False)
    assert [i.name for i in registry.call_order("select_bmm_kernel")] == ["mine", "transpose_bmm"]
    registry = load("works", extra={"mine": plugin}, disable=["mine"])
    assert record_of(registry, "unknown/mine").status is Status.BLOCKED
    with pytest.raises(PluginError, match="implements no hook"):
        load("works", extra={"mine": plugin_of()})
