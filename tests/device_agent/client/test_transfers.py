"""Downloads and uploads against real sockets."""

import hashlib
import json
from pathlib import Path

import pytest

from device_agent.formats.protocol.transfers import FileOffer
from refusals import refused
from scripted_http import Server, answering, follow, link


def test_a_download_is_complete_and_correct_or_absent(server: Server, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    offer = FileOffer(name="a.onnx", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    target = tmp_path / "files" / "a"
    altered = data[:-1] + b"!"
    for wrong in (altered, data[:-1], data + b"!"):
        server.answers = lambda method, path, wrong=wrong: (200, wrong)  # type: ignore[misc]
        code = "client.altered-file" if wrong is altered else "client.not-a-coordinator"
        with refused(code, url=server.url):
            link(server.url, patience_s=0)[0].download(offer, target)
        assert list(target.parent.iterdir()) == []
    server.answers = lambda method, path: (200, data)
    link(server.url)[0].download(offer, target)
    assert target.read_bytes() == data


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_a_full_disk_names_the_file(server: Server, tmp_path: Path) -> None:
    offer = FileOffer(name="a", size=4, sha256=hashlib.sha256(b"data").hexdigest())
    server.answers = lambda method, path: (200, b"data")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / ".part-a").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as error:
        link(server.url)[0].download(offer, tmp_path / "files" / "a")
    assert error.value.filename == str(tmp_path / "files" / "a")


def test_a_download_that_breaks_off_is_tried_again(tmp_path: Path, said: list[str]) -> None:
    data = b"x" * 1000
    offer = FileOffer(name="a", size=1000, sha256=hashlib.sha256(data).hexdigest())
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n"
    with answering(head + data[:500], head + data) as port:
        link(f"http://127.0.0.1:{port}")[0].download(offer, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data
    assert "(the connection broke off); trying again" in said[0]


@pytest.mark.parametrize("received", [0, 300, 700_000, 700_001])
def test_only_the_missing_tensors_are_sent(server: Server, tmp_path: Path, received: int) -> None:
    data = b"tensors" * 100_000
    (tmp_path / "t").write_bytes(data)
    have = json.dumps({"received": received}).encode()
    server.answers = lambda method, path: (200, have) if method == "GET" else (204, b"")
    link(server.url)[0].send_tensors(3, tmp_path / "t")
    path = f"/v1/rounds/3/tensors/{hashlib.sha256(data).hexdigest()}"
    rest = data if received > len(data) else data[received:]
    assert server.asked == [("GET", path, b""), ("PUT", path, rest)]


def test_tensors_that_have_come_are_not_sent_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"tensors")
    server.answers = lambda method, path: (200, b'{"received": 0, "complete": true}')
    link(server.url)[0].send_tensors(3, tmp_path / "t")
    assert [method for method, _, _ in server.asked] == ["GET"]


def test_a_login_page_does_not_replace_the_part_of_a_file(server: Server, tmp_path: Path) -> None:
    data = b"0123456789" * 1000
    offer = FileOffer(name="a", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (tmp_path / ".part-a").write_bytes(data[:4000])
    page, short = (200, "text/html", b"x" * len(data)), (200, "", b"short")
    follow(server, [page, short, (206, "", data[4000:])])
    client, slept = link(server.url)
    client.download(offer, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data
    assert slept == [1, 2]
