"""Controllers in this process, each with an etcd member of its own beside it, as `controld` and `controld member` are
deployed. A member is a real process and can be killed, wiped, replaced."""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from controld.app import App
from controld.config import Config, StoreConfig, StoreKind
from controld.matching.engine import plan
from controld.replica.planner import InlinePlanner
from controld.service.telemetry import make_log
from controld.store.member import MemberProcess
from controld.store.member_config import MemberConfig
from tests import support_etcd
from tests.support_service import quick_config
from virial import Client
from virial.models import JobSpec, Resources, TaskSpec

T = TypeVar("T")
HANG_SECONDS = 120.0
JOB = JobSpec(name="train", resources=Resources(cpu_millis=100, memory_bytes=1 << 20), task=TaskSpec(("true",)))


@dataclass
class Post:
    """One controller and the member beside it."""

    config: Config
    member: MemberProcess
    log: io.StringIO = field(default_factory=io.StringIO)
    app: App | None = None

    @property
    def name(self) -> str:
        return self.config.identity

    async def start(self) -> None:
        self.app = App(self.config, log=make_log(self.log, level="debug"), planner=InlinePlanner(plan))
        await self.app.start()

    async def stop(self) -> None:
        app, self.app = self.app, None
        if app is not None:
            await app.stop()

    async def kill(self) -> None:
        """Nothing is handed over, resigned or said."""
        app, self.app = self.app, None
        if app is not None:
            await app.replica._work.end()
            await app.stop()

    async def lose(self) -> None:
        """Both at once, as when the host is gone."""
        self.member.kill()
        await self.kill()


@dataclass
class Rack:
    directory: Path
    posts: list[Post]
    acked: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def addresses(self) -> list[str]:
        return [post.config.listen for post in self.posts]

    def client(self, *posts: Post) -> Client:
        return Client([post.config.listen for post in posts] or self.addresses, timeout_s=HANG_SECONDS)

    def leader(self) -> Post:
        return next(post for post in self.posts if post.app is not None and post.app.replica.leads)

    def followers(self) -> list[Post]:
        return [post for post in self.posts if post.app is not None and not post.app.replica.leads]

    async def settled(self) -> Post:
        """The leader, once every controller that runs listens to it."""
        running = [post for post in self.posts if post.app is not None]

        def ready() -> Post | None:
            for post in running:
                if post.app is not None and post.app.replica.leads:
                    unheard = set(post.app.replica.unheard)
                    return None if unheard & {other.config.listen for other in running} else post
            return None

        return await until(ready)

    async def write(self, client: Client, count: int = 5) -> None:
        for _ in range(count):
            request_id = f"w-{len(self.acked)}"
            self.acked[request_id] = (await client.submit_job(JOB, request_id=request_id)).id

    async def require_acked(self, client: Client) -> None:
        """Everything that was acknowledged is there, and is answered as the first time."""
        assert set(self.acked.values()) <= {job.id for job in await client.list_jobs()}
        request_id, job = next(iter(self.acked.items()))
        assert (await client.submit_job(JOB, request_id=request_id)).id == job


async def until(condition: Callable[[], T | None]) -> T:
    async with asyncio.timeout(HANG_SECONDS):
        while not (found := condition()):  # noqa: ASYNC110 - there is no one event for what tests wait for
            await asyncio.sleep(0.02)
        return found


def controller_config(directory: Path, name: str, address: str, peers: tuple[str, ...], member: MemberConfig) -> Config:
    store = StoreConfig(StoreKind.ETCD, size_max_bytes=member.size_bytes_max, member_dir=str(member.directory))
    base = quick_config(directory / f"{name}-data")
    return replace(base, listen=address, identity=name, peers=peers, store=store)


@asynccontextmanager
async def rack(number: int = 3, **member_changes: Any) -> AsyncGenerator[Rack]:
    """Members that are ready, and controllers of which one leads."""
    support_etcd.require_etcd()
    with ExitStack() as stack:
        directory = support_etcd.short_directory(stack)
        configs = support_etcd.configs(directory, number, **member_changes)
        addresses = tuple(f"127.0.0.1:{port}" for port in support_etcd.free_ports(number))
        posts = [
            Post(controller_config(directory, f"c{i}", addresses[i], addresses, config), MemberProcess(config))
            for i, config in enumerate(configs)
        ]
        made = Rack(directory, posts)
        try:
            for post in posts:
                post.member.start()
            await support_etcd.Members([post.member for post in posts]).ready()
            for post in posts:
                await post.start()
            await made.settled()
            yield made
        finally:
            for post in posts:
                await post.lose()


async def run(*words: str) -> tuple[int, str]:
    """A command as an operator types it: (exit status, what it said)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(HANG_SECONDS):
        said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def wiped(config: MemberConfig) -> MemberConfig:
    """The same member with nothing left of it."""
    shutil.rmtree(config.directory)
    return config
