"""The training example's parts: a right gradient, pure batches, an exchange that sums in rank order."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

from examples.exchange import HEADER, MAGIC, Exchange, Hello, PeerLost, Reduced, join
from examples.model import BATCH, CONTEXT, SIZE, SYMBOLS, Corpus, State, loss_and_gradient, views
from tests.unit.task_support import free_port


def hello(rank: int, world_size: int = 3, **differs: object) -> Hello:
    fields: dict[str, object] = {"job": "train", "generation": 1, "step": 0, "start": "d", **differs}
    return Hello(rank=rank, world_size=world_size, **fields)  # pyright: ignore[reportArgumentType]


def test_the_gradient_is_that_of_the_loss() -> None:
    contexts, targets = Corpus.load().batch(1, 1, 0)
    params = State.initial(1).params.astype(np.float64)
    _, gradient = loss_and_gradient(params, contexts, targets)  # pyright: ignore[reportArgumentType] - float64 here
    starts = np.cumsum([0, *(view.size for view in views(params))])  # pyright: ignore[reportArgumentType]
    for start, end in itertools.pairwise(starts):
        at = int(start + np.argmax(np.abs(gradient[start:end])))
        losses: list[float] = []
        for shift in (1e-5, -1e-5):
            shifted = params.copy()
            shifted[at] += shift
            losses.append(loss_and_gradient(shifted, contexts, targets)[0])  # pyright: ignore[reportArgumentType]
        assert gradient[at] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-3)


def test_a_batch_is_a_pure_function_of_seed_step_and_rank() -> None:
    corpus = Corpus.load()
    first, targets = corpus.batch(1, 20, 2)
    assert first.shape == (BATCH, CONTEXT)
    assert targets.shape == (BATCH,)
    assert first.min() >= 0
    assert max(first.max(), targets.max()) < SYMBOLS
    corpus.batch(1, 21, 2)
    assert np.array_equal(first, corpus.batch(1, 20, 2)[0])
    for other in ((2, 20, 2), (1, 21, 2), (1, 20, 1)):
        assert not np.array_equal(first, corpus.batch(*other)[0])


@pytest.mark.parametrize("arrival", [(1, 2), (2, 1)])
def test_the_sum_is_in_rank_order_whoever_comes_first(arrival: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    large = (rng.standard_normal(1000) * 1e15).astype(np.float32)
    gradients = {0: large, 1: -large, 2: rng.standard_normal(1000).astype(np.float32)}
    total = (gradients[0].astype(np.float64) + gradients[1]) + gradients[2]
    other = (gradients[0].astype(np.float64) + gradients[2]) + gradients[1]
    assert not np.array_equal(total, other)
    peers: dict[int, socket.socket] = {}
    ends: dict[int, socket.socket] = {}
    for rank in arrival:
        peers[rank], ends[rank] = socket.socketpair()
        ends[rank].sendall(HEADER.pack(MAGIC, 1, float(rank), 0) + gradients[rank].tobytes())
    exchange = Exchange(hello(0), peers, 30)
    reduced = exchange.reduce(1, gradients[0], 0.0, save_wanted=False)
    assert np.array_equal(reduced.gradient, (total / 3).astype(np.float32))
    exchange.close()
    for end in ends.values():
        end.close()


def test_all_ranks_get_the_same_sum_mean_loss_and_wish_to_save() -> None:
    port = free_port()
    results: dict[int, Reduced] = {}

    def run(rank: int) -> None:
        exchange = join(hello(rank), "127.0.0.1", port, 30)
        gradient = np.full(SIZE, rank, np.float32)
        results[rank] = exchange.reduce(1, gradient, float(rank), save_wanted=rank == 1)
        exchange.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        assert np.array_equal(results[rank].gradient, np.ones(SIZE, np.float32))
        assert (results[rank].loss, results[rank].save_wanted) == (1.0, True)


def alone_with(peer: Callable[[socket.socket], object], timeout_s: float) -> str:
    """What rank 0 of two says about a peer that does `peer` instead of its step."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(timeout_s)
        peer(theirs)
        exchange = Exchange(hello(0, 2), {1: ours}, timeout_s)
        with pytest.raises(PeerLost) as caught:
            exchange.reduce(7, np.zeros(4, np.float32), 0.0, save_wanted=False)
        return str(caught.value)


def test_a_peer_that_is_gone_silent_or_elsewhere_is_named() -> None:
    assert alone_with(lambda peer: peer.close(), 30) == "rank 1 closed its connection at step 7"
    assert alone_with(lambda peer: peer.sendall(b"half"), 0.05) == "rank 1 was silent for 0.05 s at step 7"
    frame = HEADER.pack(MAGIC, 6, 0.0, 0) + bytes(16)
    assert alone_with(lambda peer: peer.sendall(frame), 30) == (
        "rank 1 sent step 6 at step 7: the ranks are out of step"
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"rank": 0}, "rank 0 of world_size 2"),
        ({"rank": 2}, "rank 2 of world_size 2"),
        ({"rank": "1"}, "rank '1' of world_size 2"),
        ({"job": "other"}, "rank 1 has job 'other', this gang has 'train'"),
        ({"generation": 2}, "rank 1 has generation 2, this gang has 1"),
        ({"world_size": 3}, "rank 1 has world_size 3, this gang has 2"),
        ({"step": 5}, "rank 1 has step 5, this gang has 0"),
        ({"start": "e"}, "rank 1 has start 'e', this gang has 'd'"),
    ],
)
def test_who_is_not_of_this_gang_is_refused_and_the_gang_comes_together(line: dict[str, object], says: str) -> None:
    port = free_port()
    sizes: list[int] = []

    def rank0() -> None:
        exchange = join(hello(0, 2), "127.0.0.1", port, 30)
        sizes.append(len(exchange._peers))
        exchange.close()

    thread = threading.Thread(target=rank0)
    thread.start()
    stranger: socket.socket | None = None
    while stranger is None:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), 30)
        except ConnectionRefusedError:
            continue
    with stranger:
        fields: dict[str, object] = {
            "job": "train",
            "generation": 1,
            "world_size": 2,
            "step": 0,
            "start": "d",
            "rank": 1,
        }
        stranger.sendall(json.dumps(fields | line).encode() + b"\n")
        assert json.loads(stranger.makefile("rb").readline()) == {"refused": says}
    with socket.create_connection(("127.0.0.1", port), 30) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 5000)
        join(hello(1, 2), "127.0.0.1", port, 30).close()
    thread.join()
    assert sizes == [1]


def test_one_rank_needs_nobody() -> None:
    exchange = join(hello(0, 1), "192.0.2.1", 0, 1)
    gradient = np.arange(4, dtype=np.float32)
    reduced = exchange.reduce(1, gradient, 2.0, save_wanted=True)
    assert np.array_equal(reduced.gradient, gradient)
    assert (reduced.loss, reduced.save_wanted) == (2.0, True)


def test_rank_0_takes_the_port_that_a_bound_socket_holds_for_it() -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        thread = threading.Thread(target=lambda: join(hello(1, 2), "127.0.0.1", port, 30).close())
        thread.start()
        join(hello(0, 2), "127.0.0.1", port, 30).close()
        thread.join()


def test_the_state_after_a_step_depends_on_the_gradient_alone() -> None:
    one, two = State.initial(1), State.initial(1)
    gradient = np.linspace(-1, 1, SIZE, dtype=np.float32)
    one.update(gradient)
    two.update(gradient.copy())
    assert one.digest() == two.digest() != State.initial(1).digest()
    assert State.initial(2).digest() != State.initial(1).digest()
