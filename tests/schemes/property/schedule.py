"""Random schedules with a quota for every operation, and the shortest one that still fails."""

import time
from collections import Counter
from random import Random
from typing import Any

from tests.schemes.property.driver import SLOTS, Mismatch, Operation, World
from tests.schemes.property.pool import NaivePool

OPERATIONS: tuple[str, ...] = (
    "allocate", "extend", "step", "verify", "commit", "flush", "fork", "copy", "select", "reset", "preempt",
    "restore", "snapshot", "free", "pad<0", "pad=0", "read", "file", "refused",
)  # fmt: skip
"""What is counted: slots that an operation acts on (see ``counted``), and null rows under both conventions."""
FILLING = ("step", "verify", "commit")
"""Drawn beyond their quota, so that windows fill."""
BATCH = {
    "step": 3.5,
    "verify": 3.5,
    "commit": 3.0,
    "extend": 3.0,
    "flush": 2.0,
    "select": 3.0,
    "fork": 1.5,
    "file": 4.0,
}
"""About how many slots one operation serves."""


def counted(naive: NaivePool, operation: Operation) -> Counter[str]:
    """How often a legal operation exercises each cell.

    A forward counts once for each row that has tokens, a commit for each row with drafts, a flush for each slot that
    it folds (with window 1 there is never anything to fold: then for each slot), select for each target, fork for each
    new slot, file for each held slot, null rows apart.
    """
    name, arguments = operation
    count, found = 1, Counter()
    if "slots" in arguments and name != "select":
        rows = naive.live(arguments["slots"])
        found["pad=0" if naive.first else "pad<0"] = len(arguments["slots"]) - len(rows)
        count = len(rows)
        if name in ("verify", "extend") and arguments["lengths"] is not None:
            count = sum(arguments["lengths"][row] > 0 for row, _ in rows)
        if name == "commit":
            count = sum(bool(naive.held[slot].drafts) for _, slot in rows)
        if name == "flush" and naive.rules.window > 1:
            count = sum(bool(naive.held[slot].window) or naive.held[slot].live for _, slot in rows)
    elif name == "select":
        count = len(arguments["slots"])
    elif name == "fork":
        count = arguments["count"]
    elif name == "file":
        count = len(naive.held)
    found[name] = count
    return found


