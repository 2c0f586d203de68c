"""A backup is brought back under running gangs: what only the state that is given up knows is stopped, and what the
backup knows goes on from its checkpoint. Never do both hold the same thing."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tests.chaos.rack import HANG_SECONDS, LONG, alive, rack, until
from tests.chaos.test_grow import run
from virial.models import Resources

KEEP = 100


@pytest.mark.skipif(not LONG, reason="a restore under running gangs takes 15 s: set VIRIAL_LONG=1")
def test_agents_stop_what_was_given_up_before_anything_new_begins() -> None:
    with rack(2) as made:
        client = made.client()
        # So much of a node that a second one of it would have no room beside the first.
        share = client.list_nodes(brief=True)[0].cpu_millis * 6 // 10
        spec = replace(made.spec("given-up"), resources=Resources(cpu_millis=share, memory_bytes=128 << 20))
        # What was dropped since the backup is gone: see docs/operate/backup.md.
        lasting = made.spec("kept")
        lasting = replace(lasting, checkpoint=replace(lasting.checkpoint, keep=KEEP))
        kept = client.submit_job(lasting, request_id="kept").id
        before = made.until_running(kept, 1)
        until(lambda: made.lines("saved") or None, "a checkpoint is committed")
        address, file = made.cluster.address, made.base / "saved.db"
        assert run("virial.cli", "admin", "backup", str(file), "--address", address).returncode == 0
        given_up = client.submit_job(spec, request_id="given-up").id
        after = made.until_running(given_up, 1)
        epoch = client.get_status().leader_epoch
        assert made.controller.process is not None
        made.controller.process.send_signal(signal.SIGTERM)
        made.controller.process.wait(HANG_SECONDS)
        assert all(alive(pid) for pid in (*before.values(), *after.values())), "a stop of the controller ends no task"
        restored = run("virial.cli", "admin", "restore", str(file), "--data-dir", str(made.controller.data_dir))
        assert restored.returncode == 0, restored.stderr
        made.restart()
        made.until_ready()
        until(lambda: not any(alive(pid) for pid in after.values()) or None, "what was given up is stopped")
        assert [job.id for job in client.list_jobs()] == [kept]
        again = made.until_running(kept, 1, generation=2)
        assert not set(before.values()) & set(again.values())
        assert not any(alive(pid) for pid in before.values())
        current = client.get_job(kept).current
        assert current is not None
        assert current.restored_step > 0
        assert client.get_status().leader_epoch > epoch
        # Its room is free again, and its request id is new.
        made.until_running(client.submit_job(spec, request_id="given-up").id, 1)
        for job in client.list_jobs():
            client.cancel_job(job.id)
        made.until_all_ended()
