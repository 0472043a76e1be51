"""Writes docs/reference/ from the code: configuration keys, commands, metrics and wire messages.

It must never say what the code does not say: every sentence comes from the code itself.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

from docs.count_sentences import COUNTS
from docs.metrics_in_code import counts_in, metrics_in
from kvrelay import config
from kvrelay import types as words
from kvrelay.protocol import client, engine, feed, frame, handshake, operator, peer

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
PACKAGE = ROOT / "kvrelay"

UNITS = {"_bytes_per_s": "bytes a second", "_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "port": "TCP port"}
"""What the end of a key says about its unit."""
NOTICE = "<!-- Written by `make reference` from the code; edit the code instead. -->\n\n"


def row(*cells: str) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"


def table(*head: str) -> str:
    """The first two lines of a Markdown table."""
    return row(*head) + row(*("---" for _ in head))


# ---------------------------------------------------------------- config.md


def config_page() -> str:
    """Every key of the TOML file: type, unit, range, default and sentence."""
    text = "# Configuration\n\n" + NOTICE
    text += "One TOML file, given with `--config`. Every key has a default; an unknown key is an error that names the "
    text += "nearest known one.\n"
    for section in msgspec.structs.fields(config.Config):
        many = section.name == "tenants"
        kind = config.TenantConfig if many else section.type
        text += f"\n## [{section.name}{'.NAME' if many else ''}]\n\n{first_sentence(kind.__doc__)}\n\n"
        text += table("key", "type", "range", "default", "what it is")
        text += "".join(config_row(field) for field in msgspec.structs.fields(kind))
    return text


def config_row(field: msgspec.structs.FieldInfo) -> str:
    kind, metas = unwrap(field.type)
    default = field.default
    sentence = next((meta.description for meta in reversed(metas) if meta.description), "")
    return row(f"`{field.name}`", type_name(kind, field.name), limits(kind, metas), show(default), sentence)


def unwrap(annotation: Any) -> tuple[Any, list[msgspec.Meta]]:
    """The bare type of an ``Annotated`` one, and its restrictions."""
    if typing.get_origin(annotation) is typing.Annotated:
        kind, *extras = typing.get_args(annotation)
        inner, metas = unwrap(_without_none(kind))
        return inner, [*metas, *(extra for extra in extras if isinstance(extra, msgspec.Meta))]
    return _without_none(annotation), []


def _without_none(kind: Any) -> Any:
    """The type of a key that may be absent."""
    given = [each for each in typing.get_args(kind) if each is not type(None)]
    return given[0] if typing.get_origin(kind) in (types.UnionType, typing.Union) and len(given) == 1 else kind


def type_name(kind: Any, key: str) -> str:
    """A type as its reader knows it, with the unit that the key's name carries."""
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    name = names.get(kind, "list of text" if typing.get_origin(kind) is tuple else "text")
    unit = next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    return f"{name}, {unit}" if unit else name


def limits(kind: Any, metas: list[msgspec.Meta]) -> str:
    """The range that the restrictions allow."""
    if isinstance(kind, type) and issubclass(kind, words.Role):
        return ", ".join(f"`{member.value}`" for member in kind)
    words_of = {"ge": "from {}", "gt": "over {}", "le": "to {}", "lt": "under {}", "pattern": "`{}`"}
    found = [
        text.format(getattr(meta, name))
        for name, text in words_of.items()
        for meta in metas
        if getattr(meta, name) is not None
    ]
    return " ".join(found)


def show(value: Any) -> str:
    """A default as TOML would have it; nothing for a key that is absent by default."""
    return "" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def first_sentence(text: str | None) -> str:
    """The first paragraph of a docstring on one line, its double backticks made single."""
    paragraph = (text or "").strip().split("\n\n")[0]
    return re.sub(r"\s+", " ", paragraph).replace("``", "`")


def paragraphs(text: str | None, joined_by: str = " ") -> str:
    """All paragraphs of a docstring, each on one line."""
    return joined_by.join(first_sentence(each) for each in (text or "").replace("\f", "").strip().split("\n\n"))


# ---------------------------------------------------------------- cli.md


