"""Time a GPQA-shaped study of sampled answers on a CPU: 198 prompts of 200 to 260 tokens, 4 repeats, 64 new tokens.

OMP_NUM_THREADS=1 python experiments/generation_speed/study.py                      # about a minute and a half
OMP_NUM_THREADS=1 python experiments/generation_speed/study.py --questions 8       # a look
"""

import argparse
import time
from typing import Any

import numpy as np

POLICIES = ("fp32@1", "fp32@16", "fp16+sr/nvfp4@16", "int8@1", "nvfp4@1")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="reference:gated_delta")
    parser.add_argument("--questions", type=int, default=198)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--policy", action="append", help=f"default: {', '.join(POLICIES)}")
    options = parser.parse_args()
    total = 0.0
    for row in measure(options):
        total += row["seconds"]
        print(
            f"{row['policy']:<20} {row['seconds']:6.1f} s, {row['tokens_per_second']:6,.0f} tokens/s",
            flush=True,
        )
    print(f"{'all':<20} {total:6.1f} s")


def measure(options: argparse.Namespace) -> Any:
    """One row a policy, through lm-eval's model class, requests and all."""
    from lm_eval.api.instance import Instance

    from quantlab.evals import model
    from quantlab.models.reference import reference_folder
    from quantlab.models.reference import vocabulary as v
    from quantlab.terminal import fix_threads

    fix_threads()
    QuantlabLM: Any = model.QuantlabLM  # lm-eval's decorator hides the type of the class
    lm = QuantlabLM(
        str(reference_folder(options.model)), device="cpu", generation_batch=options.batch, quiet=True
    )
    chance = np.random.default_rng(0)
    asked = {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": options.new}
    requests = []
    for number in range(options.questions):
        count = int(chance.integers(200, 261))
        prompt = v.text(chance.integers(v.FIRST_WORD, v.VOCABULARY_SIZE, count))
        request = Instance("generate_until", {}, (prompt, asked), 0, ("made_up", number, options.repeats))
        requests += [request] * options.repeats
    for policy in options.policy or POLICIES:
        lm.use_policy(policy)
        began = time.monotonic()
        answers = lm.generate_until(requests)
        seconds = time.monotonic() - began
        tokens = sum(answer.tokens for answer in answers)
        yield {"policy": policy, "seconds": seconds, "tokens_per_second": tokens / seconds}


if __name__ == "__main__":
    main()
