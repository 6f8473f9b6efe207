"""A study as a TOML file: pydantic models that name the field of a typo, and their expansion into points.

::

    title = "Which store survives 1024 tokens?"
    policies = ["fp32@1", "fp32@16", "nvfp4@1"]      # default of every block

    [[drift]]                                         # made streams, or stream_file = "layer3.safetensors"
    family = "gated_delta"
    alpha = [0.9, 0.99]                               # given: preset "evidence"; left out: "realistic"
    seed = [0, 1]

    [[eval]]
    model = "builtin:tiny-mamba2"                     # or a model folder
    tasks = ["gpqa_diamond_zeroshot"]
    data = "questions.csv"

    [[script]]
    runner = "scan.py:run_points"                     # a file beside the spec
    name = "typeseg"
    params = { length = 512 }                         # become fields of the point

    [quick]                                           # what --quick puts in place of the above
    steps = 128
    max_policies = 2
    drop = ["eval", "typeseg"]

Paths are relative to the folder of the spec.
"""

import ast
import hashlib
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from quantlab.errors import InputError, unknown_name
from quantlab.records import canonical_json, content_hash, stream_file_hash
from quantlab.sweep.jobs import RUNNERS, Job

BASELINE = "fp32@1"
BUILTIN_MODELS = ("builtin:tiny-gated-delta", "builtin:tiny-mamba2")
STREAM_FIELDS = ("preset", "alpha", "heads", "sequences", "steps", "seed", "value_dim", "key_dim")

