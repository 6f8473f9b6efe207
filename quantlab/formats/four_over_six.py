"""Four over six: every NVFP4 block takes its scale from a / 6 or from a / 4, whichever leaves the smaller error.

A block maximum at 4 gives up the codes +-6 for a finer grid near it (arXiv 2512.02010).  Both candidates are
rounded and decoded, their errors compared, and 6 wins a tie.  So that the scale for 4, which is 1.5 times as
large, fits E4M3 in the block that holds the largest magnitude A, the global scale may put A at 6 * 256 instead
of 6 * 448; with 448 the top blocks cannot use 4.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from quantlab.errors import InputError, unknown_name
from quantlab.formats import nvfp4_arithmetic
from quantlab.formats import nvfp4_profiles as profiles
from quantlab.formats.nvfp4_arithmetic import (
    BLOCK,
    CODE_MAX,
    NO_CODE,
    SCALE_ELEMENT,
    ElementCast,
    Nvfp4Arithmetic,
    block_amax,
    cast_element,
    cast_values,
    divide,
    join_blocks,
    per_block,
    prepare,
    scale_bytes,
    to_e4m3,
)
from quantlab.formats.recipe import largest_scale
from quantlab.formats.table import FLOAT_ELEMENTS

METRICS = ("mse", "mae", "absmax")
SCALE_MAXIMA = (256, 448)
_SIX, _FOUR = CODE_MAX, 4.0
_RATIO = _SIX / _FOUR


@dataclass(frozen=True)
class FourOverSix:
    """A rule for the choice, over the arithmetic of a library or of quantlab."""

    arithmetic: Nvfp4Arithmetic  # its block scale is the candidate for 6
    scale_for_four: Callable[[Tensor, Tensor], Tensor]  # block maximum, global value -> the candidate for 4
    reconstruct: Callable[[Tensor, Tensor, Tensor], Tensor]  # value, scale, global value -> compared with x
    metric: str
    halves_first: bool = False  # errors are added like torch.sum does on a CPU: i to i + 8, then in order
    scale_max: int = SCALE_MAXIMA[0]  # where the global value puts the largest block scale


def encode(
    rule: FourOverSix,
    x: Tensor,
    amax: Tensor,
    encode_element: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (..., V, K) uint8, E4M3 bytes (..., V, blocks) uint8, global value: as nvfp4_arithmetic.encode.

    The choice is made between nearest roundings also where encode_element rounds stochastically: a choice that
    saw the random bits would prefer lucky ones and bias the result.
    """
    profile = rule.arithmetic
    blocks, global_value = prepare(profile, x, amax)
    shared = per_block(global_value, x.dim())
    blocks = blocks.to(torch.float32)
    amax_of_block = block_amax(blocks)
    six = _candidate(rule, blocks, profile.block_scale(amax_of_block, shared), shared)
    four = _candidate(rule, blocks, rule.scale_for_four(amax_of_block, shared), shared)
    take_four = four.error < six.error  # false for NaN
    scales = torch.where(take_four, four.scales, six.scales)
    if encode_element is None:
        codes = join_blocks(torch.where(take_four, four.codes, six.codes), x.shape[-1])
    else:
        quotient = torch.where(take_four, four.quotient, six.quotient)
        codes = encode_element(join_blocks(quotient, x.shape[-1]))
    return codes, scale_bytes(scales), global_value


def decode(rule: FourOverSix, values: Tensor, scales: Tensor, global_value: Tensor) -> Tensor:
    """Numbers (..., V, K) float32: nvfp4_arithmetic.decode of the rule's arithmetic."""
    return nvfp4_arithmetic.decode(rule.arithmetic, values, scales, global_value)


