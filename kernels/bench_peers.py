"""Other projects' decode kernels, timed beside ours: where they are imported from, and which of them serves what.

A peer is a package that is installed, or a source tree given by path, which is on ``sys.path`` for the import and for
the calls alone.  A tree that was never installed cannot be imported as a whole: then the kernels' own files are loaded
and nothing else of it, with stand-ins for the few names of the engine around them.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from quantlab.errors import InputError, unknown_name
from quantlab.kernels import bench_draft_peers as draft_calls
from quantlab.kernels import bench_peer_calls as calls
from quantlab.kernels.bench_cases import Case
from quantlab.schemes.policy import parse_policy


@dataclass(frozen=True)
class PeerKernel:
    """A function of a peer: which policies of which family its state amounts to, and how a layer's step calls it.

    verifies: it takes drafts, and stores a state for each.
    """

    family: str
    policies: tuple[str, ...]
    module: str
    attribute: str
    make: Callable[[Callable[..., Any], Case, torch.device, int], calls.Call]
    verifies: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"

    def serves(self, family: str, drafts: int) -> bool:
        return self.family == family and self.verifies == (drafts > 0)


def _mamba(package: str) -> str:
    return f"{package}.model_executor.layers.mamba.ops"


PEERS: dict[str, tuple[PeerKernel, ...]] = {
    "vllm": (
        PeerKernel(
            "mamba2",
            ("fp32@1", "fp16@1"),
            f"{_mamba('vllm')}.mamba_ssm",
            "selective_state_update",
            calls.selective_state_update,
        ),
        PeerKernel(
            "gated_delta",
            ("fp32@1", "fp16@1"),
            "vllm.model_executor.layers.fla.ops.fused_recurrent",
            "fused_recurrent_gated_delta_rule_packed_decode",
            calls.packed_gated_delta,
        ),
        PeerKernel(
            "mamba2",
            ("fp32@1",),
            f"{_mamba('vllm')}.mamba_ssm",
            "selective_state_update",
            draft_calls.stored_state_updates,
            verifies=True,
        ),
        PeerKernel(
            "gated_delta",
            ("fp32@1",),
            "vllm.model_executor.layers.fla.ops.fused_recurrent",
            "fused_recurrent_gated_delta_rule",
            draft_calls.stored_delta_states,
            verifies=True,
        ),
    ),
    "replayssm": (
        PeerKernel(
            "mamba2",
            ("fp32@16:buffer=bf16", "fp16@16:buffer=bf16"),
            f"{_mamba('vllm')}.selective_state_update_replayssm_output_only",
            "selective_state_update_replayssm_output_only",
            calls.replayed_state_update,
        ),
        PeerKernel(
            "gated_delta",
            (
                "fp32@16:buffer=bf16:contents=derived",
                "fp16@16:buffer=bf16:contents=derived",
            ),
            "vllm.model_executor.layers.fla.ops.fused_recurrent_replayssm",
            "fused_recurrent_gated_delta_rule_replayssm",
            calls.replayed_gated_delta,
        ),
    ),
    "mamba_ssm": (
        PeerKernel(
            "mamba2",
            ("fp32@1", "fp16@1"),
            "mamba_ssm.ops.triton.selective_state_update",
            "selective_state_update",
            calls.selective_state_update,
        ),
    ),
    "fla": (
        PeerKernel(
            "gated_delta",
            ("fp32@1",),
            "fla.ops.gated_delta_rule.fused_recurrent",
            "fused_recurrent_gated_delta_rule",
            calls.fused_recurrent,
        ),
        PeerKernel(
            "kimi_delta",
            ("fp32@1",),
            "fla.ops.kda.fused_recurrent",
            "fused_recurrent_kda",
            calls.fused_recurrent,
        ),
        PeerKernel(
            "kimi_delta",
            ("fp32@1",),
            "fla.ops.kda.fused_recurrent",
            "fused_recurrent_kda_fwd",
            draft_calls.stored_delta_states,
            verifies=True,
        ),
    ),
}
"""Name on the command line -> its kernels."""


def offered(name: str, family: str, drafts: int = 0) -> list[str]:
    """The policies that a peer has kernels for, if it can be imported: of a step, or of a verification."""
    return [
        str(parse_policy(text))
        for kernel in PEERS[name]
        if kernel.serves(family, drafts)
        for text in kernel.policies
    ]


@dataclass
class Peer:
    """A peer whose kernels could be imported, at least one of them, by ``PeerKernel.name``.

    missing: module -> why not, for the others.
    """

    name: str
    functions: dict[str, Callable[..., Any]]
    modules: dict[str, types.ModuleType]
    path: Path | None
    how: str
    missing: dict[str, str] = field(default_factory=dict)

    def policies(self, family: str, drafts: int = 0) -> list[str]:
        return [
            str(parse_policy(text))
            for kernel in PEERS[self.name]
            if kernel.serves(family, drafts) and kernel.name in self.functions
            for text in kernel.policies
        ]

    def call(self, case: Case, device: torch.device, seed: int) -> calls.Call:
        """A layer of its own for the case; run it inside ``active``."""
        for kernel in PEERS[self.name]:
            texts = [str(parse_policy(text)) for text in kernel.policies]
            if kernel.serves(case.family, case.drafts) and case.policy in texts:
                return kernel.make(self.functions[kernel.name], case, device, seed)
        raise InputError("peer", self.name, f"a kernel for {case.policy} of {case.family}")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Its modules under their names: two peers may bring packages of one name."""
        with _on_path(self.path), _modules(self.modules, _top(self.name)):
            yield


