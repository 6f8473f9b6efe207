"""The formats on a CUDA device store the bits that they store on the CPU."""

import dataclasses

import pytest
import torch

from quantlab.formats import parse
from quantlab.formats.recipes import profiles_of
from quantlab.formats.table import FORMATS


@pytest.fixture(autouse=True)
def on_a_gpu(runnable):
    runnable("cuda")


def texts() -> list[str]:
    found = ["nvfp4+4over6", "nvfp4+4over6.mae.448", "nvfp4+as.te+4over6", "nvfp4+as.flashinfer+4over6"]
    found += ["nvfp4+as.fouroversix+4over6", "int8+ef", "int8+ef.int4", "nvfp4+floor.0", "e4m3+overflow.nan"]
    found += ["nvfp4+rank2", "nvfp4+mean", "int8+rank1+hadamard", "nvfp4+rank2+ef", "nvfp4+keyscale"]
    for name, row in FORMATS.items():
        found += [name, *(f"{name}+as.{profile}" for profile in profiles_of(row))]
        found += [f"{name}:{granularity}" for granularity in row.granularities[1:]]
        found += [f"{name}+scale.{scale}" for scale in row.scales[1:]]
        if name not in ("fp32", "fp64"):
            found += [f"{name}+sr", f"{name}+sr8", f"{name}+rz"]
    return found


def inputs() -> dict[str, torch.Tensor]:
    """Finite states; a library profile need not keep finite what is near the ends of float32."""
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(2, 3, 40, 160, generator=random)
    exponents = torch.randint(-100, 90, (2, 3, 40, 1), generator=random).double()
    return {
        "normal": normal,
        "rows": (normal.double() * 2**exponents).float(),
        "ties": (normal * 64).round() / 16,
        "zeros": torch.zeros(1, 1, 2, 64),
        "float64": normal.double() * (1 + 2.0**-40),
        "bfloat16": normal.bfloat16(),
    }


def assert_same(one: object, other: object, what: str) -> None:
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name), f"{what} {field.name}")
    elif one is not None:
        assert isinstance(one, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        other = other.cpu()
        differ = one != other
        if one.is_floating_point():
            differ &= ~(one.isnan() & other.isnan())
        assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} differ"


@pytest.mark.parametrize("text", texts())
def test_a_gpu_stores_the_same_bits(text):
    fmt = parse(text)
    for name, x in inputs().items():
        words = torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(1))
        words = words if fmt.stochastic else None
        on_gpu = (x.cuda(), None if words is None else words.cuda())
        encoded, stored = fmt.quantize(x, words), fmt.quantize(*on_gpu)
        assert_same(encoded, stored, name)
        assert_same(fmt.dequantize(encoded), fmt.dequantize(stored), f"{name} values")
        assert_same(fmt.round(x, words), fmt.round(*on_gpu), f"{name} rounded")
        assert torch.equal(fmt.pack(encoded).codes, fmt.pack(stored).codes.cpu())
