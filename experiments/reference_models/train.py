"""Train one reference model on one GPU, in a few minutes; resumes where it was stopped.

python experiments/reference_models/train.py --kind mamba2 --seed 1 --output results/reference_models
"""

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.reference_models import chunked, mixture
from experiments.reference_models.arguments import checked_device, one_line_errors, positive, whole
from experiments.reference_models.models import KINDS, initial_model
from quantlab.errors import InputError
from quantlab.models import patching
from quantlab.models.families import Family
from quantlab.models.recurrent_layers import op_namespaces
from quantlab.models.reference import vocabulary as v
from quantlab.records import check_output_folder, write_atomic
from quantlab.recurrences import get_recurrence

STEPS = 3600
RATE, LAST_RATE, WARM_UP = 2e-3, 0.02, 200
"""Peak of the learning rate, what is left of it in the end, and steps until the peak."""
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.98), 0.05, 1.0
TEXT_WEIGHT = 0.5
PASSED, MEMORY = (0.93, 0.88), 0.97
"""Mean accuracies of letter and recall, over about 1 / (1 - MEMORY) steps, that end a stage."""
LATEST = (0.3, 0.45)
"""Shares of the steps at which the stages end whatever the accuracy."""
LOGGED_EVERY, KEPT_EVERY, PREFETCHED, WORKERS = 50, 500, 6, 2


def main() -> None:
    options = _options()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with one_line_errors():
        train(options.kind, options.seed, options.output, options.steps, options.seconds, options.device)


