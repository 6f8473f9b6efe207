"""Write the decode inputs of typeseg's trained scans as a stream file, for ``quantlab drift --stream``.

    python experiments/typeseg/capture.py results/typeseg.safetensors

typeseg's own forward runs unchanged; its scans are recorded.  One head is one scan (layer and direction), one sequence
one document, so that a drift run sees twelve trained recurrences on the same text.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run by path: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.typeseg import corpus, network
from quantlab.errors import InputError
from quantlab.records import check_output_folder, save_stream_file

FAMILY = "mamba1"
LENGTH = 512


def capture(documents: Sequence[str], length: int = LENGTH) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the meta table of a stream file, B = documents, H = G = scans.

    q, k (T, B, H, K); v = dt x (T, B, H, V); log_decay = dt (T, B, H, V); rates = A (H, V, K); initial zero, as the
    network starts.  Head 2 l is layer l forward, head 2 l + 1 layer l on the reversed text.  float32.
    """
    if not documents:
        raise InputError("documents", list(documents), "at least one name such as html+json")
    byte_tokens = network.tokens([corpus.document(name, length) for name in documents])
    recorded = [network.stock_scans(row) for row in byte_tokens]

    def stack(part: str) -> np.ndarray:
        per_document = [np.stack([getattr(scan, part) for scan in scans], 1) for scans in recorded]
        return np.ascontiguousarray(np.stack(per_document, 1))

    rates = np.stack([scan.rates for scan in recorded[0]])
    dt = stack("dt")
    arrays = {
        "q": stack("query"),
        "k": stack("key"),
        "v": dt * stack("x"),
        "log_decay": dt,
        "rates": rates,
        "initial": np.zeros((len(documents), *rates.shape), np.float32),
    }
    meta = {
        "family": FAMILY,
        "source": f"typeseg {network.version()}",
        "documents": list(documents),
        "length": length,
        "text_hash": corpus.corpus_hash(documents, length),
        "heads": [f"layer {i // 2} {network.DIRECTIONS[i % 2]}" for i in range(len(rates))],
    }
    return arrays, meta


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file and print its content hash."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="stream file to write (13 MB a document of 512 characters)")
    parser.add_argument("--document", action="append", help=f"default: {corpus.DOCUMENTS[0]}")
    parser.add_argument("--length", type=int, default=LENGTH, help="characters of each document")
    options = parser.parse_args(arguments)
    try:
        check_output_folder(options.output.parent)
        arrays, meta = capture(options.document or corpus.DOCUMENTS[:1], options.length)
        print(save_stream_file(options.output, arrays, meta))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
