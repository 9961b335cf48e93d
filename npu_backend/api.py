"""What a host writes first: :func:`load`, then :meth:`Backend.plan`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from npu_backend.catalog import Catalog, load_catalog
from npu_backend.deployment import Deployment
from npu_backend.errors import DeploymentError, ModelError
from npu_backend.mlp.environment import warn_of_old_variables
from npu_backend.mlp.options import AttnTpOptions
from npu_backend.mlp.plan import MlpPlan
from npu_backend.mlp.rules import broken
from npu_backend.model.records import MlaLayer, ModelInfo
from npu_backend.offers import BmmSpec
from npu_backend.plan import ModelPlan
from npu_backend.planner import BmmPlan, plan_bmm, plan_model
from npu_backend.registry import Registry
from npu_backend.values import items

__all__ = ["Backend", "installed_torch_npu", "load"]


def installed_torch_npu() -> str | None:
    """Return the version of the installed torch-npu package, or None; imports nothing."""
    try:
        return metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        return None


@frozen
class Backend:
    """A loaded set of plugins and a catalog.

    Args:
        registry: The plugins.
        catalog: The figures to decide by.
        torch_npu: Version of the installed torch-npu package, or None.
    """

    registry: Registry
    catalog: Catalog
    torch_npu: str | None = None

    @property
    def plugins(self) -> tuple[Mapping[str, Any], ...]:
        """Every plugin with name, distribution, version and status, in registration order."""
        return tuple(
            {
                "name": r.info.name,
                "dist": r.info.dist,
                "version": r.info.version,
                "status": r.status.value,
            }
            for r in self.registry.plugins
        )

    def complete(self, deployment: Deployment) -> Deployment:
        """Return the deployment with this backend's catalog, and with the installed torch-npu
        where neither a package nor a CANN is given (rule 9)."""
        changes: dict[str, Any] = {}
        if deployment.catalog is not self.catalog:
            changes["catalog"] = self.catalog
        if deployment.torch_npu is None and deployment.cann is None and self.torch_npu:
            changes["torch_npu"] = self.torch_npu
        return evolve(deployment, **changes) if changes else deployment

    def plan(
        self,
        layers: Iterable[MlaLayer],
        deployment: Deployment,
        *,
        model: ModelInfo | None = None,
        mlp: MlpPlan | None = None,
    ) -> ModelPlan:
        """Decide everything for the given layers.

        Args:
            layers: What :func:`npu_backend.read_model` returned, or records a host built.
            deployment: What is planned for.
            model: What is known of the model; default: what ``layers`` carries.
            mlp: Layouts of the model's MLPs (:func:`npu_backend.plan_mlp`), to stand in the plan;
                of the same TP sizes as the deployment.

        Raises:
            NpuBackendError: There is no legal plan; see :func:`npu_backend.planner.plan_model`.
            ModelError: ``layers`` are no layers.
            DeploymentError: The sizes of ``mlp`` are others, or a variable of old contradicts its
                options.
        """
        _check_deployment(deployment)
        given = _layers(layers)
        options = AttnTpOptions() if mlp is None else mlp.options
        warn_of_old_variables(options, os.environ)
        if mlp is not None:
            _check_sizes(mlp, deployment)
        info = model or getattr(layers, "info", None)
        plan = plan_model(
            given, self.complete(deployment), self.registry, model=info, plugins=self.plugins
        )
        if mlp is None:
            return plan
        return evolve(plan, mlp=mlp, warnings=(*plan.warnings, *mlp.warnings))

    def plan_bmm(self, spec: BmmSpec, deployment: Deployment) -> BmmPlan:
        """Decide one batched matmul by itself, with every strategy's verdict.

        Raises:
            SelectionError: Some row count has no legal strategy.
        """
        _check_deployment(deployment)
        if not isinstance(spec, BmmSpec):
            raise ModelError(
                f"{spec!r:.80} is not a batched matmul",
                whom="Backend.plan_bmm",
                why=f"it is a {type(spec).__name__}",
                remedy="give a BmmSpec, such as npu_backend.planner.matmul makes",
            )
        return plan_bmm(spec, self.complete(deployment), self.registry)


def _check_deployment(deployment: Deployment) -> None:
    if not isinstance(deployment, Deployment):
        raise DeploymentError(
            f"{deployment!r:.80} is not a deployment",
            whom="Backend.plan",
            why=f"it is a {type(deployment).__name__}",
            remedy="give a Deployment record",
        )


def _layers(layers: Iterable[MlaLayer]) -> tuple[MlaLayer, ...]:
    wanted = "what read_model() returned, or a list of MlaLayer records"
    given = items(ModelError, "the layers to plan", layers, wanted)
    if strange := [each for each in given if not isinstance(each, MlaLayer)]:
        raise ModelError(
            f"{strange[0]!r:.80} is not a layer",
            whom="the layers to plan",
            why=f"it is a {type(strange[0]).__name__}",
            remedy=f"give {wanted}",
        )
    return given


def _check_sizes(mlp: MlpPlan, deployment: Deployment) -> None:
    mine = (mlp.parallel.tp_size, mlp.parallel.attn_tp_size)
    other = (deployment.tp_size, deployment.attn_tp_size)
    if mine != other:
        raise broken(
            "parallel.agrees",
            "the MLPs and the attention are planned for different sizes",
            whom="the plan",
            why=(f"MLPs: {mlp.parallel}", f"deployment: TP {other[0]}, attention TP {other[1]}"),
            remedy="give both the same TP and attention-TP sizes",
        )


def load(
    *,
    enable: Iterable[str] | None = None,
    disable: Iterable[str] = (),
    strict: bool | None = None,
    third_party: bool = True,
    catalog: str | Path | Catalog | None = None,
) -> Backend:
    """Load the plugins by entry point, and the catalog. Cheap; imports no torch.

    Args:
        enable: Only these plugins (and the environment's ``NPU_BACKEND_PLUGINS``).
        disable: Not these (and ``NPU_BACKEND_DISABLE``).
        strict: A plugin's failure is an error; default: ``NPU_BACKEND_STRICT=1``.
        third_party: False leaves out every distribution but npu-backend itself.
        catalog: An override file, or a catalog.

    Raises:
        PluginError: An unknown name is enabled or disabled, or a plugin failed under strict.
        CatalogError: The override cannot be used.
    """
    figures = catalog if isinstance(catalog, Catalog) else load_catalog(catalog)
    registry = Registry.load(enable=enable, disable=disable, strict=strict, third_party=third_party)
    return Backend(registry, figures, installed_torch_npu())
