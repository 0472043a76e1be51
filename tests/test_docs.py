"""Holds the documentation to the code: links resolve, commands exist, the reference is current."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.count_sentences import COUNTS
from docs.gen_reference import FOLDER, PAGES, store_counts
from docs.metrics_in_code import Metric, metrics_in
from kvrelay.cli import app
from kvrelay.config_text import parse
from kvrelay.router.telemetry import Telemetry
from kvrelay.store.codecs import check_codecs
from kvrelay.store.counts import KNOWN

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TEXTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
FENCE = re.compile(r"```(?P<language>\w*)\n(?P<body>.*?)```", re.DOTALL)
INLINE = re.compile(r"(?<!`)`(?P<command>(?:kvrelay|make) [^`]+)`(?!`)")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
SNAKE = re.compile(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b")
NAV_PAGE = re.compile(r"^ +- .*: (?P<page>\S+\.md)$", re.MULTILINE)


def anchor(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def broken_links(path: Path) -> Iterator[str]:
    """Relative links of ``path`` whose file or heading does not exist."""
    for match in LINK.finditer(path.read_text()):
        target, _, wanted = match["target"].partition("#")
        if ":" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.is_file():
            yield f"{path.name}: {match['target']}"
        elif wanted and wanted not in {anchor(heading["title"]) for heading in HEADING.finditer(file.read_text())}:
            yield f"{path.name}: no heading {match['target']}"


def words_in(text: str) -> set[str]:
    """Every snake_case word in inline code: keys, counts, fields, files."""
    return {word for code in CODE.findall(FENCE.sub("", text)) for word in SNAKE.findall(code)}


def commands_in(text: str) -> Iterator[list[str]]:
    """Every ``make`` and ``kvrelay`` command line in shell blocks and in inline code."""
    blocks = (fence["body"].replace("\\\n", " ") for fence in FENCE.finditer(text) if fence["language"] == "sh")
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [match["command"] for match in INLINE.finditer(FENCE.sub("", text))]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words and Path(words[0]).name in ("make", "kvrelay"):
            yield [Path(words[0]).name, *words[1:]]


def problem_with(words: list[str]) -> str | None:
    """What is wrong with a command line; None when all its parts exist."""
    unknown = unknown_target if words[0] == "make" else unknown_option
    wrong = unknown(words[1:])
    return f"{' '.join(words)}: {wrong}" if wrong else None


def unknown_target(words: list[str]) -> str | None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return next((word for word in words if "=" not in word and word not in targets), None)


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(app)


def unknown_option(words: list[str]) -> str | None:
    command: Any = command_line()
    rest = list(words)
    while rest and getattr(command, "commands", None):
        name = rest.pop(0)
        if name not in command.commands:
            return name
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    return next((word for word in rest if word.startswith("-") and word not in known), None)


@functools.cache
def metrics_of_kvrelay() -> list[Metric]:
    return [metric for path in (ROOT / "kvrelay").rglob("*.py") for metric in metrics_in(path.read_text())]


@functools.cache
def counts_of_stores() -> frozenset[str]:
    return frozenset(name for name, _ in store_counts())


class NoReadings:
    """A brain that has nothing to tell."""

    def read(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        yield from ()


# ---------------------------------------------------------------- the repository


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    assert list(broken_links(path)) == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_that_are_named_exist(path: Path) -> None:
    assert [problem for words in commands_in(path.read_text()) if (problem := problem_with(words))] == []


def test_names_that_are_told_are_in_the_code() -> None:
    places = [*(ROOT / "kvrelay").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    code = "\n".join(f"{place.stem}\n{place.read_text()}" for place in places)
    told = {word for path in TEXTS if path.parent != FOLDER for word in words_in(path.read_text())}
    assert {word for word in told if word not in code} == set()


def test_the_readme_shows_the_two_commands() -> None:
    commands = list(commands_in((ROOT / "README.md").read_text()))
    assert ["make", "demo"] in commands
    assert ["make", "test"] in commands


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run: make reference"


def test_every_metric_that_is_served_is_in_the_reference() -> None:
    served = set(re.findall(r"^# TYPE (\w+)", Telemetry(NoReadings()).exposition().decode(), re.MULTILINE))
    named = {metric.name for metric in metrics_of_kvrelay()}
    assert "kvrelay_requests_total" in served
    assert {name for name in served if not name.endswith("_created")} <= named


def test_every_count_that_a_store_knows_is_in_the_reference() -> None:
    listed = counts_of_stores()
    assert set(KNOWN) <= listed
    assert {
        "load_stalled",
        "load_cancelled",
        "pages_not_saved_no_slot",
        "saves_crashed",
        "saves_behind",
        "links_refused",
    } <= listed
    assert all(name in (DOCS / "reference" / "metrics.md").read_text() for name in listed)


def test_the_example_of_a_store_without_vllm_runs(tmp_path: Path) -> None:
    (example,) = (
        fence["body"] for fence in FENCE.finditer((DOCS / "index.md").read_text()) if "StoreClient(" in fence[0]
    )
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)
    command = [sys.executable, "-m", "kvrelay", "store", "--socket", "store.sock", "--key-file", "key"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as store:
        try:
            assert store.stdout is not None
            assert store.stdout.readline().startswith("kvrelay ready:")
            script = [sys.executable, "-c", example]
            done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        finally:
            store.terminate()
    assert (done.stdout, done.stderr) == ("[True, False]\n", "")


def test_every_metric_and_every_count_has_a_sentence() -> None:
    assert [metric.name for metric in metrics_of_kvrelay() if not metric.sentence] == []
    assert set(COUNTS) == counts_of_stores()


def test_every_metric_and_every_count_is_told_without_the_one_before_it() -> None:
    sentences = [*(metric.sentence for metric in metrics_of_kvrelay()), *COUNTS.values()]
    assert [sentence for sentence in sentences if re.search(r"\bthese\b|\bthat one\b", sentence)] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_that_is_shown_is_accepted(path: Path) -> None:
    for fence in FENCE.finditer(path.read_text()):
        if fence["language"] == "toml":
            check_codecs(parse(fence["body"]).store)


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(NAV_PAGE.findall((ROOT / "mkdocs.yml").read_text())) == pages


def test_every_picture_says_what_it_shows() -> None:
    assert [path.name for path in DOCS.rglob("*.svg") if "<desc" not in path.read_text()] == []


# ---------------------------------------------------------------- the checker


@pytest.mark.parametrize("link", ["[a](gone.md)", "![a](img/gone.svg)", "[a](#gone)", "[a](there.md#gone)"])
def test_a_broken_link_is_found(tmp_path: Path, link: str) -> None:
    (tmp_path / "there.md").write_text("# A heading\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{link} [b](there.md#a-heading) [c](#page) [d](https://example.org)\n")
    assert len(list(broken_links(page))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`make nothing`",
        "`kvrelay nothing`",
        "`kvrelay up --nothing 2`",
        "```sh\n.venv/bin/kvrelay model nothing\n```",
        "```sh\nmake demo\nmake nothing\n```",
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str) -> None:
    assert len([problem for words in commands_in(text) if (problem := problem_with(words))]) == 1


def test_the_whole_command_line_is_read() -> None:
    text = "`kvrelay up --prefill 2`\n```sh\nkvrelay ask 'a b' \\\n  --max-tokens 3  # why\n```"
    assert list(commands_in(text)) == [
        ["kvrelay", "ask", "a b", "--max-tokens", "3"],
        ["kvrelay", "up", "--prefill", "2"],
    ]


def test_names_are_read_out_of_inline_code_only() -> None:
    text = "load_bad `load_good` and `store.arena_bytes`\n```sh\nmake_it\n```\n"
    assert words_in(text) == {"load_good", "arena_bytes"}


def test_metrics_are_found_however_they_are_written() -> None:
    source = """
who = {"worker": name, kind: role}
yield "kvrelay_ready", "1 when ready.", who, 1.0
yield f"kvrelay_{kind}_total", "Counted.", {"store": name}, 2.0
Histogram("kvrelay_seconds", "Time.", ["path"], buckets=(1.0,))
self._counter("kvrelay_requests", "Requests.", "status")
print("kvrelay_no", "metric")
names = ("kvrelay_seconds", "kvrelay_requests_total", "kvrelay_ready")
"""
    assert metrics_in(source) == [
        Metric("kvrelay_ready", "gauge", ("worker", "KIND"), "1 when ready."),
        Metric("kvrelay_KIND_total", "counter", ("store",), "Counted."),
        Metric("kvrelay_seconds", "histogram", ("path",), "Time."),
        Metric("kvrelay_requests_total", "counter", ("status",), "Requests."),
    ]


def test_each_metric_of_the_reference_is_told_once_in_a_sentence() -> None:
    metrics = metrics_of_kvrelay()
    assert [metric for metric in metrics if not metric.sentence.endswith(".")] == []
    names = [metric.name for metric in metrics]
    assert {name for name in names if names.count(name) > 1} == set()
