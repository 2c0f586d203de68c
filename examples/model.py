"""A small character model in numpy: embedding, one hidden layer, softmax over the next character.

Everything a rank computes is a pure function of (seed, step, rank) and the parameters, in float32, so that a run that
was stopped and restored ends with the same bits as one that was not. All arrays are views of one flat vector: it is
what is exchanged, saved and compared.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.intp]

CONTEXT = 16
EMBEDDING = 16
HIDDEN = 256
BATCH = 32
LEARNING_RATE = 2e-3
SYMBOLS = 97  # line end, the 95 printable ASCII characters, and one for all others
SHAPES = (
    (SYMBOLS, EMBEDDING),
    (CONTEXT * EMBEDDING, HIDDEN),
    (HIDDEN,),
    (HIDDEN, SYMBOLS),
    (SYMBOLS,),
)
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)

CORPUS_FILES = ("argparse.py", "ast.py", "configparser.py", "dataclasses.py", "difflib.py", "doctest.py")
CORPUS_FILE_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class Corpus:
    """Real text that is on every machine: sources of Python's own standard library, as symbol numbers."""

    symbols: Indices
    digest: str
    names: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path | None = None) -> Corpus:
        """Read the files. Raises OSError naming one that is missing."""
        folder = folder or Path(os.path.dirname(os.__file__))
        parts: list[bytes] = []
        for name in CORPUS_FILES:
            with open(folder / name, "rb") as file:
                parts.append(file.read(CORPUS_FILE_BYTES_MAX))
        text = b"".join(parts)
        table = np.zeros(256, dtype=np.intp)
        table[ord("\n")] = 1
        table[32:127] = np.arange(2, SYMBOLS)
        symbols = table[np.frombuffer(text, dtype=np.uint8)]
        return cls(symbols, hashlib.sha256(text).hexdigest(), CORPUS_FILES)

    def batch(self, seed: int, step: int, rank: int) -> tuple[Indices, Indices]:
        """Contexts (BATCH, CONTEXT) and the symbols that follow them (BATCH,)."""
        # Counter-based and raw: no state to save, and the bits do not depend on numpy's version.
        bits = np.random.Philox(key=seed, counter=[0, 0, rank, step]).random_raw(BATCH)
        starts = (bits % np.uint64(len(self.symbols) - CONTEXT)).astype(np.intp)
        return self.symbols[starts[:, None] + np.arange(CONTEXT)], self.symbols[starts + CONTEXT]


@dataclass
class State:
    """Parameters and Adam's two moments, each (SIZE,), after `step` finished steps."""

    step: int
    params: Floats
    first_moment: Floats
    second_moment: Floats

    @classmethod
    def initial(cls, seed: int) -> State:
        """The state before step 1; the same on every rank."""
        generator = np.random.Generator(np.random.Philox(key=seed))
        params = np.zeros(SIZE, dtype=np.float32)
        for view in views(params):
            if view.ndim == 2:
                view[...] = generator.standard_normal(view.shape, dtype=np.float32) / np.sqrt(np.float32(view.shape[0]))
        return cls(0, params, np.zeros_like(params), np.zeros_like(params))

    def update(self, gradient: Floats) -> None:
        """One step of Adam (Kingma and Ba 2015, with its default decay rates)."""
        self.step += 1
        decay1, decay2 = np.float32(0.9), np.float32(0.999)
        one = np.float32(1)
        self.first_moment *= decay1
        self.first_moment += (one - decay1) * gradient
        self.second_moment *= decay2
        self.second_moment += (one - decay2) * gradient * gradient
        rate = np.float32(LEARNING_RATE * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step))
        self.params -= rate * self.first_moment / (np.sqrt(self.second_moment) + np.float32(1e-8))

    def digest(self) -> str:
        """sha256 of the parameters as little-endian float32."""
        return hashlib.sha256(self.params.astype("<f4", copy=False).tobytes()).hexdigest()


def views(flat: Floats) -> list[Floats]:
    """The arrays of SHAPES inside a flat vector, without copying."""
    result: list[Floats] = []
    start = 0
    for shape in SHAPES:
        end = start + int(np.prod(shape))
        result.append(flat[start:end].reshape(shape))
        start = end
    return result


def loss_and_gradient(params: Floats, contexts: Indices, targets: Indices) -> tuple[float, Floats]:
    """Mean cross-entropy in nats and its gradient (SIZE,)."""
    embedding, weight1, bias1, weight2, bias2 = views(params)
    count = len(targets)
    rows = np.arange(count)
    inputs = embedding[contexts].reshape(count, -1)
    hidden = np.tanh(inputs @ weight1 + bias1)
    logits = hidden @ weight2 + bias2
    logits -= logits.max(axis=1, keepdims=True)
    odds = np.exp(logits)
    totals = odds.sum(axis=1, keepdims=True)
    surprise: Floats = np.log(totals[:, 0]) - logits[rows, targets]
    loss = float(surprise.mean())

    gradient = np.empty_like(params)
    to_embedding, to_weight1, to_bias1, to_weight2, to_bias2 = views(gradient)
    to_logits = odds / totals
    to_logits[rows, targets] -= 1
    to_logits /= np.float32(count)
    to_weight2[...] = hidden.T @ to_logits
    to_bias2[...] = to_logits.sum(axis=0)
    to_hidden = (to_logits @ weight2.T) * (1 - hidden * hidden)
    to_weight1[...] = inputs.T @ to_hidden
    to_bias1[...] = to_hidden.sum(axis=0)
    chosen = np.zeros((contexts.size, SYMBOLS), dtype=np.float32)
    chosen[np.arange(contexts.size), contexts.reshape(-1)] = 1
    to_embedding[...] = chosen.T @ (to_hidden @ weight1.T).reshape(-1, EMBEDDING)
    return loss, gradient
