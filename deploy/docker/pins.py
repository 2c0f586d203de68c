"""Some of the pins of a lock, with their hashes: `pins.py LOCK NAME...`. A name that is not in it is an error."""

import sys
from pathlib import Path


def main() -> None:
    lock, *names = sys.argv[1:]
    blocks: dict[str, list[str]] = {}
    name = ""
    for line in Path(lock).read_text(encoding="ascii").splitlines():
        if not line.startswith(" "):
            name = line.partition("==")[0]
            blocks[name] = []
        blocks[name].append(line)
    if missing := [name for name in names if name not in blocks]:
        sys.exit(f"{lock} does not pin {', '.join(missing)}")
    for name in names:
        sys.stdout.write("\n".join(blocks[name]) + "\n")


if __name__ == "__main__":
    main()
