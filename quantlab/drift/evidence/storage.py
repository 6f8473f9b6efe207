"""B1, B2, B8, B9, B12, B18: how often a state is stored, and how."""

import math

import numpy as np
import torch

from quantlab.drift.evidence.case import Case, Figure, Measured, mean_over, pooled_over
from quantlab.drift.evidence.streams import gdn, gdn_stream, output_errors, shadow, squared
from quantlab.drift.measure import run_drift
from quantlab.drift.rounding_noise import rounding_noise
from quantlab.drift.streams import Stream
from quantlab.drift.synthetic import synthetic_stream
from quantlab.formats import parse
from quantlab.recurrences import StepInputs, chunk, get_recurrence
from quantlab.recurrences.base import expand_groups, matvec
from quantlab.schemes import start

INT8 = ("int8@1", "int8+sr@1", "int8+ef@1")
READ_AFTER_STORE = (
    "the thread reads S q after the token's own store, the file and the serving kernels before it, when the new"
    " token has diluted the error by alpha. Measured the thread's way (lines 'read after store', T = 64, beta = .5)"
    " its figures come out: each is right about its own read point. The file, which explains the table by T alone,"
    " is not: at alpha .9 no T gives .0142"
)


def _b1(full: bool) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for alpha in (0.9, 0.99):
        stream = gdn(alpha, 64, full, beta=0.5)
        result = run_drift(stream, INT8)
        for name, run in zip(("RN", "SR", "EF"), result.runs, strict=True):
            value = pooled_over(run.output_error, result.output_reference)
            found |= {f"{who} alpha {alpha} {name}": value for who in ("check", "thread")}
        nearest, stochastic, _ = result.runs
        found["SR / RN"] = pooled_over(stochastic.output_error, nearest.output_error)
        for name, policy in zip(("RN", "SR", "EF"), INT8, strict=True):
            found[f"thread, read after store {alpha} {name}"] = _read_after_store(stream, policy)
    for alpha, steps in ((0.99, 256), (0.999, 256), (0.999, 1024)):
        for name, value in zip(
            ("RN", "SR", "EF"), output_errors(gdn(alpha, steps, full, beta=0.5), INT8).values(), strict=True
        ):
            found[f"check alpha {alpha} T {steps} {name}"] = value
    feedback = [value.value for name, value in found.items() if name.startswith("check") and "EF" in name]
    found["EF, largest distance from .0066"] = Measured(max(abs(value / 0.0066 - 1) for value in feedback))
    return found


def _read_after_store(stream: Stream, policy: str) -> Measured:
    """Output error when S q is taken from what the token's own store holds."""
    state = start(policy, stream.family, stream.initial)
    error, reference = [], []
    for exact in shadow(stream):
        state.step(exact.inputs)
        q = expand_groups(exact.inputs.q, stream.heads, 1)
        error.append(squared((matvec(state.materialize(), q).double() - exact.output)[..., None]))
        reference.append(squared(exact.output[..., None]))
    return pooled_over(np.array(error), np.array(reference))


B1 = Case(
    "B1",
    "INT8 rows stored every token: nearest, stochastic, error feedback (hipfire)",
    (
        *(Figure(f"thread alpha 0.9 {n}", f, why=READ_AFTER_STORE)
          for n, f in (("RN", "0.0142"), ("SR", "0.0203"), ("EF", "0.0066"))),
        *(Figure(f"thread, read after store 0.9 {n}", f)
          for n, f in (("RN", "0.0142"), ("SR", "0.0203"), ("EF", "0.0066"))),
        *(Figure(f"check alpha 0.9 {n}", f)
          for n, f in (("RN", "0.0128"), ("SR", "0.0182"), ("EF", "0.0060"))),
        *(Figure(f"thread alpha 0.99 {n}", f, why=READ_AFTER_STORE)
          for n, f in (("RN", "0.0264"), ("SR", "0.0374"), ("EF", "0.0066"))),
        *(Figure(f"thread, read after store 0.99 {n}", f)
          for n, f in (("RN", "0.0264"), ("SR", "0.0374"), ("EF", "0.0066"))),
        *(Figure(f"check alpha 0.99 {n}", f)
          for n, f in (("RN", "0.0258"), ("SR", "0.0363"), ("EF", "0.0064"))),
        *(Figure(f"check alpha {a} T {t} {n}", f)
          for a, t, row in ((0.99, 256, ("0.036", "0.051", "0.0066")), (0.999, 256, ("0.050", "0.070", "0.0068")),
                            (0.999, 1024, ("0.066", "0.094", "0.0071")))
          for n, f in zip(("RN", "SR", "EF"), row, strict=True)),
        Figure("SR / RN", "1.41", why="sqrt(2): a step's square / 6 against / 12"),
        Figure("EF, largest distance from .0066", "<= 0.15", why="the pass rule of the source, for every alpha and T"),
    ),
    _b1,
)  # fmt: skip

