"""--help of the daemons."""

from __future__ import annotations

import pytest

from controld import options as controld
from controld.config import Config
from noded import flags as noded
from noded.config import NodedConfig
from virialpb.layered import settings


@pytest.mark.parametrize(("table", "tree"), [(controld.HELP, Config), (noded.HELP, NodedConfig)])
def test_every_setting_says_what_it_is_for(table: dict[str, object], tree: type[Config] | type[NodedConfig]) -> None:
    assert [setting.name for setting in settings(tree) if setting.name not in table] == []
