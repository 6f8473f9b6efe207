"""The command line.  One verb a function; bad input ends with one line and exit status 2."""

import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from quantlab import (
    __version__,
    cli_bench,
    cli_capture,
    cli_compare,
    cli_drift,
    cli_explain,
    cli_preflight,
    cli_replay,
)
from quantlab.cli_claims import claims_app
from quantlab.cli_errors import CommandLineError, discard_output, flush_output, is_help, usage_text
from quantlab.cli_formats import formats_app
from quantlab.cli_predict import predict
from quantlab.cli_size import EPILOG as SIZE_EPILOG
from quantlab.cli_size import size
from quantlab.errors import InputError
from quantlab.terminal import fix_threads, print_json, print_table

if TYPE_CHECKING:
    pass

INTERRUPTED = 130  # exit status: 128 and the number of the interrupt signal
MEASURES = ("acc", "exact_match", "avg_at_k", "bits_per_byte", "word_perplexity")
"""Of lm-eval's metrics the one that is shown: the first of these that a task has."""
BESIDE = ("majority_at_k", "pass_at_k", "no_answer", "truncated", "mean_tokens")
"""What is shown beside it for tasks whose answers are sampled."""

app = typer.Typer(
    name="quantlab",
    help="In which precision may the recurrent decode state be stored and read?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quantlab {__version__}")
        raise typer.Exit


@app.callback()
def quantlab(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    pass


app.add_typer(formats_app, name="formats")
app.add_typer(claims_app, name="claims")

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", "-p", help="Policy text, e.g. fp32/nvfp4@16; repeat for several.", metavar="POLICY"
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A cut-down study that ends within half a minute.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder for records and report.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
Family = Annotated[str, typer.Option("--family", help="gated_delta, kimi_delta, mamba2 or mamba1.")]


def _example(text: str) -> str:
    return f"Example: [bold]quantlab {text}[/bold]"


@app.command(epilog=_example("study experiments/quickstart"))
def study(
    folder: Annotated[Path, typer.Argument(help="Folder with a study.toml, or the TOML file itself.")],
    output: Output = None,
    quick: Quick = False,
    workers: Annotated[int | None, typer.Option(help="Worker processes (default: all cores).", min=1)] = None,
) -> None:
    """Run a study (sweep and report).  The same command resumes one that was interrupted."""
    from quantlab.report import write_report
    from quantlab.sweep.run import run_sweep

    spec = folder / "study.toml" if folder.is_dir() else folder
    if not spec.is_file():
        raise InputError("study", str(folder), "a folder with a study.toml, or a TOML file")
    target = output or Path("results") / (spec.parent.resolve().name + ("-quick" if quick else ""))
    command = f"quantlab study {folder}{' --quick' if quick else ''} --output {target}"
    summary = run_sweep(spec, target, quick=quick, workers=workers, command=command)
    typer.echo(summary)
    typer.echo(f"report: {write_report(target)}")


@app.command(epilog=_example("sweep experiments/quickstart/study.toml --output results/mine --shard 1/4"))
def sweep(
    spec: Annotated[Path, typer.Argument(help="TOML spec of the study.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the records.")],
    quick: Quick = False,
    shard: Annotated[str | None, typer.Option(help="i/n: only the i-th of n parts, counted from 1.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes (default: all cores).", min=1)] = None,
) -> None:
    """Run the points of a spec that have no record yet."""
    from quantlab.sweep.run import parse_shard, run_sweep

    part = None if shard is None else parse_shard(shard)
    if not spec.is_file():
        raise InputError("spec", str(spec), "a TOML file")
    typer.echo(run_sweep(spec, output, quick=quick, shard=part, workers=workers))


@app.command(epilog=_example("report results/quickstart"))
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that a sweep wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the page (default: FOLDER).")
    ] = None,
) -> None:
    """Turn records into one self-contained HTML page, with CSV and Parquet beside it."""
    from quantlab.report import write_report

    typer.echo(write_report(folder, output))


app.command(epilog=cli_drift.EPILOG)(cli_drift.drift)
app.command(epilog=cli_capture.EPILOG)(cli_capture.capture)


