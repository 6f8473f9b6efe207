"""The lm-eval model "quantlab": a Hugging Face model whose decode state is held under a policy."""

import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import resolve_max_length
from tqdm import tqdm

from quantlab.errors import InputError, unknown_name
from quantlab.evals.caching import check_cache, check_repeats
from quantlab.evals.generated import Generated
from quantlab.evals.generating import DEFAULT_BATCH, ENGINES, Generation, settings_of
from quantlab.evals.preflight import rounded_copies
from quantlab.evals.scoring import Item, Score, score_batch
from quantlab.evals.sidecar import Sidecar
from quantlab.models.interception import Interception
from quantlab.schemes import Policy, PolicyRules, parse_rules

SCORINGS = ("decode", "boundary", "prefill")
# A recurrent model that names no context length has none; lm-eval would assume 2048 tokens.
_NO_LIMIT = 1 << 20

Request = tuple[Any, list[int], list[int]]
_HFLM: Any = HFLM  # lm-eval's decorator hides the type of the class


@register_model("quantlab")
class QuantlabLM(_HFLM):
    """HFLM with more arguments.

    policy: what the decode state is stored in (default fp32@1, the baseline of every comparison), or the path of a
    .toml file with rules for layers and heads.
    scoring: how log-likelihoods are taken.  "decode" (default): context and continuation token by token
    through the decode state, the state forked for each continuation.  "boundary": the context in one dense
    prefill, its final state rounded once, the continuation token by token.  "prefill": lm-eval's own
    parallel scoring, which never touches the decode state, so only unrounded policies may ask for it.
    state_seed (or seed): names the random bits of stochastic rounding.  sampling_seed: names those of sampling, which
    each sequence has of its own (state_seed, unless it is given).

    Generation runs under the policy in every scoring mode: all requests and their repeats as one batch of
    ``generation_batch`` rows that are refilled.  engine: "graph" (one CUDA graph a step), "eager", or "auto", a graph
    on a GPU if the policy has kernels.  sidecar: a file that takes each finished sequence, from which a killed run goes
    on; keep_tokens: whether answers' token ids stay in it when the run is over.  Answers are ``Generated``.

    The softmax is float32.  Nothing is truncated:
    a request longer than the model's context is an InputError, and so is ``batch_size=auto``, which would
    probe the model with its full context length.  ``batch_size`` counts contexts; a context's continuations
    are scored beside each other.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str | Path | Policy | PolicyRules = "fp32@1",
        scoring: str = "decode",
        state_seed: int | None = None,
        batch_size: int | str = 1,
        *,
        seed: int | None = None,
        sampling_seed: int | None = None,
        generation_batch: int = DEFAULT_BATCH,
        engine: str = "auto",
        sidecar: str | Path | None = None,
        keep_tokens: bool = False,
        quiet: bool = False,
        **kwargs: Any,
    ):
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise InputError(
                "batch_size", batch_size, "a whole number of at least 1 (auto probes the full context)"
            )
        if engine not in ENGINES:
            raise unknown_name("engine", engine, ENGINES)
        state_seed = _one_seed(state_seed, seed)
        checked = {"state_seed": state_seed, "generation_batch": generation_batch}
        checked |= {} if sampling_seed is None else {"sampling_seed": sampling_seed}
        for name, value in checked.items():
            _check_number(name, value, least=1 if name == "generation_batch" else 0)
        self.check_scoring(scoring, parse_rules(policy))
        folder = Path(pretrained) if isinstance(pretrained, str) else None
        is_path = str(pretrained).startswith(("/", "./", "../", "~"))
        if folder is not None and is_path and not folder.is_dir():  # else a "bad repository name"
            raise InputError("pretrained", pretrained, "a folder with a Hugging Face model")
        if folder is not None and folder.is_dir():
            # lm-eval looks a relative path up as a repository name on the network.
            pretrained = str(Path(pretrained).resolve())
        kwargs.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        kwargs.setdefault("softmax_dtype", "float32")
        self.scoring, self.engine, self.generation_batch = scoring, engine, int(generation_batch)
        self._sampling_seed = sampling_seed
        self.quiet, self._keep_tokens = quiet, keep_tokens
        self._sidecar: Sidecar | None = None
        self._sidecar_path: str | Path | None = None
        super().__init__(pretrained=pretrained, batch_size=int(batch_size), **kwargs)
        self._check_think_end()
        self.use_policy(policy, seed=int(state_seed), sidecar=sidecar)

    def use_policy(
        self,
        policy: str | Path | Policy | PolicyRules,
        *,
        seed: int = 0,
        sidecar: str | Path | None = None,
        keep_tokens: bool | None = None,
    ) -> None:
        """Run everything from here on under ``policy``, with a fresh report; the model stays loaded."""
        rules = parse_rules(policy)
        self.check_scoring(self.scoring, rules)
        self.interception = Interception(self.model, rules, seed=seed)
        self.state_seed = seed
        self.sampling_seed = seed if self._sampling_seed is None else int(self._sampling_seed)
        self._generation = Generation(self)
        if self._sidecar is not None:
            self._sidecar.close()
        self._sidecar, self._sidecar_path = None, sidecar
        if keep_tokens is not None:
            self._keep_tokens = keep_tokens
        self._warning: str | None = None
        check_cache(self)

    def _check_think_end(self) -> None:
        """InputError for an end of thoughts that no response could have: each would count as a thought to its end."""
        given = self.think_end_token
        if isinstance(given, int) and not 0 <= given < len(self.tokenizer):
            expected = f"a token id below {len(self.tokenizer)}, or text such as </think>"
            raise InputError("think_end_token", given, expected)
        if isinstance(given, str) and not given.strip():
            raise InputError("think_end_token", given, "text such as </think>, or a token id")

    @staticmethod
    def check_scoring(scoring: str, rules: PolicyRules) -> None:
        """InputError for an unknown way of scoring, and for one that would leave a policy inert."""
        if scoring not in SCORINGS:
            raise unknown_name("scoring", scoring, SCORINGS)
        if scoring == "prefill" and any(rounded_copies(rules).values()):
            raise InputError(
                "scoring", scoring, f"decode or boundary: a prefill never touches policy {rules}"
            )

    @property
    def max_length(self) -> int:
        return self._max_length or resolve_max_length(self.config, self.tokenizer, default=_NO_LIMIT)

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        raise InputError("batch_size", "auto", "a whole number")

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval copies this into ``results["config"]``: the policy, what it did, and how scores were
        taken.
        """
        info = super().get_model_info() | self.interception.report.as_dict()
        info |= {"scoring": self.scoring, "policy_seed": self.state_seed, "warning": self._warning}
        self.end_sidecar()
        return info | self._generation.info()

    def end_sidecar(self) -> None:
        """The run is over: answers' token ids leave the sidecar, unless they are to be kept."""
        sidecar, self._sidecar = self._sidecar, None
        if sidecar is not None:
            if self._keep_tokens:
                sidecar.close()
            else:
                sidecar.finish()

    def set_cache_hook(self, cache_hook: Any) -> None:
        """lm-eval's ``--use_cache``, whose keys name prompts alone: the file is kept to one policy and model.

        Raises InputError for a file with the answers of another one.
        """
        super().set_cache_hook(cache_hook)
        check_cache(self)

    # Bars are for a terminal; in a log every redraw would be a line.
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

    # lm-eval calls this for every log-likelihood, rolling ones included.
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        for _, context, continuation in requests:
            self.check_length(len(context) + len(continuation) - 1)
        if self.scoring == "prefill":
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, (_, context, _) in enumerate(requests):
            places[tuple(context)].append(place)
        results: list[Score | None] = [None] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="decode scoring") as bar:
            for contexts in self._batches(list(places), override_bs or int(self.batch_size)):
                items = [Item(c, tuple(tuple(requests[p][2]) for p in places[c])) for c in contexts]
                scores = score_batch(
                    self.model,
                    self.interception,
                    items,
                    prefill=self.scoring == "boundary",
                    device=self.device,
                )
                for context, row in zip(contexts, scores, strict=True):
                    for place, score in zip(places[context], row, strict=True):
                        results[place] = score
                        if requests[place][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[place][0], score)
                        bar.update()
        self._check_exercised()
        return results  # pyright: ignore[reportReturnType]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Generated]:
        check_repeats(self, requests)
        if self._sidecar_path is not None and self._sidecar is None:
            self._sidecar = Sidecar(
                _of_rank(self._sidecar_path, self.rank, self.world_size), settings_of(self)
            )
        quiet = disable_tqdm or self.quiet or self.rank != 0
        try:
            answers = self._generation.run(requests, self._sidecar, quiet=quiet)
            if requests:
                exercised = self._generation.count()
                self._check_exercised(exercised if not self._generation.fresh else None)
        except BaseException:
            sidecar, self._sidecar = self._sidecar, None
            if sidecar is not None:
                sidecar.close()  # what is in it stays for the next run, which may be of this process
            raise
        return answers

    def _batches(self, contexts: list[tuple[int, ...]], size: int) -> list[list[tuple[int, ...]]]:
        # Long ones first, so that a batch that does not fit in memory fails at once; the text breaks ties,
        # so that the layout is a function of the requests alone.  A dense prefill needs contexts of one
        # length.
        contexts = sorted(contexts, key=lambda context: (-len(context), context))
        groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for context in contexts:
            groups[len(context) if self.scoring == "boundary" else 0].append(context)
        return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]

    def check_length(self, tokens: int) -> None:
        """InputError for more tokens than the model's context holds."""
        if tokens > self.max_length:
            raise InputError(
                "request length", tokens, f"at most {self.max_length} tokens (max_length); nothing is cut off"
            )

    def _check_exercised(self, known: dict[str, int | None] | None = None) -> None:
        """InputError if the policy touched nothing; a warning, kept for the results, if it hardly did.

        known: counts of sequences that were all decoded by a run before this one.
        """
        if known is None:
            self.interception.require_effect()
        rules, counts = self.interception.rules, known or self.interception.report.exercised
        rounded = rounded_copies(rules)
        watched = {part: counts[part] or 0 for part, is_rounded in rounded.items() if is_rounded}
        for part, count in watched.items():
            if count == 0:
                raise InputError(
                    "policy", str(rules), f"a {part} that is read back after rounding; no store was"
                )
            if count < 2:
                self._warning = f"{rules}: only {count} rounded store of the {part} was read back"
        if self._warning:
            warnings.warn(self._warning, stacklevel=2)


def _one_seed(state_seed: int | None, seed: int | None) -> int:
    """The two names of one argument."""
    if state_seed is not None and seed is not None and state_seed != seed:
        raise InputError("seed", seed, f"that of state_seed, {state_seed}, or one of the two alone")
    return next((value for value in (state_seed, seed) if value is not None), 0)


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(name, value, f"a whole number of at least {least}")


def _of_rank(path: str | Path, rank: int, ranks: int) -> Path:
    path = Path(path)
    return path if ranks == 1 else path.with_name(f"{path.stem}_rank{rank}{path.suffix}")
