"""Every policy on the same traces: one record a policy, and the same call goes on where it was stopped."""

import io
import json
import shutil
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quantlab.evals.identity import model_identity, tokenizer_identity
from quantlab.evals.preflight import check_policies
from quantlab.evals.replay import MEASURES, Replayed, replay_batch
from quantlab.evals.replay_metrics import metrics
from quantlab.evals.run import model_folder
from quantlab.evals.traces import Trace, read_traces, traces_hash
from quantlab.models.policy_decoder import PolicyDecoder
from quantlab.records import (
    check_output_folder,
    check_output_place,
    complete_record,
    content_hash,
    load_record,
    protocol_fingerprint,
    record_path,
    remove_stale,
    save_record,
    write_atomic,
)
from quantlab.schemes import Policy, PolicyRules, parse_rules

BASELINE = "fp32@1"
_REPORTED = (
    "effective_policy",
    "bits_per_value",
    "bytes_per_token",
    "bytes_read_per_token",
    "bytes_written_per_token",
)


def run_replay(
    model: str | Path,
    source: str | Path,
    policies: Sequence[str | Path | Policy | PolicyRules],
    *,
    output: str | Path,
    environment: dict[str, Any],
    batch_size: int = 32,
    limit: int | None = None,
    seed: int = 0,
    device: str | None = None,
    max_length: int | None = None,
) -> list[dict[str, Any]]:
    """Replay the traces of ``source`` under each policy beside fp32@1; returns one record a policy.

    ``output/records`` takes the records (kind "replay"), each with its numbers a token as Parquet, no text and no token
    id among them.  All policies that have no record there yet run side by side, so the baseline is computed once: a
    token costs one forward a policy and one more, and a batch as many caches.  Traces are kept as their batch ends,
    and the same call goes on from them.

    ``batch_size``: traces beside each other.  ``limit``: the first traces.  ``seed``: of stochastic rounding.
    ``environment``: what records say of the machine.  Raises InputError, before anything is written, for a model,
    policy or traces that cannot be used.
    """
    parsed = check_policies(policies)
    with ExitStack() as stack:
        place = model_folder(str(model), stack)
        lm = _load(place, device, max_length)
        traces = read_traces(source, lm, limit)
        for policy in parsed:  # the recurrences of the model may have no use for it
            lm.use_policy(policy, seed=seed)
        shared = {
            "kind": "replay",
            "baseline": BASELINE,
            "model": place.name,
            "model_hash": model_identity(lm.model),
            "tokenizer_hash": tokenizer_identity(lm.tokenizer),
            "traces_hash": traces_hash(traces),
            "traces": len(traces),
            "tokens": sum(len(trace.response) for trace in traces),
            "seed": seed,
        }
        folder = Path(output).resolve() / "records"
        check_output_place(folder)
        points = {policy: {**shared, "policy": str(policy)} for policy in parsed}
        records = {policy: found for policy in parsed if (found := _kept_record(folder, points[policy]))}
        missing = [policy for policy in parsed if policy not in records]
        if missing:
            check_output_folder(folder)
            remove_stale(folder)
            for policy, result in _run(lm, traces, missing, points, folder, batch_size, seed).items():
                record = complete_record(points[policy], result, environment=environment)
                save_record(folder, record)
                shutil.rmtree(_parts(folder, points[policy]), ignore_errors=True)
                records[policy] = record
    return [records[policy] for policy in parsed]


def _load(place: Path, device: str | None, max_length: int | None) -> Any:
    """The model as an evaluation loads it, so that prompts become the same tokens."""
    from quantlab.evals import model

    options: dict[str, Any] = {"device": device, "max_length": max_length}
    options = {name: value for name, value in options.items() if value is not None}
    QuantlabLM: Any = model.QuantlabLM  # lm-eval's decorator hides the type of the class
    return QuantlabLM(str(place), BASELINE, quiet=True, **options)


def _kept_record(folder: Path, point: dict[str, Any]) -> dict[str, Any] | None:
    path = record_path(folder, point)
    record = load_record(path) if path.exists() else None
    if record is None or record["status"] == "failed" or record["protocol"] != protocol_fingerprint("replay"):
        return None
    return record if record["series"] is None or (folder / record["series"]).is_file() else None


def _parts(folder: Path, point: dict[str, Any]) -> Path:
    """Where the traces of a policy wait for the others."""
    return folder / f"parts_{content_hash(point)}_{protocol_fingerprint('replay')}"


