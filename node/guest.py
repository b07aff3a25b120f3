"""When a volunteer's machine is its owner's alone, and how much of its disk this node has.

    guest = Guest(Path("/var/lib/swarmnode"))
    guest.look(config, time.time(), own=12.5)      # why training is to pause now; empty: it may go on

Four settings pause training by themselves: `hours`, `only_when_idle`, `not_on_battery` and `temperature`; so does a
data directory above `disk`. What is asked stands in files of the kernel, and for a desktop in logind. A file that is
missing, unreadable or absurd says nothing, and nothing that it holds can end the daemon.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarmnode.node.config import GIGABYTE, NodeConfig
from swarmnode.node.storage.datadir import weigh

LOOK_EVERY = 5.0  # seconds between two looks
WEIGH_EVERY = 30.0  # seconds between two looks at the size of a data directory without a cap
MINUTE = 60.0
OTHERS_SHARE = 0.1  # of all cores: a machine whose other programs take more, over a minute, is in use
COOLER_BY = 5.0  # degrees below the cap from which on training resumes, so that it does not flutter
PLAUSIBLE = (0.0, 150.0)  # degrees Celsius: sensors that are not connected show -273, 0 or 255
LOGIND_WITHIN = 2.0  # seconds for it to answer
IDLE_COMMAND = ("loginctl", "show-seat", "seat0", "--property=IdleHint", "--property=IdleSinceHint")


@dataclass(frozen=True)
class Hold:
    cause: str
    why: str  # for people
    until: float | None = None  # seconds since the epoch, where that is known


class Guest:
    """What this node noticed of its machine. Methods block."""

    def __init__(self, directory: Path, root: Path = Path("/")) -> None:
        """`directory`: the node's own, which `disk` caps. `root`: of the system's files, for tests."""
        self._directory, self._root = directory, root
        self.used = 0  # bytes of the directory, at the last look
        self._weighed_at = -WEIGH_EVERY
        self._hot = False
        self._busy: deque[tuple[float, float]] = deque()  # times, and CPU seconds of others until then
        self._in_use_at = 0.0  # when others last took more than OTHERS_SHARE

    def look(self, config: NodeConfig, now: float, *, own: float) -> list[Hold]:
        """Why training is to pause at `now` (seconds since the epoch). `own`: CPU seconds of this node until now."""
        if config.disk or not 0 <= now - self._weighed_at < WEIGH_EVERY:
            self._weighed_at, self.used = now, weigh(self._directory)
        return list(self._holds(config, now, own))

    def _holds(self, config: NodeConfig, now: float, own: float) -> Iterator[Hold]:
        if config.hours and not allowed_at(config.hours, now):
            yield Hold("hours", f"outside of its hours, {config.hours}", next_allowed(config.hours, now))
        yield from self._in_use(config, now, own)
        if config.not_on_battery and self._on_battery():
            yield Hold("battery", "the machine runs on its battery")
        yield from self._too_hot(config.temperature)
        if config.disk and self.used > config.disk * GIGABYTE:
            yield Hold(
                "disk",
                f"the data directory has {self.used / GIGABYTE:.2f} GB, and may have {config.disk:g}: raise disk, keep "
                "fewer checkpoints (checkpoint_keep, checkpoint_hours), or leave old runs (swarmnode leave)",
            )

    def _on_battery(self) -> bool:
        supplies = _found(self._root / "sys/class/power_supply", "*")
        batteries = [each for each in supplies if _text(each / "type") == "Battery"]
        plugged = any(_text(each / "online") == "1" for each in supplies if each not in batteries)
        # A mouse or a headset has a battery too, and its scope is Device.
        own = (each for each in batteries if _text(each / "scope") != "Device")
        return not plugged and any(_text(each / "status") == "Discharging" for each in own)

    def _too_hot(self, cap: float) -> Iterator[Hold]:
        seen = [*self._temperatures()] if cap else [0.0]
        if seen:  # else sensors cannot be read now, as without descriptors: it stays as it was
            self._hot = bool(cap) and max(seen) > (cap - COOLER_BY if self._hot else cap)
        if self._hot:
            shows = f"a sensor shows {max(seen):.0f} °C" if seen else "no sensor can be read now"
            yield Hold("temperature", f"{shows}; it goes on at {cap - COOLER_BY:g} °C")

    def _temperatures(self) -> Iterator[float]:
        """What sensors show, degrees Celsius."""
        zones, chips = self._root / "sys/class/thermal", self._root / "sys/class/hwmon"
        for sensor in (*_found(zones, "thermal_zone*/temp"), *_found(chips, "hwmon*/temp*_input")):
            with suppress(ValueError):
                degrees = int(_text(sensor)) / 1000
                if PLAUSIBLE[0] < degrees < PLAUSIBLE[1]:
                    yield degrees

    # --- whether somebody uses the machine ----------------------------------------------------------------------------

    def _in_use(self, config: NodeConfig, now: float, own: float) -> Iterator[Hold]:
        wanted = MINUTE * config.only_when_idle
        if not wanted:
            self._busy.clear()
            return
        self._look_at_others(now, own)
        last = {
            "somebody typed at a terminal": self._typed_at(now),
            "other programs took CPU time": self._in_use_at,
            "the desktop was in use": self._desktop_used_at(now),
        }
        what = max(last, key=last.__getitem__)
        if now - last[what] < wanted:
            minutes = f"{config.only_when_idle:g} min"
            yield Hold("in use", f"{what} within the last {minutes}, and it waits for so long", last[what] + wanted)

    def _look_at_others(self, now: float, own: float) -> None:
        """Note whether other programs took much CPU time over the last minute."""
        self._in_use_at = min(now, self._in_use_at)  # the clock may have been ahead
        with suppress(ValueError):
            first = _text(self._root / "proc/stat").partition("\n")[0].split()
            user, nice, system, _, _, interrupts, soft, *_ = map(int, first[1:])
            ticks = user + nice + system + interrupts + soft
            self._busy.append((now, ticks / os.sysconf("SC_CLK_TCK") - own))
        while self._busy and not now - MINUTE <= self._busy[0][0] <= now:
            self._busy.popleft()
        if not self._busy:
            return
        (began, before), (_, after) = self._busy[0], self._busy[-1]
        if now > began and (after - before) / (now - began) > OTHERS_SHARE * (os.cpu_count() or 1):
            self._in_use_at = now

    def _typed_at(self, now: float) -> float:
        """When a terminal was last read from: the kernel notes it as the time of access, as `w` shows it."""
        dev, last = self._root / "dev", 0.0
        for terminal in (*_found(dev, "pts/[0-9]*"), *_found(dev, "tty[0-9]*")):
            with suppress(OSError):
                read_at = terminal.stat().st_atime
                last = max(last, read_at if read_at <= now else 0.0)
        return last

    def _desktop_used_at(self, now: float) -> float:
        """When the person in front of the machine was last there, as their desktop told logind; 0: nobody knows."""
        try:
            asked = subprocess.run(IDLE_COMMAND, capture_output=True, text=True, timeout=LOGIND_WITHIN, check=True)
            told = dict(line.split("=", 1) for line in asked.stdout.split())
            return now if told["IdleHint"] == "no" else min(now, int(told["IdleSinceHint"]) / 1e6)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            return 0.0


# --- hours -----------------------------------------------------------------------------------------------------------


def allowed_at(hours: str, moment: float) -> bool:
    """Whether the clock on the wall shows a time within `hours`, "22:00-07:00, 12:00-13:00", at `moment`."""
    clock = time.strftime("%H:%M", time.localtime(moment))
    spans = (span.strip().split("-") for span in hours.split(","))
    return any(begin <= clock < end if begin < end else clock >= begin or clock < end for begin, end in spans)


def next_allowed(hours: str, moment: float) -> float | None:
    """The first minute from `moment` on that is within `hours`, however clocks are set to summer time meanwhile."""
    minutes = range(int(moment // 60), int(moment // 60) + 2 * 24 * 60)
    return next((60.0 * minute for minute in minutes if allowed_at(hours, 60 * minute)), None)


# --- files that may lie or be missing --------------------------------------------------------------------------------


def _found(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:  # too few descriptors, or a sensor was unplugged
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
