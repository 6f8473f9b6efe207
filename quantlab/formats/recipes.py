"""Which arithmetic serves a format: the one place where a scaling family or a library profile is added."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantlab.formats import (
    float_scale_notes,
    four_over_six,
    fused,
    mx_notes,
    mx_profiles,
    nvfp4_arithmetic,
    nvfp4_notes,
)
from quantlab.formats.float_scale_profiles import FLOAT_SCALE_PROFILES, FloatScaleProfile
from quantlab.formats.float_scales import GROUPS, FloatScaled
from quantlab.formats.four_over_six import FourOverSix
from quantlab.formats.groups import Groups
from quantlab.formats.mx import Mx
from quantlab.formats.mx_profiles import MX_PROFILES, MXProfile
from quantlab.formats.nvfp4 import DEFAULT_FLOOR, Nvfp4
from quantlab.formats.nvfp4_arithmetic import Nvfp4Arithmetic, global_amax
from quantlab.formats.nvfp4_profiles import PROFILES as NVFP4_PROFILES
from quantlab.formats.recipe import Cast, Explanation, Recipe, Scales
from quantlab.formats.rounding import Rounding
from quantlab.formats.table import FLOAT_ELEMENTS, Element, FormatRow, Integer, Scaling

if TYPE_CHECKING:
    from quantlab.formats.format import Format


@dataclass(frozen=True)
class ProfiledNvfp4(Recipe):
    """NVFP4 in a library's arithmetic; ``own_cast`` where its element cast is used (nearest rounding).

    ignores_nan: a NaN counts in no scale and is stored as the largest number, as in every canonical recipe.
    """

    arithmetic: Nvfp4Arithmetic | FourOverSix
    granularity: str
    own_cast: bool
    ignores_nan: bool = False

    def encode(self, x: Tensor, cast: Cast) -> tuple[Tensor, Scales]:
        x = x if x.dtype == torch.bfloat16 else x.to(torch.float32)
        nan = x.isnan() if self.ignores_nan and fused.has_nan(x) else None
        x = x if nan is None else x.masked_fill(nan, 0.0)
        amax, encode_element = global_amax(x, self.granularity), None if self.own_cast else cast
        if isinstance(self.arithmetic, FourOverSix):
            assert amax is not None
            codes, scales, shared = four_over_six.encode(self.arithmetic, x, amax, encode_element)
        else:
            codes, scales, shared = nvfp4_arithmetic.encode(self.arithmetic, x, amax, encode_element)
        codes = codes if nan is None else codes.masked_fill_(nan, FLOAT_ELEMENTS["e2m1"].max_code)
        return codes, Scales(scales, shared)

    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        rule = self.arithmetic
        arithmetic = rule.arithmetic if isinstance(rule, FourOverSix) else rule
        return nvfp4_arithmetic.decode(arithmetic, values, scales.stored, scales.global_scale)

    def explain(self) -> Explanation:
        if isinstance(self.arithmetic, FourOverSix):
            return nvfp4_notes.explain_four_over_six(self.arithmetic)
        return nvfp4_notes.explain(self.arithmetic.name, self.granularity)


@dataclass(frozen=True)
class ProfiledMx(Recipe):
    """MX blocks in a library's arithmetic."""

    profile: MXProfile
    element: Element
    own_cast: bool

    def encode(self, x: Tensor, cast: Cast) -> tuple[Tensor, Scales]:
        x = x.to(torch.float32)
        codes, scales = mx_profiles.encode(x, self.element, self.profile, cast, self.own_cast)
        return codes, Scales(scales)

    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        return mx_profiles.decode(values, scales.stored, self.profile)

    def explain(self) -> Explanation:
        return mx_notes.explain(self.profile.library, self.profile.variant, self.element)


@dataclass(frozen=True)
class ProfiledFloatScale(Recipe):
    """FP32 scales in a library's convention."""

    profile: FloatScaleProfile
    element: Element | Integer
    groups: Groups
    own_cast: bool

    def encode(self, x: Tensor, cast: Cast) -> tuple[Tensor, Scales]:
        x = x.to(torch.float32)
        factors = self.profile.factors(*self.groups.extremes(x))
        values, aligned = self.groups.align(x, factors)
        quotients = self.profile.quotients(values, aligned).view(x.shape)
        codes = self.profile.cast(quotients) if self.own_cast and self.profile.cast else cast(quotients)
        return codes, Scales(self.profile.store(factors))

    def decode(self, values: Tensor, scales: Scales) -> Tensor:
        aligned, stored = self.groups.align(values, scales.stored)
        return self.profile.decode(aligned, stored).view(values.shape)

    def explain(self) -> Explanation:
        return float_scale_notes.explain(self.profile.library, self.profile.variant, self.element)


def profiles_of(row: FormatRow) -> tuple[str, ...]:
    """What may follow ``+as.`` for a format: a library, or library.variant for what is not its default."""
    if row.scaling is Scaling.NVFP4:
        return tuple(NVFP4_PROFILES)
    return tuple(_variants(row))


def canonical_profile(row: FormatRow, name: str | None) -> str | None:
    """One of ``profiles_of(row)`` for a name that may spell the library's default variant out; None for neither."""
    if name in profiles_of(row):
        return name
    for library, profile in _variants(row).items():
        if name == f"{library}.{profile.variant}":
            return library
    return None


def recipe_of(fmt: "Format") -> Recipe | None:
    """The recipe of a format; None for an unscaled element."""
    row, own_cast = fmt.row, fmt.rounding is Rounding.NEAREST
    if row.scaling is Scaling.NONE:
        return None
    granularity, scale = fmt.granularity or "", fmt.scale or row.scales[0]
    if fmt.four_over_six is not None:
        rule = four_over_six.from_text(fmt.profile, fmt.four_over_six)
        return ProfiledNvfp4(rule, granularity, own_cast, ignores_nan=fmt.profile is None)
    if row.scaling is Scaling.FLOAT32:
        if fmt.profile is None:
            return FloatScaled(row.element, granularity, scale)
        return ProfiledFloatScale(_float_scale(row)[fmt.profile], row.element, GROUPS[granularity], own_cast)
    if row.scaling is Scaling.MX:
        assert isinstance(row.element, Element)
        if fmt.profile is None:
            return Mx(row.element, scale)
        return ProfiledMx(_mx(row)[fmt.profile], row.element, own_cast)
    if fmt.profile is None:
        return Nvfp4(granularity, scale, fmt.floor or DEFAULT_FLOOR)
    return ProfiledNvfp4(NVFP4_PROFILES[fmt.profile], granularity, own_cast)


def _float_scale(row: FormatRow) -> dict[str, FloatScaleProfile]:
    return _named([p for p in FLOAT_SCALE_PROFILES if row.element.name in p.elements])


def _mx(row: FormatRow) -> dict[str, MXProfile]:
    return _named([p for p in MX_PROFILES if row.element.name in p.elements])


def _variants(row: FormatRow) -> dict:
    tables = {Scaling.FLOAT32: _float_scale, Scaling.MX: _mx}
    return tables[row.scaling](row) if row.scaling in tables else {}


def _named(profiles: list) -> dict:
    """By library for the first of each, which is the library's default, by library.variant for the others."""
    named: dict = {}
    for profile in profiles:
        first = profile.library not in named
        named[profile.library if first else f"{profile.library}.{profile.variant}"] = profile
    return named
