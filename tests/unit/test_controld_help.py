"""The examples that `controld --help` and its parts show can be typed."""

from __future__ import annotations

import argparse
import shlex

import pytest

from controld import __main__ as controld
from controld import copies, member


def examples_of(parser: argparse.ArgumentParser) -> list[list[str]]:
    _, found, text = parser.format_help().replace("\\\n", " ").partition("example")
    assert found
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("controld ")]


@pytest.mark.parametrize(
    ("words", "parser"),
    [([], controld._parser()), (["member"], member._parser())],
    ids=["controld", "controld member"],
)
def test_examples_parse(words: list[str], parser: argparse.ArgumentParser) -> None:
    examples = examples_of(parser)
    assert examples
    for example in examples:
        assert example[: len(words)] == words
        parser.parse_args(example[len(words) :])


@pytest.mark.parametrize("word", ["backup", "restore", "import"])
def test_the_example_of_a_copy_parses(word: str) -> None:
    parser = copies._parser(word)
    _, found, text = " ".join(parser.format_help().split()).partition(f"example: controld {word} ")
    assert found
    parser.parse_args(shlex.split(text))