class Generator:
    """Draws the next operation for the state that the naive pool is in."""

    def __init__(self, random: Random, quota: dict[str, int]):
        self.random, self.quota, self.counts = random, quota, Counter[str]()

    @property
    def done(self) -> bool:
        return all(self.counts[name] >= quota for name, quota in self.quota.items())

    def need(self, name: str) -> int:
        return max(0, self.quota[name] - self.counts[name])

    def next(self, world: World) -> Operation:
        naive, random = world.naive, self.random
        held = sorted(naive.held)
        idle = [slot for slot in held if not naive.held[slot].drafts]
        drafting = [slot for slot in held if naive.held[slot].drafts]
        folds = [s for s in idle if naive.held[s].window or naive.held[s].live or naive.rules.window == 1]
        possible = {
            "allocate": bool(naive.free_slots),
            "restore": bool(naive.free_slots) and bool(world.saved),
            "fork": bool(naive.free_slots) and bool(idle),
            "free": len(held) > 1,
            "preempt": len(idle) > 1,
            "copy": len(held) > 1 and bool(idle),
            "reset": bool(held),
            "read": bool(held),
            "flush": bool(folds),
            "commit": bool(drafting),
            "file": bool(held) and not drafting,
            "refused": True,
        }
        if random.random() < 0.15:
            name = random.choice(FILLING)
        else:
            # Null rows come with any forward.
            weights = {n: self.need(n) / BATCH.get(n, 1.0) + 0.1 for n in self.quota}
            name = random.choices(list(weights), list(weights.values()))[0]
            name = random.choice(FILLING) if name.startswith("pad") else name
        # What cannot be done yet is made possible first.
        for _ in range(3):
            if possible.get(name, bool(idle)):
                break
            if not held:
                name = "allocate"
            elif name in ("allocate", "restore", "fork") and not naive.free_slots:
                name = random.choice(["free", "preempt"])
            elif name == "restore":
                name = "snapshot"
            elif name in ("free", "preempt", "copy") and naive.free_slots:
                name = "allocate"
            elif name == "flush" and idle:
                name = "step"
            else:
                name = "commit" if drafting else "verify"
        return self.operation(name, world, idle, drafting, folds)

    def operation(
        self, name: str, world: World, idle: list[int], drafting: list[int], folds: list[int]
    ) -> Operation:
        random, naive = self.random, world.naive
        held = sorted(naive.held)
        if name == "refused":
            return self.illegal(world, idle, drafting)
        seed = random.randrange(1 << 30)
        arguments: dict[str, Any] = {}
        if name in ("allocate", "reset"):
            given = random.choice([None, None, random.randrange(1000)])
            arguments = {"seed": seed, "state": random.random() < 0.7, "sequence_id": given}
        if name in ("reset", "free", "read"):
            arguments["slot"] = random.choice(held)
        elif name in ("preempt", "snapshot"):
            arguments["slot"] = random.choice(idle)
        elif name == "restore":
            arguments["index"] = random.randrange(len(world.saved))
        elif name == "fork":
            count = random.randint(1, len(naive.free_slots))
            ids = random.choice([None, [random.randrange(1000) for _ in range(count)]])
            arguments = {"slot": random.choice(idle), "count": count, "sequence_ids": ids}
        elif name == "copy":
            source = random.choice(idle)
            arguments = {"source": source, "target": random.choice([s for s in held if s != source])}
        elif name == "select":
            slots = random.sample(held, random.randint(1, len(held)))
            arguments = {"slots": slots, "sources": [random.choice(idle) for _ in slots]}
        elif name == "step":
            arguments = {"slots": self.padded(idle, naive), "seed": seed}
        elif name in ("verify", "extend"):
            slots = self.padded(idle, naive)
            count = random.randint(1, naive.rules.most_drafts if name == "verify" else 7)
            lengths = [random.randint(0, count) if random.random() < 0.5 else count for _ in slots]
            arguments = {
                "slots": slots,
                "count": count,
                "lengths": random.choice([None, lengths]),
                "seed": seed,
            }
        elif name == "commit":
            # Nothing may also be accepted where nothing is pending.
            slots = self.padded(drafting + random.sample(idle, min(1, len(idle))), naive)
            pending = [len(naive.held[s].drafts) if s >= naive.first else 9 for s in slots]
            counts = [random.choice([0, p, p, random.randint(0, p)]) for p in pending]
            arguments = {"slots": slots, "counts": counts}
        elif name == "flush":
            arguments = {"slots": self.padded(folds, naive)}
        return name, arguments

    def padded(self, slots: list[int], naive: NaivePool) -> list[int]:
        """Most of ``slots`` in any order, with null rows between them."""
        random = self.random
        count = len(slots) if random.random() < 0.6 else random.randint(1, len(slots))
        chosen = random.sample(slots, count)
        for _ in range(random.choice([0, 0, 1, 2])):
            chosen.insert(random.randint(0, len(chosen)), random.choice([-1, -5] + [0] * 2 * naive.first))
        return chosen

    def illegal(self, world: World, idle: list[int], drafting: list[int]) -> Operation:
        """Something that must be refused."""
        random, naive = self.random, world.naive
        held, free, first = sorted(naive.held), naive.free_slots, naive.first
        rules, seed = naive.rules, random.randrange(1 << 30)
        outside = random.choice([SLOTS, SLOTS + 3])
        absent = random.choice([*free, outside])
        some = random.choice(held) if held else outside
        single = random.choice(["free", "reset", "read", "preempt", "snapshot"])
        more = {"seed": seed, "state": True, "sequence_id": None} if single == "reset" else {}
        options: list[Operation] = [
            (single, {"slot": absent} | more),
            ("copy", {"source": some, "target": random.choice([some, absent])}),
            ("fork", {"slot": some, "count": len(free) + 1, "sequence_ids": None}),
            ("select", {"slots": [some, absent], "sources": [some, some]}),
            ("flush", {"slots": [some, -1, some]}),
            ("step", {"slots": [*idle[:2], absent], "seed": seed}),
            ("step", {"slots": [some, *idle, some], "seed": seed}),
            ("commit", {"slots": [some, absent], "counts": [0, 0]}),
        ]
        if first:
            options.append(("free", {"slot": 0}))
        if not free:
            options.append(("allocate", {"seed": seed, "state": True, "sequence_id": None}))
            options += [("restore", {"index": 0})] * bool(world.saved) * 4
        if idle:
            rows = [*idle, -1]
            count = rules.most_drafts + random.randint(1, 2)
            options.append(("verify", {"slots": rows, "count": count, "lengths": None, "seed": seed}))
            spoil = random.choice(["q", "k", "v", "log_decay"] + ["beta"] * rules.delta)
            name = random.choice(["step", "verify", "extend"])
            shape = {} if name == "step" else {"count": 1, "lengths": None}
            options.append((name, {"slots": rows, "seed": seed, "spoil": spoil} | shape))
        if drafting:
            slot = random.choice(drafting)
            options.append(("commit", {"slots": [slot], "counts": [len(naive.held[slot].drafts) + 1]}))
            options.append(("commit", {"slots": [slot], "counts": [-1]}))
            options.append((random.choice(["preempt", "snapshot"]), {"slot": slot}))
            options.append(("fork", {"slot": slot, "count": 1, "sequence_ids": None}))
            rows = [*idle, slot]
            options.append(("step", {"slots": rows, "seed": seed}))
            options.append(("flush", {"slots": rows}))
            options.append(("file", {}))
            for name in ("verify", "extend"):
                options.append((name, {"slots": rows, "count": 1, "lengths": None, "seed": seed}))
        return random.choice(options)


