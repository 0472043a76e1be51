"""Tests of the command line: what it prints and its exit status; in processes of their own where that matters."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvrelay import __version__
from kvrelay.channel import Channel, Listener, bind_unix
from kvrelay.cli import app
from kvrelay.cli.doctor import Finding, Verdict, findings
from kvrelay.cli.settings import load
from kvrelay.cli.terminal import console
from kvrelay.cli.up import _example
from kvrelay.config_text import parse
from kvrelay.deploy.key import read_key
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.tiny import make_tiny
from kvrelay.protocol.client import Described, LinkReport
from kvrelay.types import Transport

COMMANDS = [
    ["up"],
    ["ask"],
    ["demo"],
    ["doctor"],
    ["drain"],
    ["store"],
    ["router"],
    ["worker"],
    ["model", "fetch"],
    ["mock-worker"],
    ["fault"],
    ["chaos"],
]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An empty cache: no model was fetched."""
    return tmp_path / "cache"


def kvrelay(*arguments: str, cache: Path | None = None, columns: int = 200) -> Result:
    """Run a command in this process, in a window of ``columns``."""
    console.width = columns
    environment = {"XDG_CACHE_HOME": str(cache)} if cache is not None else {}
    return CliRunner().invoke(app, arguments, env=environment, catch_exceptions=False)


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person does."""
    command = [sys.executable, "-m", "kvrelay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_page_has_an_example(command: list[str]) -> None:
    page = CliRunner().invoke(app, [*command, "--help"])
    assert page.exit_code == 0
    assert f"Example:  kvrelay {' '.join(command)}" in page.output


def test_fault_names_the_word_that_mends_a_worker() -> None:
    page = CliRunner().invoke(app, ["fault", "--help"], env={"COLUMNS": "200"})
    assert "the word none mends it" in page.output


def test_without_a_command_the_first_steps_are_shown() -> None:
    assert "kvrelay model fetch;  kvrelay up;" in kvrelay().stdout


@pytest.mark.slow
def test_an_unknown_key_of_the_configuration_gets_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text("[worker]\nmax_batch_tokens = 3\n")
    result = process("up", "--config", str(file))
    assert result.returncode == 1
    assert "'worker.max_batch_tokens'; did you mean 'max_batched_tokens'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_value_out_of_range_is_refused_by_its_name() -> None:
    result = kvrelay("up", "--port", "99999")
    assert result.exit_code == 1
    assert "--port (router.port): expected int >= 0 and <= 65535" in result.stderr


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("[router]\nport = 'x'\n", "router.port: expected int, got str"),
        ("[model]\ndtype = 'fp8'\n", "model.dtype: expected auto or bfloat16 or float32"),
        ("[router\n", "not valid TOML"),
        ("[store]\npeers = ['nonsense']\n", "store.peers[0]: expected host:port"),
        ("[store]\nadvertise = 'not an address'\n", "store.advertise: expected host:port"),
        ("[router]\nprot = 1\n", "unknown key 'router.prot'; did you mean 'port'?"),
    ],
)
def test_an_error_in_the_configuration_names_the_file_and_the_key(tmp_path: Path, toml: str, text: str) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text(toml)
    result = kvrelay("up", "--config", str(file))
    assert result.exit_code == 1
    assert f"{file}: {text}" in result.stderr


@pytest.mark.parametrize(
    "toml", ["[tenants.silver]\n", "[router]\napi_keys = ['a:K', 'b:K']\n", "[worker]\nrole = 'prefill'\n"]
)
def test_up_refuses_what_a_router_or_a_cluster_would_in_one_line_and_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml: str
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("KVRELAY_RUN_DIR", str(run_dir))
    file = tmp_path / "kvrelay.toml"
    file.write_text(toml)
    result = kvrelay("up", "--mock", "1x1", "--config", str(file))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {file}: ")
    assert len(result.stderr.splitlines()) == 1
    assert not run_dir.exists()


def test_an_unknown_dtype_is_refused_before_anything_starts() -> None:
    result = kvrelay("up", "--dtype", "fp8")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "--dtype (model.dtype): expected auto or bfloat16 or float32" in result.stderr


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_model_folder_without_a_part_is_refused_before_anything_starts(tmp_path: Path, missing: str) -> None:
    model = make_tiny(tmp_path / "tiny")
    (model / missing).unlink()
    result = kvrelay("up", "--port", "0", "--model", str(model))
    assert result.exit_code == 1
    assert result.stdout == "Stopped.\n" or result.stdout == ""
    assert f"the model folder {model} has no " in result.stderr


def test_more_workers_than_cores_are_warned_of() -> None:
    result = kvrelay("up", "--prefill", "60", "--decode", "60", "--model", "/no/such/folder")
    assert re.search(r"warning: 120 workers share \d+ cores", result.stderr)


def test_the_version_is_told() -> None:
    assert process("--version").stdout == f"kvrelay {__version__}\n"


HEAVY = ("aiohttp", "numpy", "torch", "transformers", "vllm", "kvrelay.router.runner", "kvrelay.store.daemon")


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    code = f"import sys, kvrelay.cli; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("address", ["foo", "foo:", ":7080", "http://h:7080", "h:99999"])
def test_a_router_that_is_no_address_is_refused_at_once(tmp_path: Path, address: str) -> None:
    flags = ["--key-file", str(_key(tmp_path)), "--router", address]
    for command in (
        ["worker", "--store-socket", "s", "--model", str(make_tiny(tmp_path / "m"))],
        ["store", "--socket", "s"],
    ):
        result = kvrelay(*command, *flags)
        assert result.exit_code == 1
        assert f"--router {address} is not HOST:PORT" in result.stderr


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = _key(tmp_path)
    key.chmod(0o640)
    result = kvrelay("store", "--socket", str(tmp_path / "s"), "--key-file", str(key))
    assert result.exit_code == 1
    assert f"the key file {key} is open to other users; run: chmod 600 {key}" in result.stderr


@pytest.mark.parametrize("name", ["n" * 100_000, "a\nb", os.fsdecode(b"\xff\xfe")])
def test_a_name_that_others_cannot_show_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)
    given = ["store", "--socket", str(tmp_path / "s.sock"), "--key-file", str(tmp_path / "key"), "--name", name]
    result = kvrelay(*given)
    assert result.exit_code == 1
    assert "is no name for a member" in result.output
    assert len(result.output) < 1000


@pytest.mark.slow
def test_a_store_makes_its_folder_and_is_named_after_its_socket(tmp_path: Path) -> None:
    socket_path = tmp_path / "new" / "near.sock"
    command = [
        sys.executable,
        "-m",
        "kvrelay",
        "store",
        "--socket",
        str(socket_path),
        "--key-file",
        str(_key(tmp_path)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        line = store.stdout.readline()
        store.terminate()
        _, told = store.communicate()
    assert told == f"warning: there was no folder {tmp_path / 'new'}; it is made for --socket\n"
    assert line.startswith(f"kvrelay ready: store near at {socket_path},")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_store_makes_no_folders_above_that_of_its_socket(tmp_path: Path) -> None:
    result = kvrelay("store", "--socket", str(tmp_path / "a" / "b" / "s.sock"), "--key-file", str(_key(tmp_path)))
    assert result.exit_code == 1
    assert f"cannot make the folder {tmp_path}/a/b for --socket: No such file or directory" in result.stderr
    assert not (tmp_path / "a").exists()


def _key(folder: Path) -> Path:
    key = folder / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    return key


@pytest.mark.parametrize("wants_key", [False, True])
def test_the_suggestions_have_a_place_for_the_key_where_one_is_needed(wants_key: bool) -> None:
    text = _example("http://h:1", "m", wants_key)
    assert ("ask --url http://h:1 --api-key KEY 'What" in text) is wants_key
    assert ("-H 'Authorization: Bearer KEY'" in text) is wants_key


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    result = kvrelay("up", "--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 1
    assert f"cannot read the configuration file {tmp_path}/none.toml" in result.stderr


def test_a_port_in_use_is_told_with_its_holder(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        result = kvrelay("up", "--port", str(port), "--model", str(make_tiny(tmp_path / "tiny")))
    assert result.exit_code == 1
    assert f"port {port} is in use by pid {os.getpid()} (" in result.stderr
    assert "choose another port with --port" in result.stderr


def test_up_takes_another_control_port_beside_a_cluster_that_has_the_usual_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        result = kvrelay("up", "--mock", "1x1", "--port", "0", "--control-port", port)
    assert result.exit_code == 1
    assert f"port {port} is in use by pid {os.getpid()} (" in result.stderr
    assert "choose another port with --control-port (0: any)" in result.stderr


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "run: kvrelay model fetch"),
        (["--model", "/no/such/folder"], "no model folder at /no/such/folder"),
    ],
)
def test_a_missing_model_says_what_to_run(flags: list[str], text: str, cache: Path) -> None:
    result = kvrelay("up", "--port", "0", *flags, cache=cache)
    assert result.exit_code == 1
    assert text in result.stderr
    assert "kvrelay model fetch" in result.stderr


def test_asking_where_nobody_answers_says_what_to_run() -> None:
    result = kvrelay("ask", "hi", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "start a cluster: kvrelay up" in result.stderr


def test_a_worker_without_a_key_says_so(tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path / "tiny"))
    flags = ["--store-socket", str(tmp_path / "s"), "--key-file", str(tmp_path / "none"), "--model", model]
    result = kvrelay("worker", *flags)
    assert result.exit_code == 1
    assert f"cannot read the key file {tmp_path}/none: No such file or directory; that of a cluster" in result.stderr


def test_the_doctor_names_what_is_missing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()  # without a file, a cluster that happens to run here would be looked at
    result = kvrelay("doctor", "--config", str(tmp_path / "empty.toml"), cache=cache)
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if " model " in line)
    assert row.startswith("bad")
    assert "kvrelay model fetch" in row


def test_the_doctor_counts_the_memory_of_each_store() -> None:
    row = next(each for each in findings(parse("[cluster]\nstores = 2\n")) if each.what == "memory")
    assert "about 10.0 wanted for 2 stores and 2 workers" in row.text


def test_the_doctor_looks_for_the_library_that_the_engine_is_linked_with() -> None:
    row = next(line for line in kvrelay("doctor").stdout.splitlines() if "libnuma.so.1" in line)
    assert row.startswith("ok") == (ctypes.util.find_library("numa") is not None)


@pytest.mark.parametrize("command", ["router", "worker", "store"])
def test_every_command_names_the_holder_of_a_taken_port(command: str, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("k" * 32)
    key_file.chmod(0o600)
    model = ["--model", str(make_tiny(tmp_path / "tiny"))]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        file = tmp_path / "kvrelay.toml"
        file.write_text(f"[store]\npeer_port = {port}\n")
        flags = {
            "router": [*model, "--port", port],
            "worker": [*model, "--port", port, "--store-socket", str(tmp_path / "s")],
            "store": ["--socket", str(tmp_path / "s"), "--config", str(file)],
        }
        result = kvrelay(command, "--key-file", str(key_file), *flags[command])
    assert result.exit_code == 1
    assert f"port {port} is in use by pid {os.getpid()} (" in result.stderr


def test_a_role_under_up_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text('[worker]\nrole = "both"\n[router]\ncontrol_port = 0\n')
    result = kvrelay("up", "--config", str(file), "--port", "0", "--model", str(make_tiny(tmp_path / "tiny")))
    assert result.exit_code == 1
    assert "--prefill, --decode, --colocated" in result.stderr


def port_findings(folder: Path, api_port: int, control_port: int) -> list[Finding]:
    """What the doctor says of the two ports."""
    file = folder / "kvrelay.toml"
    file.write_text(f"[router]\nport = {api_port}\ncontrol_port = {control_port}\n")
    return [finding for finding in findings(load(file)) if finding.what.startswith("port ")]


def test_a_port_that_somebody_else_has_is_a_failure_to_the_doctor(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        _, control = port_findings(tmp_path, 0, sock.getsockname()[1])
    assert control.verdict is Verdict.BAD
    assert f"in use by pid {os.getpid()}" in control.text
    assert "choose another with --control-port (0: any)" in control.text


@contextlib.contextmanager
def router_in_name(count: int, *words: str, cwd: Path | None = None) -> Iterator[list[int]]:
    """Ports of a process that listens on ``count`` and is called as a router with these ``words`` is."""
    listen = (
        "import socket, sys; held = [socket.create_server(('127.0.0.1', 0)) for _ in range(int(sys.argv[1]))]\n"
        "print(*(each.getsockname()[1] for each in held), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", listen, str(count), "kvrelay", "router", *words]
    with subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield [int(word) for word in child.stdout.readline().split()]  # it ends with its input, which the exit closes


@pytest.mark.slow
def test_the_ports_of_the_cluster_that_runs_here_are_well_and_those_of_another_are_not(tmp_path: Path) -> None:
    with router_in_name(2) as (api, control), router_in_name(1) as (foreign,):
        ours = port_findings(tmp_path, api, control)
        mixed = port_findings(tmp_path, api, foreign)
        beside = port_findings(tmp_path, free_port(), control)
    assert [finding.verdict for finding in ours] == [Verdict.GOOD] * 2
    assert "a second one needs --port" in ours[0].text
    assert [finding.verdict for finding in mixed] == [Verdict.BAD] * 2
    assert [finding.verdict for finding in beside] == [Verdict.GOOD, Verdict.BAD]


@pytest.mark.parametrize("flag", ["--prefill", "--decode"])
def test_a_size_of_mocks_and_a_count_of_workers_are_refused_together(flag: str) -> None:
    result = kvrelay("up", "--mock", "2x2", flag, "3")
    assert result.exit_code == 1
    assert f"--mock 2x2 and {flag} 3 both count workers; leave {flag} out" in result.stderr


def test_the_doctor_leaves_a_long_path_whole_in_a_narrow_window(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / ("a-long-name-" * 8) / "tiny")
    file = tmp_path / "kvrelay.toml"
    file.write_text(f"[model]\npath = '{model}'\n")
    result = kvrelay("doctor", "--config", str(file), columns=80)
    assert str(model.resolve()) in result.stdout
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


async def doctor_of(folder: Path, links: list[LinkReport]) -> Result:
    """What the doctor says of a store that knows ``links``."""
    key = folder / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)

    async def serve(link: Channel) -> None:
        await link.recv()
        await link.send(Described(id=1, counts={}, links=links))

    listener = Listener(bind_unix(folder / "s.sock"), read_key(key), receiver="s", purposes={"client"}, serve=serve)
    task = asyncio.create_task(listener.run())
    arguments = ("doctor", "--store", str(folder / "s.sock"), "--key-file", str(key))
    try:
        return await asyncio.to_thread(lambda: kvrelay(*arguments))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def way(transport: Transport, *, peer: str = "127.0.0.1:9", problem: str = "") -> LinkReport:
    if problem:
        return LinkReport(peer=peer, transport=transport, problem=problem)
    return LinkReport(peer=peer, transport=transport, rank=1, bytes_per_s=2.5e9, latency_s=0.0003)


async def test_the_doctor_shows_how_a_store_reaches_the_others(tmp_path: Path) -> None:
    lost = way(Transport.NIXL, problem="the peer does not offer it")
    result = await doctor_of(tmp_path, [way(Transport.TCP), lost])
    assert "tcp: 2.50 GB/s, round trip 0.30 ms; taken" in result.stdout
    assert "nixl: not used, the peer does not offer it" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ok", "warning"]
    assert result.exit_code == 0


async def test_the_doctor_warns_of_a_missing_package_only_where_no_other_path_is_taken(tmp_path: Path) -> None:
    missing = "NIXL is not installed here; pip install 'kvrelay[nixl]'"
    alone = way(Transport.NIXL, peer="127.0.0.1:7", problem=missing)
    result = await doctor_of(tmp_path, [way(Transport.TCP), way(Transport.NIXL, problem=missing), alone])
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ok", "ok", "warning"]


async def test_the_doctor_says_of_a_store_without_peers_when_it_will_have_some(tmp_path: Path) -> None:
    result = await doctor_of(tmp_path, [])
    assert result.stdout.startswith("warning")
    told = "no peer: one store alone has none; paths to others are tested some seconds after they register"
    assert told in result.stdout
    assert told in (Path(__file__).parent.parent / "docs" / "troubleshoot.md").read_text()


def test_the_doctor_asks_for_the_key_of_a_store() -> None:
    assert "--key-file" in kvrelay("doctor", "--store", "s.sock").stderr


def test_the_doctor_counts_ranks_and_refuses_as_many_as_a_model_has_no_heads_for(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    file = tmp_path / "kvrelay.toml"
    file.write_text(f"[model]\npath = '{model}'\n[worker]\ntensor_parallel = 7\n")
    result = kvrelay("doctor", "--config", str(file))
    assert result.exit_code == 1
    told = " ".join(result.stdout.split())
    assert "one for each of 14 ranks, 7 of each worker" in told
    assert "about 44.0 wanted for the store and 14 ranks" in told
    assert "worker.tensor_parallel: 7 ranks cannot share" in told