CHUNK = 16
BOUNDARY = {"EF": "int8+ef@16", "no EF": "int8@16", "EF per token": "int8+ef@1", "RN per token": "int8@1"}


def _b2(full: bool) -> dict[str, Measured]:
    sequences = 32 if full else 8
    generator = torch.Generator().manual_seed(2)
    alpha = torch.empty(49 * CHUNK, sequences, 4).uniform_(0.985, 0.9995, generator=generator)
    stream = gdn_stream(alpha.log(), seed=3, beta=0.5)
    states = {name: start(policy, stream.family, stream.initial) for name, policy in BOUNDARY.items()}
    worst = {name: torch.zeros(49, sequences, dtype=torch.float64) for name in states}
    largest = torch.zeros(49, sequences, dtype=torch.float64)
    for t, exact in enumerate(shadow(stream)):
        at = t // CHUNK
        largest[at] = torch.maximum(largest[at], exact.output.abs().amax((1, 2)))
        for name, state in states.items():
            error = (state.step(exact.inputs).double() - exact.output).abs().amax((1, 2))
            worst[name][at] = torch.maximum(worst[name][at], error)
    curves = {name: (value / largest).numpy() for name, value in worst.items()}
    found = {
        f"{name}, chunk {chunk}": mean_over(curves[name][chunk])
        for name in ("EF", "no EF")
        for chunk in (1, 8, 16, 48)
    }
    for name in ("EF per token", "RN per token"):
        found |= {f"{name}, chunk {chunk}": mean_over(curves[name][chunk]) for chunk in (8, 48)}
    centred = np.arange(1, 49) - 24.5
    for name in ("EF", "no EF"):
        slopes = (centred[:, None] * curves[name][1:]).sum(0) / (centred**2).sum()
        found[f"slope a chunk, {name}"] = mean_over(slopes)
    found["rise from chunk 1 to 48, no EF"] = mean_over((curves["no EF"][48] - curves["no EF"][1]) / 47)
    tail = gdn_stream(alpha[:33, :1].log(), seed=5)
    found["chunk form, T 33, float64"] = Measured(_chunk_against_steps(tail))
    found["growth of |S|, keys not normalised"] = Measured(_raw_keys(tail))
    return found


def _chunk_against_steps(stream: Stream) -> float:
    """Largest difference of outputs and state, relative to the largest output and state value."""
    tokens = StepInputs(stream.q, stream.k, stream.v, stream.log_decay, stream.beta)
    tokens = tokens.to(torch.float64).map(lambda t: t.transpose(0, 1))
    steps = list(shadow(stream))
    outputs = torch.stack([s.output for s in steps], 1)
    state, found = chunk(get_recurrence(stream.family), stream.initial.double(), tokens)
    last = steps[-1].state
    return max(
        float((found - outputs).abs().max() / outputs.abs().max()),
        float((state - last).abs().max() / last.abs().max()),
    )


def _raw_keys(stream: Stream) -> float:
    """max |S| after 33 tokens with keys of their natural length over that with unit keys."""
    length = math.sqrt(stream.k.shape[-1])
    state = stream.initial.double()
    recurrence = get_recurrence(stream.family)
    for t in range(stream.steps):
        inputs = stream.step(t).to(torch.float64)
        raw = StepInputs(inputs.q, inputs.k * length, inputs.v, inputs.log_decay, inputs.beta)
        state, _ = recurrence.step(state, raw)
    return float(state.abs().max() / list(shadow(stream))[-1].state.abs().max())


