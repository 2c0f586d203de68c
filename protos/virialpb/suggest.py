"""Nearest-name suggestions for every strict parser ("unknown field 'x': did you mean 'y'?").

Pure and standard library only. The distance is an edit distance in which a change of case, or of the separators
``_ - .`` and space, is cheap: those are the mistakes people make with ``pciBusId``, ``max-latency`` and ``gib``.
"""

from __future__ import annotations

from collections.abc import Iterable

# Costs are integers so that ties are exact. An insertion is cheaper than a substitution: a forgotten letter
# ("Gi" for "GiB") is likelier than a wrong one ("Gi" for "GB").
_CASE_COST = 1
_SEPARATOR_COST = 1
_INSERT_COST = 4
_SUBSTITUTE_COST = 5
_SEPARATORS = frozenset("_-. ")

# Longer words are not names somebody mistyped; comparing them would cost quadratic time on hostile input.
MAX_WORD_LENGTH = 64


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice closest to ``word``, or None when none is close enough to be what was meant.

    Names that differ only in case and separators are always close. Else one edit is forgiven for each four letters,
    and at least one; of two letters one may be missing. Where no spelling is close, a single choice that contains
    ``word`` as a whole part (``latency`` in ``max_latency``) is offered. Ties go to the earlier choice.
    """
    if not word or len(word) > MAX_WORD_LENGTH:
        return None
    candidates = list(choices)
    best: str | None = None
    best_cost = 0
    for choice in candidates:
        cost = _distance(word, choice)
        close = _folded(word) == _folded(choice) or cost <= _allowance(max(len(word), len(choice)))
        if close and (best is None or cost < best_cost):
            best, best_cost = choice, cost
    return best if best is not None else _sole_container(word, candidates)


def did_you_mean(suggestion: str | None) -> str:
    """The suffix every message uses: ``: did you mean 'x'?``, or nothing when there is no suggestion."""
    return "" if suggestion is None else f": did you mean '{suggestion}'?"


def _allowance(length: int) -> int:
    if length >= 3:
        return _SUBSTITUTE_COST * max(1, length // 4)
    return _INSERT_COST if length == 2 else 0


def _folded(name: str) -> str:
    return "".join(char for char in name.casefold() if char not in _SEPARATORS)


def _sole_container(word: str, choices: list[str]) -> str | None:
    folded = word.casefold()
    found = [choice for choice in choices if folded in choice.casefold().replace("-", "_").split("_")]
    return found[0] if len(found) == 1 else None


def _edit_cost(char: str) -> int:
    return _SEPARATOR_COST if char in _SEPARATORS else _INSERT_COST


def _replace_cost(left: str, right: str) -> int:
    if left == right:
        return 0
    if left.casefold() == right.casefold():
        return _CASE_COST
    if left in _SEPARATORS and right in _SEPARATORS:
        return _SEPARATOR_COST
    return _SUBSTITUTE_COST


def _distance(word: str, choice: str) -> int:
    """Edit distance with neighbour swaps (optimal string alignment), in the costs above."""
    before: list[int] = []
    row = [0]
    for char in choice:
        row.append(row[-1] + _edit_cost(char))
    for i, left in enumerate(word, start=1):
        current = [row[0] + _edit_cost(left)]
        for j, right in enumerate(choice, start=1):
            cost = min(
                row[j] + _edit_cost(left),
                current[j - 1] + _edit_cost(right),
                row[j - 1] + _replace_cost(left, right),
            )
            if i > 1 and j > 1 and left == choice[j - 2] and word[i - 2] == right:
                cost = min(cost, before[j - 2] + _INSERT_COST)
            current.append(cost)
        before, row = row, current
    return row[-1]
