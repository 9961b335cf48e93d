"""What happens to a loaded model later: new weights, another role, sleep and wake."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_world.model import Runner, attentions, build, config_of, published
from sglang_world.steps import served

from npu_backend.errors import PrepareError
from npu_backend.runtime import is_tombstone

FUSED = {"SGLANG_NPU_USE_MLAPO": "1"}
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


class Loaded:
    """One model under its plan, with SGLang's own updater."""

    def __init__(self, install: Any, environ: dict[str, str], **config: Any) -> None:
        self.adapter = install(**FUSED, **environ)
        self.model = build(config_of(layers=1, **config))
        self.runner = Runner(self.model)
        self.adapter.after_load(None, self.runner)
        self.runner.pool()
        self.adapter.after_pool(None, self.runner)
        self.attention = attentions(self.model)[0]
        self.updater = import_module(UPDATER).WeightUpdater(
            tp_rank=0,
            device="npu",
            gpu_id=0,
            model_config=self.runner.model_config,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: self.runner,
        )

    @property
    def session(self) -> Any:
        return self.adapter.sessions[id(self.model)]


@pytest.fixture
def role() -> Any:
    with published(disaggregation_mode="decode"):
        yield


@pytest.fixture
def load(install: Any, role: Any) -> Callable[..., Loaded]:
    return lambda environ=None, **config: Loaded(install, environ or {}, **config)


def new_weights(seed: int = 9) -> dict[str, torch.Tensor]:
    """Weights that differ from those loaded, by SGLang's names."""
    return {
        n: p.detach().cpu() for n, p in build(config_of(layers=1), seed=seed).named_parameters()
    }


def served_by(seed: int) -> list[torch.Tensor]:
    """What a model that was loaded with these weights serves, without npu-backend's copies."""
    model = build(config_of(layers=1), seed=seed)
    runner = Runner(model)
    adapters = import_module("npu_backend.hosts.sglang.adapter")
    adapter = adapters.Adapter(adapters.Environment(), environ=dict(FUSED))
    adapter.after_load(None, runner)
    runner.pool()
    adapter.after_pool(None, runner)
    return served(attentions(model)[0])


def by_distributed(loaded: Loaded, weights: dict[str, torch.Tensor], **_: Any) -> Any:
    return loaded.updater.load_weights_from_distributed(list(weights.items()))


def by_tensor(loaded: Loaded, weights: dict[str, torch.Tensor], **_: Any) -> Any:
    return loaded.updater.update_weights_from_tensor(list(weights.items()))


def by_disk(loaded: Loaded, weights: dict[str, torch.Tensor], tmp_path: Path, **_: Any) -> Any:
    from safetensors.torch import save_file

    save_file({n: w.contiguous() for n, w in weights.items()}, tmp_path / "model.safetensors")
    loaded.runner.model_config.dtype = torch.bfloat16
    loaded.runner.model_config.revision = loaded.runner.model_config.quantization = None
    return loaded.updater.update_weights_from_disk(str(tmp_path), "safetensors")


def by_ipc(
    loaded: Loaded, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, **_: Any
) -> Any:
    """The checkpoint engine is not here: its worker is stood in for, SGLang's method is real."""

    class Worker:
        def __init__(self, runner: Any) -> None:
            self.model = runner.model

        def update_weights_from_ipc(self, handles: Any) -> None:
            self.model.load_weights(list(handles.items()))

    name = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
    module = types.ModuleType(name)
    module.SGLangCheckpointEngineWorkerExtensionImpl = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return loaded.updater.update_weights_from_ipc(types.SimpleNamespace(zmq_handles=weights))


def addresses(loaded: Loaded) -> list[int]:
    """Where the prepared copies stand."""
    made = loaded.session.parts[0].bound._made.made
    return [tensor.data_ptr() for tensors in made.values() for tensor in tensors.values()]


PATHS = {"distributed": by_distributed, "tensor": by_tensor, "disk": by_disk, "ipc": by_ipc}


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("restore", [False, True], ids=["kept", "restorable"])
def test_after_each_of_the_four_updates_steps_serve_the_new_weights(
    load: Any, way: str, restore: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update"}
        | ({"NPU_BACKEND_SGLANG_RESTORE": "1"} if restore else {})
    )
    attention = loaded.attention
    assert is_tombstone(attention.w_kc) == restore
    before = served(attention)
    prepared = addresses(loaded)

    done = PATHS[way](loaded, new_weights(), tmp_path=tmp_path, monkeypatch=monkeypatch)

    assert done[0], done[1]
    after = served(attention)
    assert not torch.equal(before[1], after[1])
    for mine, fresh in zip(after, served_by(seed=9), strict=True):
        torch.testing.assert_close(mine, fresh, rtol=0, atol=0)
    assert is_tombstone(attention.w_kc) == restore, "released again, as before"
    assert addresses(loaded) == prepared, "captured graphs hold these addresses"
    assert loaded.session.parts[0].bound.generation == 1


