"""Extra rounding sites: places where engines and kernels round on the way, each switchable on its own.

``fp32@1:sites=beta+k.fp16`` rounds the write strength through bfloat16 (the default) and the key through float16.
They act on decoded tokens; of a prefill chunk, on its inputs and outputs (beta, gate, decay, q, k, v, output).
"""

import torch
from torch import Tensor

from quantlab import formats
from quantlab.errors import InputError, unknown_name
from quantlab.formats import Format

SITES: dict[str, str] = {
    "beta": "the write strength of a delta rule, before it is used",
    "gate": "the log decay of a token (mamba1: its step size dt)",
    "decay": "the decay factor of a token, exp(log decay)",
    "q": "the query",
    "k": "the key",
    "v": "the value",
    "d": "what a token writes along its key, before it is used or kept",
    "state": "the decoded state, where a read or a fold takes it",
    "buffer": "every field of a record as it is kept, gates and write strength included",
    "dot": "both operands of the matrix product of a fold",
    "output": "the output of the recurrence",
}
"""Every site and what is rounded there, in the order in which a token meets them."""

DEFAULT_FORMAT = "bf16"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_sites(text: str) -> dict[str, Format]:
    """``SITE[.FORMAT][+SITE[.FORMAT]...]`` as formats by site, in the order of ``SITES``.

    A format is an unscaled element, rounded to nearest.  Raises InputError (argument "sites").
    """
    found: dict[str, Format] = {}
    for part in text.split("+") if text else []:
        name, _, format_name = part.partition(".")
        if name not in SITES:
            raise unknown_name("sites", name, SITES)
        if name in found:
            raise InputError("sites", text, f"each site once, but {name} is given twice")
        found[name] = _site_format(format_name or DEFAULT_FORMAT, text)
    return {name: found[name] for name in SITES if name in found}


def canonical_sites(text: str) -> str:
    """The text with sites in the order of ``SITES`` and the default format dropped."""
    parsed = parse_sites(text)
    return "+".join(n if f.text == DEFAULT_FORMAT else f"{n}.{f.text}" for n, f in parsed.items())


def narrow(x: Tensor, format: Format) -> Tensor:
    """``x`` rounded through ``format``, in its own dtype.  What overflows is as in the hardware's conversion."""
    dtype = _DTYPES.get(format.text)
    if dtype is not None and x.dtype == torch.float32:
        return x.to(dtype).to(x.dtype)
    return format.round(x, specials="hardware").to(x.dtype)


def _site_format(name: str, text: str) -> Format:
    try:
        format = formats.parse(name)
    except InputError as error:
        raise InputError("sites", text, f"a known format after '.', but {error}") from None
    if format.recipe is not None or format.text != format.name:
        raise InputError("sites", text, f"an element without scale or modifier after '.', not {name}")
    return format
