"""Flags of vLLM's own: those that change nothing that others rely on reach the engine, all others are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from kvrelay.config import Config, ConnectorConfig, WorkerConfig
from kvrelay.deploy.engine import engine_command, engine_spec
from kvrelay.deploy.vllm_args import ALLOWED, STRUCTURED_KEYS
from kvrelay.errors import Misconfigured

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")


def command(*arguments: str) -> list[str]:
    config = Config(worker=WorkerConfig(vllm_args=arguments))
    return engine_command(engine_spec(config, Path("/models/m"), port=1, cpus=(0,)))


def test_allowed_flags_reach_the_engine_as_they_are_written() -> None:
    assert command(*TOOLS)[-2:] == list(TOOLS)
    assert command("--tool_call_parser=hermes")[-1] == "--tool_call_parser=hermes"


def test_no_flag_that_kvrelay_sets_is_allowed() -> None:
    connector = ConnectorConfig(
        worker="w",
        incarnation="1",
        store_socket="s",
        key_file="k",
        engine_file="e",
        weights="abc",
        page_tokens=32,
        load_wait_s=2.0,
    )
    worker = WorkerConfig(max_model_len=64, block_tokens=32)
    spec = engine_spec(Config(worker=worker), Path("/models/m"), port=1, cpus=(0,))
    whole = msgspec.structs.replace(spec, connector=connector, events=Path("/events"))
    own = {word for word in engine_command(whole) if word.startswith("--")}
    assert {"--kv-transfer-config", "--kv-events-config", "--block-size", "--scheduler-cls"} <= own
    assert not own & ALLOWED


@pytest.mark.parametrize(
    "argument",
    ["--kv-cache-dtype=fp8", "--hf-overrides={}", "--quantization=fp8", "--tool-call=hermes", "--chat-template=x",
     "--kv-transfer-config.kv_role=kv_both", "--config=x", "--no-enable-prefix-caching", "--middleware=x", "--",
     "--exclude-tools-when-tool-choice-none", "--tool-parser-plugin=/x.py", "--reasoning_parser_plugin=/x.py",
     "--structured-outputs-config.reasoning_parser_plugin=/x.py"],
)  # fmt: skip
def test_a_flag_that_is_not_known_to_be_harmless_is_refused_by_name(argument: str) -> None:
    with pytest.raises(Misconfigured, match=r"it takes --enable-auto-tool-choice, "):
        command(argument)


@pytest.mark.parametrize("argument", ["hermes", "-tp=2", ""])
def test_a_word_of_its_own_is_refused(argument: str) -> None:
    with pytest.raises(Misconfigured, match="--name=value"):
        command("--tool-call-parser", argument)


def test_the_backend_of_structured_outputs_may_be_chosen() -> None:
    argument = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'
    assert command(argument)[-1] == argument


def test_no_program_reaches_the_engine_as_a_plug_in_of_structured_outputs() -> None:
    with pytest.raises(Misconfigured, match="has reasoning_parser_plugin in --structured-outputs-config"):
        command('--structured_outputs_config={"backend": "auto", "reasoning_parser_\\u0070lugin": "/x.py"}')


@pytest.mark.parametrize("value", ["", "=", "={", "=[]", "=xgrammar", "=null"])
def test_structured_outputs_are_configured_by_a_json_object(value: str) -> None:
    with pytest.raises(Misconfigured, match="write it as a JSON object"):
        command(f"--structured-outputs-config{value}")


@pytest.mark.slow
def test_every_allowed_flag_is_one_of_vllms() -> None:
    launchers = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    arguments = pytest.importorskip("vllm.utils.argparse_utils")
    parser = launchers.make_arg_parser(arguments.FlexibleArgumentParser())
    assert set(parser._option_string_actions) >= ALLOWED


def test_the_keys_of_structured_outputs_are_all_of_vllms_but_its_plug_in() -> None:
    structured = pytest.importorskip("vllm.config.structured_outputs").StructuredOutputsConfig
    assert {field.name for field in dataclasses.fields(structured)} == STRUCTURED_KEYS | {"reasoning_parser_plugin"}