SATURATES = (
    "nobody's growth law: the state forgets within 1 / (1 - rho) = 47 tokens, so the error saturates after the third"
    " chunk, and a line through chunks 1 to 48 spreads that first rise over the run: 6e-5 (8e-5 for beta = .1; with"
    " alpha drawn once a head 1.7e-4, as slow heads go on). The thread's number equals its own rise from first to"
    " last chunk, which is ours too (next line): a rise, not a slope"
)
_EF_CHUNKS = (("1", "6.87e-3"), ("8", "6.14e-3"), ("16", "6.03e-3"), ("48", "7.48e-3"))
_PLAIN_CHUNKS = (("1", "6.87e-3"), ("8", "8.66e-3"), ("16", "9.45e-3"), ("48", "1.16e-2"))
B2 = Case(
    "B2",
    "INT8 stored at the ends of chunks of 16, alpha ~ U(.985, .9995) per token (hipfire)",
    (
        *(Figure(f"EF, chunk {c}", f, units=1) for c, f in _EF_CHUNKS),
        *(Figure(f"no EF, chunk {c}", f, units=1) for c, f in _PLAIN_CHUNKS),
        Figure("EF per token, chunk 8", "6.5e-3", units=1),
        Figure("EF per token, chunk 48", "9.4e-3", units=1),
        Figure("RN per token, chunk 8", "4.0e-2", units=1),
        Figure("RN per token, chunk 48", "4.5e-2", units=1),
        Figure("slope a chunk, EF", "1.9e-5", units=1),
        Figure("slope a chunk, no EF", "1.07e-4", units=1, why=SATURATES),
        Figure(
            "rise from chunk 1 to 48, no EF", "1.01e-4", units=1, why="(1.16e-2 - 6.87e-3) / 47 of the thread"
        ),
        Figure(
            "chunk form, T 33, float64",
            "<= 1.8e-14",
            why="(T + key_dim) 2^-53 bounds T sums of key_dim products; the thread saw 1.3e-15",
        ),
        Figure(
            "growth of |S|, keys not normalised",
            ">= 4.2e5",
            why="the thread's 1.6e7 / 38; each token multiplies the part along its key by |1 - beta |k|^2|, up to 127",
        ),
    ),
    _b2,
)


def _b8(full: bool) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for alpha, steps in ((0.9, 256), (0.99, 64), (0.99, 256), (0.999, 256)):
        result = run_drift(gdn(alpha, steps, full), ["bf16@1", "fp16@1"])
        bf16, fp16 = result.runs
        found[f"alpha {alpha}, T {steps}"] = pooled_over(bf16.output_error, result.output_reference)
        found["bf16 / fp16"] = pooled_over(bf16.output_error, fp16.output_error)
    state = torch.randn(1, 16, 128, 128, generator=torch.Generator().manual_seed(4))
    found["thread, relative RMS"] = mean_over(rounding_noise(parse("bf16"), state).numpy()[0])
    return found


B8 = Case(
    "B8",
    "bf16 state rewritten every token, GDN (imp and others)",
    (
        Figure("alpha 0.9, T 256", "0.0034"),
        Figure("alpha 0.99, T 64", "0.0067"),
        Figure("alpha 0.99, T 256", "0.0094"),
        Figure("alpha 0.999, T 256", "0.013"),
        Figure("bf16 / fp16", "8.0", why="three more bits of mantissa"),
        Figure(
            "thread, relative RMS",
            "0.0018",
            comparable=False,
            why="alpha is not given. The measured number is ONE rounding of a Gaussian state: a round trip of .18 % is"
            " that, or a state that forgets within a token or two; it says nothing about 256 stores at alpha .99",
        ),
    ),
    _b8,
)

WINDOWS = (1, 8, 16, 32)


def _b9(full: bool) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for alpha, formats in ((0.99, ("int8",)), (0.999, ("int8", "bf16"))):
        policies = [f"{name}@{window}" for name in formats for window in WINDOWS]
        result = run_drift(gdn(alpha, 2048, full, beta=0.5), policies)
        errors = {str(run.policy): run.output_error[1024:] for run in result.runs}
        reference = result.output_reference[1024:]
        found |= {
            f"alpha {alpha} {policy}": pooled_over(error, reference) for policy, error in errors.items()
        }
        found["L 8 / L 32"] = pooled_over(errors["int8@8"], errors["int8@32"])
    return found


