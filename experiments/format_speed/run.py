"""Time the number formats, eager and compiled, beside other libraries: one run, interleaved repeats.

Every peer's result is compared with the matching recipe of ours first; a peer that is absent, fails or differs says
so in its row.  Run from the root: ``python experiments/format_speed/run.py``.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]


def main() -> None:
    options = _options()
    # A cache of its own, so that the warm-up is that of a first use.
    cache = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(options.threads)
    if options.peak:
        print(json.dumps(_peak(options.peak, options.size)))
        return
    import cases

    x = torch.randn(options.size // 4096, 4096, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    functions: dict[str, Callable] = {"copy of the input": lambda x: target.copy_(x)}
    rows = [{"task": "-", "name": "copy of the input", "note": ""}]
    for case in cases.all_cases():
        row: dict = {"task": case.task, "name": case.name, "note": ""}
        rows.append(row)
        if options.peers == "none" and not case.name.startswith("quantlab"):
            row["note"] = "not asked for"
            continue
        try:
            function = case.make()
            start = time.perf_counter()
            result = function(x)
            row["warm_up_seconds"] = time.perf_counter() - start
            row["note"] = case.compare(result, x)
            functions[f"{case.task} {case.name}"] = function
        except ImportError as error:
            row["note"] = f"missing: {error.name or error}"
        except Exception as error:
            row["note"] = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(options.repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function(x)
            seconds[name].append(time.perf_counter() - start)
    _fill(rows, seconds, x.nbytes)
    for row in rows:
        if options.memory and row["name"] == "quantlab compiled":
            row["peak_over_input"] = _measure_peak(row["task"], options)
    ratios = _ratios(seconds)
    _print(rows, ratios)
    if options.output:
        from quantlab.records import encode, write_atomic

        record = {
            "kind": "format_speed",
            "size": options.size,
            "threads": options.threads,
            "repeats": options.repeats,
            "environment": _environment(),
            "rows": rows,
            "ratios": ratios,
        }
        write_atomic(options.output, (json.dumps(encode(record), indent=1) + "\n").encode())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 24, help="float32 values, a multiple of 4096")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", choices=("all", "none"), default="all")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="skip the peak memory")
    parser.add_argument("--output", type=Path, help="a JSON record")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    return parser.parse_args()


def _fill(rows: list[dict], seconds: dict[str, list[float]], nbytes: int) -> None:
    """Median, quartiles, and bytes of input read and output written a second, beside those of the copy."""
    copy = statistics.median(seconds["copy of the input"])
    for row in rows:
        times = seconds.get(row["name"] if row["task"] == "-" else f"{row['task']} {row['name']}")
        if times is None:
            continue
        lower, median, upper = statistics.quantiles(times, n=4)
        gigabytes = 2 * nbytes / median / 1e9
        row |= {"median_ms": median * 1e3, "lower_ms": lower * 1e3, "upper_ms": upper * 1e3}
        row |= {"gb_per_second": gigabytes, "fraction_of_copy": copy / median}


def _ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles of peer seconds / ours, repeat by repeat; for every task, against quantlab compiled."""
    result = {}
    for name, times in seconds.items():
        task = name.split(" ")[0]
        ours = seconds.get(f"{task} quantlab compiled")
        if ours is not None and ours is not times:
            pairs = [theirs / mine for theirs, mine in zip(times, ours, strict=True)]
            result[name] = statistics.quantiles(pairs, n=4)
    return result


def _measure_peak(task: str, options: argparse.Namespace) -> float:
    """High-water mark of the resident set of a fresh process, input included, in multiples of the input.

    What a small call of the same kind had left resident (interpreter, libraries, compiled loops) is taken off.
    """
    command = [sys.executable, __file__, "--peak", task, "--size", str(options.size)]
    command += ["--threads", str(options.threads)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def _peak(task: str, size: int) -> float:
    import cases
    import torch

    function = next(c for c in cases.all_cases() if (c.task, c.name) == (task, "quantlab compiled")).make()
    # Compiles; the compiler's own processes do not count, and neither does what this one needed meanwhile.
    function(torch.randn(1 << 8, 4096))
    x = torch.randn(size // 4096, 4096)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from here
    before = _status("VmRSS") - x.nbytes
    function(x)
    return (_status("VmHWM") - before) / x.nbytes


def _status(field: str) -> int:
    """Bytes, from /proc; the resource module's maximum cannot be set back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _environment() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("torch", "torchao", "nvidia-modelopt", "compressed-tensors", "ml_dtypes"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _print(rows: list[dict], ratios: dict[str, list[float]]) -> None:
    header = f"{'task':<12} {'implementation':<30} {'ms':>8} {'quartiles':>15} {'of copy':>8} {'warm s':>7}"
    print(f"{header} {'peak':>5}  result")
    for row in rows:
        if "median_ms" not in row:
            print(
                f"{row['task']:<12} {row['name']:<30} {'-':>8} {'':>15} {'':>8} {'':>7} {'':>5}  {row['note']}"
            )
            continue
        spread = f"{row['lower_ms']:.1f}-{row['upper_ms']:.1f}"
        warm = f"{row['warm_up_seconds']:.1f}" if "warm_up_seconds" in row else ""
        peak = f"{row['peak_over_input']:.2f}" if "peak_over_input" in row else ""
        print(
            f"{row['task']:<12} {row['name']:<30} {row['median_ms']:>8.1f} {spread:>15} "
            f"{row['fraction_of_copy']:>8.2f} {warm:>7} {peak:>5}  {row['note']}"
        )
    print("\ntime of the other / time of quantlab compiled, median (quartiles) of the repeats")
    for name, (lower, median, upper) in ratios.items():
        print(f"  {name:<44} {median:6.2f} ({lower:.2f}-{upper:.2f})")


if __name__ == "__main__":
    main()