def _run(
    lm: Any,
    traces: Sequence[Trace],
    policies: Sequence[PolicyRules],
    points: dict[PolicyRules, dict[str, Any]],
    folder: Path,
    batch_size: int,
    seed: int,
) -> dict[PolicyRules, dict[str, Any]]:
    """What a record says of each policy."""
    started = time.monotonic()
    # Long ones first, so that a batch that does not fit in memory fails at once.
    order = sorted(traces, key=lambda trace: (-len(trace.tokens), trace.number))
    parts = {policy: _parts(folder, points[policy]) for policy in policies}
    done = {policy: set(_load_parts(parts[policy], traces)) for policy in policies}
    baseline = PolicyDecoder(lm.model, parse_rules(BASELINE), seed)
    decoders = {policy: PolicyDecoder(lm.model, policy, seed) for policy in policies}
    with _bar(sum(len(trace.tokens) - 1 for trace in traces)) as bar:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            going = [policy for policy in policies if decoders[policy].message is None]
            # A batch in which a trace is missing is read again whole: its rows keep each other's shape.
            todo = [policy for policy in going if any(trace.number not in done[policy] for trace in batch)]
            if not todo:
                bar.update(sum(len(trace.tokens) - 1 for trace in batch))
                continue
            found = replay_batch(
                baseline, [decoders[policy] for policy in todo], batch, device=lm.device, on_token=bar.update
            )
            for policy, replayed in zip(todo, found, strict=True):
                if replayed is None:
                    continue
                report = decoders[policy].interception.report.as_dict()
                for trace, one in zip(batch, replayed, strict=True):
                    _save_part(parts[policy], trace, one, report)
                    done[policy].add(trace.number)
    seconds = (time.monotonic() - started) / len(policies)  # side by side; each is charged its share
    results = {}
    for policy in policies:
        found = _load_parts(parts[policy], traces)  # one policy's numbers at a time: they may be gigabytes
        result = _result(decoders[policy], traces, found)
        if result["status"] == "ok":
            result["series"] = record_path(folder, points[policy]).with_suffix(".parquet").name
            write_atomic(folder / result["series"], _series(traces, found))
        results[policy] = result | {"seconds": seconds}
    return results


def _bar(total: int) -> Any:
    quiet = sys.stderr is None or not sys.stderr.isatty()
    return tqdm(total=total, desc="replay", unit="token", unit_scale=True, disable=quiet)


Done = dict[int, tuple[Replayed, dict[str, Any]]]


def _result(decoder: PolicyDecoder, traces: Sequence[Trace], done: Done) -> dict[str, Any]:
    if decoder.message is not None:
        report = decoder.interception.report.as_dict()
        kept = {name: report[name] for name in _REPORTED} | {"diverged_at": decoder.diverged_at}
        return {"status": "diverged", "message": decoder.message, "metrics": kept}
    replayed = [done[trace.number][0] for trace in traces]
    reported = done[traces[0].number][1]
    found = metrics(traces, replayed)
    if 0 in found["exercised"].values():
        # The counts say why; numbers of a policy that nobody read would be those of the baseline.
        short = next(line["trace"] for line in found["per_trace"] if 0 in line["exercised"].values())
        message = f"no stored state was read back in trace {short}: exercised {found['exercised']}"
        kept = {name: found[name] for name in ("traces", "tokens", "exercised")}
        return {"status": "not_exercised", "message": message, "metrics": reported | kept}
    return {"status": "ok", "message": None, "metrics": reported | found}


def _series(traces: Sequence[Trace], done: Done) -> bytes:
    """A row a response token: trace, token (from 1), and MEASURES."""
    import pandas

    tables = []
    for trace in traces:
        one = done[trace.number][0]
        tokens = np.arange(1, len(trace.response) + 1)
        tables.append(pandas.DataFrame({"trace": trace.number, "token": tokens, **one.measures}))
    buffer = io.BytesIO()
    pandas.concat(tables, ignore_index=True).to_parquet(buffer, index=False)
    return buffer.getvalue()


def _save_part(folder: Path, trace: Trace, one: Replayed, report: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    about = {"exercised": one.exercised, "report": {name: report[name] for name in _REPORTED}}
    arrays: dict[str, Any] = {"about": np.array(json.dumps(about)), **one.measures}
    arrays |= {} if one.letters is None else {"letters": one.letters}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(folder / f"{trace.name}.npz", buffer.getvalue())


def _load_parts(folder: Path, traces: Sequence[Trace]) -> Done:
    """What a run that was stopped left; a file that is not whole counts as none."""
    if folder.is_dir():
        remove_stale(folder)
    found: Done = {}
    for trace in traces:
        path = folder / f"{trace.name}.npz"
        if not path.exists():
            continue
        try:
            with np.load(path, allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                letters = arrays["letters"] if "letters" in arrays.files else None
                one = Replayed({name: arrays[name] for name in MEASURES}, letters, about["exercised"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            continue
        found[trace.number] = one, about["report"]
    return found
