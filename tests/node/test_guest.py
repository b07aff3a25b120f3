"""When a node pauses by itself: hours, a machine that somebody uses, its battery, its heat, its disk.

Time and the kernel's files are given; the files of the disk and the logind that is asked are real ones.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from swarmnode.node.config import NodeConfig, load_config
from swarmnode.node.guest import Guest, Hold, allowed_at, next_allowed
from swarmnode.training.options import SettingError

NOON = datetime(2026, 11, 23, 12, 0, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
ZONE = ZoneInfo("Europe/Berlin")


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine's files, of which it has none yet, and of programs du alone, so no logind."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "du").symlink_to("/usr/bin/du")
    return tmp_path


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def supply(root: Path, name: str, **values: str) -> None:
    put(root, **{f"sys/class/power_supply/{name}/{key}": f"{value}\n" for key, value in values.items()})


def causes(guest: Guest, now: float = NOON, own: float = 0.0, **settings: Any) -> list[str]:
    return [hold.cause for hold in guest.look(NodeConfig(**settings), now, own=own)]


def at(day: int, clock: str, month: int = 11) -> float:
    hour, minute = clock.split(":")
    return datetime(2026, month, day, int(hour), int(minute), tzinfo=ZONE).timestamp()


@pytest.mark.parametrize(
    ("hours", "clock", "allowed"),
    [
        ("22:00-07:00", "21:59", False),
        ("22:00-07:00", "22:00", True),
        ("22:00-07:00", "00:00", True),
        ("22:00-07:00", "06:59", True),
        ("22:00-07:00", "07:00", False),
        ("12:00-13:00, 22:00-07:00", "12:30", True),
        ("12:00-13:00, 22:00-07:00", "13:00", False),
        ("00:00-00:00", "15:00", True),
    ],
)
def test_hours_are_those_of_the_clock_on_the_wall(hours: str, clock: str, allowed: bool) -> None:
    assert allowed_at(hours, at(23, clock)) is allowed


def test_it_is_told_when_the_next_hours_begin_also_where_clocks_change() -> None:
    assert next_allowed("22:00-07:00", at(23, "12:00")) == at(23, "22:00")
    assert next_allowed("06:00-07:00", at(23, "12:00")) == at(24, "06:00")
    spring, autumn = at(28, "23:00", month=3), at(24, "23:00", month=10)
    assert next_allowed("02:30-05:00", spring) == at(29, "03:00", month=3)  # there is no 02:30 in that night
    assert next_allowed("06:00-07:00", autumn) == autumn + 8 * 3600  # one hour twice
    assert next_allowed("02:10-02:50", spring) == at(30, "02:10", month=3)


def test_outside_of_its_hours_a_node_says_when_it_goes_on(machine: Path) -> None:
    guest = Guest(machine / "node", machine)
    assert causes(guest, hours="11:00-13:00") == []
    (hold,) = guest.look(NodeConfig(hours="22:00-07:00"), NOON, own=0)
    assert hold == Hold("hours", "outside of its hours, 22:00-07:00", at(23, "22:00"))


@pytest.mark.parametrize("wrong", ["22-7", "25:00-26:00", "22:00", "22:00-07:60", "night"])
def test_hours_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(SettingError, match="22:00-07:00"):
        load_config(None, {}, {"hours": wrong})


def test_a_battery_counts_while_it_drains_and_that_of_a_mouse_never(machine: Path) -> None:
    guest = Guest(machine / "node", machine)
    assert causes(guest, not_on_battery=True) == []  # a machine without either
    supply(machine, "AC", type="Mains", online="1")
    supply(machine, "BAT0", type="Battery", status="Charging")
    supply(machine, "hidpp_battery_0", type="Battery", status="Discharging", scope="Device")
    assert causes(guest, not_on_battery=True) == []
    supply(machine, "AC", online="0")
    assert causes(guest, not_on_battery=True) == []
    supply(machine, "BAT0", status="Discharging")
    assert causes(guest, not_on_battery=True) == ["battery"]
    assert causes(guest) == []
    supply(machine, "AC", online="1")
    assert causes(guest, not_on_battery=True) == []


def test_heat_pauses_until_it_is_cooler_by_five_degrees(machine: Path) -> None:
    guest = Guest(machine / "node", machine)
    zone = "sys/class/thermal/thermal_zone0/temp"
    for shown, held in (("79000", False), ("81000", True), ("78000", True), ("74900", False), ("79000", False)):
        put(machine, **{zone: shown})
        assert (causes(guest, temperature=80.0) == ["temperature"]) is held
    put(machine, **{"sys/class/hwmon/hwmon1/temp3_input": "95000"})
    assert causes(guest, temperature=80.0) == ["temperature"]
    put(machine, **{zone: "", "sys/class/hwmon/hwmon1/temp3_input": ""})
    assert causes(guest, temperature=80.0) == ["temperature"], "that nothing can be read does not make it cooler"
    assert causes(guest) == []


def test_without_descriptors_nothing_holds_and_nothing_ends(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guest, looks = Guest(machine / "node", machine), {"temperature": 80.0, "only_when_idle": 1.0}
    put(machine, **{"proc/stat": "cpu 1 1 1 1 1 1 1"})
    assert causes(guest, **looks) == []

    def none_left(*_: object, **how: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "glob", none_left)
    monkeypatch.setattr(Path, "read_text", none_left)
    for minutes in range(5):
        assert causes(guest, NOON + 60 * minutes, **looks) == []


@pytest.mark.parametrize("lie", ["", "hot", "-273000", "255000", "99999999999999999999", "\x00\xff", "1e400"])
def test_files_that_lie_hold_nothing_and_end_nothing(machine: Path, lie: str) -> None:
    put(machine, **{"sys/class/thermal/thermal_zone0/temp": lie, "proc/stat": lie, "dev/tty1": lie})
    supply(machine, "BAT0", type=lie, status=lie, online=lie)
    os.utime(machine / "dev/tty1", (NOON + 1e6, NOON))
    (machine / "sys/class/power_supply/loop").symlink_to("loop")
    (machine / "bin/loginctl").write_text(f"#!/bin/sh\necho 'IdleHint={lie[:4]}'\n".replace("\x00", ""))
    (machine / "bin/loginctl").chmod(0o755)
    guest = Guest(machine / "node", machine)
    assert causes(guest, temperature=80.0, not_on_battery=True, only_when_idle=1.0, disk=1.0) == []


def test_a_key_at_a_terminal_pauses_for_as_long_as_was_asked(machine: Path) -> None:
    guest = Guest(machine / "node", machine)
    put(machine, **{"dev/pts/3": ""})
    os.utime(machine / "dev/pts/3", (NOON - 240, NOON))
    (hold,) = guest.look(NodeConfig(only_when_idle=5.0), NOON, own=0)
    assert hold.cause == "in use" and "typed" in hold.why and hold.until == NOON + 60
    assert causes(guest, NOON + 61, only_when_idle=5.0) == []


def test_other_programs_that_compute_pause_it_and_its_own_do_not(machine: Path) -> None:
    guest, tick, cores = Guest(machine / "node", machine), os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
    found = {}
    for second in range(0, 400, 5):
        own = 0.9 * cores * second
        others = 0.5 * cores * min(second, 100)
        put(machine, **{"proc/stat": f"cpu  {int((own + others) * tick)} 0 0 {second} 0 0 0 0 0 0\ncpu0 1 2\n"})
        found[second] = causes(guest, NOON + second, own=own, only_when_idle=2.0)
    assert found[0] == [] and found[5] == ["in use"] and found[200] == ["in use"]
    assert found[395] == []  # 100 s, then at most a minute until the mean is low, and two minutes without


def test_a_clock_that_was_ahead_pauses_it_no_longer_once_it_is_set(machine: Path) -> None:
    guest, ticks = Guest(machine / "node", machine), os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
    for second in (0, 5):
        put(machine, **{"proc/stat": f"cpu  {second * ticks} 0 0 0 0 0 0 0 0 0\n"})
        held = causes(guest, NOON + 86_400 + second, only_when_idle=2.0)
    assert held == ["in use"]
    assert causes(guest, NOON, only_when_idle=2.0) == ["in use"]
    assert causes(guest, NOON + 120, only_when_idle=2.0) == []


@pytest.mark.parametrize(("hint", "since", "held"), [("no", 0, True), ("yes", 60, True), ("yes", 600, False)])
def test_a_desktop_that_is_in_use_pauses_it(machine: Path, hint: str, since: int, held: bool) -> None:
    idle = f"IdleHint={hint}\nIdleSinceHint={int((NOON - since) * 1e6)}"
    (machine / "bin/loginctl").write_text(f"#!/bin/sh\necho '{idle}'\n")
    (machine / "bin/loginctl").chmod(0o755)
    assert causes(Guest(machine / "node", machine), only_when_idle=5.0) == (["in use"] if held else [])


def test_a_data_directory_above_its_cap_pauses_and_says_what_to_do(machine: Path) -> None:
    (machine / "node").mkdir()
    (machine / "node/checkpoint").write_bytes(os.urandom(300_000))
    guest = Guest(machine / "node", machine)
    assert causes(guest, disk=0.001) == []
    (hold,) = guest.look(NodeConfig(disk=0.0002), NOON, own=0)
    assert hold.cause == "disk" and "checkpoint_keep" in hold.why
    (machine / "node/checkpoint").unlink()
    assert causes(guest, NOON + 31, disk=0.0002) == []