_B9_ROWS = (
    (0.99, "int8", ("0.0394", "0.0141", "0.0100", "0.0070")),
    (0.999, "int8", ("0.0714", "0.0256", "0.0182", "0.0128")),
    (0.999, "bf16", ("0.0189", "0.0066", "0.0047", "0.0033")),
)
B9 = Case(
    "B9",
    "the same format stored every L tokens: error falls as 1 / sqrt(L)",
    (
        *(
            Figure(f"alpha {alpha} {name}@{window}", text)
            for alpha, name, row in _B9_ROWS
            for window, text in zip(WINDOWS, row, strict=True)
        ),
        Figure("L 8 / L 32", "2.0", why="1 / sqrt(L)"),
    ),
    _b9,
)

DUAL = {
    "copy serves q only": "fp32/nvfp4@16:key_read=checkpoint:flush_read=copy",
    "copy serves q and k": "fp32/nvfp4@16:contents=derived:flush_read=copy",
    "is the checkpoint": "nvfp4@16",
    "every token": "nvfp4@1",
}
_B12_ROWS = {
    "copy serves q only": ("0.048", "0.087", "0.094"),
    "copy serves q and k": ("0.047", "0.089", "0.105"),
    "is the checkpoint": ("0.048", "0.147", "0.274"),
}


def _b12(full: bool) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for alpha in (0.9, 0.99, 0.999):
        result = run_drift(gdn(alpha, 1024, full), list(DUAL.values()))
        half = slice(512, None)
        for name, run in zip(DUAL, result.runs, strict=True):
            error = pooled_over(run.output_error[half], result.output_reference[half])
            found[f"{name}, alpha {alpha}"] = error
            if name == "copy serves q only" and alpha == 0.99:
                found["growth of the copy's error"] = Measured(abs(result.growth(run).exponent))
    found[SHARED] = _one_scale_for_four_heads(8 if full else 3)
    state = torch.randn(1, 16, 128, 128, generator=torch.Generator().manual_seed(5))
    found["NVFP4 of a Gaussian"] = mean_over(rounding_noise(parse("nvfp4"), state).numpy()[0])
    return found


def _one_scale_for_four_heads(draws: int) -> Measured:
    """NVFP4 stored every token at alpha 0.99 with one global scale for the four heads of a draw: error of a draw."""
    format, recurrence, errors = parse("nvfp4:tensor"), get_recurrence("gated_delta"), []
    for seed in range(draws):
        stream = synthetic_stream("gated_delta", alpha=0.99, steps=1024, heads=4, sequences=1, seed=seed)
        state, error, reference = stream.initial, 0.0, 0.0
        for t, exact in enumerate(shadow(stream)):
            state, output = recurrence.step(state, exact.inputs)
            state = format.round(state)
            if t >= 512:
                error += float((output.double() - exact.output).square().sum())
                reference += float(exact.output.square().sum())
        errors.append(math.sqrt(error / reference))
    return mean_over(np.array(errors))


SHARED = "every token 0.99, scale of 4 heads"
_NEAR_THRESHOLD = (
    "the file has one FP32 scale for the four heads of its tensor, we one for each (no row of a batch may depend on"
    " another). Near the threshold (eps^2 = .0090, 1 - rho = .0253) that is worth a tenth: with one scale for four"
    " heads, the line below, the file's figure comes out. Both are right about their own grouping"
)
_DIVERGES = (
    "past the threshold eps^2 = .0090 > 1 - rho = .0075 the error multiplies by itself: its level after 1,024 tokens is"
    " exponential in everything, and two seeds differ by factors. That it is past ten times the signal is the finding"
)
B12 = Case(
    "B12",
    "NVFP4 as a read copy, as the checkpoint, and in the recurrence",
    (
        *(
            Figure(f"{name}, alpha {alpha}", text)
            for name, row in _B12_ROWS.items()
            for alpha, text in zip((0.9, 0.99, 0.999), row, strict=True)
        ),
        Figure("every token, alpha 0.9", "0.18"),
        Figure("every token, alpha 0.99", "1.10", why=_NEAR_THRESHOLD),
        Figure(SHARED, "1.10", units=1),
        Figure("every token, alpha 0.999", ">= 10", why=_DIVERGES),
        Figure(
            "growth of the copy's error",
            "<= 0.05",
            why="flat: 8^.05 = 1.11 over the eightfold length that the exponent is fitted to",
        ),
        Figure("NVFP4 of a Gaussian", "0.095"),
    ),
    _b12,
)


