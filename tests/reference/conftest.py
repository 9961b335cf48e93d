"""Torch without a device backend, and seeded random tensors."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import pytest
import torch


@pytest.fixture
def rand():
    """Return ``rand(*shape, dtype=...)``: seeded normal values."""
    generator = torch.Generator().manual_seed(20260903)

    def make(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return make


@pytest.fixture
def rand_int8():
    """Return ``rand_int8(*shape)``: seeded int8 values over the whole range."""
    generator = torch.Generator().manual_seed(7)

    def make(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    return make


@pytest.fixture
def angles():
    """Return ``angles(positions, D)``: (cos, sin), each ``(tokens, D)`` in half layout."""

    def make(positions, width: int, dtype: torch.dtype = torch.float32):
        rows_cos, rows_sin = [], []
        for position in positions:
            half = [float(position) * 10000.0 ** (-2 * i / width) for i in range(width // 2)]
            rows_cos.append([torch.tensor(a).cos().item() for a in half] * 2)
            rows_sin.append([torch.tensor(a).sin().item() for a in half] * 2)
        return torch.tensor(rows_cos).to(dtype), torch.tensor(rows_sin).to(dtype)

    return make
