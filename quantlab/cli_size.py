"""``quantlab size``: how many sequences fit, and what a decoded token moves."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_table

if TYPE_CHECKING:
    from quantlab.models.capacity import Demand, Machine, Speculation
    from quantlab.models.published import Geometry

EPILOG = (
    "Example: [bold]quantlab size --model Qwen3.5-4B -p fp32@1 -p fp32/nvfp4@16:buffer=bf16 "
    "--memory 80GiB --weights 8.4GB[/bold]"
)
BASELINE = "fp32@1"
DEFAULTS = (BASELINE, "fp32@16:buffer=bf16")
DEFAULTS_OF_ONE = (BASELINE, "bf16@1", "int8+ef@1", "fp32@16:buffer=bf16", "fp16+sr/nvfp4@16:buffer=bf16")
LARGEST_COUNT = 10**9
BATCHES = (1, 8, 32, 128, 512)
_SHAPE = ("heads", "key_heads", "value_dim", "key_dim", "layers", "conv_kernel")
_BYTES_HELP = "for example 80GiB (2^30) or 80GB (10^9)"

_SUMMARY = {
    "model": "model",
    "policy": "policy",
    "stored": "B/value",
    "read_mb": "read MB",
    "written_mb": "write MB",
    "relative": "moved",
    "slot_mb": "slot MB",
    "slot_mib": "MiB",
    "slots_per_gib": "per GiB",
}
_NUMBERS = [name for name in _SUMMARY if name not in ("model", "policy")]


def size(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="A published model; repeat (default: all).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Folder of a Hugging Face model: its config.json.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policy text; repeat for several.", metavar="POLICY"),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="A shape by hand: mamba2, gated_delta, kimi_delta or mamba1.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a layer.", min=1)] = None,
    key_heads: Annotated[int | None, typer.Option(help="Key heads (default: heads).", min=1)] = None,
    value_dim: Annotated[int | None, typer.Option(help="Value dim of a head.", min=1)] = None,
    key_dim: Annotated[int | None, typer.Option(help="Key dim of a head.", min=1)] = None,
    layers: Annotated[int | None, typer.Option(help="Recurrent layers (default: 1).", min=1)] = None,
    conv_kernel: Annotated[
        int | None, typer.Option(help="Width of the short convolution (default: none).", min=1)
    ] = None,
    drafts: Annotated[
        int | None, typer.Option(help="Drafted tokens of a forward (speculation).", min=1)
    ] = None,
    accepted: Annotated[
        int | None, typer.Option(help="Tokens of a forward that stay (default: drafts + 1, all).", min=1)
    ] = None,
    memory: Annotated[str | None, typer.Option(help=f"Of the accelerator: {_BYTES_HELP}.")] = None,
    weights: Annotated[str | None, typer.Option(help=f"That the accelerator holds: {_BYTES_HELP}.")] = None,
    weights_read: Annotated[
        str | None, typer.Option(help="Weights that a decode step reads (default: all of --weights).")
    ] = None,
    kv_per_token: Annotated[
        str | None, typer.Option(help="KV cache of a token, all attention layers.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in the KV cache of a sequence.", min=1)] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences decoded together; repeat for several.", min=1)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line instead of tables.")
    ] = False,
) -> None:
    """Count what a decoded token moves and a slot holds, how many sequences fit, and when the state decides."""
    from quantlab.models.capacity import Machine, Speculation, demand, parse_bytes
    from quantlab.schemes import parse_policy

    given = (heads, key_heads, value_dim, key_dim, layers, conv_kernel)
    shape: dict[str, int | None] = dict(zip(_SHAPE, given, strict=True))
    counts = shape | {"drafts": drafts, "accepted": accepted, "context": context, "batch": max(batch or [1])}
    for name, value in counts.items():
        # Beyond this a typing error, and soon no float.
        if value is not None and value > LARGEST_COUNT:
            raise InputError(name.replace("_", "-"), value, f"at most {LARGEST_COUNT}")
    geometries = _geometries(model, config, family, shape)
    one = len(geometries) == 1
    policies = [parse_policy(text) for text in policy or (DEFAULTS_OF_ONE if one else DEFAULTS)]
    if accepted is not None and drafts is None:
        raise InputError("accepted", accepted, "--drafts beside it")
    speculation = (
        None if drafts is None else Speculation(drafts, drafts + 1 if accepted is None else accepted)
    )
    if (kv_per_token is None) != (context is None):
        raise InputError("kv-per-token", kv_per_token, "both --kv-per-token and --context, or neither")
    if batch and weights is None and weights_read is None:
        raise InputError("batch", batch, "--weights or --weights-read, which the state is weighed against")
    held = 0.0 if weights is None else parse_bytes("weights", weights)
    machine = Machine(
        memory=None if memory is None else parse_bytes("memory", memory),
        weights=held,
        weights_read=held if weights_read is None else parse_bytes("weights-read", weights_read),
        kv_per_token=0.0 if kv_per_token is None else parse_bytes("kv-per-token", kv_per_token),
        context=context or 0,
    )
    chosen = [
        (demand(geometry, parse_policy(BASELINE), speculation), demand(geometry, parsed, speculation))
        for geometry in geometries
        for parsed in policies
    ]
    batches = list(batch or BATCHES)
    if as_json:
        print_json([_as_object(*pair, machine, speculation, batches) for pair in chosen])
        return
    _print_summary(chosen, speculation)
    if one:
        _print_parts([found for _, found in chosen])
    if machine.memory is not None:
        _print_concurrency([found for _, found in chosen], machine)
    if machine.weights_read:
        _print_break_even(chosen, machine, batches)
    for line in _notes([found for _, found in chosen]):
        typer.echo(line)


def _geometries(
    names: list[str] | None, config: Path | None, family: str | None, shape: dict[str, int | None]
) -> list["Geometry"]:
    """The models asked for, in one of three ways."""
    from quantlab.models.config_geometry import read_config
    from quantlab.models.published import PUBLISHED, Geometry, published
    from quantlab.recurrences import get_recurrence

    if sum(given is not None for given in (names or None, config, family)) > 1:
        raise InputError("model", names or family or str(config), "one of --model, --config or --family")
    if family is None:
        given = [name for name, value in shape.items() if value is not None]
        if given:
            raise InputError(given[0].replace("_", "-"), shape[given[0]], "--family beside it")
        if config is not None:
            return [read_config(config)]
        return [published(name) for name in names] if names else list(PUBLISHED.values())
    get_recurrence(family)
    missing = [name for name in ("heads", "value_dim", "key_dim") if shape[name] is None]
    if missing:
        raise InputError("family", family, f"--{missing[0].replace('_', '-')} beside it")
    sizes = {name: value or 0 for name, value in shape.items()}
    key_heads = sizes["key_heads"] or sizes["heads"]
    if sizes["heads"] % key_heads:
        raise InputError("key-heads", key_heads, f"a divisor of heads = {sizes['heads']}")
    name = f"{family} {sizes['heads']}x{sizes['value_dim']}x{sizes['key_dim']}"
    return [
        Geometry(
            *(name, family, sizes["heads"], key_heads, sizes["value_dim"], sizes["key_dim"]),
            layers=sizes["layers"] or 1,
            conv_kernel=shape["conv_kernel"],
            source="by hand",
        )
    ]


def _print_summary(pairs: list[tuple["Demand", "Demand"]], speculation: "Speculation | None") -> None:
    rows = []
    for baseline, found in pairs:
        rows.append(
            {
                "model": _label(found.geometry),
                "policy": str(found.policy),
                "stored": f"{found.stored_per_value:.3f}",
                "read_mb": found.bytes_read / found.accepted,
                "written_mb": found.bytes_written / found.accepted,
                "relative": f"{found.bytes_per_token / baseline.bytes_per_token:.0%}",
                "slot_mb": found.bytes_held,
                "slot_mib": found.bytes_held,
                "slots_per_gib": f"{found.slots_per_gib:,}",
                "states": str(found.states),
            }
        )
    _align(rows, {"read_mb": 1e6, "written_mb": 1e6, "slot_mb": 1e6, "slot_mib": 2**20})
    columns = list(_SUMMARY)
    title = "For a sequence: read and written a token, held by a slot (MB, MiB), slots in a GiB; moved: against fp32@1"
    if speculation is not None:
        columns.append("states")
        title = (
            f"For a request, {speculation.tokens} tokens in a forward, {speculation.accepted} of them stay: "
            "read and written for one that stays"
        )
    if len({row["model"] for row in rows}) == 1:
        columns.remove("model")
        title = f"{rows[0]['model']}. {title}"
    kept = ("policy", "relative", "slot_mb", "slot_mib", "slots_per_gib", "states")
    narrow = [c for c in columns if c in (("model", *kept[:1], *kept[3:]) if "model" in columns else kept)]
    print_table(title, rows, columns, _SUMMARY, [*_NUMBERS, "states"], narrow)


def _print_parts(demands: list["Demand"]) -> None:
    rows: list[dict[str, Any]] = []
    names = {"read": "read MB", "written": "write MB", "held": "held MB", "held_mib": "MiB"}
    for found in demands:
        # A policy is a line of its own: no column, so that a narrow terminal has room.
        rows.append({"part": str(found.policy)} | dict.fromkeys(names))
        sides = [_split(found, side) for side in (found.read, found.written, found.held)]
        for part in dict.fromkeys(name for side in (sides[2], sides[0], sides[1]) for name in side):
            read, written, held = (side.get(part) for side in sides)
            rows.append(
                {"part": f"  {part}", "read": read, "written": written, "held": held, "held_mib": held}
            )
    _align(rows, {"read": 1e6, "written": 1e6, "held": 1e6, "held_mib": 2**20})
    for row in rows:
        if not row["part"].startswith(" "):
            row |= dict.fromkeys(names, "")
    unit = "token" if demands[0].accepted == demands[0].states == 1 else "forward"
    print_table(f"By part, read and written a {unit}", rows, ["part", *names], names, list(names))


def _split(found: "Demand", side: dict[str, float]) -> dict[str, float]:
    """The parts of a side, with scales and component apart from codes."""
    from quantlab.models.capacity import shares

    stores = {"checkpoint": found.policy.checkpoint, "read copy": found.policy.read_copy}
    parts = {}
    for name, value in side.items():
        store = stores.get(name)
        split = {} if store is None else shares(store, found.geometry)
        if len(split) > 1:
            parts |= {f"{name} {part}": value * share for part, share in split.items()}
        else:
            parts[name] = value
    return parts


def _print_concurrency(demands: list["Demand"], machine: "Machine") -> None:
    from quantlab.models.capacity import concurrency

    rows = [
        {
            "model": _label(found.geometry),
            "policy": str(found.policy),
            "request": found.bytes_held + machine.kv,
            "state": f"{found.bytes_held / (found.bytes_held + machine.kv):.0%}",
            "fit": f"{concurrency(found, machine):,}",
        }
        for found in demands
    ]
    _align(rows, {"request": 2**20})
    names = {"request": "request MiB", "state": "state's share", "fit": "requests"}
    title = f"Requests in {machine.memory / 2**30 if machine.memory else 0:.4g} GiB"
    title += (
        f" beside {machine.weights / 2**30:.4g} GiB of weights" if machine.weights else ", nothing else in it"
    )
    title += f", KV cache of {machine.context:,} tokens each" if machine.kv else ", no KV cache counted"
    columns = ["model", "policy", *names]
    if len({row["model"] for row in rows}) == 1:
        columns.remove("model")
    print_table(title, rows, columns, names, list(names))


def _print_break_even(pairs: list[tuple["Demand", "Demand"]], machine: "Machine", batches: list[int]) -> None:
    from quantlab.models.capacity import (
        batch_of_equal_memory,
        batch_of_equal_traffic,
        speed_bound,
        state_share,
    )

    rows = []
    for baseline, found in pairs:
        row = {"model": _label(found.geometry), "policy": str(found.policy)}
        row["traffic"] = f"{batch_of_equal_traffic(found, machine):,.1f}"
        row["memory"] = f"{batch_of_equal_memory(found, machine):,.1f}" if machine.weights else "-"
        ratio = baseline.bytes_per_forward / found.bytes_per_forward
        for batch in batches:
            row[f"bound {batch}"] = f"{speed_bound(state_share(baseline, machine, batch), ratio):.3f}"
        rows.append(row)
    shares: dict[str, str] = {}
    for baseline, _ in pairs:
        shares[_label(baseline.geometry)] = ", ".join(
            f"{state_share(baseline, machine, batch):.1%} at {batch}" for batch in batches
        )
    names = {"traffic": "= moved", "memory": "= held"} | {
        f"bound {batch}": f"x at {batch}" for batch in batches
    }
    columns = ["model", "policy", *names]
    if len(shares) == 1:
        columns.remove("model")
    others = f"{machine.weights_read / 1e9:.4g} GB of weights"
    others += f" and {machine.context:,} tokens of KV cache a sequence" if machine.kv else ""
    title = f"A step that also reads {others}: at most x times faster than with {BASELINE}"
    narrow = [*columns[: columns.index("memory") + 1], *columns[-2:]]
    print_table(title, rows, columns, names, list(names), narrow)
    typer.echo("= moved, = held: the batch whose states move, or hold, as many bytes as the weights")
    for model, text in shares.items():
        typer.echo(f"state's share of a step's bytes, {model}, {BASELINE}: {text}")


def _notes(demands: list["Demand"]) -> list[str]:
    """What a reader of the tables could miss."""
    lines = []
    for found in demands:
        bits = found.policy.checkpoint.element.storage_bits
        if bits < 16 and found.policy.read_copy is None and found.stored_per_value >= 2:
            lines.append(
                f"{found.policy}: {bits}-bit codes, but {found.stored_per_value:.2f} B a value with scales and "
                "residual; bf16 takes 2"
            )
    for found in demands:
        geometry = found.geometry
        if geometry.from_memory:
            lines.append(f"{geometry.name}: {', '.join(geometry.from_memory)} from memory, unchecked")
        if geometry.layers is None:
            lines.append(f"{geometry.name}: number of layers unknown, figures are those of one")
        if geometry.conv_kernel is None:
            lines.append(f"{geometry.name}: convolution unknown, not counted")
    return list(dict.fromkeys(lines))


def _label(geometry: "Geometry") -> str:
    return geometry.name if geometry.layers is not None else f"{geometry.name}, a layer"


def _align(rows: list[dict[str, Any]], units: dict[str, float]) -> None:
    """Numbers of the named columns as text in their units, with as many decimals as the smallest of all needs."""
    values = [row[name] / unit for row in rows for name, unit in units.items() if row[name]]
    decimals = min(6, max(1, 1 - math.floor(math.log10(min(values))))) if values else 0
    for row in rows:
        for name, unit in units.items():
            row[name] = "-" if row[name] is None else f"{row[name] / unit:,.{decimals}f}"


def _as_object(
    baseline: "Demand",
    found: "Demand",
    machine: "Machine",
    speculation: "Speculation | None",
    batches: list[int],
) -> dict[str, Any]:
    from quantlab.models.capacity import (
        batch_of_equal_memory,
        batch_of_equal_traffic,
        concurrency,
        speed_bound,
        state_share,
    )

    geometry = found.geometry
    row: dict[str, Any] = {
        "model": geometry.name,
        "policy": str(found.policy),
        "geometry": {key: value for key, value in vars(geometry).items() if key != "name"},
        "values": geometry.counted_layers * geometry.shape.values,
        "stored_bytes_per_value": found.stored_per_value,
        "tokens_per_forward": speculation.tokens if speculation else 1,
        "accepted_per_forward": found.accepted,
        "bytes_read_per_forward": found.read,
        "bytes_written_per_forward": found.written,
        "bytes_per_token": found.bytes_per_token,
        "against_fp32": found.bytes_per_token / baseline.bytes_per_token,
        "states_held": found.states,
        "bytes_held": found.held,
        "slot_bytes": found.bytes_held,
        "slot_mb": found.bytes_held / 1e6,
        "slot_mib": found.bytes_held / 2**20,
        "slots_per_gib": found.slots_per_gib,
    }
    if machine.memory is not None:
        row["requests"] = concurrency(found, machine)
        row["request_bytes"] = found.bytes_held + machine.kv
    if machine.weights_read:
        ratio = baseline.bytes_per_forward / found.bytes_per_forward
        row["batch_of_equal_traffic"] = batch_of_equal_traffic(found, machine)
        row["batch_of_equal_memory"] = batch_of_equal_memory(found, machine) if machine.weights else None
        row["break_even"] = [
            {
                "batch": batch,
                "state_share_fp32": (share := state_share(baseline, machine, batch)),
                "speed_bound": speed_bound(share, ratio),
            }
            for batch in batches
        ]
    return row
