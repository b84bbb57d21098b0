"""Test the demo's `--listen` and `--port`."""

from __future__ import annotations

import socket
import sys

import pytest

from demo import showcase
from demo.__main__ import main
from scripts.comfy_server import free_port
from tests.loop import loop


@loop(
    ("listen", "wanted"),
    [
        (showcase.EVERYWHERE, showcase.EVERYWHERE),
        ("127.0.0.1,0.0.0.0", showcase.EVERYWHERE),
        ("192.0.2.7", "127.0.0.1,192.0.2.7"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost, ::", "127.0.0.1,::"),
        (None, None),
    ],
)
def test_the_server_answers_this_machine_too(
    listen: str | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server must always listen on 127.0.0.1, to which the demo's own client connects."""
    seen = list[str]()
    monkeypatch.setattr(showcase.ComfyServer, "start", lambda server: seen.extend(server._command()))
    with showcase.demo_server(listen=listen):
        pass
    assert ("--listen" in seen) == bool(wanted)
    assert wanted is None or seen[seen.index("--listen") + 1] == wanted


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(showcase.DemoError, match=f"port {port} is taken"):
            showcase.serve(port=port)


def test_a_port_is_free_again_when_its_server_has_ended() -> None:
    """The port must count as free although the operating system keeps its closed connections for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
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
