"""What every policy costs the reference models in right answers; one record a model, level and policy, resumes.

python experiments/reference_models/measure.py --output results/reference_models            # everything there is
python experiments/reference_models/measure.py --model hybrid --level 152 --policy nvfp4@1 --items 200
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from tqdm import tqdm

from experiments.reference_models.arguments import checked_device, one_line_errors, positive, whole
from quantlab.evals.state_recall import Level
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.models.reference import reference_folder, reference_models
from quantlab.recurrences import get_recurrence
from quantlab.schemes import PolicyRules, parse_rules

BASELINE = "fp32@1"
POLICIES = (
    BASELINE,
    "bf16@1",
    "fp16+sr@1",
    "fp8_e4m3@1",
    "int8@1",
    "int8+sr@1",
    "int8+ef@1",
    "int8+ef@1:ef_read=include",
    "nvfp4@1",
    "nvfp4+sr@1",
    "int8@16",
    "fp8_e4m3@16",
    "nvfp4@16",
    "fp32/nvfp4@16",
    "fp32/nvfp4@16:contents=derived",
    "fp16+sr/nvfp4@16",
    "fp8_e4m3+sr/nvfp4@16",
    "fp32/fp8_e4m3@16",
    "fp32/int8@16",
    "nvfp4+keyscale@1",
    "nvfp4+keyscale@16",
    "fp32/nvfp4+keyscale@16",
)
LEVELS = {
    "152": (Level(), 2000),
    "32": (Level(updates=32), 2000),
    "512": (Level(16, 8, 512), 1000),
    "2048": (Level(16, 8, 2048), 300),
    "crowded": (Level(40, 8, 112, keys=64), 2000),
}
"""By name: the questions, and how many."""


def main() -> None:
    options = _options()
    with one_line_errors():
        _measure(options)


def _measure(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from quantlab.evals.recall_scoring import answer
    from quantlab.evals.state_recall import questions
    from quantlab.models.interception import Interception
    from quantlab.records import check_output_folder, complete_record, record_path, save_record
    from quantlab.schemes import Diverged
    from quantlab.sweep.environment import capture_environment

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    policies = [parse_rules(policy) for policy in options.policy]
    folder, device = options.output / "records", checked_device(options.device)
    check_output_folder(folder)
    environment, begun = capture_environment(torch.get_num_threads()), time.monotonic()
    for name in options.model:
        model: Any = None
        for level_name in options.level:
            level, items = LEVELS[level_name]
            items = options.items or items
            for rules in policies:
                text = rules.text
                point = {"kind": "recall", "model": name, "level": vars(level), "policy": text}
                point |= {"items": items, "items_seed": 0, "seed": options.seed}
                if record_path(folder, point).exists():
                    continue
                if time.monotonic() - begun > options.seconds:
                    print(f"not reached: {name} {level_name} {text}", file=sys.stderr)
                    continue
                if model is None:
                    model = AutoModelForCausalLM.from_pretrained(reference_folder(name))
                    model = one_token_chunks(model.to(device).eval())
                if not applies(model, rules):
                    continue
                start = time.monotonic()
                asked = questions(level, items, 0)
                interception = Interception(model, rules, seed=options.seed, pools=options.pools)
                try:
                    with tqdm(total=asked.tokens.size, disable=not sys.stderr.isatty(), desc=text) as bar:
                        found = answer(
                            model,
                            interception,
                            asked,
                            device=device,
                            on_token=lambda done, _, bar=bar: bar.update(done - bar.n),
                        )
                except Diverged as error:
                    result: dict[str, Any] = {"status": "diverged", "message": str(error), "metrics": {}}
                else:
                    interception.require_effect()
                    report = interception.report.as_dict()
                    kept = ("exercised", "bits_per_value", "bytes_per_token")
                    metrics = {key: report[key] for key in kept}
                    metrics |= {"letter": float(found.letter.mean()), "value": float(found.value.mean())}
                    metrics |= {"letters": bits(found.letter), "values": bits(found.value)}
                    result = {"metrics": metrics}
                seconds = time.monotonic() - start
                save_record(folder, complete_record(point, result, environment=environment, seconds=seconds))
                shown = result["metrics"]
                right = f"{shown['letter']:.3f} {shown['value']:.3f}" if shown else result["message"]
                print(
                    f"{time.monotonic() - begun:6.1f} s  {name} {level_name} {text}: {right}"
                    f" ({seconds:.1f} s)",
                    flush=True,
                )


def one_token_chunks(model: Any) -> Any:
    """The model, whose prefills go token by token: prompts here are one token long, and transformers' own scan of
    Mamba-2 pads a prompt to a chunk, 60 GB for 2,000 of them.
    """
    for module in model.modules():
        if isinstance(getattr(module, "chunk_size", None), int):
            module.chunk_size = 1
    return model


def bits(right: Any) -> str:
    """Which answers are right, four a hexadecimal digit, the first one in front."""
    return np.packbits(right).tobytes().hex()


def right_answers(text: str, items: int) -> Any:
    """What ``bits`` packed: (items,) of bool."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))[:items].astype(bool)


def applies(model: Any, rules: PolicyRules) -> bool:
    """Whether the policy is another one for this model: only a delta rule has contents to derive."""
    derived = any(policy.options.contents == "derived" for policy in rules.policies)
    families = {layer.family.recurrence for layer in recurrent_layers(model).values()}
    return not derived or all(get_recurrence(family).delta_rule for family in families)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = reference_models()
    parser.add_argument("--output", type=Path, default=Path("results/reference_models"))
    parser.add_argument("--model", action="append", choices=known, help="repeat for several (default: all)")
    parser.add_argument("--level", action="append", choices=LEVELS, help="repeat for several (default: all)")
    parser.add_argument(
        "--policy",
        action="append",
        help="or a .toml file of rules; repeat for several (default: the study's)",
    )
    parser.add_argument(
        "--items", type=positive, help="questions a point (default: 2,000; long levels fewer)"
    )
    parser.add_argument("--seed", type=whole, default=0, help="of stochastic rounding")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--no-pools", dest="pools", action="store_false", default=None, help="torch instead of kernels"
    )
    parser.add_argument("--seconds", type=positive, default=10**9, help="no point begins after so many")
    options = parser.parse_args()
    options.model, options.level = options.model or list(known), options.level or list(LEVELS)
    options.policy = options.policy or list(POLICIES)
    return options


if __name__ == "__main__":
    main()
