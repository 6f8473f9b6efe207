"""Time the generation of all questions and repeats of a GPQA-sized run on one GPU, prompts and refills included.

python experiments/generation_speed/run.py --output results/generation_speed     # 198 x 8 sequences of a 4B geometry
python experiments/generation_speed/run.py --tiny                                # the same code on a CPU, seconds
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quantlab.errors import InputError
from quantlab.schemes import parse_policy

POLICIES = ("fp16+sr/nvfp4@16:buffer=bf16", "fp32@1")
CHECKED = ("fp32@1", "fp32@16")
"""Policies under which a cut model must generate on the device what it does on a CPU, token by token."""


@dataclass(frozen=True)
class Load:
    """questions x repeats sequences: ``prompt`` tokens in, ``new`` tokens out, ``batch`` of them at a time."""

    questions: int = 198
    repeats: int = 8
    prompt: int = 256
    new: int = 256
    batch: int = 792
    temperature: float = 1.0
    top_p: float = 1.0


TINY = Load(questions=3, repeats=2, prompt=12, new=9, batch=4)


def main() -> None:
    options = _options()
    import torch

    from quantlab.records import check_output_folder, complete_record, save_record
    from quantlab.sweep.environment import capture_environment

    environment, device = capture_environment(torch.get_num_threads()), torch.device("cpu")
    if not options.tiny:
        from quantlab.kernels.bench_timing import GraphTimer, gpu_environment, obstacle

        if reason := obstacle():
            sys.exit(f"error: this needs {reason}, or --tiny")
        timer = GraphTimer()
        environment, device = environment | gpu_environment(timer), timer.device
    folder = options.output / "records"
    check_output_folder(folder)
    load = TINY if options.tiny else Load(**{name: getattr(options, name) for name in vars(Load())})
    with contextlib.ExitStack() as stack:
        model, cut = _tiny(stack) if options.tiny else _published(options.model, device)
        failed = check(cut, device)
        for policy in options.policy:
            name = "tiny" if options.tiny else options.model
            point = {"kind": "generation_speed", "model": name, "policy": str(parse_policy(policy))}
            point |= {**vars(load), "device": environment.get("gpu", "cpu")}
            began, result = (
                time.monotonic(),
                {"status": "comparison_failed", "message": failed, "metrics": {}},
            )
            if failed is None:
                result = {"metrics": measure(model, policy, load)}
            seconds = time.monotonic() - began
            save_record(folder, complete_record(point, result, environment=environment, seconds=seconds))
            print(line(policy, load, result), flush=True)


def measure(model: Any, policy: str, load: Load, seed: int = 0) -> dict[str, Any]:
    """Seconds, rates and memory of one generation.  Every sequence gets all its tokens: nothing ends early.

    tokens_per_second: generated tokens over ``seconds``, prompts, refills and sampling included; the capture of the
    graph is ``build_seconds``, apart.
    """
    import torch

    from quantlab.evals.generation import capacity, generate
    from quantlab.evals.sampling import Sampling
    from quantlab.evals.stopping import Stops
    from quantlab.models.decode_rows import GraphRows

    tasks = _tasks(model, load, seed)
    on_gpu = next(model.parameters()).device.type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    rows = GraphRows(model, policy, load.batch, capacity(tasks), seed=seed)
    wait()
    built = time.monotonic() - began
    prefill = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            wait()
            start = time.monotonic()
            found = function(*args)
            wait()
            prefill[0] += time.monotonic() - start
            return found

        return call

    rows.read, rows.admit = timed(rows.read), timed(rows.admit)
    lengths: list[int] = []
    stops = Stops(frozenset(), (), str, str)
    began = time.monotonic()
    generate(
        rows,
        tasks,
        Sampling(load.temperature, top_p=load.top_p),
        stops,
        seed=seed,
        on_ended=lambda ended: lengths.extend(len(one.watch.tokens) for one in ended),
    )
    wait()
    seconds = time.monotonic() - began
    if lengths != [load.new] * len(tasks):
        raise ArithmeticError(f"{len(lengths)} sequences, not {len(tasks)} of {load.new} tokens each")
    report = rows.report
    return {
        "tokens": sum(lengths),
        "seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds,
        "build_seconds": built,
        "prefill_seconds": prefill[0],
        "decode_seconds": seconds - prefill[0],
        "steps": report.steps,
        "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "state_bytes_per_sequence": sum(report.ledger.held.values()),
        "backends": sorted(set(report.backends.values())),
    }


def check(cut: Callable[[Any], Any], device: Any) -> str | None:
    """Why a cut model in float32 does not generate on ``device`` as row by row on the CPU; None if it does."""
    import torch

    from quantlab.evals.generation import capacity, generate
    from quantlab.evals.sampling import Sampling
    from quantlab.evals.stopping import Stops
    from quantlab.models.decode_rows import EagerRows, GraphRows
    from quantlab.models.interception import Interception

    host, other = cut(torch.device("cpu")), cut(device)
    tasks = _tasks(host, Load(questions=3, repeats=2, prompt=9, new=21), 0)
    tasks = [_shorter(task, number) for number, task in enumerate(tasks)]
    stops, positions = Stops(frozenset(), (), str, str), capacity(tasks)
    for policy in CHECKED:
        found: list[dict[int, list[int]]] = []
        try:
            for rows in (
                EagerRows(host, Interception(host, policy), 6, positions),
                GraphRows(other, policy, 3, positions),
            ):
                got: dict[int, list[int]] = {}
                generate(
                    rows,
                    tasks,
                    Sampling(1.0),
                    stops,
                    seed=0,
                    on_ended=lambda ended, got=got: got.update({e.number: e.watch.tokens for e in ended}),
                )
                found.append(got)
        except (InputError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        wrong = [number for number in found[0] if found[0][number] != found[1].get(number)]
        if wrong:
            return f"{policy}: {len(wrong)} of {len(tasks)} sequences differ from the CPU's"
    return None


def _shorter(task: Any, number: int) -> Any:
    """Another length for each, so that rows are refilled at different times."""
    from dataclasses import replace

    return replace(task, prompt=task.prompt[: 9 - number % 3], limit=task.limit - 3 * number)


def _tasks(model: Any, load: Load, seed: int) -> Sequence[Any]:
    import torch

    from quantlab.evals.generation import Task

    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, vocabulary, (load.questions, load.prompt), generator=generator).tolist()
    return [
        Task(tuple(prompt), number, repeat, load.new)
        for number, prompt in enumerate(prompts)
        for repeat in range(load.repeats)
    ]


def _published(name: str, device: Any) -> tuple[Any, Callable[[Any], Any]]:
    import torch

    from experiments.decode_step.check import cut
    from experiments.decode_step.models import MODELS, random_model

    model = random_model(MODELS[name].build, device, torch.bfloat16)
    small = random_model(cut(name), torch.device("cpu"), torch.float32)
    return model, lambda where: _copied(small, where)


def _tiny(stack: contextlib.ExitStack) -> tuple[Any, Callable[[Any], Any]]:
    from transformers import AutoModelForCausalLM

    from quantlab.models import build_tiny

    parent = stack.enter_context(tempfile.TemporaryDirectory())
    model = AutoModelForCausalLM.from_pretrained(build_tiny("nemotron_h", Path(parent) / "tiny")).eval()
    return model, lambda where: _copied(model, where)


def _copied(model: Any, device: Any) -> Any:
    import copy

    return copy.deepcopy(model).to(device)


def line(policy: str, load: Load, result: dict[str, Any]) -> str:
    """What a record says, for people."""
    found = result["metrics"]
    if not found:
        return f"{policy:<34} {result['status']}: {result['message']}"
    memory = found["memory_bytes"]
    told = "" if memory is None else f", {memory / 2**30:.1f} GiB"
    return (
        f"{policy:<34} {found['tokens_per_second']:10,.0f} tokens/s: {load.questions} x {load.repeats} sequences of "
        f"{load.prompt} + {load.new} tokens, batch {load.batch}, prefill {found['prefill_seconds']:.1f} s, decode "
        f"{found['decode_seconds']:.1f} s, graph {found['build_seconds']:.1f} s{told}"
    )


def _fields() -> Iterator[tuple[str, Any]]:
    yield from vars(Load()).items()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    from experiments.decode_step.models import MODELS

    parser.add_argument("--output", type=Path, default=Path("results/generation_speed"))
    parser.add_argument("--model", choices=MODELS, default="nano_4b")
    parser.add_argument(
        "--policy", action="append", help=f"repeat for several (default: {', '.join(POLICIES)})"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    for name, value in _fields():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    options.policy = options.policy or list(POLICIES)
    try:
        for policy in options.policy:
            parse_policy(policy)
    except InputError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    main()