def _b18(full: bool) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for alpha, policies in (
        (0.9, ("int8@1", "int8+ef@1")),
        (0.99, ("int8@1", "bf16@1", "int8+ef@1")),
        (0.999, ("int8@1", "int8@16", "int8@32", "nvfp4@16", "int8+ef@1")),
    ):
        errors = output_errors(gdn(alpha, 2048, full, beta=0.5), policies, second_half=True)
        found |= {f"{policy} alpha {alpha}": value for policy, value in errors.items()}
    generator = torch.Generator().manual_seed(6)
    state = torch.randn(1, 16, 128, 128, generator=generator)
    for name in ("int8", "bf16", "fp16", "nvfp4"):
        found[f"eps {name}"] = mean_over(rounding_noise(parse(name), state).numpy()[0])
    for alpha, name, window, _ in _B18_CLOSED:
        rho = alpha**2 * (1 - 0.75 / 128)
        closed = found[f"eps {name}"].value / math.sqrt(1 - rho**window)
        found[f"formula {name}@{window} alpha {alpha}"] = Measured(closed)
        run = found[f"{name}@{window} alpha {alpha}"]
        diluted = closed * math.sqrt(sum(rho**j for j in range(1, window + 1)) / window)
        found[f"run / diluted, {name}@{window} {alpha}"] = Measured(
            run.value / diluted, run.spread / diluted, run.units
        )
    return found


_B18_CLOSED = (
    (0.9, "int8", 1, "0.0139"),
    (0.99, "int8", 1, "0.0384"),
    (0.999, "int8", 1, "0.0693"),
    (0.999, "int8", 16, "0.0178"),
    (0.999, "int8", 32, "0.0130"),
    (0.99, "bf16", 1, "0.0104"),
    (0.999, "nvfp4", 16, "0.28"),
)
_EPS = (
    "the largest of 128 Gaussian values is 2.8 sigma, so a step is 2.8 / 127 and eps = 2.8 / 127 / sqrt(12) = .0064"
    " (.0065 with the scatter of the maximum). The .0061 of the file is too small, and its formula is of the state"
    " beside output errors of the runs. With eps measured and the output diluted by sqrt(mean of rho^j, j = 1 .. L)"
    " the closed form meets every run (lines 'run / diluted')"
)
B18 = Case(
    "B18",
    "the closed form eps / sqrt(1 - rho^L), rho = alpha^2 (1 - (2 beta - beta^2) / d_k), against runs",
    (
        *(Figure(f"eps {n}", f, why=_EPS)
          for n, f in (("int8", "0.0061"), ("bf16", "0.00166"), ("fp16", "0.00021"), ("nvfp4", "0.095"))),
        *(Figure(f"formula {n}@{w} alpha {a}", f, why=_EPS) for a, n, w, f in _B18_CLOSED),
        *(Figure(f"run / diluted, {n}@{w} {a}", "1.0") for a, n, w, _ in _B18_CLOSED),
        Figure("int8@1 alpha 0.9", "0.0130"),
        Figure("int8@1 alpha 0.99", "0.0394"),
        Figure("int8@1 alpha 0.999", "0.0714"),
        Figure("int8@16 alpha 0.999", "0.0182"),
        Figure("int8@32 alpha 0.999", "0.0128"),
        Figure("bf16@1 alpha 0.99", "0.0103"),
        Figure("nvfp4@16 alpha 0.999", "0.27"),
        Figure("int8+ef@1 alpha 0.9", "0.0060"),
        Figure("int8+ef@1 alpha 0.99", "0.0066"),
        Figure("int8+ef@1 alpha 0.999", "0.0071"),
    ),
    _b18,
)  # fmt: skip

CASES = (B1, B2, B8, B9, B12, B18)
