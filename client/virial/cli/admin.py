"""`virial admin`: what an operator of a cluster does. Each module adds its commands to a group made here."""

from __future__ import annotations

import importlib
from typing import Final

from virial.cli.frame import group

admin = group("admin", "Run a cluster: certificates and what else its operator does.")

# Each adds its commands when it is imported; --help lists them in this order.
_MODULES: Final = ("admin_members", "admin_copies", "admin_certs", "admin_token")
for _module in _MODULES:
    importlib.import_module(f"virial.cli.{_module}")
