"""`python -m virial.cli`: the same as `virial`."""

from __future__ import annotations

import sys

from virial.cli import main

sys.exit(main())
