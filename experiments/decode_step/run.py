"""Time whole decode steps of models of published geometry on one GPU, and say where the time goes.

python experiments/decode_step/run.py --output results/decode_step                  # all models and batches; resumes
python experiments/decode_step/run.py --output results/decode_step --model nano_4b --batch 1,256
python experiments/decode_step/run.py --output experiments/decode_step --report     # from the records alone
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from quantlab.errors import InputError
from quantlab.schemes import parse_policy

BASELINE = "fp32@1"
POLICIES = (BASELINE, "fp32@16:buffer=bf16", "fp16+sr/nvfp4@16:buffer=bf16")
BATCHES = (256, 1, 8, 32, 64, 128, 512)
"""The most important first: a run that is cut off has it."""
LENGTH = 512
"""Positions of the attention caches; a step attends over all of them."""
ROUNDS = 11
CHECK_BATCH, CHECK_STEPS, CHECK_LIMIT = 3, 20, 1e-3


def main() -> None:
    options = _options()
    if not options.report:
        _measure(options)
    from experiments.decode_step.report import write_report

    for line in write_report(options.output):
        print(line)


def points(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(model, batch), all models at a batch before the next one."""
    for batch in options.batch:
        for model in options.model:
            yield model, batch


def _measure(options: argparse.Namespace) -> None:
    import torch

    from experiments.decode_step.models import MODELS, random_model
    from quantlab.kernels.bench_timing import GraphTimer, copy_bandwidth, gpu_environment, obstacle
    from quantlab.records import check_output_folder, complete_record, record_path, save_record
    from quantlab.sweep.environment import capture_environment

    if reason := obstacle():
        sys.exit(f"error: this needs {reason}")
    folder = options.output / "records"
    check_output_folder(folder)
    timer, begun = GraphTimer(), time.monotonic()
    environment = capture_environment(torch.get_num_threads()) | gpu_environment(timer)
    bandwidth = copy_bandwidth(timer)
    checked: dict[str, str | None] = {}
    for name in options.model:
        model = None
        for batch in options.batch:
            wanted = [_point(name, batch, policy, timer.name) for policy in options.policy]
            paths = [record_path(folder, point) for point in wanted]
            if all(path.exists() for path in paths) and not options.again:
                continue
            if time.monotonic() - begun > options.seconds:
                print(f"not reached: {name} batch {batch}; the same command goes on", file=sys.stderr)
                continue
            if name not in checked:
                checked[name] = _check(name, timer.device)
            if model is None:
                model = random_model(MODELS[name].build, timer.device, torch.bfloat16)
            start = time.monotonic()
            found = _times(model, name, batch, options.policy, checked[name])
            for point in wanted:
                status, message, metrics = found[point["policy"]]
                metrics["copy_bandwidth"] = bandwidth
                result = {"status": status, "message": message, "metrics": metrics}
                seconds = time.monotonic() - start
                save_record(folder, complete_record(point, result, environment=environment, seconds=seconds))
                us = metrics.get("us")
                text = f"{us / 1e3:9.3f} ms" if us else f"{status}: {message}"
                print(
                    f"{time.monotonic() - begun:6.1f} s  {name} batch {batch:>4} {point['policy']:<32} {text}",
                    flush=True,
                )
            gc.collect()
            torch.cuda.empty_cache()
        del model
        gc.collect()
        torch.cuda.empty_cache()


def _point(model: str, batch: int, policy: str, device: str) -> dict[str, Any]:
    return {
        "kind": "decode_step",
        "model": model,
        "policy": str(parse_policy(policy)),
        "batch": batch,
        "length": LENGTH,
        "device": device,
    }