def train(
    kind: str,
    seed: int,
    output: Path,
    steps: int,
    seconds: float,
    device: str,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Train until ``steps`` or ``seconds``.  Every KEPT_EVERY steps and at the end the state to resume from and the
    curve are written, when done the model.

    Returns the folder ``output/<kind>-<seed>``.
    """
    folder = output / f"{kind}-{seed}"
    check_output_folder(folder)
    model = initial_model(kind, seed, checked_device(device)).train()
    optimizer = _optimizer(model, device)
    step, stage, means, spent, curve = 0, 0, [0.0, 0.0], 0.0, []
    saved = folder / "training.pt"
    if saved.exists():
        try:
            state = torch.load(saved, map_location=device, weights_only=True)
        except Exception as error:  # whatever a damaged file raises inside the library
            raise InputError("training.pt", str(saved), "what this wrote; delete it to start over") from error
        if state["steps"] != steps:
            raise InputError("steps", steps, f"{state['steps']}, with which {folder} was begun")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, stage, means, spent = state["step"], state["stage"], state["means"], state["spent"]
        curve = state["curve"]
    begun = clock()

    def keep() -> None:
        """All that the next call goes on from, and the curve; a kill leaves the last ones whole."""
        state = {"steps": steps, "step": step, "stage": stage, "means": means, "curve": curve}
        state |= {"spent": spent + clock() - begun}
        partial = saved.with_suffix(".partial")
        torch.save(state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        partial.replace(saved)
        shown = json.dumps({"kind": kind, "seed": seed, "curve": curve}, indent=1)
        write_atomic(folder / "curve.json", shown.encode())

    with ProcessPoolExecutor(WORKERS) as pool, _all_chunks_at_once(model):
        batches = _Batches(pool, seed)
        while step < steps and clock() - begun < seconds:
            for group in optimizer.param_groups:
                group["lr"] = RATE * _schedule(step, steps)
            losses, right = _losses(model, batches.take(stage, step), device)
            loss = losses["letter"] + losses["recall"] + losses["options"] + losses["arithmetic"]
            loss = loss + TEXT_WEIGHT * losses["text"]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            step += 1
            found = right.tolist()  # waits for the device
            means = [MEMORY * mean + (1 - MEMORY) * new for mean, new in zip(means, found, strict=True)]
            if step % LOGGED_EVERY == 0 or step == steps:
                row = {"step": step, "stage": stage, "seconds": round(spent + clock() - begun, 1)}
                row |= {"letter_accuracy": means[0], "recall_accuracy": means[1]}
                row |= {name: value.item() for name, value in losses.items()}
                curve.append(row)
                print(f"{kind}-{seed}", *(f"{k} {x:.3g}" for k, x in row.items()), flush=True)
                if not math.isfinite(row["letter"]):
                    raise FloatingPointError(f"{kind}-{seed} diverged at step {step}")
            passed = all(mean > enough for mean, enough in zip(means, PASSED, strict=True))
            if stage < len(LATEST) and (passed or step >= LATEST[stage] * steps):
                stage, means = stage + 1, [0.0, 0.0]
            if step % KEPT_EVERY == 0:
                keep()
    keep()
    if step == steps:
        export(model, folder / "model")
    return folder


def export(model: Any, folder: Path) -> None:
    """The model in bfloat16 on disk, to be run in float32, with the tokenizer."""
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    v.tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n")


class _Batches:
    """Batches that processes of ``pool`` prepare ahead, in the order of the steps."""

    def __init__(self, pool: ProcessPoolExecutor, seed: int):
        self._pool, self._seed = pool, seed
        self._ahead: deque[tuple[tuple[int, int], Any]] = deque()

    def take(self, stage: int, step: int) -> mixture.Batch:
        if self._ahead and self._ahead[0][0] != (stage, step):
            self._ahead.clear()
        while len(self._ahead) < PREFETCHED:
            key = stage, step + len(self._ahead)
            self._ahead.append((key, self._pool.submit(mixture.batch, self._seed, *key)))
        return self._ahead.popleft()[1].result()


def _losses(model: Any, batch: mixture.Batch, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Mean cross entropies by name, and the accuracies (2,) of letter and recall in rows that are not crowded."""

    def there(values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)

    hidden = model.base_model(there(batch.tokens), use_cache=False).last_hidden_state
    head, rows = model.get_output_embeddings(), mixture.ROWS
    asked = batch.questions
    # Questions stand in the same places in all rows.
    letter = head(hidden[:rows, asked.letter[0]])
    recall = head(hidden[:rows, asked.recall[0]])
    options = head(hidden[:rows, asked.options[0].reshape(-1)])
    other = head(hidden[rows:, :-1])
    right_letter = there(v.token("A") + asked.choice)
    right_value = there(v.token("v00") + asked.value)
    right_option = there(
        np.where(mixture.option_is_right(asked), v.token(v.YES), v.token(v.NO)).reshape(rows, -1)
    )
    follow, arithmetic = there(batch.follow), mixture.ARITHMETIC_ROWS
    losses = {
        "letter": F.cross_entropy(letter.flatten(0, 1), right_letter.flatten()),
        "recall": F.cross_entropy(recall.flatten(0, 1), right_value.flatten()),
        "options": F.cross_entropy(options.flatten(0, 1), right_option.flatten()),
        "arithmetic": F.cross_entropy(
            other[:arithmetic].flatten(0, 1), follow[:arithmetic].flatten(), ignore_index=-1
        ),
        "text": F.cross_entropy(other[arithmetic:].flatten(0, 1), follow[arithmetic:].flatten()),
    }
    right = [(letter.argmax(-1) == right_letter), (recall.argmax(-1) == right_value)]
    plain = rows - mixture.CROWDED_ROWS
    return losses, torch.stack([each[:plain].float().mean() for each in right])


@contextmanager
def _all_chunks_at_once(model: Any) -> Iterator[None]:
    """Recurrent ops of ``model`` run by ``chunked.outputs``."""

    def op(family: Family) -> Callable[..., Any]:
        recurrence = get_recurrence(family.recurrence)

        def run(*args: Any, **kwargs: Any) -> Any:
            call = family.chunk_inputs(None, *args, **kwargs)
            return call.finish(chunked.outputs(recurrence, call.inputs), None)

        return run

    with ExitStack() as stack:
        patching.enter(stack, model, "training")
        for file, family in op_namespaces(model):
            patching.replace(stack, file, family.prefill_op, lambda _, f=family: op(f))
        yield


def _optimizer(model: Any, device: str) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=device.startswith("cuda"))


def _schedule(step: int, steps: int) -> float:
    """Share of the peak: linear warm-up, constant to the half, then a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    past = max(0.0, step / steps - 0.5) * 2
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * past)) / 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--seed", type=whole, default=1, help="of weights and batches (default: 1)")
    parser.add_argument(
        "--output", type=Path, default=Path("results/reference_models"), help="folder; one a model inside"
    )
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"in all (default: {STEPS})")
    parser.add_argument(
        "--seconds", type=positive, default=300, help="then stop (default: 300); the same command goes on"
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, help="a CPU takes a second a step and more")
    return parser.parse_args()


if __name__ == "__main__":
    main()