def replay(policy: str, family: str, null: str, seed: int, schedule: list[Operation]) -> World:
    """The operations in turn on a new pool; raises Mismatch.  What a failure prints calls this."""
    world = World(policy, family, null, seed)
    for operation in schedule:
        world.apply(operation)
    return world


class Failed(AssertionError):
    """A schedule that fails, with the shortest part of it that does.  ``operations``: how many it took."""

    def __init__(self, message: str, operations: int):
        super().__init__(message)
        self.operations = operations


def explore(
    policy: str,
    family: str,
    seed: int,
    quota: dict[str, int],
    episodes: int = 2,
    limit: int | None = None,
    shrink: float = 60.0,
) -> tuple[Counter[str], int]:
    """Run schedules until the quota of every operation is met, or ``limit`` operations are done.

    episodes: an even number of pools, every other one with slot 0 reserved for null rows.
    Returns how often each was exercised, and the number of roundings that were ties.  shrink: seconds that a failing
    schedule may be shortened for.  Raises Failed.
    """
    total, ties = Counter[str](), 0
    for episode in range(episodes):
        null = "zero" if episode % 2 else "negative"
        other = "pad<0" if episode % 2 else "pad=0"
        share = {
            n: -(-q // (episodes // 2 if n.startswith("pad") else episodes))
            for n, q in quota.items()
            if n != other
        }
        run_seed = seed * episodes + episode
        generator, schedule = Generator(Random(run_seed), share), []
        world = World(policy, family, null, run_seed)
        while not generator.done and (limit is None or sum((total + generator.counts).values()) < limit):
            operation = generator.next(world)
            schedule.append(operation)
            cells = None if world.naive.objections(*operation) else counted(world.naive, operation)
            try:
                legal = world.apply(operation)
            except Mismatch as mismatch:
                done = sum((total + generator.counts).values()) + 1
                shortest = shortened(policy, family, null, run_seed, schedule, time.monotonic() + shrink)
                raise Failed(report(policy, family, null, run_seed, shortest, mismatch), done) from mismatch
            generator.counts += cells if legal and cells else Counter({"refused": 1})
        total, ties = total + generator.counts, ties + world.ties
    return total, ties


def shortened(
    policy: str, family: str, null: str, seed: int, schedule: list[Operation], until: float
) -> list[Operation]:
    """Delta debugging: leave out ever smaller runs of operations while it still fails."""
    size = len(schedule) // 2
    while size and time.monotonic() < until:
        start = 0
        while start < len(schedule) and time.monotonic() < until:
            less = schedule[:start] + schedule[start + size :]
            try:
                replay(policy, family, null, seed, less)
                start += size
            except Mismatch:
                schedule = less
        size //= 2
    return schedule


def report(
    policy: str, family: str, null: str, seed: int, schedule: list[Operation], mismatch: Mismatch
) -> str:
    lines = "".join(f"    {operation!r},\n" for operation in schedule)
    return f"{mismatch}\nreplay({policy!r}, {family!r}, {null!r}, {seed}, [\n{lines}])"