def _times(
    model: Any, name: str, batch: int, policies: list[str], failure: str | None
) -> dict[str, tuple[str, str | None, dict[str, Any]]]:
    """Status, message and metrics by canonical policy; no time if the comparison failed."""
    import torch

    from experiments.decode_step.models import MODELS
    from experiments.decode_step.split import STEPS, prepare, split_of, time_recurrence, time_steps
    from quantlab.models import DecodeGraph

    texts = [str(parse_policy(policy)) for policy in policies]
    if failure is not None:
        return {text: ("comparison_failed", failure, {}) for text in texts}
    held, found = LENGTH - STEPS - 1, {}
    split = split_of(model, MODELS[name], policies[0], batch, LENGTH, ROUNDS)
    together = _fits_together(model, policies, batch)
    for group in [texts] if together else [[text] for text in texts]:
        graphs = {text: DecodeGraph(model, text, batch, LENGTH) for text in group}
        for graph in graphs.values():
            prepare(graph, held)
        whole = time_steps(graphs, held, ROUNDS)
        for text, graph in graphs.items():
            recurrence = time_recurrence(graph, ROUNDS)
            finite = bool(torch.isfinite(graph.logits).all())
            metrics = {
                "us": whole[text].median,
                "us_lower": whole[text].lower,
                "us_upper": whole[text].upper,
                "replays": whole[text].count * STEPS,
                "ssm": recurrence.median,
                "rest": split.rest,
                "attention": split.attention,
                "mlp": split.mlp,
                "other": split.other,
                "gaps": split.gaps,
                "bytes_per_token": graph.report.ledger.bytes_per_token,
                "chosen": _chosen(graph),
                "turns": "by rounds" if together else "one after the other",
            }
            found[text] = ("ok", None, metrics) if finite else ("diverged", "logits are not finite", metrics)
        del graphs
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _chosen(graph: Any) -> str:
    """The policy whose kernels are to decode at this batch (``kernels.choice``), where all layers agree on one."""
    from quantlab.kernels.choice import step_policy

    found = {
        str(step_policy(pool.policy, pool.family, pool.shape, graph.batch)) for pool in graph.pools.values()
    }
    return found.pop() if len(found) == 1 else str(next(iter(graph.pools.values())).policy)


def _fits_together(model: Any, policies: list[str], batch: int) -> bool:
    """Whether the memory of all policies' states and caches, at most that of fp32 each, is there at once."""
    import torch

    from quantlab.models.recurrent_layers import recurrent_layers

    free = torch.cuda.mem_get_info()[0]
    values = 0
    for layer in recurrent_layers(model).values():
        config = model.config
        sizes = [
            getattr(config, n, 0) for n in ("mamba_head_dim", "linear_value_head_dim", "linear_head_dim")
        ]
        keys = [getattr(config, n, 0) for n in ("ssm_state_size", "linear_key_head_dim", "linear_head_dim")]
        values += layer.heads * max(sizes) * max(keys)
    return len(policies) * batch * values * 6 < 0.8 * free


def _check(name: str, device: Any) -> str | None:
    """Why a cut model in float32 does not decode on the GPU as on the CPU; None if it does."""
    from experiments.decode_step.check import difference

    try:
        worst = difference(name, device, CHECK_BATCH, CHECK_STEPS, POLICIES[:2])
    except (InputError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return (
        None
        if worst < CHECK_LIMIT
        else f"logits differ by {worst:.2g} from the CPU's, more than {CHECK_LIMIT:g}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    from experiments.decode_step.models import MODELS

    parser.add_argument(
        "--output", type=Path, default=Path("results/decode_step"), help="folder of the records"
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="repeat for several (default: all)")
    parser.add_argument("--batch", type=_numbers, default=list(BATCHES), help="one or more, by commas")
    parser.add_argument(
        "--policy", action="append", help=f"repeat for several (default: {', '.join(POLICIES)})"
    )
    parser.add_argument("--seconds", type=float, default=420, help="no point begins after so many")
    parser.add_argument("--again", action="store_true", help="time what has a record too")
    parser.add_argument("--report", action="store_true", help="table and figure from the records alone")
    options = parser.parse_args()
    options.model = options.model or list(MODELS)
    options.policy = options.policy or list(POLICIES)
    try:
        for policy in options.policy:
            parse_policy(policy)
    except InputError as error:
        parser.error(str(error))
    return options


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not all(number > 0 for number in found):
        raise ValueError
    return found


if __name__ == "__main__":
    main()
