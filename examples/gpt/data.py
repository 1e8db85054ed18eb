"""Real text that every machine has: the sources of Python's own standard library, as character ids."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Printable ASCII and the line end; everything else is rare in the sources and dropped.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
HELD_OUT_EVERY = 10  # each tenth file is for validation only


def encode(text: str) -> Tensor:
    """The ids of the characters of `text` that are in the alphabet."""
    table = np.full(256, 255, dtype=np.uint8)
    table[[ord(character) for character in ALPHABET]] = range(len(ALPHABET))
    ids = table[np.frombuffer(text.encode("latin-1", errors="ignore"), dtype=np.uint8)]
    return torch.from_numpy(ids[ids != 255].astype(np.int64))


def decode(ids: Tensor) -> str:
    """The text of `ids`."""
    return "".join(ALPHABET[i] for i in ids.tolist())


def load_text() -> tuple[Tensor, Tensor]:
    """(training, validation) ids of the standard library's top-level modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"), key=lambda path: path.name)
    if len(paths) < HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"found {len(paths)} Python sources in {folder}; this example learns from the standard library's sources, "
            "so run it with a Python that ships them"
        )
    files = [encode(path.read_text(encoding="utf-8", errors="ignore")) for path in paths]
    training = [ids for index, ids in enumerate(files) if index % HELD_OUT_EVERY]
    return torch.cat(training), torch.cat(files[::HELD_OUT_EVERY])


class Batches:
    """Random windows of a text; each rank draws its own, the same ones in every run with the same seed."""

    def __init__(self, text: Tensor, batch: int, context: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self._window = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """(inputs, targets) [batch, context]: the targets are the inputs moved on by one character."""
        last = len(self._text) - len(self._window)
        starts = torch.randint(last, (self._batch, 1), generator=self._generator)
        windows = self._text[starts + self._window]
        return windows[:, :-1], windows[:, 1:]


def validation_batches(text: Tensor, batch: int, context: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` fixed batches spread over the whole validation text."""
    batches = Batches(text, batch, context, seed=0)
    return [batches.next() for _ in range(count)]
