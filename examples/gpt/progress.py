"""A progress bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator

from tqdm import tqdm

LINES = 10  # this many where there is no terminal


class Progress:
    """Counts steps; shows the newest of `losses`, which the loop appends to."""

    def __init__(self, steps: int, label: str, losses: list[float], shown: bool) -> None:
        self._steps = steps
        self._label = label
        self._losses = losses
        self._shown = shown

    def __iter__(self) -> Iterator[int]:
        if self._shown and sys.stderr.isatty():
            return self._bar()
        return self._lines()

    def _bar(self) -> Iterator[int]:
        with tqdm(total=self._steps, desc=f"{self._label:>10}", unit="step") as bar:
            for step in range(self._steps):
                yield step
                bar.set_postfix_str(f"loss {self._losses[-1]:.3f}", refresh=False)
                bar.update()

    def _lines(self) -> Iterator[int]:
        every = max(1, self._steps // LINES)
        for step in range(self._steps):
            yield step
            if self._shown and ((step + 1) % every == 0 or step == 0):
                print(f"{self._label:>10}  step {step + 1:>5}/{self._steps}  loss {self._losses[-1]:.3f}", flush=True)
