"""What the doctor makes of a cluster that runs here: which one it is, and how it is configured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from kvrelay.cli import app
from kvrelay.cli.doctor import Finding, Verdict, findings
from kvrelay.config import ClusterConfig, Config, MockConfig, ModelConfig, RouterConfig, WorkerConfig
from kvrelay.config_text import render
from kvrelay.deploy.running_config import running_at
from kvrelay.types import Role
from tests.test_cli import router_in_name

KEYED = RouterConfig(api_keys=("gold:K",), control_port=0)


def with_port(config: Config, port: int) -> Config:
    return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, port=port))


def port_of(config: Config, running: Config, folder: Path) -> Finding:
    """What the doctor says of the API's port of ``config`` where a router runs that was started with ``running``."""
    (folder / "config.toml").write_text(render(running))
    with router_in_name(1, "--config", "config.toml", cwd=folder) as (port,):
        return next(each for each in findings(with_port(config, port)) if each.what == f"port {port}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("running", "verdict"),
    [
        (Config(router=KEYED), Verdict.GOOD),
        (Config(router=RouterConfig(api_keys=("other:K",), control_port=0)), Verdict.BAD),
        (Config(), Verdict.BAD),
        (Config(router=KEYED, worker=WorkerConfig(page_tokens=64)), Verdict.BAD),
    ],
)
def test_a_cluster_that_is_configured_in_another_way_is_not_ours(
    tmp_path: Path, running: Config, verdict: Verdict
) -> None:
    row = port_of(Config(router=KEYED), running, tmp_path)
    assert row.verdict is verdict
    assert ("this cluster runs already" in row.text) is (verdict is Verdict.GOOD)
    assert ("in use by pid" in row.text) is (verdict is Verdict.BAD)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"cluster": ClusterConfig(prefill=3, decode=2, stores=2)},
        {"model": ModelConfig(path="m", dtype="float32")},
        {"mock": MockConfig(enabled=True, control_port=1, device="A100", time_scale=2.0)},
        {"router": msgspec.structs.replace(KEYED, control_port=7081, learned_file="/l", replicas=2)},
    ],
    ids=str,
)
def test_what_flags_say_makes_no_other_cluster(tmp_path: Path, flags: dict[str, Any]) -> None:
    running = msgspec.structs.replace(Config(router=KEYED), **flags)
    assert port_of(Config(router=KEYED), running, tmp_path).verdict is Verdict.GOOD


@pytest.mark.slow
def test_a_file_for_one_worker_says_little_of_its_cluster(tmp_path: Path) -> None:
    ours = Config(router=RouterConfig(control_port=0), worker=WorkerConfig(role=Role.PREFILL))
    assert port_of(ours, Config(router=KEYED), tmp_path).verdict is Verdict.GOOD


@pytest.mark.slow
def test_without_a_file_the_cluster_that_runs_here_is_looked_at_as_it_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with router_in_name(1, "--config", str(tmp_path / "config.toml")) as (port,):
        running = Config(mock=MockConfig(enabled=True), router=RouterConfig(port=port, control_port=0))
        (tmp_path / "config.toml").write_text(render(running))
        assert running_at(port) == running
        monkeypatch.setattr(sys.modules[findings.__module__], "running_at", lambda _usual: running_at(port))
        said = CliRunner().invoke(app, ["doctor"], catch_exceptions=False).stdout
    assert "no --config is given: that of the cluster which runs here is looked at" in " ".join(said.split())
    assert "mock workers serve one that is made up" in " ".join(said.split())
    assert "kvrelay model fetch" not in said
    assert not {"cores", "memory"} & {line.split()[1] for line in said.splitlines() if len(line.split()) > 1}


def test_a_router_whose_file_is_gone_or_that_serves_elsewhere_says_nothing_of_its_cluster(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(render(Config()))
    for file in ("gone.toml", "config.toml"):
        with router_in_name(1, "--config", str(tmp_path / file)) as (port,):
            assert running_at(port) is None