def cli_page() -> str:
    """Every command with its arguments and options, as ``--help`` has them."""
    from kvrelay.cli import app

    text = "# Commands\n\n" + NOTICE
    for path, command in commands(typer.main.get_command(app), "kvrelay"):
        text += f"## `{usage(path, command)}`\n\n{command_help(command)}\n\n"
        rows = "".join(parameter_row(each) for each in command.params if parameter_help(each) is not None)
        text += table("option", "default", "what it is") + rows + "\n" if rows else ""
    return text.rstrip() + "\n"


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All commands that do something, depth first in the order of their definition."""
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        if not child.hidden:
            yield from commands(child, f"{path} {name}")


def usage(path: str, command: Any) -> str:
    """The command with its positional arguments."""
    arguments = [each.name.upper() for each in command.params if each.param_type_name == "argument"]
    return " ".join([path, *arguments])


def command_help(command: Any) -> str:
    return paragraphs(command.help, joined_by="\n\n")


def parameter_help(parameter: Any) -> str | None:
    """The sentence of an option; None for those that every command has."""
    if getattr(parameter, "hidden", False) or parameter.name in ("help", "install_completion", "show_completion"):
        return None
    return getattr(parameter, "help", None) or ""


def parameter_row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    spelled = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    name = ", ".join(f"`{each}`" for each in spelled)
    return row(name, "required" if parameter.required else default_of(parameter), parameter_help(parameter) or "")


def default_of(parameter: Any) -> str:
    value = parameter.default
    if value is None or callable(value) or value in ("", (), []):
        return ""
    return f"`{getattr(value, 'value', value)}`"


# ---------------------------------------------------------------- metrics.md


def metrics_page() -> str:
    """Every Prometheus metric that the code defines."""
    text = "# Metrics\n\n" + NOTICE
    text += "The router serves these at `/metrics`. Counters are monotonic; the unit is in the name. "
    text += "Capitals stand for a part that varies.\n\n"
    text += table("metric", "kind", "labels", "what it is")
    for path in sorted(PACKAGE.rglob("*.py")):
        for metric in metrics_in(path.read_text()):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            text += row(f"`{metric.name}`", metric.kind, labels, metric.sentence)
    text += "\n## Counts of a store\n\n"
    text += "`kvrelay_store_count` has these as its label `count`, and `StoreClient.describe()` returns them. A worker "
    text += "reports its own to its node's store, which adds them up.\n\n"
    text += table("count", "counted by", "what it is")
    return text + "".join(row(f"`{name}`", room, COUNTS.get(name, "")) for name, room in sorted(store_counts()))


def store_counts() -> Iterator[tuple[str, str]]:
    """Each count that the code keeps, and whether a store or a worker does."""
    for room, who in (("store", "store"), ("connector", "worker")):
        for name in {name for path in (PACKAGE / room).rglob("*.py") for name in counts_in(path.read_text())}:
            yield name, who


# ---------------------------------------------------------------- wire.md


LINKS = (handshake, client, peer, feed, operator, engine)
"""The modules of ``protocol`` that have messages, in the order of the page."""


def wire_page() -> str:
    """Every message of ``protocol``, under the link that it belongs to."""
    text = "# Wire\n\n" + NOTICE
    text += f"Wire version {frame.WIRE_VERSION}. {paragraphs(frame.__doc__)} The class name is the tag. "
    text += f"Longest frame: {frame.MAX_FRAME_BYTES:,} bytes; longest payload: {frame.MAX_PAYLOAD_BYTES:,} bytes.\n"
    for link in LINKS:
        text += f"\n## {link.__name__.rpartition('.')[2].capitalize()}\n\n{paragraphs(link.__doc__)}\n"
        text += "".join(struct_text(struct) for struct in structs_in(ast.parse(inspect.getsource(link))))
    return text


def structs_in(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes that have fields: messages and the values inside them."""
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and any(fields_of(node))]


def struct_text(struct: ast.ClassDef) -> str:
    sentence = first_sentence(ast.get_docstring(struct))
    text = f"\n### {struct.name}\n\n" + (f"{sentence}\n\n" if sentence else "")
    text += table("field", "type", "what it is")
    return text + "".join(row(f"`{name}`", f"`{kind}`", note) for name, kind, note in fields_of(struct))


def fields_of(struct: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, type and note of each field; the note is the string below it."""
    for index, node in enumerate(struct.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            after = struct.body[index + 1] if index + 1 < len(struct.body) else None
            note = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
            yield node.target.id, ast.unparse(node.annotation) + default, first_sentence(str(note))


PAGES: types.MappingProxyType[str, Callable[[], str]] = types.MappingProxyType(
    {"config.md": config_page, "cli.md": cli_page, "metrics.md": metrics_page, "wire.md": wire_page}
)
"""Every generated page, by file name."""


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    sys.stdout.write(f"wrote {', '.join(PAGES)}\n")


if __name__ == "__main__":
    main()
