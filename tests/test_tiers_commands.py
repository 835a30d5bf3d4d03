"""`mmcache store`: what operators see and do, on a directory and on a server."""

import os

import pytest
from tier_helpers import key_of, read, rows_of, write
from tier_servers import MooncakeCluster, RedisServer, free_port

from mmcache.cli import main
from mmcache.tiers import DiskTier, RedisTier, encode_entry

SIZE = encode_entry(key_of("a"), rows_of("a")).nbytes


@pytest.fixture
def directory(tmp_path):
    tier = DiskTier(tmp_path / "store", 1 << 20)
    write(tier, "a", "b", "c")
    other = key_of("a", salt="tenant")
    tier.put_many({other: encode_entry(other, rows_of("a"))})
    tier.close()
    return tmp_path / "store"


def run(capsys, *arguments):
    status = main(["store", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


def damage(directory, key):
    path = directory / "objects" / key.name[:2] / key.name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_ls_shows_what_there_is(directory, capsys):
    status, out, _ = run(capsys, "ls", directory)
    lines = out.splitlines()
    assert status == 0
    assert len(lines) == 4
    (line,) = (line for line in lines if line.endswith(f"{key_of('b').namespace} b"))
    assert f" {SIZE} " in line
    assert "  image 4 x 16 float32  " in line
    assert len(run(capsys, "ls", directory, "--limit", 2)[1].splitlines()) == 2


def test_stat_sums_up_by_namespace(directory, capsys):
    status, out, _ = run(capsys, "stat", directory)
    assert status == 0
    assert f"entries 4  bytes {4 * SIZE}" in out
    assert f"{key_of('a').namespace}  entries 3  bytes {3 * SIZE}" in out


def test_verify_finds_damage_and_removes_it_when_told(directory, capsys):
    assert run(capsys, "verify", directory)[0] == 0
    damage(directory, key_of("b"))
    status, out, _ = run(capsys, "verify", directory)
    assert status == 1
    assert f"damaged: checksum: {key_of('b').name}" in out
    assert "whole 3  damaged 1" in out
    assert run(capsys, "verify", directory, "--remove")[0] == 1
    status, out, _ = run(capsys, "verify", directory)
    assert status == 0
    assert "whole 3  damaged 0" in out


@pytest.mark.parametrize(("size", "left"), [("0", 0), (str(2 * SIZE), 2), ("1K", 2), ("1g", 4)])
def test_prune_shrinks_to_a_size(directory, capsys, size, left):
    status, out, _ = run(capsys, "prune", directory, "--to", size)
    assert (status, out) == (0, f"removed {4 - left}\n")
    assert f"entries {left}" in run(capsys, "stat", directory)[1]


def test_clear_takes_a_namespace_or_everything(directory, capsys):
    assert run(capsys, "clear", directory, "--namespace", key_of("a").namespace)[1] == "removed 3\n"
    assert run(capsys, "clear", directory)[1] == "removed 1\n"
    assert run(capsys, "ls", directory)[1] == ""


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "clear"])
@pytest.mark.parametrize("location", ["missing", "ftp://host/x", "redis://host:port", "mooncake://nowhere"])
def test_a_location_that_is_no_store_is_said_so_and_left_alone(tmp_path, capsys, monkeypatch, action, location):
    monkeypatch.chdir(tmp_path)
    if location.startswith("redis") and RedisServer.why_not():
        pytest.skip(RedisServer.why_not())
    status, out, err = run(capsys, action, location)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", ["", "-1", "many", "1X"])
def test_a_size_that_is_none_is_refused(directory, capsys, size):
    with pytest.raises(SystemExit):
        run(capsys, "prune", directory, f"--to={size}")
    assert "size" in capsys.readouterr().err


@pytest.mark.server
def test_a_redis_server(capsys):
    if why := RedisServer.why_not():
        pytest.skip(why)
    server = RedisServer()
    try:
        tier = RedisTier(server.url)
        keys = write(tier, "a", "b")
        assert len(run(capsys, "ls", server.url)[1].splitlines()) == 2
        assert f"entries 2  bytes {2 * SIZE}" in run(capsys, "stat", server.url)[1]
        tier.put_many({keys[0]: encode_entry(keys[1], rows_of("b"))})
        assert run(capsys, "verify", server.url, "--remove")[0] == 1
        assert set(read(tier, keys[1])) == {"b"}
        status, _, err = run(capsys, "prune", server.url, "--to", "0")
        assert status == 1
        assert "servers evict by themselves" in err
        assert run(capsys, "clear", server.url)[1] == "removed 1\n"
    finally:
        server.kill()
    status, _, err = run(capsys, "stat", server.url)
    assert status == 1
    assert "Traceback" not in err


@pytest.mark.server
def test_a_mooncake_cluster(capsys):
    if why := MooncakeCluster.why_not():
        pytest.skip(why)
    status, _, err = run(capsys, "stat", f"mooncake://127.0.0.1:{free_port()}")
    assert status == 1
    assert "cannot be reached" in err
