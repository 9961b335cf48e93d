"""From SGLang's hooks to a plan that is applied, or to SGLang left alone, on all ranks alike."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

from npu_backend.api import Backend, load
from npu_backend.errors import NpuBackendError, PlanMismatchError
from npu_backend.hosts.sglang import route, updates
from npu_backend.hosts.sglang import shadow as watching
from npu_backend.hosts.sglang.environment import Environment
from npu_backend.hosts.sglang.guard import check_host, check_patched, sglang_version
from npu_backend.hosts.sglang.log import cli_options, plan_line
from npu_backend.hosts.sglang.ranks import Verdict, agree, tp_group
from npu_backend.hosts.sglang.session import Session, compare
from npu_backend.hosts.sglang.settings import Machine, deployment_of, read_settings
from npu_backend.hosts.sglang.targets import (
    FUNCTIONS,
    NPU_MODULE,
    PREPROCESS,
    RUNNER,
    SCHEDULER_UPDATER,
    SWITCH,
    UPDATER,
)
from npu_backend.hosts.sglang.translate import layers_of
from npu_backend.model.records import MlaLayer, ModelInfo
from npu_backend.plan import ModelPlan

__all__ = ["Adapter", "machine_of_this_process", "make_adapter"]

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]
Modules = list[tuple[Any, MlaLayer]]


def machine_of_this_process() -> Machine:
    """Return the device that SGLang set for this process, and the packages beside it."""
    torch, torch_npu = import_module("torch"), import_module("torch_npu")
    device = torch.npu.current_device()
    cann = str(torch_npu.npu.utils.get_cann_version()).split(":")[-1].strip()
    return Machine(
        soc=str(torch.npu.get_device_name(device)),
        cann=cann or None,
        torch_npu=_version("torch-npu"),
        kernels=_version("sgl-kernel-npu"),
    )


def _captured(layer_id: int, chosen: Any) -> Any:
    """Let SGLang see which rows a layer's indexer chose, as its own forward does."""
    return import_module(NPU_MODULE).maybe_capture_indexer_topk(layer_id, chosen)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Adapter:
    """What npu-backend does inside one process of SGLang.

    Args:
        environment: The adapter's own variables.
        failure: Why this process cannot plan, found while registering; it still joins its group, so
            that no other rank waits for it.
        machine: Returns the device and packages, once a model is loaded.
        backend: Returns the loaded plugins.
        environ: The process's environment.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        failure: BaseException | None = None,
        machine: Callable[[], Machine] = machine_of_this_process,
        backend: Callable[[], Backend] = load,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.environment = environment
        self._failure = failure
        self._machine = machine
        self._backend = backend
        self._environ = environ
        self._told: set[str] = set()
        self._targets: tuple[str, ...] = ()
        self.sessions: dict[int, Session] = {}
        self.shadows: dict[int, watching.Shadow] = {}

    # --- hooks -----------------------------------------------------------------------------------

    def hooks(self) -> dict[str, tuple[str, Hook]]:
        """Return ``target -> (type, hook)`` for SGLang's registry.

        A process that cannot plan has the one hook by which it tells its group.
        """
        first = {f"{RUNNER}.configure_kv_cache_dtype": ("after", self.after_load)}
        if self._failure is not None:
            return first
        if self.environment.shadow:
            found = watching.hooks(self._shadow_of)
            return first | {
                f"{PREPROCESS if name in watching.PATHS else NPU_MODULE}.{name}": ("around", hook)
                for name, hook in found.items()
            }
        routed = route.hooks(_captured)
        later = updates.Updates(lambda model: self.sessions.get(id(model)))
        return {
            **first,
            f"{RUNNER}.alloc_memory_pool": ("after", self.after_pool),
            **{target: ("around", routed[target.rpartition(".")[2]]) for target in FUNCTIONS},
            **{f"{UPDATER}.{name}": ("around", hook) for name, hook in later.hooks().items()},
            f"{SCHEDULER_UPDATER}.resume_memory_occupation": ("around", self.around_wake),
            SWITCH: ("around", self.around_switch),
        }

    def register(self, registry: Any, types: Any) -> None:
        """Hand the hooks to SGLang.

        Args:
            registry: ``HookRegistry``.
            types: ``HookType``.
        """
        found = self.hooks()
        self._targets = tuple(found)
        for target, (kind, hook) in found.items():
            registry.register(target, hook, types(kind))

    # --- load ------------------------------------------------------------------------------------

    def after_load(self, result: Any, runner: Any, *_: Any, **__: Any) -> None:
        """Plan a runner's model, agree with the other ranks, and release; before the KV pool is
        sized, after weights are processed and LoRA is set up.

        Raises:
            PlanMismatchError: The ranks' plans differ, or one failed after bytes were freed; or
                under ``NPU_BACKEND_STRICT=1`` for whatever lets SGLang run alone.
        """
        context = import_module("sglang.srt.runtime_context")
        group = tp_group(context)
        plan, modules, failure = self._planned(runner, context)
        verdict = agree(failure, group)
        if not verdict.go_on:
            self._stand_aside(verdict, failure)
            return
        if plan is None or not modules:
            self._once(
                "no attention of this model goes through the functions that npu-backend routes"
            )
            return
        if self.environment.shadow:
            self.shadows[id(runner.model)] = watching.Shadow(plan, modules)
            self._line("shadow, nothing is changed", plan, verdict.rank)
            return
        self._apply(runner, plan, modules, group)

    def _planned(
        self, runner: Any, context: Any
    ) -> tuple[ModelPlan | None, Modules, BaseException | None]:
        try:
            if self._failure is not None:
                raise self._failure
            check_patched(self._targets)
            return (*self._plan(runner, context), None)
        except Exception as err:  # noqa: BLE001 - told to every rank, and by one of them to people
            return None, [], err

    def _plan(self, runner: Any, context: Any) -> tuple[ModelPlan | None, Modules]:
        if getattr(runner, "startup_weight_load", None) is not None:
            raise PlanMismatchError(
                "the weights are not there yet",
                whom="SGLang",
                why="they are loaded while the server starts up (startup weight load)",
                remedy="load weights before the KV pool is sized, or set NPU_BACKEND_SGLANG=0",
            )
        settings = read_settings(context, self._environ)
        backend = self._backend()
        deployment = deployment_of(
            settings,
            self._machine(),
            self.environment,
            is_draft=bool(runner.is_draft_worker),
            catalog=backend.catalog,
        )
        config = runner.model_config.hf_config
        modules = layers_of(
            runner.model,
            settings,
            config=config,
            kv_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        )
        if not modules:
            return None, []
        name = str(getattr(runner.model_config, "model_path", "") or type(runner.model).__name__)
        info = ModelInfo(name=name, model_type=modules[0][1].model_type, source="SGLang's modules")
        return backend.plan([layer for _, layer in modules], deployment, model=info), modules

    def _apply(self, runner: Any, plan: ModelPlan, modules: Modules, group: Any) -> None:
        compare(plan.layers, group, None, "nothing was changed or freed")
        session, failure = Session(plan, modules), None
        try:
            session.bind()
        except Exception as err:  # noqa: BLE001 - as above
            failure = err
        verdict = agree(failure, group)
        if not verdict.go_on:
            session.undo()
            self._stand_aside(verdict, failure)
            return
        amended = [part.bound.plan for part in session.parts]
        compare(amended, group, None, "nothing was freed")
        try:
            session.release()
        except Exception as err:  # noqa: BLE001 - the other ranks must hear of it before it is raised
            failure = err
        compare(
            [part.bound.plan for part in session.parts],
            group,
            failure,
            "weights are gone, so SGLang cannot go on alone",
        )
        if failure is not None:
            raise failure
        self.sessions[id(runner.model)] = session
        self._line("applied", session.current_plan(), 0 if group is None else _rank(group))

    def after_pool(self, result: Any, runner: Any, *_: Any, **__: Any) -> None:
        """Give a model's layers their caches, and hold the pool against the plan.

        Raises:
            PlanMismatchError: The pool is not what SGLang's arguments said; weights are gone.
        """
        session = self.sessions.get(id(runner.model))
        if session is not None:
            modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
            session.attach(runner.token_to_kv_pool, modes)

    # --- later -----------------------------------------------------------------------------------

    def around_wake(self, original: Hook, manager: Any, request: Any) -> Any:
        """Apply the plan anew where weights came back from sleep."""
        result = original(manager, request)
        tags = request.tags
        if not tags or "weights" in tags:
            updates.Updates.wake(self.sessions.values())
        return result

    def around_switch(self, original: Hook, scheduler: Any, request: Any) -> Any:
        """Refuse a role that the plan does not cover; else bring back what only it reads."""
        new_role = (request.new_role or "").lower()
        old_role = scheduler.disaggregation_mode.value
        refusal = updates.role_switch_refusal(self.sessions.values(), new_role)
        if refusal is not None and new_role != old_role:
            answer = import_module("sglang.srt.managers.io_struct").PdRoleSwitchReqOutput
            return answer(
                success=False,
                message=refusal,
                old_role=old_role,
                new_role=new_role,
                safe_to_restore=True,
            )
        changes = new_role != old_role and not request.prepare_only
        back = sum(s.restore() for s in self.sessions.values()) if changes else 0
        answer = original(scheduler, request)
        if back and not answer.success and answer.safe_to_restore:
            for session in self.sessions.values():
                session.release_again()
        return answer

    # --- words -----------------------------------------------------------------------------------

    def _shadow_of(self, attention: Any) -> watching.Shadow | None:
        return next((s for s in self.shadows.values() if s.watches(attention)), None)

    def _stand_aside(self, verdict: Verdict, failure: BaseException | None) -> None:
        error = PlanMismatchError(
            "SGLang runs as if npu-backend were not installed",
            whom="all ranks of the TP group",
            why=verdict.words,
            remedy="correct what the reason names, or set NPU_BACKEND_SGLANG=0",
        )
        if self.environment.strict:
            raise error from failure
        if verdict.rank == 0:
            self._once(str(error))

    def _once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("npu-backend: %s", text)

    def _line(self, how: str, plan: ModelPlan, rank: int) -> None:
        logger.info("npu-backend: rank %d, %s: %s", rank, how, plan_line(plan))
        for warning in plan.warnings if rank == 0 else ():
            logger.warning("npu-backend: %s", warning)
        if rank == 0:
            command = " ".join(["npu-backend plan MODEL", *cli_options(plan)])
            logger.info("npu-backend: predicted by: %s", command)


def _rank(group: Any) -> int:
    return int(import_module("torch.distributed").get_rank(group))


def make_adapter(environ: Mapping[str, str]) -> Adapter:
    """Return the adapter of this process; what stands against it becomes its failure."""
    try:
        environment = Environment.read(environ)
    except NpuBackendError as err:
        return Adapter(Environment(), failure=err, environ=environ)
    try:
        for difference in check_host(sglang_version(), any_version=environment.any_version):
            logger.warning("npu-backend: used all the same: %s", difference)
    except NpuBackendError as err:
        return Adapter(environment, failure=err, environ=environ)
    return Adapter(environment, environ=environ)
