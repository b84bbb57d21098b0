"""Test the demo's `--listen` and `--port`."""

import socket
import sys

import pytest

from demo import showcase
from demo.__main__ import main
from scripts.comfy_server import free_port


@pytest.mark.parametrize(
    ("listen", "wanted"),
    [
        ("127.0.0.1,0.0.0.0", showcase.EVERYWHERE),
        ("192.0.2.7", "127.0.0.1,192.0.2.7"),
        ("localhost, ::", "127.0.0.1,::"),
        (None, None),
    ],
)
def test_the_server_always_listens_on_the_address_of_the_demos_client(
    listen: str | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    monkeypatch.setattr(showcase.ComfyServer, "start", lambda server: seen.extend(server._command()))
    with showcase.demo_server(listen=listen):
        pass
    assert ("--listen" in seen) == bool(wanted)
    assert wanted is None or seen[seen.index("--listen") + 1] == wanted


def test_a_port_that_is_taken_is_said_and_is_free_when_its_server_has_ended() -> None:
    """The port of an ended server must count as free although the system keeps its closed connections for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(showcase.DemoError, match=f"port {address[1]} is taken"):
            showcase.serve(port=address[1])
        with socket.create_connection(address) as client, server.accept()[0] as connection:
            connection.close()
            assert client.recv(1) == b""
    assert free_port(address[1]) == address[1]


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--port", "8200"], "go with --serve"), (["--serve", "--port", "70000"], "not a port")]
)
def test_addresses_are_checked(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
