"""Which arithmetic serves a format: the one place where a scaling family or a library profile is added."""

from typing import TYPE_CHECKING

from quantlab.formats.float_scales import FloatScaled
from quantlab.formats.mx import Mx
from quantlab.formats.nvfp4 import DEFAULT_FLOOR, Nvfp4
from quantlab.formats.recipe import Recipe
from quantlab.formats.table import Element, FormatRow, Scaling

if TYPE_CHECKING:
    from quantlab.formats.format import Format


def profiles_of(row: FormatRow) -> tuple[str, ...]:
    """Libraries whose arithmetic the format can reproduce."""
    return ()


def recipe_of(fmt: "Format") -> Recipe | None:
    """The recipe of a format; None for an unscaled element."""
    row = fmt.row
    if row.scaling is Scaling.NONE:
        return None
    granularity, scale = fmt.granularity or "", fmt.scale or row.scales[0]
    if row.scaling is Scaling.FLOAT32:
        return FloatScaled(row.element, granularity, scale)
    if row.scaling is Scaling.MX:
        assert isinstance(row.element, Element)
        return Mx(row.element, scale)
    return Nvfp4(granularity, scale, fmt.floor or DEFAULT_FLOOR)
