"""Casts are new storages or the input itself; formats belong to storages."""

from __future__ import annotations

import pytest
import torch

from npu_backend.runtime.reference import get_npu_format, npu_format_cast

ND, NZ = 2, 29


def test_a_cast_is_a_clone_in_the_new_format():
    w = torch.randn(32, 48).bfloat16()
    cast = npu_format_cast(w, NZ)
    assert cast.data_ptr() != w.data_ptr()
    assert torch.equal(cast, w)
    assert get_npu_format(cast) == NZ
    assert get_npu_format(w) == ND


def test_views_have_the_format_of_their_storage():
    cast = npu_format_cast(torch.zeros(32, 32).bfloat16(), NZ)
    assert get_npu_format(cast[:16].t()) == NZ
    assert get_npu_format(cast.clone()) == ND


@pytest.mark.parametrize(
    ("shape", "dtype", "castable"),
    [
        ((16, 16), torch.bfloat16, True),
        ((16, 15), torch.bfloat16, False),
        ((15, 16), torch.float16, False),
        ((16, 32), torch.int8, True),
        ((16, 16), torch.int8, False),
        ((32, 16), torch.int8, False),
        ((2, 16, 16), torch.bfloat16, True),
        ((16, 16), torch.float32, False),
        ((16,), torch.bfloat16, False),
    ],
)
def test_what_has_no_nz_form_comes_back_as_it_is(shape, dtype, castable):
    w = torch.zeros(shape, dtype=dtype)
    cast = npu_format_cast(w, NZ)
    assert (cast is not w) == castable
    assert get_npu_format(cast) == (NZ if castable else ND)


def test_a_cast_to_its_own_format_is_the_input():
    w = torch.zeros(16, 16)
    assert npu_format_cast(w, ND) is w
    cast = npu_format_cast(w.bfloat16(), NZ)
    assert npu_format_cast(cast, NZ) is cast
    assert npu_format_cast(w.bfloat16(), cast) is not w
    assert get_npu_format(npu_format_cast(cast, ND)) == ND


def test_a_cast_of_a_strided_weight_is_contiguous():
    assert npu_format_cast(torch.zeros(32, 16).bfloat16().t(), NZ).is_contiguous()


def test_what_is_not_there_is_named():
    with pytest.raises(NotImplementedError, match="customize_dtype"):
        npu_format_cast(torch.zeros(16, 16), NZ, customize_dtype=1)
    with pytest.raises(NotImplementedError, match="format 3"):
        npu_format_cast(torch.zeros(16, 16), 3)
