"""A few numbers through a format, with everything that is stored of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import fused
from quantlab.formats.describe import scale_values
from quantlab.formats.format import Format
from quantlab.formats.mx import decode_scales
from quantlab.formats.nvfp4_arithmetic import NO_CODE
from quantlab.formats.random import random_words
from quantlab.formats.storage import Encoded, Packed
from quantlab.formats.table import Scaling


@dataclass(frozen=True)
class Tryout:
    """x (V, K) and what the format makes of it.

    elements: the numbers that the codes stand for, before any scale.  values: what is decoded.  words: the random
    words of a stochastic format.
    """

    x: Tensor
    encoded: Encoded
    packed: Packed
    elements: Tensor
    values: Tensor
    words: Tensor | None

    @property
    def errors(self) -> Tensor:
        """values - x, exact up to one rounding to float64."""
        return self.values.to(torch.float64) - self.x.to(torch.float64)


def try_format(fmt: Format, x: Tensor, seed: int = 0, specials: str = "raise") -> Tryout:
    """x (V, K) stored and read back.

    Random words are those of head 0, store 0, sequence 0, layer 0, part 0 (``random_words``).
    Errors: InputError for another shape, and those of ``Format.quantize``.
    """
    if x.dim() != 2:
        raise InputError("x", tuple(x.shape), "shape (V, K)")
    words = None
    if fmt.stochastic:
        zero = torch.zeros(1, dtype=torch.int64)
        words = random_words((1, 1, x.shape[0], x.shape[1]), seed, zero, zero, layer=0, part=0)[0, 0]
    encoded = fmt.quantize(x, words, specials=specials)
    if fmt.rounded:
        elements = fused.decode(encoded.codes, fmt.element)
        if fmt.row.scaling is Scaling.NVFP4:
            elements = elements.masked_fill(encoded.codes == NO_CODE, torch.nan)
    else:
        elements = encoded.codes
    return Tryout(x, encoded, fmt.pack(encoded), elements, fmt.dequantize(encoded), words)


def parts(fmt: Format, encoded: Encoded) -> dict[str, Tensor]:
    """What is stored beside the codes, as numbers: "scales" (V, groups), "global scale", "key scales" (1, K),
    "key factor" (r, K) and "value factor" (V, r), each where there is one.
    """
    found = {"scales": scale_values(fmt, encoded), "global scale": encoded.global_scale}
    by_key = None if encoded.key_scales is None else decode_scales(encoded.key_scales)
    found |= {"key scales": by_key, "key factor": encoded.key_factor, "value factor": encoded.value_factor}
    return {name: values for name, values in found.items() if values is not None}
