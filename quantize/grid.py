"""Weights → integers and factors, a slice of rows at a time. Knows no file and no name.

A group's weights are read back as `q * factor`, rounded to the factor's type and then to the model's, with whole numbers
`q` of `num_bits` bits: transformers and compressed-tensors do that, and so what is lossless and what the error is are said of those values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# A group whose first columns are no multiples of a step need not be looked at whole.
_GLIMPSE = 4


@dataclass(frozen=True)
class Packing:
    """Whole numbers of `num_bits` bits around zero, with a factor for each `group_size` columns; None: for a row."""

    num_bits: int
    group_size: int | None
    reaches: tuple[float, ...]
    """Factors tried: those that put a group's largest value at so many steps. More than there are is clipped."""

    @property
    def half(self) -> int:
        """The least whole number is minus this."""
        return 1 << (self.num_bits - 1)

    @property
    def values_per_word(self) -> int:
        """Values in one int32."""
        return 32 // self.num_bits

    def fits(self, columns: int) -> bool:
        """Whether rows of `columns` are whole groups and whole words."""
        return columns > 0 and columns % (self.group_size or self.values_per_word) == 0

    def groups(self, columns: int) -> int:
        """Factors of a row."""
        return columns // (self.group_size or columns)


W4 = Packing(4, 32, tuple(7 + step / 2 for step in range(9)))
"""Steps from 1/7 of the largest value (nothing is clipped, either sign) to 1/11. Twice as many lower the error by 0.3 %."""
W8 = Packing(8, 32, (127.0, 127.5, 128.0, 130.0, 134.0, 140.0, 150.0))
"""A factor a row would be 6 % smaller and have twice the error (docs/log.md)."""


@dataclass(frozen=True)
class Packed:
    """What stands for a slice of rows, and how near it is."""

    words: torch.Tensor
    """uint8 `[rows, columns * num_bits / 8]`: the bytes of the int32 words, low bits first, `q + half` in each place."""
    scale: torch.Tensor
    """`[rows, groups]`."""
    squared_error: float
    squared_weights: float
    lossless: int
    """Groups that are read back as they were, bit for bit (zeros of either sign are one)."""


def pack(weight: torch.Tensor, packing: Packing, scale_dtype: torch.dtype) -> Packed:
    """Packs rows `[rows, columns]`; columns are whole groups (`Packing.fits`). NaN and infinity give an error that is not finite."""
    rows, columns = weight.shape
    groups = weight.float().reshape(-1, packing.group_size or columns)
    values = _Values(groups, packing, scale_dtype, weight.dtype)
    scale, found = _lossless(values)
    rest = (~found).nonzero().squeeze(-1)
    if len(rest):
        scale[rest] = _nearest(values.some(rest))
    whole = values.whole(scale)
    difference = values.read(whole, scale) - groups
    return Packed(
        words=_bytes(whole.reshape(rows, columns), packing),
        scale=scale.reshape(rows, -1).to(scale_dtype),
        squared_error=difference.square().sum(dtype=torch.float64).item(),
        squared_weights=groups.square().sum(dtype=torch.float64).item(),
        lossless=int((difference == 0).all(-1).sum()),
    )


@dataclass(frozen=True)
class _Values:
    """Groups `[groups, size]` in float32, and what their packed form would be for factors `[groups]`, float32 as well."""

    groups: torch.Tensor
    packing: Packing
    scale_dtype: torch.dtype
    dtype: torch.dtype

    def some(self, which: torch.Tensor) -> _Values:
        return _Values(self.groups[which], self.packing, self.scale_dtype, self.dtype)

    def glimpse(self) -> _Values:
        return _Values(self.groups[:, :_GLIMPSE], self.packing, self.scale_dtype, self.dtype)

    def extreme(self) -> torch.Tensor:
        """The value farthest from zero, with its sign: there is one whole number more on the negative side."""
        low, high = self.groups.aminmax(dim=-1)
        return torch.where(high > -low, high, low)

    def rounded(self, scale: torch.Tensor) -> torch.Tensor:
        """Factors as they are stored; 1 in place of zero, of which nothing is a multiple."""
        stored = scale.to(self.scale_dtype).float()
        return torch.where(stored == 0, 1.0, stored)

    def whole(self, scale: torch.Tensor) -> torch.Tensor:
        half = self.packing.half
        return (self.groups / scale.unsqueeze(-1)).round_().clamp_(-half, half - 1)

    def read(self, whole: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (whole * scale.unsqueeze(-1)).to(self.scale_dtype).to(self.dtype).float()

    def error(self, scale: torch.Tensor) -> torch.Tensor:
        # Products are not rounded here, which makes no difference between factors. The sum is in float64, so that no order
        # of adding up decides between two of them.
        difference = self.whole(scale).mul_(scale.unsqueeze(-1)).sub_(self.groups)
        return difference.square_().sum(-1, dtype=torch.float64)

    def is_read_back(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.read(self.whole(scale), scale) == self.groups).all(-1)


def _lossless(values: _Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the groups that lie on a grid of 4 bits, and which groups those are.

    The largest value is some whole multiple m of the step, rounded: m = 8 in what llama.cpp's Q4_0 made. Its own rounding
    moves the quotient by less than two places of the weights' type, unless m is a power of two.
    """
    count = len(values.groups)
    scale = values.groups.new_ones(count)
    found = torch.zeros(count, dtype=torch.bool)
    if values.packing.num_bits != 4:
        return scale, found
    extreme, glimpse = values.extreme(), values.glimpse()
    for m in range(values.packing.half, 0, -1):
        for places in (0,) if m & (m - 1) == 0 else (0, 1, -1):
            rest = (~found).nonzero().squeeze(-1)
            if not len(rest):
                return scale, found
            tried = values.rounded(_neighbour((extreme[rest] / -m).to(values.dtype), places))
            likely = glimpse.some(rest).is_read_back(tried).nonzero().squeeze(-1)
            rest, tried = rest[likely], tried[likely]
            exact = values.some(rest).is_read_back(tried)
            scale[rest[exact]] = tried[exact]
            found[rest[exact]] = True
    return scale, found


def _neighbour(scale: torch.Tensor, places: int) -> torch.Tensor:
    """The number so many places farther from zero; what comes of zero or infinity is nobody's factor."""
    bits = scale.view(torch.int32 if scale.element_size() == 4 else torch.int16)
    return (bits + places).view(scale.dtype)


def _nearest(values: _Values) -> torch.Tensor:
    """The factors with the least squared error among those tried, each then moved to where its whole numbers want it."""
    extreme = values.extreme()
    best = values.rounded(extreme / -values.packing.reaches[0])
    least = values.error(best)
    for reach in values.packing.reaches[1:]:
        best, least = _better(values, best, least, extreme / -reach)
    for _ in range(2):
        whole = values.whole(best)
        # Least squares for the whole numbers as they are.
        wanted = (values.groups * whole).sum(-1) / whole.square().sum(-1).clamp_(min=1)
        best, least = _better(values, best, least, wanted)
    return best


def _better(
    values: _Values, best: torch.Tensor, least: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    other = values.rounded(other)
    error = values.error(other)
    wins = error < least
    return torch.where(wins, other, best), torch.where(wins, error, least)


def _bytes(whole: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Whole numbers `[rows, columns]` as the bytes of little-endian int32 words."""
    offset = (whole + packing.half).to(torch.uint8)
    if packing.num_bits == 8:
        return offset
    return offset[:, 0::2] | (offset[:, 1::2] << 4)