Count = Annotated[int, pydantic.Field(gt=0)]
Alpha = Annotated[float, pydantic.Field(gt=0, lt=1)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Some = pydantic.Field(min_length=1)


class _Table(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class DriftBlock(_Table):
    """Error per decoded token on one synthetic stream per (alpha, seed), or on one captured stream."""

    name: str | None = None
    family: str | None = None
    preset: Literal["evidence", "realistic"] | None = None
    alpha: Alpha | Annotated[list[Alpha], Some] | None = None
    heads: Count = 8
    sequences: Count = 2
    steps: Count = 1024
    seed: Seed | Annotated[list[Seed], Some] = 0
    value_dim: Count | None = None
    key_dim: Count | None = None
    stream_file: str | None = None
    policies: list[str] | None = None


class EvalBlock(_Table):
    """Accuracy of one model on lm-eval tasks."""

    name: str | None = None
    model: str
    tasks: Annotated[list[str], Some]
    data: str | None = None
    limit: Count | None = None
    items: Count | None = None
    batch_size: Count = 8
    policies: list[str] | None = None


class ScriptBlock(_Table):
    """Points of a runner that lives in a file beside the spec; its records are of kind "scan"."""

    name: str
    runner: str
    params: dict[str, Any] = {}
    policies: list[str] | None = None


class Quick(_Table):
    """Replacements that make a study small enough to try; ``drop`` names block kinds or block names."""

    steps: Count | None = None
    heads: Count | None = None
    sequences: Count | None = None
    max_policies: Count | None = None
    max_seeds: Count | None = None
    max_alphas: Count | None = None
    limit: Count | None = None
    params: dict[str, Any] = {}
    drop: list[str] = []


class Study(_Table):
    """A whole spec."""

    title: str
    description: str = ""
    policies: list[str] = []
    drift: list[DriftBlock] = []
    eval: list[EvalBlock] = []
    script: list[ScriptBlock] = []
    quick: Quick = Quick()


_TABLES: dict[str, type[_Table]] = {
    "drift": DriftBlock,
    "eval": EvalBlock,
    "script": ScriptBlock,
    "quick": Quick,
}


def load_study(path: str | os.PathLike[str]) -> Study:
    """Read and check a spec.  InputError names the field that is wrong and, for a typo, the nearest valid
    one."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("spec", str(path), f"a readable TOML file ({error})") from error
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("spec", path.name, f"valid TOML ({error})") from error
    try:
        return Study.model_validate(table)
    except pydantic.ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: pydantic.ValidationError) -> InputError:
    # A typo also shows up as a missing field: the unknown name is the better message.
    problems = sorted(
        error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden"
    )
    problem = problems[0]
    location = list(problem["loc"])
    where = ""
    for part in location:
        # Union members are named in the location ("alpha", "list[constrained-float]"); users did not write
        # those.
        if isinstance(part, int):
            where += f"[{part + 1}]"
        elif part.isidentifier() and part not in ("int", "float"):
            where += f".{part}" if where else part
    if problem["type"] == "extra_forbidden":
        table = _TABLES[str(location[0])] if len(location) > 1 else Study
        owner = where.rpartition(".")[0]
        return unknown_name(
            f"spec {owner} field".replace("  ", " "), str(problem["loc"][-1]), table.model_fields
        )
    if problem["type"] == "missing":
        return InputError(f"spec {where}", None, "a value, as this field is required")
    message = problem["msg"].removeprefix("Input should be ")
    return InputError(f"spec {where}", problem["input"], message[:1].lower() + message[1:])


def expand(study: Study, base: str | os.PathLike[str], *, quick: bool = False) -> list[Job]:
    """Jobs of a study: each holds the points that share everything but the policy, in the order of the spec.

    ``base``: folder of the spec.  Policies become canonical text, every default is filled in, a point named
    twice is kept once.  Raises InputError for whatever can be known to be wrong before anything runs.
    """
    base = Path(base).resolve()
    if quick:
        study = _shrink(study)
    groups: dict[str, tuple[str, str, list[dict[str, Any]]]] = {}
    seen: set[str] = set()
    for where, block in _blocks(study):
        runner, shared = _shared_parts(block, where, base)
        policies = _canonical_policies(block.policies or study.policies, where)
        if isinstance(block, EvalBlock) and BASELINE not in policies:
            raise InputError(
                f"spec {where}.policies", policies, f"{BASELINE} among them: accuracy is paired against it"
            )
        for part in shared:
            group = groups.setdefault(canonical_json([runner, part]), (runner, _label(part), []))
            for policy in policies:
                point = {**part, "policy": policy}
                if content_hash(point) not in seen:
                    seen.add(content_hash(point))
                    group[2].append(point)
    jobs = [
        Job(runner, str(base), label, tuple(points)) for runner, label, points in groups.values() if points
    ]
    if not jobs:
        raise InputError("spec", study.title, "at least one [[drift]], [[eval]] or [[script]] block to run")
    return jobs


_Block = DriftBlock | EvalBlock | ScriptBlock


def _blocks(study: Study) -> Iterator[tuple[str, _Block]]:
    for kind in ("drift", "eval", "script"):
        for index, block in enumerate(getattr(study, kind), 1):
            yield f"{kind}[{index}]", block


def _shared_parts(block: _Block, where: str, base: Path) -> tuple[str, list[dict[str, Any]]]:
    """Runner of a block and its points without the policy."""
    if isinstance(block, DriftBlock):
        return RUNNERS["drift"], [
            {"kind": "drift", "stream": stream} for stream in _streams(block, where, base)
        ]
    if isinstance(block, EvalBlock):
        return RUNNERS["eval"], [_eval_part(block, where, base)]
    _check_script(block.runner, f"spec {where}.runner", base)
    own: dict[str, Any] = {"kind": "scan", "name": block.name, "runner": block.runner}
    taken = sorted({*own, "policy"} & block.params.keys())
    if taken:
        raise InputError(f"spec {where}.params", taken[0], "a name that the point does not use itself")
    return block.runner, [own | block.params]


def _streams(block: DriftBlock, where: str, base: Path) -> list[dict[str, Any]]:
    if block.stream_file is not None:
        given = sorted({"family", *STREAM_FIELDS} & block.model_fields_set)
        if given:
            raise InputError(
                f"spec {where}.{given[0]}", getattr(block, given[0]), "nothing, as stream_file decides it"
            )
        path = base / block.stream_file
        return [{"file": block.stream_file, "hash": stream_file_hash(path)}]
    if block.family is None:
        raise InputError(f"spec {where}", None, "family = ... or stream_file = ...")
    families = _families()
    if block.family not in families:
        raise unknown_name(f"spec {where}.family", block.family, families)
    preset = block.preset or ("realistic" if block.alpha is None else "evidence")
    if (block.alpha is None) == (preset == "evidence"):
        expected = (
            "a decay per step, which preset evidence needs" if block.alpha is None else 'preset = "evidence"'
        )
        raise InputError(f"spec {where}.alpha", block.alpha, expected)
    from quantlab.drift.synthetic import DEFAULT_SHAPE

    value_dim, key_dim = DEFAULT_SHAPE[block.family]
    return [
        {
            "preset": preset,
            "family": block.family,
            "alpha": alpha,
            "heads": block.heads,
            "sequences": block.sequences,
            "steps": block.steps,
            "value_dim": block.value_dim or value_dim,
            "key_dim": block.key_dim or key_dim,
            "seed": seed,
        }
        for alpha in _as_list(block.alpha)
        for seed in _as_list(block.seed)
    ]


def _eval_part(block: EvalBlock, where: str, base: Path) -> dict[str, Any]:
    if block.model.startswith("reference:"):
        from quantlab.models.reference import reference_folder

        reference_folder(block.model)
    elif block.model.startswith("builtin:"):
        if block.model not in BUILTIN_MODELS:
            raise unknown_name(f"spec {where}.model", block.model, BUILTIN_MODELS)
    elif not (base / block.model).is_dir():
        expected = f"a model folder, reference:NAME, or one of {', '.join(BUILTIN_MODELS)}"
        raise InputError(f"spec {where}.model", block.model, expected)
    digest = None
    if block.data is not None:
        try:
            digest = hashlib.sha256((base / block.data).read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise InputError(
                f"spec {where}.data", block.data, f"a readable CSV file ({error.strerror})"
            ) from error
    return {
        "kind": "eval",
        "model": block.model,
        "tasks": block.tasks,
        "data": block.data,
        "data_hash": digest,
        "limit": block.limit,
        "batch_size": block.batch_size,
        # Only where it is asked for: other points keep their names.
        **({} if block.items is None else {"items": block.items}),
    }


def _check_script(runner: str, argument: str, base: Path) -> None:
    # The syntax tree tells whether the function is there without running the user's code in this process.
    file, _, function = runner.partition(":")
    if not file.endswith(".py") or not function:
        raise InputError(argument, runner, '"relative/path.py:function"')
    try:
        tree = ast.parse((base / file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise InputError(argument, runner, f"a readable Python file ({error})") from error
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function not in names:
        raise unknown_name(argument, function, names)


def _canonical_policies(texts: list[str], where: str) -> list[str]:
    from quantlab.schemes import parse_policy

    if not texts:
        raise InputError(
            f"spec {where}.policies", texts, "at least one policy, here or at the top of the spec"
        )
    return list(dict.fromkeys(str(parse_policy(text)) for text in texts))


def _families() -> list[str]:
    from quantlab.recurrences import RECURRENCES

    return sorted(RECURRENCES)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _label(part: dict[str, Any]) -> str:
    """A few words for progress lines."""
    if part["kind"] == "drift":
        stream = part["stream"]
        if "file" in stream:
            return stream["file"]
        decay = "" if stream["alpha"] is None else f" alpha {stream['alpha']:g}"
        return f"{stream['family']} {stream['preset']}{decay} seed {stream['seed']}"
    return part["name"] if part["kind"] == "scan" else f"{part['model']} {' '.join(part['tasks'])}"


def _shrink(study: Study) -> Study:
    """The study that --quick runs."""
    quick = study.quick
    names = {block.name for _, block in _blocks(study) if block.name}
    for name in quick.drop:
        if name not in names | {"drift", "eval", "script"}:
            raise unknown_name("spec quick.drop", name, names | {"drift", "eval", "script"})

    def policies(texts: list[str]) -> list[str]:
        return texts[: quick.max_policies]

    def shrunk(block: _Block) -> _Block:
        changes: dict[str, Any] = {"policies": policies(block.policies) if block.policies else None}
        if isinstance(block, DriftBlock) and block.stream_file is None:
            sizes = {"steps": quick.steps, "heads": quick.heads, "sequences": quick.sequences}
            changes |= {name: size for name, size in sizes.items() if size is not None}
            changes["seed"] = _as_list(block.seed)[: quick.max_seeds]
            if block.alpha is not None:
                changes["alpha"] = _as_list(block.alpha)[: quick.max_alphas]
        elif isinstance(block, EvalBlock) and quick.limit is not None:
            changes["limit"] = quick.limit
        elif isinstance(block, ScriptBlock):
            changes["params"] = block.params | quick.params
        return block.model_copy(update=changes)

    kept = {
        kind: [shrunk(block) for block in getattr(study, kind) if block.name not in quick.drop]
        for kind in ("drift", "eval", "script")
        if kind not in quick.drop
    }
    empty: dict[str, Any] = {"drift": [], "eval": [], "script": []}
    return study.model_copy(update=empty | kept | {"policies": policies(study.policies)})
