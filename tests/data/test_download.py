"""Downloads, from a local server that answers as the hub does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from speedrun.data.dataset import Dataset
from speedrun.data.download import RETRIES, download
from speedrun.errors import ConfigError, DataError, SpeedrunError
from tests.hub import Hub, serve_hub

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setattr("speedrun.data.download.RETRY_SECONDS", 0.0)
        yield server


def test_the_first_shards_arrive_and_make_a_dataset(tmp_path: Path, hub: Hub) -> None:
    seen: list[tuple[str, int, int]] = []
    out = download("fineweb10B", tmp_path / "out", 2, lambda *state: seen.append(state))
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all((out / name).read_bytes() == hub.files[name] for name in names)
    total = sum(len(hub.files[name]) for name in names)
    assert seen[0] == ("fineweb_val_000000.bin", 0, total)
    assert seen[-1] == ("fineweb_train_000002.bin", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    dataset = Dataset.open(out)
    assert dataset.vocab_size == 50257
    assert dataset.split("train").tokens == 400_000
    hub.requests.clear()
    download("fineweb10B", out, 3)
    assert hub.requests == [("fineweb_train_000003.bin", "")], "fetched again what was there"


def test_a_cut_connection_goes_on_at_the_next_byte(tmp_path: Path, hub: Hub) -> None:
    hub.cut_after = [100_000, 50_005]
    download("fineweb10B", tmp_path / "out", 1)
    name = "fineweb_val_000000.bin"
    assert (tmp_path / "out" / name).read_bytes() == hub.files[name]
    asked = [wanted for file, wanted in hub.requests if file == name]
    assert asked == ["", "bytes=100000-", "bytes=150005-"]


def test_a_hub_that_knows_no_ranges_sends_all_again(tmp_path: Path, hub: Hub) -> None:
    hub.cut_after, hub.knows_ranges = [100_000], False
    download("fineweb10B", tmp_path / "out", 1)
    name = "fineweb_val_000000.bin"
    assert (tmp_path / "out" / name).read_bytes() == hub.files[name]
    assert [wanted for file, wanted in hub.requests if file == name] == ["", "bytes=100000-"]


def test_connections_that_bring_nothing_are_given_up(tmp_path: Path, hub: Hub) -> None:
    hub.cut_after = [7000, *[0] * 20]
    with pytest.raises(DataError, match=r"fineweb_val_000000\.bin stopped at byte 7000 of 401024"):
        download("fineweb10B", tmp_path / "out", 1)
    assert len(hub.requests) == 1 + RETRIES


def test_a_refusal_is_not_asked_again(tmp_path: Path, hub: Hub) -> None:
    del hub.files["fineweb_val_000000.bin"]
    with pytest.raises(DataError, match=r"stopped at byte 0 of 401024 \(.*404") as caught:
        download("fineweb10B", tmp_path / "out", 1)
    assert "\n" not in str(caught.value)


def test_a_stopped_download_goes_on_in_another_run(tmp_path: Path, hub: Hub) -> None:
    class StopError(BaseException):
        pass

    def stop(name: str, done: int, total: int) -> None:
        if done:
            raise StopError

    name = "fineweb_val_000000.bin"
    with pytest.raises(StopError):
        download("fineweb10B", tmp_path / "out", 1, stop)
    (partial,) = (tmp_path / "out").iterdir()
    assert partial.name == f"{name}.partial"
    arrived = partial.stat().st_size
    assert 0 < arrived < len(hub.files[name])
    with pytest.raises(DataError):
        Dataset.open(tmp_path / "out")
    hub.requests.clear()
    download("fineweb10B", tmp_path / "out", 1)
    assert hub.requests[0] == (name, f"bytes={arrived}-")
    assert (tmp_path / "out" / name).read_bytes() == hub.files[name]


def test_a_hub_that_goes_away_is_a_sentence(tmp_path: Path, hub: Hub) -> None:
    hub.files["fineweb_val_000000.bin"] = hub.listed["fineweb_val_000000.bin"][:5000]
    with pytest.raises(DataError, match=r"fineweb_val_000000\.bin stopped at byte 5000 of 401024"):
        download("fineweb10B", tmp_path / "out", 1)
    hub.files = dict(hub.listed)
    download("fineweb10B", tmp_path / "out", 1)
    assert hub.requests[1] == ("fineweb_val_000000.bin", "bytes=5000-")


@pytest.mark.parametrize("offset", [0, 5000, 401_023])
def test_a_damaged_body_is_refused_and_removed(tmp_path: Path, hub: Hub, offset: int) -> None:
    damaged = bytearray(hub.files["fineweb_train_000001.bin"])
    damaged[offset] ^= 1
    hub.files["fineweb_train_000001.bin"] = bytes(damaged)
    with pytest.raises(DataError, match=r"fineweb_train_000001\.bin arrived damaged"):
        download("fineweb10B", tmp_path / "out", 1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fineweb_val_000000.bin"]


def test_damage_on_disk_is_repaired(tmp_path: Path, hub: Hub) -> None:
    download("fineweb10B", tmp_path / "out", 1)
    path = tmp_path / "out/fineweb_train_000001.bin"
    path.write_bytes(path.read_bytes()[:-7] + b"garbage")
    (tmp_path / "out/fineweb_val_000000.bin").unlink()
    (tmp_path / "out/fineweb_val_000000.bin.partial").write_bytes(b"x" * 500_000)
    download("fineweb10B", tmp_path / "out", 1)
    assert path.read_bytes() == hub.files[path.name]
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_file_that_is_no_shard_is_refused(tmp_path: Path, hub: Hub) -> None:
    hub.files["fineweb_val_000000.bin"] = hub.listed["fineweb_val_000000.bin"] = b"<html>" * 1000
    with pytest.raises(DataError, match="is not a token shard"):
        download("fineweb10B", tmp_path / "out", 1)
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize(
    ("name", "shards", "message"),
    [
        ("fineweb10b", 1, r"did you mean fineweb10B\?"),
        ("pile", 1, "choose fineweb10B, fineweb100B, finewebedu10B"),
        ("fineweb10B", 0, "ask for at least 1"),
        ("fineweb10B", 4, "has 3 training shards, not 4"),
        ("fineweb100B", 1, "the list of kjj0/fineweb100B-gpt2 cannot be had"),
    ],
)
def test_wrong_requests_are_refused(
    tmp_path: Path, hub: Hub, name: str, shards: int, message: str
) -> None:
    with pytest.raises(SpeedrunError, match=message) as caught:
        download(name, tmp_path / "out", shards)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_network_and_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(DataError, match=r"cannot be had from http://127\.0\.0\.1:9"):
        download("fineweb10B", tmp_path / "out", 1)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'speedrun\[hub\]'"):
        download("fineweb10B", tmp_path / "out", 1)
