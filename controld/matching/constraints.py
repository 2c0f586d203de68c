"""Comparisons on attributes. A missing attribute satisfies nothing, not even NE: unknown is not different."""

from __future__ import annotations

from collections.abc import Mapping

from controld.core.spec import Constraint, Operator


def meets(attributes: Mapping[str, str | int | bool], constraints: tuple[Constraint, ...]) -> Constraint | None:
    """The first constraint that is not met, or None when all are."""
    return next((c for c in constraints if not _met(attributes, c)), None)


def _met(attributes: Mapping[str, str | int | bool], constraint: Constraint) -> bool:
    value = attributes.get(constraint.attribute)
    if value is None:
        return False
    if constraint.operator is Operator.EXISTS:
        return True
    text = _text(value)
    match constraint.operator:
        case Operator.EQ | Operator.IN:
            return text in constraint.values
        case Operator.NE:
            return text not in constraint.values
        case _:
            return _ordered(text, constraint)


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ordered(text: str, constraint: Constraint) -> bool:
    """Ordered operators compare integers in base units; a text that is none is not comparable."""
    try:
        left, right = int(text), int(constraint.values[0])
    except (ValueError, IndexError):
        return False
    match constraint.operator:
        case Operator.LT:
            return left < right
        case Operator.LE:
            return left <= right
        case Operator.GT:
            return left > right
        case _:
            return left >= right
