"""Integers and factors: exact where weights lie on a grid, nearer than llama.cpp's elsewhere, laid out as compressed-tensors has it."""

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import unpack_from_int32
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as llama_quantize

from quantize.grid import W4, W8, Packed, Packing, pack

BF16 = torch.bfloat16


def normal(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


def with_outliers(rows: int, columns: int) -> torch.Tensor:
    values = normal(rows, columns)
    values[::7, ::13] *= 6
    return values


def whole_numbers(packed: Packed, packing: Packing, columns: int) -> torch.Tensor:
    words = packed.words.contiguous().view(torch.int32)
    shape = torch.Size([len(words), columns])
    whole: torch.Tensor = unpack_from_int32(words, packing.num_bits, shape)
    return whole


def read_back(packed: Packed, packing: Packing, columns: int) -> torch.Tensor:
    """As transformers with compressed-tensors reads it in bfloat16."""
    whole = whole_numbers(packed, packing, columns)
    size = packing.group_size or columns
    groups = whole.view(len(whole), -1, size).to(packed.scale.dtype) * packed.scale.unsqueeze(-1)
    return groups.reshape(len(whole), columns).to(BF16)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    squares = (found.double() - wanted.double()).square().sum()
    return (squares / wanted.double().square().sum()).sqrt().item()


@pytest.mark.parametrize("largest", range(1, 9))
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale_dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_weights_that_lie_on_a_grid_are_recovered_bit_for_bit(
    largest: int, sign: int, scale_dtype: torch.dtype
) -> None:
    """As in "unquantized" uploads of models trained for Q4_0, whose steps may be negative."""
    generator = torch.Generator().manual_seed(largest)
    whole = torch.randint(1 - largest, largest, (64, 4, 32), generator=generator)
    whole[:, :, 5] = -largest
    steps = sign * (torch.rand(64, 4, 1, generator=generator) * 0.1 + 1e-3).to(BF16)
    weight = (whole.to(BF16) * steps).view(64, 128)
    packed = pack(weight, W4, scale_dtype)
    assert packed.lossless == 64 * 4
    assert packed.squared_error == 0
    assert torch.equal(read_back(packed, W4, 128), weight)


def test_one_group_off_the_grid_is_searched_and_the_others_stay_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-8, 8, (4, 64), generator=generator).to(BF16) * 0.0625
    weight[:, 0] = -0.5
    weight[:, 32] = -0.5
    weight[2, 32:] = normal(1, 32).to(BF16)
    packed = pack(weight, W4, BF16)
    found = read_back(packed, W4, 64)
    assert packed.lossless == 7
    off = found != weight
    assert off.any()
    assert not off[[0, 1, 3]].any()
    assert not off[2, :32].any()


@pytest.mark.parametrize("values", [normal, with_outliers])
def test_four_bits_are_nearer_than_llama_cpps_and_than_rounding_to_the_largest(
    values: Callable[[int, int], torch.Tensor],
) -> None:
    weight = values(256, 512).to(BF16)
    ours = error(read_back(pack(weight, W4, BF16), W4, 512), weight)
    theirs = llama_quantize(weight.float().numpy(), GGMLQuantizationType.Q4_0)
    llama = error(torch.from_numpy(dequantize(theirs, GGMLQuantizationType.Q4_0)), weight)
    groups = weight.float().view(-1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 7.5
    rounded = ((groups / step).round().clamp(-8, 7) * step).view(256, 512)
    assert ours < 0.97 * llama
    assert ours < 0.97 * error(rounded, weight)


@pytest.mark.parametrize("values", [normal, with_outliers])
def test_eight_bits_are_no_farther_than_rounding_to_the_largest(
    values: Callable[[int, int], torch.Tensor],
) -> None:
    weight = values(256, 512).to(BF16)
    groups = weight.view(256, 16, 32)
    step = (groups.float().abs().amax(-1, keepdim=True) / 127.5).to(BF16)
    whole = (groups.float() / step.float()).round().clamp(-128, 127).to(BF16)
    rounded = (whole * step).view(256, 512)
    ours = error(read_back(pack(weight, W8, BF16), W8, 512), weight)
    assert 0 < ours <= error(rounded, weight)


@pytest.mark.parametrize(
    ("packing", "values", "words"),
    [
        (W4, list(range(-8, 8)), [0x76543210, 0xFEDCBA98 - (1 << 32)]),
        (Packing(8, None, (128.0,)), [-128, -1, 0, 127], [0xFF807F00 - (1 << 32)]),
    ],
)
def test_words_hold_low_bits_first(packing: Packing, values: list[int], words: list[int]) -> None:
    row = (values * 2)[: packing.group_size or len(values)]
    packed = pack(torch.tensor([row]).to(BF16), packing, BF16)
    assert packed.scale.abs().tolist() == [[1.0]]
    if packed.scale.item() == 1:
        assert packed.words.view(torch.int32)[0, : len(words)].tolist() == words
    assert torch.equal(read_back(packed, packing, len(row)), torch.tensor([row]).to(BF16))


@pytest.mark.parametrize("packing", [W4, W8])
def test_zeros_and_the_least_numbers_have_a_factor_that_can_be_read(packing: Packing) -> None:
    weight = torch.zeros(3, 32, dtype=BF16)
    weight[1] = 1e-39
    packed = pack(weight, packing, torch.float16)
    assert torch.isfinite(packed.scale).all()
    assert torch.equal(read_back(packed, packing, 32)[[0, 2]], weight[[0, 2]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_the_error(value: float) -> None:
    weight = normal(2, 32).to(BF16)
    weight[1, 3] = value
    assert not torch.tensor(pack(weight, W4, BF16).squared_error).isfinite()
