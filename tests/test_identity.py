"""When two pages are the same: in every process, and only with everything equal."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec
import pytest

from kvrelay import identity
from kvrelay.identity import (
    ByConversion,
    Exact,
    Unlike,
    can_exchange,
    extend_names,
    frame,
    name_pages,
    page_name,
    root_name,
    token_bytes,
    with_dtype,
)
from kvrelay.router.keys import tenant_salt
from kvrelay.types import Codec, Fingerprint, PageFormat, PageName
from tests.router.fake_vllm import FORBIDDEN_IN_SALTS, MOST_SALT_CHARACTERS

FORMAT = PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=32)
OURS = Fingerprint(weights="w1", weights_epoch=0, format=FORMAT, naming=3, engine="vllm 0.32.0")
ROOT = root_name(OURS)
TOKENS = list(range(100, 400))

_SCRIPT = """
from kvrelay.identity import name_pages, root_name
from kvrelay.types import Fingerprint, PageFormat
fmt = PageFormat(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_tokens=32)
ours = Fingerprint(weights="w1", weights_epoch=0, format=fmt, naming=3, engine="vllm 0.32.0")
print(b"".join(name_pages(root_name(ours, salt="tenant", adapter="lora"), range(100, 400), 32)).hex())
"""


def _names_of_a_process(seed: str | None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_three_processes_with_different_hash_seeds_give_equal_names() -> None:
    here = b"".join(name_pages(root_name(OURS, salt="tenant", adapter="lora"), TOKENS, 32)).hex() + "\n"
    assert [_names_of_a_process(seed) for seed in (None, "0", "123")] == [here] * 3


def test_names_do_not_change_between_versions_of_this_code() -> None:
    assert name_pages(ROOT, range(40), 32) == name_pages(ROOT, list(range(40)), 32)
    assert [name.hex() for name in name_pages(ROOT, range(40), 32)] == [PINNED_FULL, PINNED_PARTIAL]


PINNED_FULL = "e557146414ec00fbc43b4b63f04bb4be"
PINNED_PARTIAL = "6ea8a316ff2541bd17a4c21f4cd8dda3"


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (63, 2), (64, 2), (65, 3)])
def test_every_prompt_length_has_the_pages_it_needs(tokens: int, pages: int) -> None:
    assert len(name_pages(ROOT, range(tokens), 32)) == pages == FORMAT.pages_for(tokens)


def test_prompts_share_the_names_of_their_common_prefix_and_no_more() -> None:
    other = [*TOKENS[:100], 7, *TOKENS[101:]]
    ours, theirs = name_pages(ROOT, TOKENS, 32), name_pages(ROOT, other, 32)
    assert ours[:3] == theirs[:3]
    assert set(ours[3:]).isdisjoint(theirs)


def test_the_same_tokens_elsewhere_in_a_prompt_are_another_page() -> None:
    block = list(range(32))
    names = name_pages(ROOT, block * 3, 32)
    assert len(set(names)) == 3
    assert page_name(names[0], token_bytes(block)) == names[1] != page_name(ROOT, token_bytes(block))


def test_a_partial_page_is_never_a_full_one() -> None:
    names = [name_pages(ROOT, [0] * count, 32)[0] for count in range(1, 33)]
    assert len(set(names)) == 32


def test_names_grow_with_a_conversation_as_if_named_at_once() -> None:
    names: list[PageName] = []
    for end in range(0, len(TOKENS), 7):
        extend_names(names, ROOT, TOKENS[:end], 32)
    extend_names(names, ROOT, TOKENS, 32)
    assert names == name_pages(ROOT, TOKENS, 32)[: len(TOKENS) // 32]


ROOTS = {
    "plain": root_name(OURS),
    "salt": root_name(OURS, salt="a"),
    "longer salt": root_name(OURS, salt="ab"),
    "adapter": root_name(OURS, adapter="a"),
    "salt and adapter": root_name(OURS, salt="b", adapter="a"),
    "adapter and salt": root_name(OURS, salt="a", adapter="b"),
    "odd salt": root_name(OURS, salt="../../x"),
    "salt with NUL": root_name(OURS, salt="a\0"),
    "weights": root_name(msgspec.structs.replace(OURS, weights="w2")),
    "epoch": root_name(msgspec.structs.replace(OURS, weights_epoch=1)),
    "dtype": root_name(msgspec.structs.replace(OURS, format=msgspec.structs.replace(FORMAT, dtype="float32"))),
    "page": root_name(msgspec.structs.replace(OURS, format=msgspec.structs.replace(FORMAT, page_tokens=16))),
}


def test_anything_that_makes_the_bytes_another_gives_another_root() -> None:
    assert len(set(ROOTS.values())) == len(ROOTS)


def test_framing_keeps_neighbouring_parts_apart() -> None:
    assert frame([b"a", b"bc"]) != frame([b"ab", b"c"]) != frame([b"abc"])
    assert frame([b"", b"a"]) != frame([b"a", b""])


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_id_outside_32_bits_is_an_error_not_another_token(token: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token])


CHANGES: list[tuple[str, object]] = [
    ("weights", "w2"),
    ("weights_epoch", 1),
    ("naming", 4),
    ("engine", "vllm 0.33.0"),
    ("speculative", "eagle"),
    ("format.layers", 31),
    ("format.kv_heads", 4),
    ("format.head_dim", 128),
    ("format.dtype", "float16"),
    ("format.page_tokens", 16),
    ("format.lossy", Codec.INT8),
]


def changed(field: str, value: object, of: Fingerprint = OURS) -> Fingerprint:
    leaf = field.removeprefix("format.")
    if leaf == field:
        return msgspec.structs.replace(of, **{leaf: value})
    return msgspec.structs.replace(of, format=msgspec.structs.replace(of.format, **{leaf: value}))


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_a_pair_that_differs_is_refused_by_the_name_of_the_field(field: str, value: object) -> None:
    theirs = changed(field, value)
    assert can_exchange(OURS, theirs) == Unlike(field=field) == can_exchange(theirs, OURS)


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_workers_whose_pages_are_not_the_same_give_them_other_names(field: str, value: object) -> None:
    theirs = changed(field, value)
    assert can_exchange(OURS, theirs) != Exact()
    assert root_name(theirs) != ROOT, "at one store they would load each other's pages, whatever a router pairs"


def test_every_field_of_a_fingerprint_is_compared() -> None:
    fields = {field.name for field in msgspec.structs.fields(Fingerprint)} - {"format"}
    fields |= {f"format.{field.name}" for field in msgspec.structs.fields(PageFormat)}
    assert fields == {field for field, _ in CHANGES}


def test_equal_workers_can_exchange() -> None:
    assert can_exchange(OURS, msgspec.structs.replace(OURS)) == Exact()


def test_kv_types_that_round_into_each_other_convert_and_say_which_type_the_pages_have() -> None:
    theirs = with_dtype(OURS, "float32")
    assert OURS.format.dtype == "bfloat16"
    assert can_exchange(theirs, OURS) == ByConversion(dtype="float32")
    assert can_exchange(OURS, theirs) == ByConversion(dtype="bfloat16")


@pytest.mark.parametrize(("field", "value"), [change for change in CHANGES if change[0] != "format.dtype"])
def test_another_type_bridges_no_other_difference(field: str, value: object) -> None:
    assert can_exchange(OURS, changed(field, value, with_dtype(OURS, "float32"))) == Unlike(field=field)


def test_ten_thousand_tokens_are_named_in_about_a_millisecond() -> None:
    tokens = list(range(10_000))
    best_s = 1.0
    for _ in range(20):
        started = time.thread_time()
        name_pages(ROOT, tokens, 32)
        best_s = min(best_s, time.thread_time() - started)
    assert best_s < 0.003


def test_an_engine_takes_the_salt_of_converted_pages_of_every_tenant() -> None:
    for name in ("", "a", "../../x", "a@b\\c\0", "x" * 10_000):
        salt = tenant_salt(b"k" * 32, "tenant", name)
        assert identity.exact_salt(identity.near_salt(salt)) == salt
        for sent in (salt, identity.near_salt(salt), identity.near_salt("")):
            assert 0 < len(sent) <= MOST_SALT_CHARACTERS
            assert not FORBIDDEN_IN_SALTS & set(sent)
