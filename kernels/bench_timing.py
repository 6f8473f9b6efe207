"""Time on a GPU: CUDA graphs replayed, and what the memory of the machine can do at best in the same run."""

import functools
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from triton.runtime.jit import JITFunction

COPY_ELEMENTS = 2**30
"""float32 values of the copy: 4 GiB read, 4 GiB written."""
FEWEST, MOST = 11, 60
SECONDS = 0.25
"""Of replays that a measurement takes by default, within FEWEST and MOST of them."""


@dataclass(frozen=True)
class Times:
    """Microseconds of the replays: median and quartiles, and how many there were."""

    median: float
    lower: float
    upper: float
    count: int

    def per(self, steps: int) -> "Times":
        return Times(self.median / steps, self.lower / steps, self.upper / steps, self.count)


class Timer(Protocol):
    """device: where tensors are to be.  name: of the machine, as in records.  l2_bytes: of its last cache."""

    device: torch.device
    name: str
    l2_bytes: int

    def measure(self, work: Callable[[], object]) -> Times:
        """Time ``work``, which launches the same kernels on the same memory at every call."""
        ...

    def free_bytes(self) -> int: ...


class GraphTimer:
    """Captures the work in one CUDA graph, so that neither Python nor a launch is in the time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self.l2_bytes = properties.L2_cache_size

    def measure(self, work: Callable[[], object]) -> Times:
        graph = captured(work)
        for _ in range(2):
            graph.replay()
        first = self._replay(graph)
        count = min(MOST, max(FEWEST, int(self.seconds * 1e6 / first)))
        return quartiles([self._replay(graph) for _ in range(count)])

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``work`` as a graph, after a call that compiles; a host synchronisation inside it is an error of CUDA's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def recorded_launches(work: Callable[[], object]) -> list[tuple[str, Callable[[], object]]]:
    """Name and repetition of every Triton kernel that ``work`` launches, in order; memory and sizes as they were."""
    found: list[tuple[str, Callable[[], object]]] = []
    launcher: Any = JITFunction
    original = launcher.run

    def run(kernel: Any, *arguments: Any, **options: Any) -> Any:
        if not options.get("warmup"):
            found.append((kernel.fn.__name__, functools.partial(original, kernel, *arguments, **options)))
        return original(kernel, *arguments, **options)

    launcher.run = run
    try:
        work()
    finally:
        launcher.run = original
    return found


def quartiles(microseconds: list[float]) -> Times:
    lower, median, upper = statistics.quantiles(microseconds, n=4)
    return Times(median, lower, upper, len(microseconds))


def copy_bandwidth(timer: Timer, elements: int = COPY_ELEMENTS) -> float:
    """Bytes a microsecond, read and written, of an elementwise kernel on memory far larger than any cache.

    Not ``copy_``: in a graph that is a copy of the driver's, which reaches two thirds of it.
    """
    elements = min(elements, max(1, timer.free_bytes() // 16))
    x = torch.ones(elements, device=timer.device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / timer.measure(lambda: torch.mul(x, 1.5, out=y)).median


def gpu_environment(timer: Timer) -> dict[str, Any]:
    """GPU, driver and clocks where the driver's tool says them, versions; no name of a host or user."""
    found: dict[str, Any] = {
        "gpu": timer.name,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "l2_bytes": timer.l2_bytes,
    }
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return found
    values = [value.strip() for value in line.splitlines()[0].split(",")] if line.strip() else []
    return found | dict(zip((field.replace(".", "_") for field in fields), values, strict=False))


def obstacle() -> str | None:
    """Why nothing can be timed here, or None."""
    if not torch.cuda.is_available():
        return "a CUDA GPU (compute capability 8.0 or more), which torch does not find here"
    from quantlab.kernels import target

    return target.obstacle(torch.device("cuda", torch.cuda.current_device()))
