"""How far a generation is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from tqdm import tqdm

SECONDS = 30
"""Between two lines of a log."""


class Progress:
    """Counts sequences and their tokens.  quiet: says nothing."""

    def __init__(self, total: int, resumed: int = 0, *, quiet: bool = False):
        self.tokens, self._total, self._done, self._quiet = 0, total, resumed, quiet
        self._began = self._told = time.monotonic()
        self._bar = None
        if not quiet and sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=resumed, desc="generation", unit="sequence")
        elif not quiet and resumed:
            print(
                f"generation: {resumed} of {total} sequences are there already", file=sys.stderr, flush=True
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def read(self, tokens: int) -> None:
        self.tokens += tokens
        now = time.monotonic()
        if self._quiet or now - self._told < (1 if self._bar is not None else SECONDS):
            return
        self._told, rate = now, self.tokens / max(self.seconds, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s")
        else:
            text = f"generation: {self._done} of {self._total} sequences, {rate:,.0f} tokens/s"
            print(text, file=sys.stderr, flush=True)

    def ended(self, sequences: int) -> None:
        self._done += sequences
        if self._bar is not None:
            self._bar.update(sequences)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
