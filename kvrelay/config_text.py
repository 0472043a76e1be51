"""TOML of the configuration, read and written; whatever is wrong with it is told by its key and by what is allowed."""

from __future__ import annotations

import difflib
import json
import re

import msgspec
from msgspec import inspect

from kvrelay.config import (
    BLOCK_MULTIPLE,
    DEFAULT_BLOCK_TOKENS,
    ClusterConfig,
    Config,
    RouterConfig,
    Section,
    StoreConfig,
    TenantConfig,
    WorkerConfig,
)
from kvrelay.errors import Misconfigured
from kvrelay.types import Transport

_WAYS = tuple(each for each in Transport if each is not Transport.LOCAL)
"""Transports that can be asked for; the other one says that nothing was carried."""


def render(config: Config) -> str:
    """``config`` as the TOML that ``parse`` reads."""
    lines: list[str] = []
    tree = msgspec.to_builtins(config)
    tenants = {f"tenants.{json.dumps(name)}": values for name, values in tree.pop("tenants").items()}
    for section, values in (tree | tenants).items():
        lines.append(f"[{section}]")
        # JSON's strings, numbers and lists of strings are TOML's too.
        given = {key: value for key, value in values.items() if value is not None}
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    return "\n".join(lines) + "\n"


def parse(toml: str) -> Config:
    """The configuration in ``toml``. Raises ``Misconfigured``, naming the key and the nearest known one."""
    try:
        return checked(msgspec.toml.decode(toml, type=Config))
    except msgspec.ValidationError as error:
        raise Misconfigured(explain(str(error))) from error
    except msgspec.DecodeError as error:
        raise Misconfigured(f"not valid TOML: {error}") from error


def checked(config: Config) -> Config:
    """``config`` itself. Raises ``Misconfigured`` when keys, each in its range, do not fit together."""
    complaints = (
        _about_blocks(config.worker),
        _about_transports(config.store),
        _about_leases(config.cluster),
        _about_ports(config.router),
    )
    for complaint in complaints:
        if complaint:
            raise Misconfigured(complaint)
    return config


def _about_blocks(worker: WorkerConfig) -> str:
    if worker.block_tokens % BLOCK_MULTIPLE:
        return f"worker.block_tokens: {worker.block_tokens} is no multiple of {BLOCK_MULTIPLE}, as engines on CPU need"
    block, page = worker.block_tokens or DEFAULT_BLOCK_TOKENS, worker.page_tokens
    if not (block % page and page % block):
        return ""
    owner = "worker.block_tokens" if worker.block_tokens else "the engine's own block of"
    return f"worker.page_tokens: {page} and {owner} {block} must divide one another"


def _about_transports(store: StoreConfig) -> str:
    if not store.transports:
        return f"store.transports: none is named; leave the key out, or name some of {', '.join(_WAYS)}"
    if Transport.LOCAL in store.transports:
        return f"store.transports: {Transport.LOCAL} is no way to another store; the ways are {', '.join(_WAYS)}"
    twice = {each for each in store.transports if store.transports.count(each) > 1}
    return f"store.transports: {', '.join(sorted(twice))} is named more than once" if twice else ""


def _about_leases(cluster: ClusterConfig) -> str:
    """A lease that ends before the next heartbeat comes makes dead whoever lives."""
    if cluster.heartbeat_s < cluster.dead_after_s:
        return ""
    return (
        f"cluster.heartbeat_s: {cluster.heartbeat_s:g} must be under cluster.dead_after_s, {cluster.dead_after_s:g}: "
        "with silences that long everybody counts as dead; a quarter of it is usual"
    )


def _about_ports(router: RouterConfig) -> str:
    """One port of one address is one listener's."""
    if not router.port or router.port != router.control_port or router.host != router.control_host:
        return ""
    return f"router.control_port: {router.control_port} is router.port as well; give each a port of its own"


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]+)`(?: - at `\$(?P<path>[^`]*)`)?")
_PLACED = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<key>[^`]*)`)?", re.DOTALL)
_ADDRESS = re.compile(r"str matching regex '\S*\[0-9\]\{1,5\}\S*'")
_CHOICES = re.compile(r"str matching regex '\^\((?P<choices>[\w|]+)\)\$'")
_BOUND = re.compile(r"(?P<expected>expected (?:int|float)) [<>]=? \S+")
_BAD_CHOICE = re.compile(r"invalid enum value (?P<given>.*)", re.DOTALL)


def explain(problem: str) -> str:
    """A ``msgspec.ValidationError`` of the tree as ``section.key: what is wrong``."""
    unknown = _UNKNOWN.search(problem)
    if unknown is None:
        return _place(problem)
    section = (unknown["path"] or "").removeprefix(".")
    where = f"{section}.{unknown['key']}" if section else unknown["key"]
    known = ", ".join(_owner(section).__struct_fields__)
    return f"unknown key {where!r}; did you mean {_nearest(unknown['key'], section)}? Known here: {known}"


def _owner(section: str) -> type[Section]:
    """The struct that has the keys of ``section``."""
    if section.startswith("tenants"):
        return TenantConfig
    return Config if not section else type(getattr(Config(), section))


def _nearest(key: str, section: str) -> str:
    """The known key most like ``key``; one that stands in no section may be meant for any."""
    places = {name: [name] for name in _owner(section).__struct_fields__}
    for other in Config.__struct_fields__ if not section else ():
        for name in _owner(other).__struct_fields__ if other != "tenants" else ():
            places.setdefault(name, []).append(f"{other}.{name}")
    near = difflib.get_close_matches(key, places, n=1, cutoff=0.0)[0]
    return " or ".join(repr(place) for place in places[near])


def _place(problem: str) -> str:
    placed = _PLACED.fullmatch(problem)
    if placed is None or not placed["key"]:
        return problem
    key = placed["key"]
    what = _CHOICES.sub(
        lambda match: match["choices"].replace("|", " or "), _ADDRESS.sub("host:port", placed["what"].replace("`", ""))
    )
    return f"{key}: {_with_what_is_allowed(f'{what[:1].lower()}{what[1:]}', _type_at(key))}"


def _with_what_is_allowed(what: str, kind: inspect.Type) -> str:
    if isinstance(kind, inspect.EnumType) and (bad := _BAD_CHOICE.fullmatch(what)):
        allowed = _WAYS if kind.cls is Transport else kind.cls
        return f"expected {' or '.join(each.value for each in allowed)}, got {bad['given']}"
    if isinstance(kind, inspect.IntType | inspect.FloatType) and (bound := _BOUND.fullmatch(what)):
        sides = {">=": kind.ge, ">": kind.gt, "<=": kind.le, "<": kind.lt}
        told = [f"{sign} {limit}" for sign, limit in sides.items() if limit is not None]
        return f"{bound['expected']} {' and '.join(told)}"
    return what


def _type_at(key: str) -> inspect.Type:
    """The type at ``section.key``, ``section.key[0]`` or ``tenants[...].key``, without its description."""
    kind = inspect.type_info(Config)
    for step in re.findall(r"\w+|\[[^]]*\]", key):
        kind = _bare(kind)
        if isinstance(kind, inspect.StructType):
            kind = next(field.type for field in kind.fields if field.encode_name == step)
        elif isinstance(kind, inspect.DictType):
            kind = kind.value_type
        elif isinstance(kind, inspect.VarTupleType):
            kind = kind.item_type
    return _bare(kind)


def _bare(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        kind = kind.type if isinstance(kind, inspect.Metadata) else kind.types[0]
    return kind