def four_over_six(
    library: str | None = None, metric: str | None = None, scale_max: int | None = None
) -> FourOverSix:
    """The rule of a library ("te", "flashinfer", "fouroversix"), or quantlab's own (None).

    metric: "mse" (sum of squared errors over the block), "mae" (sum of magnitudes), "absmax" (the largest).
    scale_max: 256 or 448.  Defaults: mse and 256 for quantlab, as in the paper and in fouroversix, which takes
    no other scale_max; mae for te and flashinfer, which have no absmax, with 256 as in te's recipe class and 448 as
    in flashinfer's configuration.
    InputError for a name, metric or scale_max that the library does not have.

    quantlab: gs = A / (6 * scale_max), scales a / (6 * gs) and a / (4 * gs) to nearest, at most 448, at least
    2^-9 unless the block is zero; code of x / (s * gs); errors |code * (s * gs) - x| added up in order, all in
    float32 with true division.  With a global value per row, flashinfer measures errors as te does: use te.

    The error of a value is bounded as in nvfp4.Nvfp4, by h * m under the chosen scale m: up to 4 no more than m / 2,
    about a / 8, where a block that takes 6 errs by up to m, about a / 6.  The metric of a block never exceeds that
    under the scale for 6.  Saturation as there; the scale for 4 is at most 448, and with 448 the top blocks, whose
    scale for 4 does not fit, reach up to 6.
    """
    if library not in _LIBRARIES:
        raise unknown_name("library", str(library), [name for name in _LIBRARIES if name])
    build, metrics, maxima = _LIBRARIES[library]
    if (metric or metrics[0]) not in metrics:
        raise InputError("metric", metric, f"{' or '.join(metrics)} for {library or 'nvfp4'}")
    if (scale_max or maxima[0]) not in maxima:
        expected = " or ".join(map(str, maxima))
        raise InputError("scale_max", scale_max, f"{expected} for {library or 'nvfp4'}")
    return _build(build, metric or metrics[0], scale_max or maxima[0])


def from_text(library: str | None, options: str) -> FourOverSix:
    """The rule of canonical format text: options as ``canonical_options`` gives them."""
    return four_over_six(library, *_split_options(options))


def canonical_options(library: str | None, options: str) -> str:
    """``[.mse|.mae|.absmax][.256|.448]`` without what is the library's default.  Errors: as ``four_over_six``."""
    metric, scale_max = _split_options(options)
    four_over_six(library, metric, scale_max)
    _, metrics, maxima = _LIBRARIES[library]
    kept = [metric if metric != metrics[0] else None, scale_max if scale_max != maxima[0] else None]
    return "".join(f".{option}" for option in kept if option)


def _split_options(options: str) -> tuple[str | None, int | None]:
    words = options.split(".")[1:]
    metric = words.pop(0) if words and words[0] in METRICS else None
    scale_max = int(words.pop(0)) if words and words[0] in map(str, SCALE_MAXIMA) else None
    if words:
        raise InputError("four over six", options, "[.mse|.mae|.absmax][.256|.448]")
    return metric, scale_max


@lru_cache
def _build(build: "_Builder", metric: str, scale_max: int) -> FourOverSix:
    """One object for equal arguments, so that equal rules compare equal."""
    return replace(build(metric, scale_max), scale_max=scale_max)


@dataclass(frozen=True)
class _Candidate:
    scales: Tensor
    quotient: Tensor
    codes: Tensor
    error: Tensor  # (..., blocks, 1)


def _candidate(rule: FourOverSix, blocks: Tensor, scales: Tensor, shared: Tensor) -> _Candidate:
    cast = rule.arithmetic.cast
    quotient = rule.arithmetic.quotient(blocks, scales, shared)
    codes = cast_element(quotient, cast)
    values = cast_values(quotient, codes, cast)
    difference = rule.reconstruct(values, scales, shared) - blocks
    return _Candidate(scales, quotient, codes, block_error(difference, rule.metric, rule.halves_first))


