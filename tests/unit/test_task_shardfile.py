"""The shard file: what is read back is what was written, or ShardCorrupt says where it is not."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from virialpb.shardfile import (
    STRIPE_BYTES,
    TOLD_BYTES,
    Manifest,
    Problem,
    ShardCorrupt,
    ShardIdentity,
    ShardWriter,
    VerifiedReader,
    encode_manifest,
    make_directory,
    read_manifest,
    shard_digest,
    verify_shard,
)

WHO = ShardIdentity(checkpoint_id="c1", step=20, rank=1, world_size=3, job="train", generation=2)


def pattern(size: int) -> bytes:
    """Bytes in which no two stripes are alike."""
    return b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(-(-size // 32)))[:size]


def write(directory: Path, data: bytes, chunk: int = 0, who: ShardIdentity = WHO) -> Manifest:
    writer = ShardWriter(directory, who)
    for start in range(0, len(data), chunk or max(1, len(data))):
        writer.write(data[start : start + (chunk or len(data))])
    return writer.finish()


@pytest.mark.parametrize("chunk", [0, 1000, STRIPE_BYTES - 1, STRIPE_BYTES, STRIPE_BYTES + 1, 3 * STRIPE_BYTES])
@pytest.mark.parametrize("size", [0, 1, STRIPE_BYTES - 1, STRIPE_BYTES, STRIPE_BYTES + 1, 2 * STRIPE_BYTES + 77])
def test_reads_back_what_was_written_whatever_the_chunks(tmp_path: Path, size: int, chunk: int) -> None:
    data = pattern(size)
    manifest = write(tmp_path, data, chunk)
    assert sorted(os.listdir(tmp_path)) == ["rank-00001.json", "rank-00001.shard"]
    assert verify_shard(tmp_path, 1, digest=manifest.digest) == manifest == read_manifest(tmp_path, 1)
    assert manifest.identity == WHO
    assert (tmp_path / "rank-00001.shard").read_bytes() == data
    with VerifiedReader(tmp_path, manifest) as reader:
        assert reader.readall() == data
        assert reader.seek(-min(5, size), os.SEEK_END) == size - min(5, size)
        assert reader.read() == data[size - min(5, size) :]


def test_the_digest_is_that_of_the_text_in_the_docs(tmp_path: Path) -> None:
    data = pattern(STRIPE_BYTES + 5)
    first, second = (hashlib.sha256(part).hexdigest() for part in (data[:STRIPE_BYTES], data[STRIPE_BYTES:]))
    text = f"virial-shard-1 stripe_bytes=1048576 size_bytes=1048581\n{first}\n{second}\n"
    assert write(tmp_path, data).digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_digest_never_changes() -> None:
    # printf 'virial-shard-1 stripe_bytes=1048576 size_bytes=0\n' | sha256sum
    assert shard_digest(0, []) == "14b569f118579fc3493d13942e4761c2dd65db28c00fdb292fb5babd3f6fc8da"


@pytest.mark.parametrize("stripe", [0, 1, 2])
def test_a_flipped_bit_is_found_and_named_before_its_bytes_are_handed_out(tmp_path: Path, stripe: int) -> None:
    data = pattern(2 * STRIPE_BYTES + 77)
    manifest = write(tmp_path, data)
    path = tmp_path / "rank-00001.shard"
    bad = bytearray(data)
    bad[stripe * STRIPE_BYTES + 13] ^= 1
    path.write_bytes(bad)
    with pytest.raises(ShardCorrupt, match=f"{path}: stripe {stripe}: ") as caught:
        verify_shard(tmp_path, 1)
    assert (caught.value.file, caught.value.problem, caught.value.stripe) == (str(path), Problem.STRIPE, stripe)
    with VerifiedReader(tmp_path, manifest) as reader:
        for good in range(stripe):
            assert reader.stripe(good) == data[good * STRIPE_BYTES : (good + 1) * STRIPE_BYTES]
        reader.seek(stripe * STRIPE_BYTES)
        with pytest.raises(ShardCorrupt):
            reader.read(1)


@pytest.mark.parametrize("size", [0, STRIPE_BYTES + 76, STRIPE_BYTES + 78])
def test_another_size_is_found_when_opened(tmp_path: Path, size: int) -> None:
    manifest = write(tmp_path, pattern(STRIPE_BYTES + 77))
    os.truncate(tmp_path / "rank-00001.shard", size)
    with pytest.raises(ShardCorrupt, match=f"{size} bytes, the manifest has {STRIPE_BYTES + 77}") as caught:
        VerifiedReader(tmp_path, manifest)
    assert caught.value.problem == Problem.SIZE


def test_a_file_that_shrinks_while_it_is_read_is_found(tmp_path: Path) -> None:
    manifest = write(tmp_path, pattern(STRIPE_BYTES + 77))
    with VerifiedReader(tmp_path, manifest) as reader:
        os.truncate(tmp_path / "rank-00001.shard", STRIPE_BYTES)
        with pytest.raises(ShardCorrupt) as caught:
            reader.stripe(1)
    assert (caught.value.problem, caught.value.stripe) == (Problem.SIZE, 1)


def nothing(path: Path) -> None:
    assert not path.exists()


def link_elsewhere(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("name", ["rank-00001.shard", "rank-00001.json"])
@pytest.mark.parametrize(
    ("replace", "problem"),
    [
        (nothing, Problem.MISSING),
        (link_elsewhere, Problem.NOT_A_FILE),
        (os.mkfifo, Problem.NOT_A_FILE),
        (os.mkdir, Problem.NOT_A_FILE),
    ],
)
def test_only_a_regular_file_is_read(
    tmp_path: Path, name: str, replace: Callable[[Path], None], problem: Problem
) -> None:
    write(tmp_path, b"x")
    (tmp_path / name).unlink()
    replace(tmp_path / name)
    with pytest.raises(ShardCorrupt) as caught:
        verify_shard(tmp_path, 1)
    assert (caught.value.file, caught.value.problem) == (str(tmp_path / name), problem)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("format", "virial-shard-2", "format is 'virial-shard-2', this reads 'virial-shard-1'"),
        ("stripe_bytes", 4096, "stripe_bytes is 4096"),
        ("size_bytes", -1, "size_bytes is -1, not a whole number >= 0"),
        ("size_bytes", True, "size_bytes is True"),
        ("size_bytes", STRIPE_BYTES + 1, "1 stripe digests for 1048577 bytes"),
        ("size_bytes", 2, "digest is not that of its stripe digests"),
        ("step", "20", "step is '20'"),
        ("job", None, "job is None, not a string"),
        ("rank", 3, "rank 3 of world_size 3"),
        ("rank", 2, "file is 'rank-00001.shard', rank 2 has 'rank-00002.shard'"),
        ("file", "../../etc/passwd", "file is '../../etc/passwd'"),
        ("stripe_digests", "none", "0 stripe digests for 1 bytes"),
        ("stripe_digests", ["abc"], r"stripe_digests\[0\] is 'abc', not 64 hex digits"),
        ("stripe_digests", ["0" * 64], "digest is not that of its stripe digests"),
        ("digest", "0" * 64, "digest is not that of its stripe digests"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_field(tmp_path: Path, key: str, value: object, says: str) -> None:
    write(tmp_path, b"x")
    path = tmp_path / "rank-00001.json"
    fields = cast("dict[str, object]", json.loads(path.read_bytes()))
    path.write_text(json.dumps({**fields, key: value}))
    with pytest.raises(ShardCorrupt, match=says) as caught:
        read_manifest(tmp_path, 1)
    assert caught.value.file == str(path)
    assert caught.value.problem in (Problem.MANIFEST, Problem.DIGEST)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rank-00001.json").write_bytes(data)
    with pytest.raises(ShardCorrupt, match="not a shard manifest") as caught:
        read_manifest(tmp_path, 1)
    assert caught.value.problem == Problem.MANIFEST


def test_another_ranks_manifest_under_this_name_is_refused(tmp_path: Path) -> None:
    manifest = write(tmp_path, b"x")
    (tmp_path / "rank-00000.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(ShardCorrupt, match="it is rank 1's") as caught:
        read_manifest(tmp_path, 0)
    assert caught.value.problem == Problem.IDENTITY


def test_another_digest_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    write(tmp_path, b"x")
    with pytest.raises(ShardCorrupt, match=f"{'0' * 64} was recorded"):
        verify_shard(tmp_path, 1, digest="0" * 64)


@pytest.mark.parametrize("name", ["rank-00001.shard", "rank-00001.json", ".rank-00001.shard.tmp"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"older")
    with pytest.raises(FileExistsError):
        ShardWriter(tmp_path, WHO)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"older"


@pytest.mark.parametrize("name", ["rank-00001.shard", "rank-00001.json"])
def test_a_name_taken_while_writing_is_not_overwritten(tmp_path: Path, name: str) -> None:
    writer = ShardWriter(tmp_path, WHO)
    writer.write(b"newer")
    (tmp_path / name).write_bytes(b"older")
    with pytest.raises(FileExistsError):
        writer.finish()
    writer.discard()
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"older"


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WHO)
    writer.write(pattern(STRIPE_BYTES + 1))
    writer.discard()
    writer.discard()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("rank", "world_size", "step"), [(-1, 3, 0), (3, 3, 0), (0, 0, 0), (0, 100_001, 0), (0, 1, -1)]
)
def test_an_identity_that_cannot_be_is_refused(rank: int, world_size: int, step: int) -> None:
    with pytest.raises(ValueError, match=r"rank|step"):
        ShardIdentity("c1", step, rank, world_size)


def test_directories_are_made_with_their_parents_and_may_exist(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "file")


def test_a_reader_tells_how_far_it_is(tmp_path: Path) -> None:
    write(tmp_path, pattern(1024) * (TOLD_BYTES // 1024) * 2 + b"rest")
    told: list[int] = []
    verify_shard(tmp_path, WHO.rank, told=told.append)
    assert told == [TOLD_BYTES, 2 * TOLD_BYTES]
