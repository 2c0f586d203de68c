"""One noded process with its real guardian, against a controller that the test plays."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.noded_support import controller, go, noded, prepare, token
from virialpb.v1 import node_pb2


async def test_a_rank_from_prepare_to_release(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await fake.until(lambda: fake.sessions, "hello")
        hello = fake.session.hello
        assert hello.name == "n1"
        assert hello.incarnation.node_uid
        assert hello.incarnation.guardian_nonce
        assert (hello.cpu_millis, hello.memory_bytes) == (1000, 64 << 20)
        await fake.until(lambda: fake.inventories, "inventory")
        script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['VIRIAL_JOB']); exit(3)"
        fake.order(prepare=prepare([sys.executable, "-c", script], hold_port=True))
        ready = await fake.until_state("j.1.0", "READY")
        assert ready.port > 0
        assert ready.token == token()
        fake.order(go=go())
        exited = await fake.until_state("j.1.0", "EXITED")
        assert (exited.exit.reason, exited.exit.code) == ("EXITED", 3)
        fake.bulk.put_nowait(
            node_pb2.BulkDown(log_request=node_pb2.LogRequest(request_id=7, slot="j.1.0", stream="stdout"))
        )
        await fake.until(lambda: any(chunk.end for chunk in fake.chunks), "end of the log")
        assert b"".join(chunk.data for chunk in fake.chunks) == b"0 1 j\n"
        fake.order(release=node_pb2.Release(slot="j.1.0", token=token()))
        await fake.until(lambda: fake.slot("j.1.0") is None, "release")
