"""What becomes of a part's result, and of a part that fails; the clients of a server."""

import asyncio
import json
import subprocess
import threading
from types import SimpleNamespace

import load
import load_server
import pytest


def test_a_part_joins_the_others_in_the_result_file(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "RESULTS", tmp_path / "load.json")
    monkeypatch.setattr(load, "draw", lambda results: None)
    load.keep("training", {"steps": 6})
    load.keep("server", {"requests": 1})
    load.keep("server", {"requests": 2})
    found = json.loads((tmp_path / "load.json").read_text())
    assert list(found) == ["server", "training"] and found["server"]["requests"] == 2 and found["training"]["steps"] == 6
    assert (tmp_path / "load.lock").exists()


@pytest.mark.parametrize(
    "code, told, said",
    [
        (1, 0, r"training: exit code 1: error: no such model \(.*training\.log\)"),
        (-11, 3, "training: exit code -11"),
        (0, 0, "training: stopped before its second step"),
        (0, 1, "training: stopped before its second step"),
    ],
)
def test_a_training_run_that_ends_early_measured_nothing(tmp_path, monkeypatch, code, told, said):
    def run(command, stderr, **_):
        [file] = [word.removeprefix("--child=") for word in command if word.startswith("--child=")]
        assert len(set(command)) == len(command)
        if told:
            with open(file, "w") as out:
                out.write('{"step": 1}\n' * told)
        stderr.write("error: no such model\n")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(load.subprocess, "run", run)
    with pytest.raises(SystemExit, match=said):
        load.train(SimpleNamespace(work=tmp_path, steps=6, busy=False))


@pytest.mark.parametrize("takes", [0.05, 0.5])
def test_clients_of_a_server_that_takes_its_time(takes):
    """Eight ask for a fifth of a second: none of what is answered is lost, and it took until the last answer."""
    answered = []

    async def respond(reader, writer):
        while True:
            try:
                header = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return writer.close()
            length = int(header.lower().partition(b"content-length: ")[2].split()[0])
            asked = json.loads(await reader.readexactly(length))
            await asyncio.sleep(takes)
            body = json.dumps({"result": [["hit"] * asked["topk"]]}).encode()
            answered.append(asked["queries"])
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    loop, opened = asyncio.new_event_loop(), []
    opened.append(loop.run_until_complete(asyncio.start_server(respond, "127.0.0.1", 0)))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        clients = load_server.Clients(opened[0].sockets[0].getsockname(), ["who", "where"], 8, 0.2)
        clients.run()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert not clients.failures and len(clients.latencies) == len(answered) and min(clients.latencies) >= takes
    assert len(answered) >= 8 and clients.elapsed >= max(0.2, *clients.latencies)