def block_error(difference: Tensor, metric: str, halves_first: bool = False) -> Tensor:
    """(..., blocks, 16) -> (..., blocks, 1).  Float32 sums in a fixed order: near ties hang on it."""
    if metric == "absmax":
        return difference.abs().amax(-1, keepdim=True)
    terms = difference * difference if metric == "mse" else difference.abs()
    if halves_first:
        terms = terms[..., : BLOCK // 2] + terms[..., BLOCK // 2 :]
    total = terms[..., 0]
    for term in terms.unbind(-1)[1:]:
        total = total + term
    return total[..., None]


def _quantlab_global(amax: Tensor, scale_max: float) -> Tensor:
    scale = divide(amax, _SIX * scale_max)
    # 6 times the largest scale must stay finite: beyond that bound the blocks lose the room for 4, not their values.
    bound = largest_scale(SCALE_ELEMENT.max, _SIX)
    return scale.clamp(FLOAT_ELEMENTS["fp32"].smallest, bound).masked_fill(amax == 0, 1.0)


def _quantlab_scale(amax: Tensor, global_scale: Tensor, largest: float) -> Tensor:
    scale = to_e4m3(amax / (largest * global_scale))
    return scale.clamp(min=SCALE_ELEMENT.smallest).masked_fill(amax == 0, 0.0)


def _quantlab_quotient(x: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    divisor = scale * global_scale
    return x / divisor.masked_fill(divisor == 0, 1.0)


def _quantlab_decode(value: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return value * (scale * global_scale)


def _quantlab(metric: str, scale_max: int) -> FourOverSix:
    arithmetic = Nvfp4Arithmetic(
        "nvfp4",
        partial(_quantlab_global, scale_max=scale_max),
        partial(_quantlab_scale, largest=_SIX),
        _quantlab_quotient,
        _quantlab_decode,
        ElementCast(NO_CODE, keeps_minus_zero=True),
    )
    return FourOverSix(arithmetic, partial(_quantlab_scale, largest=_FOUR), _quantlab_decode, metric)


# TransformerEngine: NVFP4QuantizerRef._quantize_blockwise_4over6_reference.
# flashinfer: tests/test_helpers/utils_fp4.py ref_fp4_quant_4over6_te, with S as the global value.
# Both multiply a / 6 by S; the plain profile of both multiplies a by S / 6.


def _encode_scale_scale(amax: Tensor, encode_scale: Tensor, ratio: float) -> Tensor:
    return to_e4m3(divide(amax, _SIX) * encode_scale * ratio)


def _te_scale(amax: Tensor, global_amax: Tensor, full_scale: float, ratio: float) -> Tensor:
    return _encode_scale_scale(amax, profiles.te_encode_scale(global_amax, full_scale), ratio)


def _te(metric: str, scale_max: int) -> FourOverSix:
    full_scale = _SIX * scale_max
    arithmetic = Nvfp4Arithmetic(
        "te",
        profiles.amax_itself,
        partial(_te_scale, full_scale=full_scale, ratio=1.0),
        partial(profiles.te_quotient, full_scale=full_scale),
        partial(profiles.te_decode, full_scale=full_scale),
        profiles.PROFILES["te"].cast,
    )
    # The error is measured in another order of operations than the decoder's.
    reconstruct = partial(profiles.fouroversix_decode, full_scale=full_scale)
    return FourOverSix(
        arithmetic, partial(_te_scale, full_scale=full_scale, ratio=_RATIO), reconstruct, metric
    )


def _flashinfer_reconstruct(value: Tensor, scale: Tensor, encode_scale: Tensor) -> Tensor:
    return value * scale * (1.0 / encode_scale)


def _flashinfer(metric: str, scale_max: int) -> FourOverSix:
    arithmetic = replace(
        profiles.flashinfer_te("flashinfer", _SIX * scale_max),
        block_scale=partial(_encode_scale_scale, ratio=1.0),
    )
    return FourOverSix(
        arithmetic, partial(_encode_scale_scale, ratio=_RATIO), _flashinfer_reconstruct, metric
    )


def _fouroversix(metric: str, scale_max: int) -> FourOverSix:
    six = profiles.fouroversix("fouroversix", _SIX, scale_max)
    four = profiles.fouroversix("fouroversix", _SIX, scale_max, _RATIO)
    return FourOverSix(six, four.block_scale, six.decode, metric, halves_first=True)


_Builder = Callable[[str, int], FourOverSix]
# Builder, metrics and largest E4M3 scales under the global scale; the first of each is the default.
_LIBRARIES: dict[str | None, tuple[_Builder, tuple[str, ...], tuple[int, ...]]] = {
    None: (_quantlab, METRICS, SCALE_MAXIMA),
    "te": (_te, ("mae", "mse"), SCALE_MAXIMA),
    "flashinfer": (_flashinfer, ("mae", "mse"), (448, 256)),
    "fouroversix": (_fouroversix, METRICS, (256,)),
}
