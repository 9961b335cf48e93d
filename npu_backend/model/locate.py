"""Finding what MODEL names: a bundled model, a config, or a model directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from npu_backend.catalog import Catalog
from npu_backend.catalog.versions import suggest
from npu_backend.errors import ModelError
from npu_backend.model.files import read_object

__all__ = ["Source", "locate"]

CONFIG_NAME = "config.json"
CONFIG_LIMIT = 1 << 26
"""Bytes of a config; published ones have some kilobytes, with long ignore lists a hundred."""

_CONFIG_REMEDY = "give a bundled model's name, a config.json, or a directory that holds one"


@frozen
class Source:
    """Where a model description comes from.

    Args:
        name: Bundled name, or the name of the file or folder.
        raw: The config.
        where: The file, or the bundled model, for messages.
        words: The same for plans: no paths, so that equal models give equal plans.
        directory: The model directory, or None.
        unverified: Fields of a bundled model that its source does not confirm.
    """

    name: str
    raw: Mapping[str, Any]
    where: str
    words: str
    directory: Path | None = None
    unverified: tuple[str, ...] = ()


def _is_path(text: str) -> bool:
    separators = [os.sep, *([os.altsep] if os.altsep else [])]
    return any(sep in text for sep in separators) or text in (".", "..")


def locate(model: str | os.PathLike[str], catalog: Catalog) -> Source:
    """Return the description that a MODEL names.

    A text without a separator is a bundled name first, so that a folder of that name in the
    current directory changes nothing: ``./glm-5.2`` or a :class:`~pathlib.Path` means the folder.
    """
    if not isinstance(model, str | os.PathLike) or isinstance(os.fspath(model), bytes):
        raise ModelError(
            f"{model!r:.80} names no model",
            whom="the model to plan",
            why="it is None" if model is None else f"it is a {type(model).__name__}",
            remedy=_CONFIG_REMEDY,
        )
    if isinstance(model, str) and not _is_path(model):
        if model in catalog.models:
            raw = catalog.models[model]
            return Source(
                model,
                raw,
                where=f"bundled model {model}",
                words=f"catalog {catalog.version}",
                unverified=tuple(raw.get("unverified", ())),
            )
        if not model.strip() or "\0" in model or not os.path.lexists(model):
            raise ModelError(
                f"{model[:120]!r} is neither a bundled model nor a file"
                f"{suggest(model[:120].lower(), catalog.models)}",
                whom="the model to plan",
                why="the bundled models are " + ", ".join(catalog.models),
                remedy=_CONFIG_REMEDY,
            )
    path = Path(model)
    try:
        directory = path if path.is_dir() else None
    except (OSError, ValueError):
        directory = None
    file = path / CONFIG_NAME if directory is not None else path
    raw = read_object(file, "the model's config", _CONFIG_REMEDY, limit=CONFIG_LIMIT)
    named = path if directory is not None or path.name != CONFIG_NAME else path.parent
    name = named.name or named.resolve().name or path.name
    return Source(name, raw, str(file), file.name, directory)
