"""The cards of the reference models, README.md in each one's folder, from what was measured.

python experiments/reference_models/cards.py            # writes them
python experiments/reference_models/cards.py --check    # says which differ from what the records give
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.reference_models.arguments import one_line_errors
from experiments.reference_models.measure import BASELINE, LEVELS
from experiments.reference_models.report import HERE, Records
from quantlab.models.reference import reference_folder, reference_models
from quantlab.records import write_atomic

ABOUT = {
    "gated_delta": "Qwen3.5 (`Qwen3_5ForCausalLM`): three gated-delta layers, seed 2",
    "kimi_delta": "Kimi-Linear (`KimiLinearForCausalLM`): three KDA layers, seed 1; its last 50 steps ran on a CPU",
    "hybrid": "Nemotron-H (`NemotronHForCausalLM`): two Mamba-2 layers and one of attention between them, seed 1",
    "mamba2_s1": "Nemotron-H (`NemotronHForCausalLM`): three Mamba-2 layers, seed 1",
    "mamba2_s3": "Nemotron-H (`NemotronHForCausalLM`): three Mamba-2 layers, seed 3",
}
LEVEL_NAMES = {
    "32": "24 facts, 32 updates",
    "152": "24 facts, 152 updates (default)",
    "512": "16 facts, 512 updates",
    "2048": "16 facts, 2,048 updates",
    "crowded": "40 facts of 64 keys, 112 updates",
}
INERT = """Its attention layer has an output matrix of zeros: transformers' cache counts tokens by it, and nothing is
told by it."""
TRAINED = """Trained from scratch, 3,600 steps of 64 sequences, on made-up sequences of facts, registers and questions,
running arithmetic on a scratch-pad, and Python's own manual (`pydoc_data.topics`); on no other text. It knows nothing
of the world and is good for one thing: to show what the precision of a decode state does. How it is trained:
`experiments/reference_models` of the repository. Licence: the package's."""
ANSWERS = "Right answers in %, letter of four / value of 64 (chance 25 / 1.6), every token through the decode state:"
BY_HEAD = """By head, when a fact is asked for behind 152 updates (64 questions): share of the state's energy in its
largest singular component; binades between the largest key column of a block of 16 and its median one; what decay
leaves of the fact; the fact's share of the state."""
SHOWN = (BASELINE, "fp32/nvfp4@16", "nvfp4@1")


def card(name: str, records: Records, mechanism: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of the card of ``name``; mechanism: the layers of one of its records."""
    folder = reference_folder(name)
    size = (folder / "model.safetensors").stat().st_size
    yield f"# {name}"
    yield ""
    yield f"{ABOUT[name]}. {size / 2 / 1e6:.2f} million parameters, exact in bfloat16, run in float32."
    if name != "hybrid":
        yield INERT
    yield from ("", TRAINED, "", ANSWERS, "")
    yield "| questions | n | " + " | ".join(SHOWN) + " |"
    yield "|---|---|" + "---|" * len(SHOWN)
    for level in LEVELS:
        rows = records.rows(name, level)
        if not rows:
            continue
        cells = [
            f"{rows[policy].right['letter']:.1f} / {rows[policy].right['value']:.1f}"
            if policy in rows
            else ""
            for policy in SHOWN
        ]
        yield f"| {LEVEL_NAMES[level]} | {rows[BASELINE].items:,} | " + " | ".join(cells) + " |"
    yield from ("", BY_HEAD, "")
    columns = (
        "rank-1 share",
        "column spread",
        "retention",
        "the fact in the state",
        "decay of a token, 5 / 50 / 95 / 99 %",
    )
    yield "| layer | heads | " + " | ".join(columns) + " |"
    yield "|---|---|---|---|---|---|---|"
    for layer in mechanism:
        decay = " / ".join(f"{value:.4f}" for value in layer["decay"].values())
        cells = [
            " ".join(f"{value:.{digits}f}" for value in layer[what])
            for what, digits in (("rank_one", 2), ("column_spread", 1), ("retention", 3), ("share", 4))
        ]
        yield f"| {layer['layer']} | {len(layer['rank_one'])} | " + " | ".join([*cells, decay]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--mechanism", type=Path, default=HERE / "mechanism")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with one_line_errors():
        records = Records(options.records)
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(options.mechanism.glob("*.json")):
        record = json.loads(path.read_text())
        if record["point"]["policy"] == BASELINE:
            found[record["point"]["model"]] = record["metrics"]["layers"]
    stale = []
    for name in reference_models():
        if name not in found:
            print(f"{name}: no record of mechanism.py under {BASELINE}", file=sys.stderr)
            stale.append(name)
            continue
        text = "\n".join(card(name, records, found[name])) + "\n"
        path = reference_folder(name) / "README.md"
        if options.check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            write_atomic(path, text.encode())
    if stale:
        print(f"not what the records give: {', '.join(stale)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
