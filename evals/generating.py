"""lm-eval's generation requests through the batch of ``generation``: parsed, run, kept in a sidecar, and answered."""

import gc
import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from quantlab.errors import InputError
from quantlab.evals.generated import Generated
from quantlab.evals.generation import Ended, Task, capacity, generate
from quantlab.evals.identity import model_identity, software, tokenizer_identity
from quantlab.evals.progress import Progress
from quantlab.evals.sampling import Sampling
from quantlab.evals.sidecar import Line, Sidecar
from quantlab.evals.stopping import Stops
from quantlab.models.decode_rows import ROWS_TOGETHER, DecodeRows, EagerRows, GraphRows
from quantlab.records import content_hash

ENGINES = ("auto", "graph", "eager")
DEFAULT_BATCH = 256


@dataclass(frozen=True)
class Asked:
    """One request and how it is to be continued; ``line`` names it in a sidecar."""

    arguments: tuple[Any, ...]
    task: Task
    sampling: Sampling
    stops: Stops
    line: Line


def parse_requests(lm: Any, requests: Sequence[Any]) -> list[Asked]:
    """InputError for what the engine does not serve, and for a request that is longer than the model's context.

    lm-eval gives a request that is to be repeated several times; its n-th appearance is its n-th repeat.
    """
    seen: Counter[tuple[str, int, int]] = Counter()
    found = []
    encoded: dict[str, tuple[int, ...]] = {}
    ends, think_end = end_tokens(lm), _think_end(lm)
    eos = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    for request in requests:
        context, given = request.args
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), lm.max_gen_toks))
        if given.get("do_sample") and "temperature" not in given:
            options.pop("temperature", None)  # lm-eval would say 0
        limit = options.pop("max_gen_toks")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InputError("max_gen_toks", limit, "a whole number of at least 1")
        texts = tuple(text for text in handle_stop_sequences(options.pop("until", None), eos=None) if text)
        sampling = Sampling.of(options)
        if context not in encoded:
            encoded[context] = tuple(lm.tok_encode(context))
            if not encoded[context]:
                raise InputError("prompt", context, "text that is at least one token")
        prompt = encoded[context]
        lm.check_length(len(prompt) + limit)
        # The end of a sequence is known by its token; its text is looked for only if a task asks for it.
        stops = Stops(
            ends, tuple(t for t in texts if t != eos), _decode(lm, False), _decode(lm, True), think_end
        )
        key = str(request.task_name), int(request.doc_id or 0), int(request.idx or 0)
        prompt_hash = _hash(prompt)
        stream = int(hashlib.sha256(f"{key} {prompt_hash}".encode()).hexdigest()[:16], 16)
        how = sampling.as_dict() | {"limit": limit, "until": list(stops.texts), "ends": sorted(ends)}
        line = Line(
            *key,
            seen[key],
            prompt_hash,
            content_hash(how),
            len(prompt),
            0,
            "length",
            lm.sampling_seed,
            {},
            None,
        )
        task = Task(prompt, stream, seen[key], limit)
        seen[key] += 1
        found.append(Asked(request.args, task, sampling, stops, line))
    return found


