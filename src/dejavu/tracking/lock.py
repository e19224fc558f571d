"""A run's folder is written by one process at a time: a file in it says which, and that it still lives.

The file is made with O_EXCL, which network file systems keep, so processes on several hosts may share a sweep. A
process of this host counts as dead when its number is gone or belongs to a younger process; one of another host, which
cannot be asked, when it has not renewed the file for STALE_SECONDS. Ages are differences of the file system's own
times, so the clocks of hosts need not agree.
"""

import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dejavu.errors import DejavuError

LOCK = "lock.json"
BEAT_SECONDS = 20
STALE_SECONDS = 300


class Busy(DejavuError):
    """Another process that lives is writing the folder."""


@dataclass(frozen=True)
class Holder:
    """Who writes a folder. `born` tells a process from a later one of the same number (None: not known)."""

    host: str
    pid: int
    pid_space: int | None
    born: int | None
    token: str
    heartbeat: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass
class Lock:
    """A lock that this process made. `taken_from`: whose it was, and why that process counted as dead."""

    path: Path
    holder: Holder
    taken_from: str | None = None

    def beat(self) -> bool:
        """Renew the file; False when it is another's, to which this process seemed dead."""
        if not self.held():
            return False
        partial = self.path.with_name(f".{self.holder.token}.partial")
        partial.write_text(text(replace(self.holder, heartbeat=now())), "utf-8")
        partial.replace(self.path)
        return True

    def held(self) -> bool:
        """Whether the file is still this process's."""
        holder = read(self.path)
        return holder is not None and holder.token == self.holder.token


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold an existing folder's lock; a dead process's is taken over. Raises Busy when one that lives has it."""
    lock = acquire(folder / LOCK)
    ended = threading.Event()

    def keep_alive() -> None:
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # a disk that is full or away for a moment; the next beat tries again
                if not lock.beat():
                    return

    thread = threading.Thread(target=keep_alive, daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        ended.set()
        thread.join()
        if lock.held():
            lock.path.unlink(missing_ok=True)


def living_holder(folder: Path) -> Holder | None:
    """Who is writing the folder now; None when nobody is, or one that died."""
    path = folder / LOCK
    holder = read(path)
    return holder if holder is not None and why_dead(holder, path) is None else None


def acquire(path: Path) -> Lock:
    """Make the lock file, or take it over from a dead process. Raises Busy."""
    own = myself()
    while True:
        with suppress(FileExistsError):
            create(path, own)
            return Lock(path, own)
        holder = read(path)
        if holder is None:  # released at this moment
            continue
        reason = why_dead(holder, path)
        if reason is None:
            raise Busy(f"{path.parent} is being written by {holder}: wait for it or choose another run_dir")
        if take_over(path, holder, own):
            return Lock(path, own, taken_from=f"{holder}, {reason}")


def take_over(path: Path, dead: Holder, own: Holder) -> bool:
    """Replace the dead process's lock. Of several that try, the one that makes the claim named after that lock does."""
    claim = path.with_name(f".{dead.token}.claim")
    try:
        create(claim, own)
    except FileExistsError:
        if age(claim) > STALE_SECONDS:  # it died between claim and lock
            claim.unlink(missing_ok=True)
        return False
    try:
        if read(path) != dead:  # somebody was faster
            return False
        partial = path.with_name(f".{own.token}.partial")
        create(partial, own)
        partial.replace(path)
        return True
    finally:
        claim.unlink(missing_ok=True)


def why_dead(holder: Holder, path: Path) -> str | None:
    """Why a lock is stale, in words; None while its process may live."""
    here = myself()
    if (holder.host, holder.pid_space) == (here.host, here.pid_space):
        return None if born(holder.pid) == holder.born and exists(holder.pid) else "which is gone"
    silent = age(path)
    return f"silent for {silent:.0f} s" if silent > STALE_SECONDS else None


def exists(pid: int) -> bool:
    """Whether this host has such a process; one of another user counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def born(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None where that cannot be seen."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def myself() -> Holder:
    """This process, with a token that no other lock has."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  # containers may share a host's name
    except OSError:
        space = None
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, space, born(pid), secrets.token_hex(8), now())


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def age(path: Path) -> float:
    """Seconds since a file was written, by its file system's clock; 0 when it is gone."""
    probe = path.with_name(f".{secrets.token_hex(8)}.probe")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def text(holder: Holder) -> str:
    return json.dumps(asdict(holder), indent=2) + "\n"


def create(path: Path, holder: Holder) -> None:
    """Write a file that must not be there yet. Raises FileExistsError."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w", encoding="utf-8") as file:
        file.write(text(holder))


def read(path: Path) -> Holder | None:
    """The holder that a lock file names, a nameless one of an unknown host when it is damaged, None without a file."""
    try:
        return Holder(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # its process died, or is, between making and filling it
        return Holder("an unknown host", 0, None, None, path.name, "")
