"""What TAB offers: `virial __complete WORD...`, the words after `virial` up to the one being typed.

Runs at every press of TAB, so it imports a table and nothing else. Printing nothing makes the shell offer files.
"""

from __future__ import annotations

from collections.abc import Sequence

from virial.cli._table import ARGUMENTS, OPTIONS


def complete(words: Sequence[str]) -> int:
    for word in candidates(words):
        print(word)
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """The words that may stand in place of the last of `words` (which may be empty)."""
    current = words[-1] if words else ""
    before = [word for word in words[:-1] if word != "="]  # bash splits --output=json into three words
    command, option, arguments = _position(before)
    known = OPTIONS[command]
    if current == "=" and option:
        return list(known[option] or ())
    if option:
        return _starting(current, known[option] or ())
    head, equals, rest = current.partition("=")
    if equals and head in known:
        return [f"{head}={value}" for value in _starting(rest, known[head] or ())]
    if current.startswith("-"):
        return _starting(current, sorted(known))
    places = ARGUMENTS[command]
    return _starting(current, _commands_in(command) or (places[arguments] if arguments < len(places) else ()))


def _commands_in(group: str) -> list[str]:
    """The names of the commands in a group ("" for `virial` itself); none where it is a command."""
    prefix = f"{group} " if group else ""
    return sorted(
        name.removeprefix(prefix)
        for name in OPTIONS
        if name and name.startswith(prefix) and " " not in name.removeprefix(prefix)
    )


def _position(before: Sequence[str]) -> tuple[str, str, int]:
    """What these words have named ("" for nothing yet, "admin certs" for a group), the option whose value comes next
    ("" for none), and how many arguments of the command stand there."""
    command, option, arguments = "", "", 0
    for word in before:
        if option:
            option = ""
        elif word.startswith("-"):
            option = word if OPTIONS[command].get(word) is not None else ""
        elif f"{command} {word}".strip() in OPTIONS:
            command = f"{command} {word}".strip()
        else:
            arguments += 1
    return command, option, arguments


def _starting(prefix: str, choices: Sequence[str]) -> list[str]:
    return [choice for choice in choices if choice.startswith(prefix)]
