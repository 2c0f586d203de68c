"""`virial completion`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from virial.cli.frame import Session, command


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


# The words come from `virial __complete`, which imports nothing but a table.
SCRIPTS = {
    Shell.BASH: """\
_virial() {
    local IFS=$'\\n'
    COMPREPLY=($(virial __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 0 ]] && compopt -o default
}
complete -F _virial virial
""",
    Shell.ZSH: """\
#compdef virial
_virial() {
    local -a found
    found=(${(f)"$(virial __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ${#found} )); then compadd -- $found; else _files; fi
}
compdef _virial virial
""",
    Shell.FISH: """\
function __virial
    set -l current (commandline -ct)
    set -l words (commandline -opc) "$current"
    set -l found (virial __complete $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c virial -f -a '(__virial)'
""",
}


@command(
    "completion",
    'eval "$(virial completion bash)"                         # in ~/.bashrc',
    'eval "$(virial completion zsh)"                          # in ~/.zshrc, after compinit',
    "virial completion fish > ~/.config/fish/completions/virial.fish",
    connects=False,
)
def completion(session: Session, shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> None:
    """Print a script that completes commands at TAB."""
    print(SCRIPTS[shell], end="")