def parse_peers(texts: list[str]) -> dict[str, Path | None]:
    """``NAME`` or ``NAME=PATH`` each; raises InputError, argument "peer"."""
    found: dict[str, Path | None] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if name not in PEERS:
            raise unknown_name("peer", name, PEERS)
        if equals and not Path(path).is_dir():
            raise InputError("peer", text, f"{name}=PATH with the folder of its sources or of its package")
        found[name] = Path(path).resolve() if equals else None
    return found


def load_peers(wanted: dict[str, Path | None]) -> tuple[dict[str, Peer], list[str]]:
    """The peers that can be imported, and a line on each kernel that cannot."""
    found, notes = {}, []
    for name, path in wanted.items():
        peer = load_peer(name, path)
        if peer.functions:
            found[name] = peer
        notes += [f"peer {name}: no {module}: {reason}" for module, reason in peer.missing.items()]
    return found, notes


def load_peer(name: str, path: Path | None) -> Peer:
    """Import a peer's kernels, as a whole package if that works, else from their own files; never raises for them."""
    top = _top(name)
    if path is not None and path.name == top and not (path / top).is_dir():
        path = path.parent  # the package's own folder was given
    peer = _imported_peer(name, path, "installed" if path is None else "source tree", None)
    folder = _folder(top, path)
    if peer.functions or folder is None:
        return peer
    return _imported_peer(name, path, "kernel files alone", folder)


def _imported_peer(name: str, path: Path | None, how: str, bare: Path | None) -> Peer:
    """bare: folder of a package of which nothing but the kernels' files is to run."""
    top, peer = _top(name), Peer(name, {}, {}, path, how)
    around = contextlib.nullcontext() if bare is None else _bare_packages(name, bare)
    with _on_path(path), _modules({}, top), around:
        for kernel in PEERS[name]:
            try:
                module = importlib.import_module(kernel.module)
                peer.functions[kernel.name] = getattr(module, kernel.attribute)
            except Exception as error:  # whatever a foreign package raises while it is imported
                peer.missing[kernel.module] = _first_line(error)
        peer.modules |= _under(top)
    return peer


def _top(name: str) -> str:
    return PEERS[name][0].module.partition(".")[0]


def _folder(top: str, path: Path | None) -> Path | None:
    """Of the package, or None if there is none."""
    if path is not None:
        return path / top if (path / top).is_dir() else None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


@contextlib.contextmanager
def _on_path(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path))


@contextlib.contextmanager
def _modules(modules: dict[str, types.ModuleType], top: str) -> Iterator[None]:
    """``modules`` in place of whatever is imported under the package ``top``; back to that afterwards."""
    outside = _under(top)
    for name in outside:
        del sys.modules[name]
    sys.modules |= modules
    try:
        yield
    finally:
        for name in _under(top):
            del sys.modules[name]
        sys.modules |= outside


def _under(top: str) -> dict[str, types.ModuleType]:
    return {name: module for name, module in sys.modules.items() if name == top or name.startswith(f"{top}.")}


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


class _Platform:
    """What a kernel file asks of the engine's platform: a CUDA GPU and its name."""

    def get_device_name(self, *_: Any) -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_device_capability_family(self, family: int) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == family // 10

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: False


class _Settings(types.ModuleType):
    """Settings that nobody made."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextlib.contextmanager
def _bare_packages(name: str, folder: Path) -> Iterator[None]:
    """The packages around the kernels' files run no ``__init__``; what files ask of an engine is stood in for."""
    top, finder = _top(name), _Bare(name, folder)
    sys.meta_path.insert(0, finder)
    einops = importlib.util.find_spec("einops") is None
    if einops:  # imported beside kernels for their reference functions, which nobody calls here
        sys.modules["einops"] = _Settings("einops")
    try:
        _stand_in(top)
        yield
    finally:
        sys.meta_path.remove(finder)
        if einops:
            del sys.modules["einops"]


def _logger(name: str) -> Any:
    """Python's logger with the methods that vLLM adds to its own: what was said once is not said again."""
    logger: Any = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", functools.lru_cache(getattr(logger, level)))
    return logger


def _stand_in(top: str) -> None:
    triton_names = {
        "HAS_TRITON": True,
        "tl": tl,
        "triton": triton,
        "tldevice": importlib.import_module("triton.language.extra.libdevice"),
    }
    names: dict[str, dict[str, Any]] = {
        "vllm.triton_utils": triton_names,
        "vllm.backends.compute.dsl.triton_utils": triton_names,
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.backends.platform": {"current_platform": _Platform()},
        "vllm.logger": {"init_logger": _logger},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.envs": {},
        "vllm._custom_ops": {},
    }
    for name, values in names.items():
        if name.startswith(f"{top}."):
            module = _Settings(name)
            vars(module).update(values)
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent == top:
                setattr(importlib.import_module(top), child, module)
    vars(importlib.import_module(top)).setdefault("__version__", "0")


class _Bare:
    """Finds the packages around a peer's kernels as folders without an ``__init__``, and no others."""

    def __init__(self, name: str, folder: Path):
        self.folder = folder
        self.packages = {
            ".".join(parts[:count])
            for kernel in PEERS[name]
            if (parts := kernel.module.split("."))
            for count in range(1, len(parts))
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.packages:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.folder.joinpath(*name.split(".")[1:]))]
        return spec