@app.command(
    name="eval", epilog=_example("eval --model DIR -p fp32@1 -p fp32/nvfp4@16 --data gpqa_diamond.csv")
)
def evaluate(
    model: Annotated[
        Path, typer.Option("--model", help="Folder of a Hugging Face model, or reference:gated_delta.")
    ],
    policy: Policies = None,
    tasks: Annotated[
        str, typer.Option(help="lm-eval task names, comma-separated.")
    ] = "quantlab_gpqa_diamond_mc",
    data: Annotated[
        str | None,
        typer.Option(help='Questions: a file, a folder, or "hub" to download GPQA (docs/evaluation.md).'),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Traces to read under each policy instead: JSONL, or a run's folder of a policy."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder; one folder a policy inside.")
    ] = Path("results/eval"),
    batch_size: Annotated[int, typer.Option(help="Contexts decoded together.", min=1)] = 32,
    limit: Annotated[
        int | None, typer.Option(help="Only the first documents; of quantlab's benchmarks a sample.", min=1)
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="Documents of state_recall and its like (default 198).", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Sampling and stochastic rounding.", min=0, max=2**32 - 1)] = 0,
    choice_seed: Annotated[int, typer.Option(help="Order of GPQA's choices.", min=0, max=2**32 - 1)] = 0,
    scoring: Annotated[str, typer.Option(help="decode, boundary or prefill.")] = "decode",
    repeats: Annotated[
        int | None, typer.Option(help="Responses to each document of a generative task (default 8).", min=1)
    ] = None,
    max_gen_toks: Annotated[
        int | None, typer.Option("--max-gen-toks", help="Generated tokens at most (default 32768).", min=1)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of sampling (default 1.0); 0 is greedy.", min=0)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Of sampling (default 0.95).", min=0, max=1)] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False,
    generation_batch: Annotated[
        int | None, typer.Option(help="Responses generated together (default 256).", min=1)
    ] = None,
    engine: Annotated[str, typer.Option(help="Of generation: auto, graph or eager.")] = "auto",
    sampling_seed: Annotated[
        int | None, typer.Option(help="Of sampling alone (default: the seed).", min=0, max=2**32 - 1)
    ] = None,
    think_end: Annotated[
        str | None,
        typer.Option(help="What ends a thinking model's thoughts, such as </think>, or its token id."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of the model's context, if its configuration says less.", min=1)
    ] = None,
    log_samples_with_text: Annotated[
        bool,
        typer.Option("--log-samples-with-text", help="Write questions and responses too; keep them private."),
    ] = False,
    preflight: Annotated[
        bool | None,
        typer.Option(
            "--preflight/--no-preflight",
            help="Only look at what would be run; or run without generating a sample first.",
        ),
    ] = None,
    preflight_documents: Annotated[
        int, typer.Option(help="Of each generative task, twice each, in the sample.", min=1)
    ] = 4,
    preflight_tokens: Annotated[
        int, typer.Option(help="Of a response in the sample, at most.", min=1)
    ] = 1024,
    as_json: Json = False,
) -> None:
    """Run lm-eval tasks with the model's decode state under each policy."""
    from quantlab.evals.preflight_report import SampleSize
    from quantlab.evals.run import run_eval
    from quantlab.evals.task_settings import Sampling

    fix_threads()
    if replay is not None:
        without = {
            "data": data,
            "items": items,
            "choice_seed": choice_seed,
            "repeats": repeats,
            "max_gen_toks": max_gen_toks,
            "temperature": temperature,
            "top_p": top_p,
            "chat_template": chat_template,
            "generation_batch": generation_batch,
            "sampling_seed": sampling_seed,
            "think_end": think_end,
            "log_samples_with_text": log_samples_with_text,
        }
        cli_replay.replay(
            model,
            replay,
            policy,
            output=output,
            batch_size=batch_size,
            limit=limit,
            seed=seed,
            max_length=max_length,
            as_json=as_json,
            without=without,
        )
        return
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    generation = {
        "generation_batch": generation_batch,
        "engine": engine,
        "sampling_seed": sampling_seed,
        "think_end_token": think_end,
        "max_length": max_length,
    }
    title = f"{model.name}: {', '.join(names)}"
    show = partial(cli_preflight.show, title=title, as_json=as_json)
    records = run_eval(
        model,
        policy or ["fp32@1"],
        names,
        data=data,
        output=output,
        batch_size=batch_size,
        limit=limit,
        seed=seed,
        scoring=scoring,
        items=items,
        sampling=Sampling(repeats, max_gen_toks, temperature, top_p),
        chat_template=chat_template,
        choice_seed=choice_seed,
        log_samples_with_text=log_samples_with_text,
        generation={name: value for name, value in generation.items() if value is not None},
        preflight=None if preflight is False else SampleSize(preflight_documents, preflight_tokens),
        preflight_only=preflight is True,
        on_preflight=show if preflight else cli_preflight.tell_warnings,
    )
    if preflight:
        return
    rows = []
    for record in records:
        metrics = record["metrics"]
        row = {"policy": record["point"]["policy"], "status": record["status"]}
        for task, values in metrics.get("tasks", {}).items():
            measure = next((name for name in MEASURES if name in values), MEASURES[0])
            row |= {
                f"{task} {measure}": values.get(measure),
                f"{task} stderr": values.get(f"{measure}_stderr"),
            }
            row |= {f"{task} {name}": values[name] for name in BESIDE if name in values}
        keys = ("exercised", "op_hits", "bits_per_value", "bytes_per_token", "warning")
        rows.append(row | {key: metrics.get(key) for key in keys})
    if as_json:
        print_json(rows)
        return
    columns = [
        key for key in dict.fromkeys(k for row in rows for k in row) if key not in ("op_hits", "warning")
    ]
    print_table(title, rows, columns)
    for row in rows:
        if row["warning"]:
            typer.echo(f"{row['policy']}: {row['warning']}")
    typer.echo(f"lm-eval results: {output}")


app.command(epilog=cli_compare.EPILOG)(cli_compare.compare)
app.command(
    epilog=_example("predict fp32/nvfp4@16 nvfp4@1 --alpha 0.999")
    + "\n\n"
    + _example("predict --model DIR --budget 0.3 --output rules.toml")
)(predict)


app.command(epilog=cli_explain.EPILOG)(cli_explain.explain)
app.command(epilog=SIZE_EPILOG)(size)
app.command(epilog=cli_bench.EPILOG)(cli_bench.bench)


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: what a user can cause becomes one line on stderr and exit status 2."""
    # What a batch system sends before it kills: end as on the interrupt key, workers and all.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        status = app(standalone_mode=False)
        flush_output()
    except CommandLineError as error:
        if not is_help(error):
            _leave(usage_text(error))
        if text := error.format_message():
            typer.echo(text)
        sys.exit(error.exit_code)
    except InputError as error:
        _leave(error)
    except BrokenPipeError:
        # The reader has seen enough, as in "| head": nothing to report, but not a success either.
        discard_output()
        sys.exit(1)
    except OSError as error:
        # A disk that fills up, an output that is taken away: nobody's bug, and what is stored stays.
        discard_output()
        place = f" {error.filename}" if error.filename else ""
        _leave(f"{error.strerror or error}{place}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, typer.Abort):
            _interrupted()
        if not isinstance(error, MemoryError) and not re.search("alloc.* memory|out of memory", str(error)):
            raise
        _leave("out of memory: fewer or smaller heads, sequences, steps or batches needed")
    except KeyboardInterrupt:
        _interrupted()
    # Typer makes an exit status of the interrupt key itself.
    if status == INTERRUPTED:
        _interrupted()
    sys.exit(status if isinstance(status, int) else 0)


def _leave(text: object) -> NoReturn:
    typer.echo(f"error: {text}", err=True)
    sys.exit(2)


def _interrupted() -> NoReturn:
    typer.echo(
        "interrupted; what was stored is whole: study, sweep, eval, drift and bench go on from it", err=True
    )
    sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
