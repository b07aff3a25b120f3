"""Run specifications: the same meaning is the same run, and what is wrong is named."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.training import runspec, sections
from swarmnode.training.codecs import CODECS
from swarmnode.training.options import SettingError, as_toml
from swarmnode.training.outer import Layout
from swarmnode.training.runspec import decode, encode, load_runspec, parse_runspec, to_toml
from swarmnode.training.sections import LAST_RATE

EXAMPLE = Path(__file__).parents[2] / "examples" / "byte-lm.toml"


def spec_of(**tables: dict[str, Any]) -> runspec.RunSpec:
    return parse_runspec({"run": {"name": "t"}, **tables}, source="t.toml")


def test_the_example_is_what_the_defaults_say_but_for_how_fast_it_learns() -> None:
    example = load_runspec(EXAMPLE)
    defaults = parse_runspec({"run": {"name": "byte-lm", "seed": example.run.seed}}, source="defaults")
    assert example == defaults.updated(inner={"lr": example.inner.lr, "eps": example.inner.eps})


@pytest.mark.parametrize("path", sorted(EXAMPLE.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_is_a_run(path: Path) -> None:
    assert load_runspec(path).run.name


def test_a_file_may_be_named_by_a_text() -> None:
    assert load_runspec(str(EXAMPLE)) == load_runspec(EXAMPLE)
    with pytest.raises(SettingError, match="no such file"):
        load_runspec("nowhere.toml")


def test_two_files_that_mean_the_same_are_the_same_run() -> None:
    assert spec_of(inner={"lr": 1e-3}).run_id == spec_of().run_id
    assert spec_of(outer={"lr": 1}).run_id == spec_of(outer={"lr": 1.0}).run_id
    assert spec_of(inner={"lr": 2e-3}).run_id != spec_of().run_id


def test_rounds_that_grow_have_a_share_of_the_steps_before_them() -> None:
    inner = spec_of(inner={"steps": 20, "interval": "growing"}).inner
    lengths = [inner.steps_in(round) for round in range(200)]
    assert lengths[:50] == [1] * 50 and set(lengths[150:]) == {20} and lengths == sorted(lengths)
    for round, length in enumerate(lengths):
        assert inner.steps_before(round) == sum(lengths[:round])
        assert length in (1, 20) or abs(length - sections.GROWTH * sum(lengths[:round])) <= 0.5
    fixed = spec_of(inner={"steps": 20}).inner
    assert (fixed.steps_in(0), fixed.steps_before(7)) == (20, 140)


def test_the_loss_is_measured_every_few_steps() -> None:
    growing = spec_of(inner={"steps": 30, "interval": "growing"}).inner
    measured = [round for round in range(60) if growing.measured_after(round)]
    assert measured[:4] == [0, 9, 19, 29] and all(map(growing.measured_after, range(200, 300)))
    few, many = (spec_of(inner={"steps": steps}).inner for steps in (2, 20))
    assert all(few.measured_after(round) and many.measured_after(round) for round in range(20))


def test_muon_brings_rounds_that_grow_and_one_bit() -> None:
    for trust, without in (("known", "int8"), ("open", "topk")):
        by_muon = spec_of(run={"name": "t", "trust": trust}, inner={"optimizer": "muon"})
        assert (by_muon.inner.interval, by_muon.exchange.codec) == ("growing", "sign")
        by_adamw = spec_of(run={"name": "t", "trust": trust})
        assert (by_adamw.inner.interval, by_adamw.exchange.codec) == ("fixed", without)


def test_the_run_id_is_pinned() -> None:
    """Changing this breaks every run that exists: a new key, or another default, raises SCHEMA."""
    fixed = spec_of(
        model={"layers": 2, "heads": 2, "width": 32, "context": 32},
        inner={"lr": 0.5, "warmup": 1, "weight_decay": 0.25, "clip": 1.5, "batch": 2, "steps": 3},
        outer={"lr": 0.75, "momentum": 0.5},
        exchange={"group_size": 8, "weight_cap": 3, "deadline_floor": 1, "deadline_ceiling": 2},
        task={"heldout_sha256": "00"},
        data={"source": "local", "index": "00" * 32},
    )
    assert fixed.run_id == "83a7e6f08f4c78814000534e34b3e211a49670a59580e2d556868b7c1228387b"


def test_the_run_id_of_an_open_run_is_pinned() -> None:
    """Its defaults may not change silently either."""
    plain = spec_of(run={"name": "t", "trust": "open"}, task={"heldout_sha256": "00"}, data={"index": "00" * 32})
    assert plain.run_id == "1177cf9bcf34032e85999eed8496fde97c50c0a9572755a36df8ef22daf82cc2"
    assert plain.begun_by("12D3").run_id != plain.run_id


def test_a_nonce_makes_another_run_and_none_leaves_old_run_ids_alone() -> None:
    plain = spec_of()
    drawn = plain.updated(run={"nonce": "07"})
    assert drawn.run_id != plain.run_id == drawn.updated(run={"nonce": ""}).run_id
    for wrong in ("x1", "AB", "0" * 65):
        with pytest.raises(SettingError, match="nonce"):
            spec_of(run={"name": "t", "nonce": wrong})


def test_open_runs_exchange_sparsely_by_the_open_method_unless_told_otherwise() -> None:
    known, open_ = spec_of(), spec_of(run={"name": "t", "trust": "open"})
    assert (known.exchange.method, known.exchange.codec) == ("diloco", "int8")
    assert (open_.exchange.method, open_.exchange.codec) == ("open", "topk")
    assert spec_of(run={"name": "t", "trust": "open"}, exchange={"codec": "int8"}).exchange.codec == "int8"
    assert spec_of(exchange={"method": "auto", "codec": "auto"}).run_id == known.run_id
    assert spec_of(exchange={"method": "diloco", "codec": "int8"}).run_id == known.run_id


def test_every_codec_there_is_can_be_chosen() -> None:
    chosen = runspec.describe(sections.ExchangeSection)["codec"][1].choices
    assert set(chosen) == {"auto", *CODECS}


def test_the_creator_of_an_open_run_is_its_validator_unless_the_file_names_some() -> None:
    unnamed = spec_of(run={"name": "t", "trust": "open"})
    named = spec_of(run={"name": "t", "trust": "open"}, trust={"validators": ["12D3", "12D4"]})
    assert unnamed.begun_by("12D5").trust.validators == ("12D5",)
    assert named.begun_by("12D5") == named
    assert spec_of().begun_by("12D5") == spec_of()  # nobody judges among known peers


def test_what_is_written_as_toml_or_sent_to_a_peer_comes_back_equal() -> None:
    spec = spec_of(run={"name": "t", "seed": 7, "members": ["12D3", 'a"b\\']}, exchange={"codec": "fp16"})
    assert parse_runspec(tomllib.loads(to_toml(spec)), source="again") == spec
    assert decode(encode(spec), expected_run_id=spec.run_id) == spec
    spec = spec_of(run={"name": "t", "trust": "open"}, trust={"revert_above": 0.01}).begun_by("12D3")
    assert parse_runspec(tomllib.loads(to_toml(spec)), source="again") == spec
    assert decode(encode(spec), expected_run_id=spec.run_id) == spec


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ({"inner": {"lrr": 1}}, ["t.toml [inner]", "'lrr'", "did you mean 'lr'"]),
        ({"inner": {"lr": 100}}, ["t.toml [inner]", "lr = 100", "1e-08 to 10"]),
        ({"inner": {"lr": "fast"}}, ["lr = 'fast'", "a number"]),
        ({"inner": {"steps": 2.5}}, ["steps = 2.5", "a whole number"]),
        ({"inner": {"steps": True}}, ["steps = True", "a number"]),
        ({"inner": {"lr": float("nan")}}, ["lr = nan", "finite"]),
        ({"inner": {"lr": 10**400, "steps": 10**400}}, ["lr = 1000", "steps = 1000", "finite"]),
        ({"exchange": {"codec": "int9"}}, ["codec = 'int9'", "fp32, fp16, bf16, int8"]),
        ({"exchange": {"deadline_floor": 10, "deadline_ceiling": 5}}, ["deadline_floor", "above", "deadline_ceiling"]),
        ({"model": {"width": 100, "heads": 3}}, ["width = 100", "multiple of twice heads = 3"]),
        ({"run": {"name": "No Spaces"}}, ["name = 'No Spaces'", "lower case"]),
        ({"data": {"source": "peers"}}, ["t.toml [data]", "source = 'peers'", "shards, local"]),
        ({"data": {"sealed": "AB" * 32}}, ["t.toml [data]", "sealed = 'ABAB", "64 lower case hex digits", "sha256sum"]),
        ({"data": {"index": "ab"}}, ["t.toml [data]", "index = 'ab'", "64 lower case hex digits", "leave it out"]),
        ({"run": {"name": "t", "trust": "all"}}, ["t.toml [run]", "trust = 'all'", "known, open"]),
        (
            {"run": {"name": "t", "trust": "open"}, "exchange": {"method": "diloco"}},
            ["t.toml [exchange]", "method = 'diloco'", "trust = 'open'", "leave method out"],
        ),
        (
            {"task": {"name": "mine"}, "exchange": {"method": "sapo"}},
            ["method = 'sapo'", "[task] name = 'mine'", "digits-rl", "learned from batches"],
        ),
        ({"trust": {"participants": 9}}, ["t.toml [trust]", "method = 'diloco'", "leave the table out"]),
        (
            {"run": {"name": "t", "trust": "open"}, "trust": {"validators": ["a", "a"]}},
            ["t.toml [trust]", "validators", "a more than once"],
        ),
        (
            {"run": {"name": "t", "trust": "open", "members": ["a"]}, "trust": {"validators": ["b"]}},
            ["t.toml [trust]", "validators names b", "[run] members"],
        ),
        (
            {"run": {"name": "t", "trust": "open"}, "trust": {"shortest_window": 9, "longest_window": 3}},
            ["t.toml [trust]", "shortest_window = 9 s", "longest_window = 3 s", "lower the first"],
        ),
        ({"run": {}}, ["'name' is missing"]),
        ({"outter": {}}, ["unknown table [outter]"]),
        ({"outer": 3}, ["outer = 3 is not a table"]),
        (  # all that is wrong is told at once
            {"outter": {}, "outer": 3, "inner": {"lrr": 1, "lr": 100}, "run": {"seed": 1}},
            ["[outter]", "outer = 3", "'lrr'", "lr = 100", "'name' is missing"],
        ),
        (
            {"model": {"width": 100, "heads": 3}, "inner": {"rounds": 3}, "trust": {"participants": 9}},
            ["width = 100", "rounds = 3", "leave the table out"],
        ),
    ],
)
def test_an_error_names_the_file_the_key_the_value_and_what_is_allowed(
    tables: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(SettingError) as error:
        parse_runspec({"run": {"name": "t"}, **tables}, source="t.toml")
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_spec_that_is_another_run_is_refused() -> None:
    with pytest.raises(SettingError, match="does not hash"):
        decode(encode(spec_of(inner={"lr": 0.5})), expected_run_id=spec_of().run_id)


def test_a_spec_of_a_newer_schema_says_to_update() -> None:
    tables = msgpack.unpackb(encode(spec_of()))
    with pytest.raises(SettingError, match="update swarmnode"):
        decode(msgpack.packb({**tables, "schema": runspec.SCHEMA + 1}))


def test_a_spec_of_the_older_schema_says_what_became_of_it() -> None:
    tables = msgpack.unpackb(encode(spec_of()))
    with pytest.raises(SettingError, match="begin a new run"):
        decode(msgpack.packb({**tables, "schema": 1}))


def test_a_spec_in_another_encoding_is_refused_because_its_hash_would_differ() -> None:
    tables = msgpack.unpackb(encode(spec_of()))
    with pytest.raises(SettingError, match="canonical"):
        decode(msgpack.packb({**tables, "outer": {"momentum": 0.0, "lr": 1.0}}))


@given(st.binary(max_size=200))
def test_any_bytes_from_a_peer_are_a_spec_or_a_setting_error(raw: bytes) -> None:
    try:
        decode(raw)
    except SettingError as error:
        assert str(error)


def test_to_read_the_specs_of_a_whole_catalogue_holds_up_nobody() -> None:
    packed, began = encode(spec_of()), time.thread_time()
    for _ in range(20):
        decode(packed)
    assert time.thread_time() - began < 0.2


def test_a_huge_spec_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(SettingError, match="refused"):
        decode(bytes(runspec.MAX_ENCODED_SPEC + 1))


def test_a_layout_has_no_gaps_and_its_digest_tells_shapes_apart() -> None:
    layout = Layout.of([("a", (2, 3)), ("b", ()), ("c", (4,))])
    assert [s.offset for s in layout.slots] == [0, 6, 7]
    assert layout.parameters == 11
    assert layout.digest != Layout.of([("a", (3, 2)), ("b", ()), ("c", (4,))]).digest
    assert Layout.of([]).parameters == 0


def test_turns_are_taken_in_open_rounds_only() -> None:
    taken = {"exchange": {"codec": "sign3"}}
    assert parse_runspec({"run": {"name": "t", "trust": "open"}, **taken}, source="r").exchange.method == "open"
    with pytest.raises(SettingError, match="two thirds would never be sent"):
        parse_runspec({"run": {"name": "t"}, **taken}, source="r")


def rates(**inner: Any) -> list[float]:
    """In each step of ten rounds of ten steps, and of two rounds more."""
    found = spec_of(inner={"steps": 10, "warmup": 20, **inner}).inner
    return [found.rate_at(round, step) for round in range(12) for step in range(10)]


def test_rates_warm_up_and_follow_the_schedule_over_the_rounds_of_the_run() -> None:
    constant, cosine, wsd = rates(), rates(schedule="cosine", rounds=10), rates(schedule="wsd", rounds=10)
    for rate in (constant, cosine, wsd):
        assert rate[:20] == sorted(rate[:20]) and rate[0] == pytest.approx(1 / 20, rel=0.01) and max(rate) <= 1
        assert rate[20] == pytest.approx(1, abs=0.01)
    assert set(constant[20:]) == {1.0}
    for rate in (cosine, wsd):
        assert rate[20:] == sorted(rate[20:], reverse=True)
        assert set(rate[100:]) == {LAST_RATE}
    assert cosine[60] == pytest.approx((1 + LAST_RATE) / 2)  # halfway
    assert set(wsd[20:84]) == {1.0} and wsd[92] == pytest.approx((1 + LAST_RATE) / 2)


def test_steps_beyond_those_of_a_round_do_not_run_ahead_of_the_schedule() -> None:
    inner = spec_of(inner={"steps": 10, "warmup": 0, "schedule": "cosine", "rounds": 10}).inner
    assert inner.rate_at(3, 500) == inner.rate_at(4, 0)


@pytest.mark.parametrize(
    ("inner", "trust", "said"),
    [
        ({"schedule": "cosine"}, "known", "rounds"),
        ({"rounds": 5}, "known", "rounds"),
        ({"schedule": "wsd", "rounds": 1, "steps": 20, "warmup": 20}, "known", "warmup"),
        ({"precision": "bf16"}, "open", "audit_share"),
    ],
)
def test_keys_of_the_inner_loop_are_checked_together(inner: dict[str, Any], trust: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        parse_runspec({"run": {"name": "t", "trust": trust}, "inner": inner}, source="test")


def test_plain_gradients_and_the_method_that_has_their_momentum_belong_together() -> None:
    run = {"run": {"name": "r"}}
    both = {**run, "inner": {"optimizer": "sgd", "steps": 1}, "exchange": {"method": "demo"}}
    spec = parse_runspec(both, source="f")
    assert spec.exchange.codec == "topk" and decode(encode(spec)) == spec
    for without in ("inner", "exchange"):
        given = {name: table for name, table in both.items() if name != without}
        with pytest.raises(SettingError, match="demo is for sgd"):
            parse_runspec(given, source="f")
    # a loss takes as long as three steps: where each step is a round, it is measured after each tenth
    assert [round for round in range(31) if spec.inner.measured_after(round)] == [0, 9, 19, 29]


def test_what_is_told_of_overlap_has_no_meaning_with_another_method() -> None:
    run = {"run": {"name": "r"}}
    spec = parse_runspec({**run, "exchange": {"method": "streaming", "fragments": 3, "eager": False}}, source="f")
    assert spec.exchange.codec == "e3m0" and decode(encode(spec)) == spec
    low = parse_runspec({**run, "exchange": {"method": "lowrank", "rank": 3, "tau": 1}}, source="f")
    assert low.exchange.codec == "int4" and decode(encode(low)) == low
    given = (
        ("fragments", 3, "streaming"),
        ("alpha", 0.25, "streaming with eager = false"),
        ("eager", False, "streaming"),
    )
    for key, value, methods in (*given, ("tau", 1, "streaming and lowrank"), ("rank", 3, "lowrank")):
        with pytest.raises(SettingError, match=f"{key} = .* only with {methods};"):
            parse_runspec({**run, "exchange": {key: value}}, source="f")
    for key, value, method in (("fragments", 3, "lowrank"), ("eager", False, "lowrank"), ("rank", 3, "streaming")):
        with pytest.raises(SettingError, match=f"{key} = .* no meaning with method = '{method}'"):
            parse_runspec({**run, "exchange": {"method": method, key: value}}, source="f")
    with pytest.raises(SettingError, match=r"alpha = 0.25 has no meaning .* only with streaming with eager = false;"):
        parse_runspec({**run, "exchange": {"method": "streaming", "alpha": 0.25}}, source="f")
    mixes = parse_runspec({**run, "exchange": {"method": "streaming", "alpha": 0.25, "eager": False}}, source="f")
    assert mixes.exchange.alpha == 0.25


def test_a_text_in_toml_moves_no_cursor_and_loads_to_itself() -> None:
    for text in ("\x1b]0;x\x07", "two\nlines\t", 'a "quoted" \\ one', "\x85\u202e\U0001f600"):
        written = as_toml(text)
        assert written.isprintable() and tomllib.loads(f"x = {written}") == {"x": text}


@pytest.mark.parametrize("text", ["x = ", "x = " + "[" * 100_000, "x = " + "1" * 5000], ids=["cut", "deep", "long"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SettingError, match=r"run\.toml: not valid TOML"):
        load_runspec(tmp_path / "run.toml")