class Generation:
    """Runs requests for one model and policy, and remembers what happened, for the results."""

    def __init__(self, lm: Any):
        self._lm = lm
        self.lines: list[Line] = []
        self.fresh = 0
        self._used: dict[str, Any] = {}
        self._seconds, self._tokens = 0.0, 0
        self._samplings: dict[str, dict[str, Any]] = {}

    def run(
        self, requests: Sequence[Any], sidecar: Sidecar | None, *, quiet: bool = False
    ) -> list[Generated]:
        """The answers, in the order of the requests.

        Those that ``sidecar`` has are taken from there.  Raises Diverged, and InputError for what is not served.
        """
        lm = self._lm
        asked = parse_requests(lm, requests)
        answers: dict[int, Generated] = {}
        for number, one in enumerate(asked):
            self._samplings[one.line.sampling] = one.sampling.as_dict() | {"max_gen_toks": one.task.limit}
            line = None if sidecar is None else sidecar.find(one.line)
            if line is not None and line.ids is not None:
                answers[number] = self._answer(one, line)
        progress = Progress(len(asked), len(answers), quiet=quiet)
        groups: dict[tuple[Sampling, tuple[str, ...]], list[int]] = defaultdict(list)
        for number, one in enumerate(asked):
            groups[one.sampling, one.stops.texts].append(number)
        try:
            for (sampling, _), numbers in groups.items():
                left = [number for number in numbers if number not in answers]
                if not left:
                    continue
                tasks = [asked[number].task for number in numbers]

                def ended(sequences: list[Ended], numbers: list[int] = numbers) -> None:
                    lines = [_line(asked[numbers[one.number]].line, one) for one in sequences]
                    if sidecar is not None:
                        sidecar.append(lines)
                    for one, line in zip(sequences, lines, strict=True):
                        number = numbers[one.number]
                        answers[number] = self._answer(asked[number], line)
                    progress.ended(len(lines))

                # As many rows as without a restart: products of other shapes add up in another order on a GPU.
                rows = self._rows(min(lm.generation_batch, len(tasks)), capacity(tasks))
                self.fresh += len(left)
                generate(
                    rows,
                    tasks,
                    sampling,
                    asked[numbers[0]].stops,
                    seed=lm.sampling_seed,
                    done={place for place, number in enumerate(numbers) if number in answers},
                    on_ended=ended,
                    on_tokens=progress.read,
                )
                if isinstance(rows, GraphRows):
                    rows.tell(lm.interception.report)
                    del rows
                    gc.collect()  # a captured step holds itself, and its memory is wanted for the next one
        finally:
            progress.close()
        if asked and not self.fresh:
            EagerRows(lm.model, lm.interception, 1, 16).close()  # what the report says of layers and bytes
        self._seconds, self._tokens = self._seconds + progress.seconds, self._tokens + progress.tokens
        return [answers[number] for number in range(len(asked))]

    def count(self) -> dict[str, int | None]:
        """Enter the least that a sequence exercised into the policy's report, and return it.

        How long a sequence becomes is the model's choice: those that ended before they read a store back do not count
        unless none did more.
        """
        least: dict[str, int | None] = {}
        for part in ("checkpoint", "read_copy"):
            counts = [line.exercised[part] for line in self.lines]
            known = [count for count in counts if count is not None]
            least[part] = min((count for count in known if count), default=0 if known else None)
        self._lm.interception.report.count_stores(least)
        return least

    def info(self) -> dict[str, Any]:
        """For the results file: the engine, what it was asked, and what came."""
        if not self.lines:
            return {}
        unread = {
            part: sum(line.exercised[part] == 0 for line in self.lines)
            for part in ("checkpoint", "read_copy")
        }
        return {
            "generation": {
                **self._used,
                "sampling": list(self._samplings.values()),
                "sampling_seed": self._lm.sampling_seed,
                "think_end_token": self._lm.think_end_token,
                "sequences": len(self.lines),
                "resumed": len(self.lines) - self.fresh,
                "finish": dict(Counter(line.finish for line in self.lines)),
                "prompt_tokens": sum(line.prompt_tokens for line in self.lines),
                "generated_tokens": sum(line.tokens for line in self.lines),
                "sequences_without_a_read": unread,
                "seconds": self._seconds,
                "tokens_per_second": self._tokens / self._seconds if self._seconds else None,
            }
        }

    def _answer(self, one: Asked, line: Line) -> Generated:
        assert line.ids is not None
        self.lines.append(line)
        text = Generated(one.stops.answer(line.ids), tokens=line.tokens, finish=line.finish)
        if one.sampling.greedy:
            self._lm.cache_hook.add_partial("generate_until", one.arguments, text)
        return text

    def _rows(self, count: int, positions: int) -> DecodeRows:
        lm = self._lm
        engine = engine_of(lm)
        if engine == "graph":
            try:
                rows = GraphRows(lm.model, lm.interception.rules, count, positions, seed=lm.state_seed)
                self._used = {"engine": "graph", "batch": count, "positions": positions}
                return rows
            except InputError as error:
                if lm.engine == "graph" or error.argument in ("batch", "length"):
                    raise
                warnings.warn(f"no graph of a step, generation is slower: {error}", stacklevel=2)
        count += (
            -count % ROWS_TOGETHER
        )  # of a batch that is no multiple, some rows would be computed otherwise
        self._used = {"engine": "eager", "batch": count, "positions": positions}
        return EagerRows(lm.model, lm.interception, count, positions)


def settings_of(lm: Any) -> dict[str, Any]:
    """All that decides a sample but its prompt and its sampling, as plain values that name no folder."""
    return {
        "policy": str(lm.interception.rules),
        "model": model_identity(lm.model),
        "tokenizer": tokenizer_identity(lm.tokenizer),
        "dtype": str(next(lm.model.parameters()).dtype).removeprefix("torch."),
        "device": lm.device.type,
        "engine": engine_of(lm),
        "state_seed": lm.state_seed,
        "sampling_seed": lm.sampling_seed,
        "think_end_token": lm.think_end_token,
        **software(),
    }


def engine_of(lm: Any) -> str:
    if lm.engine != "auto":
        return lm.engine
    return "graph" if lm.device.type == "cuda" else "eager"


def end_tokens(lm: Any) -> frozenset[int]:
    """The tokenizer's end of sequence and those of the model's own generation settings."""
    ends = {lm.eot_token_id}
    own = getattr(getattr(lm.model, "generation_config", None), "eos_token_id", None)
    ends |= set(own) if isinstance(own, list | tuple) else {own}
    return frozenset(int(end) for end in ends if end is not None)


def _think_end(lm: Any) -> int | str | None:
    """A token where the text is one: decoding may leave special tokens out."""
    given = lm.think_end_token
    if not isinstance(given, str):
        return given
    ids = lm.tokenizer.encode(given, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else given


def _decode(lm: Any, plain: bool) -> Any:
    return lambda tokens: lm.tok_decode(tokens, skip_special_tokens=plain)


def _line(blank: Line, one: Ended) -> Line:
    assert one.watch.finish is not None
    ids = tuple(one.watch.tokens)
    return Line(
        **vars(blank)
        | {"tokens": len(ids), "finish": one.watch.finish, "exercised": dict(one.exercised), "ids": ids}
    )


def _hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
