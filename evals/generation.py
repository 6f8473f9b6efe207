"""Generation: sequences of many prompts in one batch whose rows are refilled as they finish.

A prompt is read once and handed to all its repeats.  What a sequence becomes does not depend on what is beside it: no
row is padded, its random numbers are its own (``sampling``), and so are the random bits of its state's rounding, named
by request and repeat.  The rounding of float arithmetic is left: in one batch size, or in any on a CPU, a row's numbers
come out the same; another batch size on a GPU may turn a choice that was close to even.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from quantlab.evals.sampling import Sampling, uniforms
from quantlab.evals.stopping import Stops, Watch
from quantlab.models.decode_rows import DecodeRows, Prefix
from quantlab.schemes.store import Diverged

PROMPTS_AT_ONCE = 8
"""Prompts of one length that are read together; which ones is a function of the requests alone."""


@dataclass(frozen=True)
class Task:
    """A sequence to generate: its prompt, the names of its random numbers, and how long it may become."""

    prompt: tuple[int, ...]
    stream: int
    repeat: int
    limit: int

    @property
    def sequence_id(self) -> int:
        """Its name for stochastic rounding: 31 bits, another one for each repeat."""
        digest = hashlib.sha256(f"{self.stream},{self.repeat}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class Ended:
    """A finished sequence: its number among the tasks, what came, and which stores were read back, by copy."""

    number: int
    watch: Watch
    exercised: dict[str, int | None]


@dataclass
class _Running:
    number: int
    task: Task
    watch: Watch


def capacity(tasks: Sequence[Task]) -> int:
    """Positions that rows need: whole blocks of 16, which attention on a GPU likes."""
    most = max(len(task.prompt) + task.limit for task in tasks)
    return -(-most // 16) * 16


@torch.no_grad()
def generate(
    rows: DecodeRows,
    tasks: Sequence[Task],
    sampling: Sampling,
    stops: Stops,
    *,
    seed: int,
    done: Collection[int] = (),
    on_ended: Callable[[list[Ended]], object] = lambda ended: None,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> None:
    """Run all tasks but those whose numbers are ``done`` on ``rows``, which are closed behind the last one.

    ``on_ended`` is called as sequences finish, ``on_tokens`` with how many tokens came.  Raises Diverged where a state
    or the logits of a sequence stop being finite.
    """
    waiting = _Waiting(rows, tasks, sampling, stops, seed, done, on_ended)
    running: list[_Running | None] = [None] * rows.count
    spare = 0  # rows at the end that repeat the first one
    tokens = torch.zeros(rows.count, dtype=torch.int64, device=rows.device)
    try:
        while True:
            free = [row for row, one in enumerate(running) if one is None]
            while free and (found := waiting.take(len(free))):
                prefix, sources, started = found
                at, free = free[: len(started)], free[len(started) :]
                rows.admit(at, prefix, sources, [one.task.sequence_id for one in started])
                tokens[torch.tensor(at, device=rows.device)] = torch.tensor(
                    [one.watch.tokens[-1] for one in started], device=rows.device
                )
                for row, one in zip(at, started, strict=True):
                    running[row] = one
            active = [row for row, one in enumerate(running) if one is not None]
            if not active:
                return
            if not rows.fixed and len(free) > spare:
                rows.keep(active)
                spare = rows.count - len(active)
                order = torch.tensor(active + [active[0]] * spare, device=rows.device)
                tokens, running = tokens[order], [running[row] for row in active] + [None] * spare
                active = list(range(len(active)))
            tokens, found = _decode(rows, running, tokens, sampling, seed)
            over = []
            for row in active:
                one = running[row]
                assert one is not None
                before = len(one.watch.tokens)
                one.watch.add(column[row] for column in found)
                on_tokens(len(one.watch.tokens) - before)
                if one.watch.finish:
                    over.append(row)
            if over:
                ended = [one for row in over if (one := running[row]) is not None]
                counts = rows.exercised(over, [len(one.watch.tokens) - 1 for one in ended])
                on_ended([Ended(e.number, e.watch, c) for e, c in zip(ended, counts, strict=True)])
                for row in over:
                    running[row] = None
    finally:
        rows.close()


def _decode(
    rows: DecodeRows,
    running: list[_Running | None],
    tokens: torch.Tensor,
    sampling: Sampling,
    seed: int,
) -> tuple[torch.Tensor, list[list[int]]]:
    """The next tokens of every row: the last ones, and all of them (steps, rows).  Waits for the device once."""
    active = [one for one in running if one is not None]
    count = max(1, min(rows.block, max(one.watch.left for one in active)))
    drawn = None
    if not sampling.greedy:
        # A row without a sequence repeats the first one, or runs on for nobody.
        shown = [one or active[0] for one in running]
        named = [one for one in shown for _ in range(count)]
        places = [len(one.watch.tokens) + step for one in shown for step in range(count)]
        drawn = uniforms(seed, [o.task.stream for o in named], [o.task.repeat for o in named], places)
        drawn = drawn.view(len(shown), count).T.to(rows.device)
    found, logits = [], tokens
    for step in range(count):
        logits = rows.step(tokens)
        # Not a number has no place among the running sums; it is looked for below.
        tokens = sampling.choose(logits, None if drawn is None else drawn[step]).clamp_(
            max=logits.shape[-1] - 1
        )
        found.append(tokens)
    # What is not finite stays so: the last step of a block shows it.
    finite = logits.isfinite().all(-1)
    table, finite = torch.stack(found).tolist(), finite.tolist()
    lost = [one.number for one, good in zip(running, finite, strict=True) if one is not None and not good]
    if lost:
        raise Diverged(f"logits of {len(lost)} sequences are not finite, that of task {lost[0]} among them")
    return tokens, table


class _Waiting:
    """Tasks in the order in which they start: long prompts first, repeats of one prompt beside each other."""

    def __init__(
        self,
        rows: DecodeRows,
        tasks: Sequence[Task],
        sampling: Sampling,
        stops: Stops,
        seed: int,
        done: Collection[int],
        on_ended: Callable[[list[Ended]], object],
    ):
        self._rows, self._sampling, self._stops, self._seed = rows, sampling, stops, seed
        self._on_ended = on_ended
        by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, task in enumerate(tasks):
            by_prompt[task.prompt].append(number)
        by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for prompt in sorted(by_prompt, key=lambda prompt: (-len(prompt), prompt)):
            by_length[len(prompt)].append(prompt)
        self._chunks: deque[list[tuple[tuple[int, ...], list[_Running]]]] = deque()
        over = set(done)
        for prompts in by_length.values():
            for first in range(0, len(prompts), PROMPTS_AT_ONCE):
                # All of a chunk are read, finished or not: what is beside a prompt is the same after a restart.
                chunk = [
                    (
                        prompt,
                        [
                            _Running(number, tasks[number], Watch(stops, tasks[number].limit))
                            for number in by_prompt[prompt]
                            if number not in over
                        ],
                    )
                    for prompt in prompts[first : first + PROMPTS_AT_ONCE]
                ]
                if any(started for _, started in chunk):
                    self._chunks.append(chunk)
        self._prefix: Prefix | None = None
        self._ready: deque[tuple[int, _Running]] = deque()

    def take(self, count: int) -> tuple[Prefix, list[int], list[_Running]] | None:
        """Up to ``count`` sequences behind one prefix, with its rows; their first tokens are chosen.  None: no more."""
        while not self._ready:
            self._prefix = None
            if not self._chunks:
                return None
            self._read(self._chunks.popleft())
        taken = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
        assert self._prefix is not None
        return self._prefix, [source for source, _ in taken], [one for _, one in taken]

    def _read(self, chunk: list[tuple[tuple[int, ...], list[_Running]]]) -> None:
        prefix = self._rows.read(torch.tensor([prompt for prompt, _ in chunk]))
        waiting = [(source, one) for source, (_, started) in enumerate(chunk) for one in started]
        logits = prefix.logits[torch.tensor([source for source, _ in waiting], device=self._rows.device)]
        drawn = None
        if not self._sampling.greedy:
            tasks = [one.task for _, one in waiting]
            drawn = uniforms(
                self._seed, [t.stream for t in tasks], [t.repeat for t in tasks], [0] * len(tasks)
            )
            drawn = drawn.to(self._rows.device)
        for (_, one), token in zip(waiting, self._sampling.choose(logits, drawn).tolist(), strict=True):
            one.watch.add([token])
        # One token comes from the prompt alone: no decode state was read.
        nothing: dict[str, int | None] = {"checkpoint": 0, "read_copy": 0 if self._rows.copies else None}
        over = [Ended(one.number, one.watch, nothing) for _, one in waiting if one.watch.finish]
        if over:
            self._on_ended(over)
        self._prefix = prefix
        self._ready.extend(pair for pair in waiting if not pair[1].watch.finish)
