"""``quantlab capture``: the real decode inputs of a model's recurrent layers, as stream files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from quantlab.terminal import fix_threads, print_json, print_table, print_wrapped, progress

EPILOG = "Example: [bold]quantlab capture --model DIR --text FILE --layers 0,3-5 --steps 512 --output captured[/bold]"
_COLUMNS = (
    "layer",
    "file",
    "family",
    "heads",
    "key_heads",
    "value_dim",
    "key_dim",
    "sequences",
    "steps",
    "hash",
)


def capture(
    model: Annotated[
        Path, typer.Option("--model", help="Folder of a Hugging Face model, or builtin:tiny-mamba2.")
    ],
    text: Annotated[Path, typer.Option("--text", help="UTF-8 text that the model reads.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to be made: a stream file a layer, and index.json.")
    ],
    layers: Annotated[
        str | None, typer.Option(help="Recurrent layers, such as 0,3-5 (default: all).")
    ] = None,
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="Decoded tokens behind it.", min=1)] = 1024,
    sequences: Annotated[
        int, typer.Option(help="Consecutive pieces of the text, each with a prompt of its own.", min=1)
    ] = 1,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", "-p", help="What holds the state meanwhile; a .toml file of rules.", metavar="POLICY"
        ),
    ] = "fp32@1",
    seed: Annotated[int, typer.Option(help="Of stochastic rounding.", min=0, max=2**63 - 1)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line instead of a table.")
    ] = False,
) -> None:
    """Record what a model feeds to its decode states while it reads a text, for replay without the model.

    Each file replays with quantlab drift --stream FILE.  No piece of the text is written.  The same command on a folder
    that it has filled does nothing.
    """
    import torch

    from quantlab.evals.run import model_folder
    from quantlab.models.capture import capture as capture_streams
    from quantlab.models.capture import check_free, check_layers, read_index, write_capture
    from quantlab.models.texts import load_weights, quiet_transformers, read_text_source
    from quantlab.records import check_output_place, remove_stale
    from quantlab.schemes import parse_rules
    from quantlab.schemes.rules import parse_numbers
    from quantlab.sweep.environment import capture_environment

    fix_threads()
    quiet_transformers()
    rules = parse_rules(policy)
    asked = None if layers is None else sorted(parse_numbers("layers", layers))
    read_index(output)  # whatever else is there is refused before the weights are read
    with ExitStack() as stack:
        folder = model_folder(str(model), stack)
        needed = f"{sequences} x (a prefill of {prefill} and {steps} steps)"
        source = read_text_source(folder, text, sequences=sequences, tokens=prefill + steps, needed=needed)
        loaded = load_weights(folder)
        request: dict[str, Any] = {
            **source.about,
            "layers": list(check_layers(loaded, asked)),
            "prefill": prefill,
            "steps": steps,
            "sequences": sequences,
            "policy": str(rules),
            "policy_seed": seed,
        }
        index = check_free(output, request)
        if index is None:
            check_output_place(output)
            remove_stale(output.resolve().parent)
            with progress(f"{steps} steps", steps) as advance:
                streams = capture_streams(
                    loaded,
                    source.ids,
                    layers=request["layers"],
                    prefill=prefill,
                    steps=steps,
                    policy=rules,
                    seed=seed,
                    on_step=advance,
                )
            environment = capture_environment(torch.get_num_threads())
            write_capture(streams, output, request=request, environment=environment)
            index = read_index(output)
            assert index is not None
    if as_json:
        print_json(index["streams"])
        return
    print_table(
        f"{source.about['model']} under {rules}", index["streams"], list(_COLUMNS), None, (), ["file", "hash"]
    )
    print_wrapped(f"Replay: quantlab drift --stream {output / index['streams'][0]['file']} -p POLICY")