@pytest.mark.parametrize("way", PATHS)
def test_without_the_promise_the_engine_refuses_all_four_before_it_writes(
    load: Any, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load()
    before = served(loaded.attention)

    ok, why = PATHS[way](loaded, new_weights(), tmp_path=tmp_path, monkeypatch=monkeypatch)

    assert not ok
    assert "npu-backend released fused_qkv_a_proj" in why
    assert "NPU_BACKEND_SGLANG_PROMISES=weight_update" in why
    for mine, first in zip(served(loaded.attention), before, strict=True):
        torch.testing.assert_close(mine, first, rtol=0, atol=0)


def test_a_session_of_refused_updates_leaves_the_model_serving(
    load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(dsa=True)
    assert is_tombstone(loaded.attention.kv_b_proj.weight), "its end would read this"
    loaded.attention.skip_topk = True
    before = served(loaded.attention)
    loaded.updater.begin_weight_update()
    assert "a session of weight updates changes nothing" in caplog.text
    assert not by_distributed(loaded, new_weights())[0]
    loaded.updater.end_weight_update(run_post_load=True)
    for mine, first in zip(served(loaded.attention), before, strict=True):
        torch.testing.assert_close(mine, first, rtol=0, atol=0)


def test_a_session_of_updates_is_prepared_for_once(load: Any) -> None:
    loaded = load(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update", "NPU_BACKEND_SGLANG_RESTORE": "1"}
    )
    weights = new_weights()
    half = len(weights) // 2
    loaded.updater.begin_weight_update()
    assert not is_tombstone(loaded.attention.w_kc)
    with pytest.raises(PrepareError, match="update"):
        served(loaded.attention)
    for part in (dict(list(weights.items())[:half]), dict(list(weights.items())[half:])):
        assert by_distributed(loaded, part)[0]
    loaded.updater.end_weight_update(run_post_load=False)
    assert loaded.session.parts[0].bound.generation == 1
    for mine, fresh in zip(served(loaded.attention), served_by(seed=9), strict=True):
        torch.testing.assert_close(mine, fresh, rtol=0, atol=0)


def test_an_update_that_fails_leaves_the_old_weights_serving(load: Any) -> None:
    loaded = load(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update", "NPU_BACKEND_SGLANG_RESTORE": "1"}
    )
    before = served(loaded.attention)
    ok, why = by_distributed(loaded, {"model.no.such.weight": torch.zeros(1)})
    assert not ok
    assert "no.such" in why
    for mine, first in zip(served(loaded.attention), before, strict=True):
        torch.testing.assert_close(mine, first, rtol=0, atol=0)


# --- another role ---------------------------------------------------------------------------------


class Scheduler:
    """What ``handle_pd_role_switch`` asks of SGLang's scheduler."""

    def __init__(self, role: str, *, idle: bool = True) -> None:
        modes = import_module("sglang.srt.disaggregation.utils").DisaggregationMode
        self.disaggregation_mode = modes(role)
        self.server_args = types.SimpleNamespace(enable_pd_role_switch=True)
        self._pd_role_switch_unhealthy = self._pd_role_switch_in_progress = False
        self.idle, self.device = idle, "npu"
        self.tp_worker = types.SimpleNamespace(
            get_decode_cuda_graph_bs=lambda: [1], ensure_decode_cuda_graphs=lambda sizes: None
        )

    def is_fully_idle(self) -> bool:
        return self.idle

    def init_disaggregation(self) -> None:
        modes = import_module("sglang.srt.disaggregation.utils").DisaggregationMode
        published_role = import_module("sglang.srt.runtime_context").get_disagg()
        self.disaggregation_mode = modes(published_role.disaggregation_mode)

    def _sync_disaggregation_mode_to_subcomponents(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_queues(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no queues and caches of a role here to tear down."""
    module = import_module("sglang.srt.disaggregation.role_switch")
    monkeypatch.setattr(module, "teardown_disaggregation", lambda scheduler: None)


def switch(scheduler: Scheduler, role: str, **more: Any) -> Any:
    """Ask for a role by SGLang's own handler, with whatever hooks stand around it."""
    request = import_module("sglang.srt.managers.io_struct").PdRoleSwitchReqInput
    handler = import_module("sglang.srt.disaggregation.role_switch").handle_pd_role_switch
    return handler(scheduler, request(new_role=role, **more))


def test_a_role_that_is_not_planned_is_refused_before_anything_is_torn_down(load: Any) -> None:
    loaded = load()
    scheduler = Scheduler("decode")
    answer = switch(scheduler, "prefill")
    assert not answer.success
    assert answer.safe_to_restore
    assert "without extend" in answer.message
    assert "--enable-pd-role-switch" in answer.message
    assert scheduler.disaggregation_mode.value == "decode"
    assert is_tombstone(loaded.attention.w_kc)


def test_what_sglang_refuses_it_refuses_in_its_own_words(load: Any) -> None:
    load()
    assert "invalid new_role" in switch(Scheduler("decode"), "").message
    answer = switch(Scheduler("decode"), "decode")
    assert answer.success
    assert answer.message == "already in target role"


RESTORABLE = {"NPU_BACKEND_SGLANG_PROMISES": "role_switch", "NPU_BACKEND_SGLANG_RESTORE": "1"}


def test_a_planned_role_gets_its_weights_back_first(load: Any) -> None:
    loaded = load(RESTORABLE, dsa=True)
    loaded.attention.skip_topk = True
    assert is_tombstone(loaded.attention.w_kc)
    decoded = served(loaded.attention)
    answer = switch(Scheduler("decode"), "prefill")
    assert answer.success, answer.message
    assert not is_tombstone(loaded.attention.w_kc)
    extended = served(loaded.attention, "EXTEND")
    for one, other in zip(decoded, extended, strict=True):
        # Another path on the same inputs: one bfloat16 rounding apart at this size.
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_a_switch_that_does_not_come_about_releases_again(load: Any) -> None:
    loaded = load(RESTORABLE, dsa=True)
    answer = switch(Scheduler("decode", idle=False), "prefill")
    assert not answer.success
    assert "not idle" in answer.message
    assert is_tombstone(loaded.attention.w_kc)


def test_a_preflight_changes_nothing(load: Any) -> None:
    loaded = load(RESTORABLE, dsa=True)
    assert switch(Scheduler("decode"), "prefill", prepare_only=True).message == "ready"
    assert is_tombstone(loaded.attention.w_kc)


def test_without_restore_what_both_roles_read_is_kept(load: Any) -> None:
    loaded = load({"NPU_BACKEND_SGLANG_PROMISES": "role_switch"}, dsa=True)
    assert not is_tombstone(loaded.attention.w_kc)
    assert switch(Scheduler("decode"), "prefill").success


# --- sleep and wake -------------------------------------------------------------------------------


class Saver:
    """A memory saver that drops weights while they sleep, as SGLang's does without a backup."""

    def __init__(self, model: Any, fresh: dict[str, torch.Tensor]) -> None:
        self.model, self.fresh = model, fresh

    def pause(self, tag: str) -> None:
        if tag == "weights":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if not is_tombstone(parameter):
                        parameter.zero_()

    def resume(self, tag: str) -> None:
        """Other content than before, where there was no backup."""


def manager(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = import_module("sglang.srt.managers.scheduler_components.weight_updater")
    monkeypatch.setattr(module.torch.distributed, "barrier", lambda group: None)
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    group = types.SimpleNamespace(cpu_group=None, world_size=1)
    with parallel.override(tp_group=group):
        return module.SchedulerWeightUpdaterManager(
            tp_worker=types.SimpleNamespace(model_runner=loaded.runner),
            draft_worker=None,
            memory_saver_adapter=Saver(loaded.model, {}),
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
        )


@pytest.mark.parametrize("restore", [False, True], ids=["kept", "restorable"])
def test_after_a_sleep_and_new_weights_the_plan_is_applied_anew(
    load: Any, restore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = import_module("sglang.srt.managers.io_struct")
    loaded = load(
        {"NPU_BACKEND_SGLANG_PROMISES": "weight_update"}
        | ({"NPU_BACKEND_SGLANG_RESTORE": "1"} if restore else {})
    )
    sleeper = manager(loaded, monkeypatch)
    sleeper.release_memory_occupation(requests.ReleaseMemoryOccupationReqInput(tags=["weights"]))
    sleeper.resume_memory_occupation(requests.ResumeMemoryOccupationReqInput(tags=["weights"]))
    assert loaded.session.parts[0].bound.generation == 1, "prepared from what came back"
    assert by_distributed(loaded, new_weights())[0]
    for mine, fresh in zip(served(loaded.attention), served_by(seed=9), strict=True):
        torch.testing.assert_close(mine, fresh, rtol=0, atol=0)
    assert is_tombstone(loaded.attention.w_kc) == restore


def test_a_sleep_of_the_cache_alone_leaves_the_plan_alone(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = import_module("sglang.srt.managers.io_struct")
    loaded = load({"NPU_BACKEND_SGLANG_PROMISES": "weight_update"})
    sleeper = manager(loaded, monkeypatch)
    sleeper.release_memory_occupation(requests.ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    sleeper.resume_memory_occupation(requests.ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
    assert loaded.session.parts[0].bound.generation == 0


# --- export ---------------------------------------------------------------------------------------


def test_what_was_released_for_good_is_not_exported(load: Any) -> None:
    loaded = load()
    exporter = import_module(
        "sglang.srt.model_executor.model_runner_components.weight_exporter"
    ).WeightExporter(
        tp_rank=0,
        tp_size=1,
        gpu_id=0,
        get_model_path=lambda: "model",
        get_model=lambda: loaded.model,
    )
    with pytest.raises(RuntimeError, match="NPU_BACKEND_SGLANG_PROMISES=export"):
        exporter._check_weight_export_supported()
