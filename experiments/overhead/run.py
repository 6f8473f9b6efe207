"""Time of a decode step under fp32@1 against the untouched model, on a CPU.

Both run the same tokens from the same prompt, in rounds that take turns, so that what else the machine does meets
both.  A round's figure is the median of its steps; the overhead is the median over rounds of policy / stock - 1.
There is no figure without a comparison: the logits of the two must agree.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from typing import Any

import torch

from quantlab.models.interception import Interception, cache_keyword

LAYERS, BATCH, PROMPT, VOCABULARY = 4, 8, 16, 512
# Of the largest logit: sums of 1024 terms in float32 in another order, 2^-24 * sqrt(1024) = 2e-6 an op, some ten ops a
# layer, four layers.
SAME = 1e-4


def mamba2(hidden: int) -> Any:
    """Mamba-2 with heads of 64 and 128 state columns, expansion 2: the published ratios."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    heads = hidden * 2 // 64
    return Mamba2ForCausalLM(
        Mamba2Config(
            hidden_size=hidden,
            num_hidden_layers=LAYERS,
            num_heads=heads,
            head_dim=64,
            state_size=128,
            n_groups=1,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
        )
    )


def gated_delta(hidden: int) -> Any:
    """Gated delta rule with states of 128 x 128, two value heads a key head: the published ratios."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=LAYERS,
            layer_types=["linear_attention"] * (LAYERS - 1) + ["full_attention"],
            num_attention_heads=max(1, hidden // 256),
            num_key_value_heads=max(1, hidden // 512),
            head_dim=64,
            linear_num_key_heads=max(1, hidden // 256),
            linear_num_value_heads=max(1, hidden // 128),
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            vocab_size=VOCABULARY,
        )
    )


MODELS = {"mamba2": mamba2, "gated_delta": gated_delta}


@torch.no_grad()
def decode(model: Any, ids: torch.Tensor) -> tuple[list[float], torch.Tensor]:
    """Seconds and logits of each single-token step behind a prompt of ``PROMPT`` tokens."""
    from transformers import DynamicCache

    keywords = {cache_keyword(model): DynamicCache(config=model.config), "use_cache": True}
    model(ids[:, :PROMPT], **keywords)
    times, logits = [], []
    for t in range(PROMPT, ids.shape[1]):
        start = time.perf_counter()
        output = model(ids[:, t : t + 1], **keywords)
        times.append(time.perf_counter() - start)
        logits.append(output.logits)
    return times, torch.cat(logits, 1)


def measure(kind: str, hidden: int, policy: str, rounds: int, steps: int) -> dict[str, Any]:
    """One row: the medians of both in milliseconds a step, and the overhead with its quartiles.

    Raises ArithmeticError if the two do not compute the same.
    """
    torch.manual_seed(0)
    model = MODELS[kind](hidden).float().eval()
    ids = torch.randint(0, VOCABULARY, (BATCH, PROMPT + steps))
    interception = Interception(model, policy)
    stock, ours, difference = [], [], 0.0
    for number in range(rounds + 1):
        plain, expected = decode(model, ids)
        with interception:
            held, found = decode(model, ids)
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference < SAME:
            raise ArithmeticError(f"{kind} under {policy}: logits differ by {difference:.2g} of the largest")
        if number:  # the first round warms up
            stock.append(statistics.median(plain))
            ours.append(statistics.median(held))
    interception.require_effect()
    ratios = [b / a - 1 for a, b in zip(stock, ours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "model": kind,
        "hidden": hidden,
        "policy": policy,
        "stock_ms": round(1e3 * statistics.median(stock), 3),
        "policy_ms": round(1e3 * statistics.median(ours), 3),
        "overhead": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "difference": difference,
        "rounds": rounds,
        "steps": steps,
    }


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="default: both")
    parser.add_argument("--hidden", type=int, action="append", help="width (default 1024, and 64 beside it)")
    parser.add_argument("--policy", default="fp32@1", help="one that rounds nothing")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "layers": LAYERS,
        "batch": BATCH,
        "threads": 1,
    }
    print(json.dumps(where))
    for kind in arguments.model or sorted(MODELS):
        for hidden in arguments.hidden or (1024, 64):
            print(
                json.dumps(measure(kind, hidden, arguments.policy, arguments.rounds, arguments.steps)),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
