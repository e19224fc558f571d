"""`make test-cluster`: a sweep on a real Slurm, one job killed midway, the same command again, all results checked.

Starts the one-node cluster of slurm.sh in a folder of its own and stops it whatever happens. Prints what is done and
what the commands say, which is also what docs/cluster.md shows.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
DEJAVU = Path(sys.executable).with_name("dejavu")
JOBS = ("sparsity.selector=oracle,random", "sparsity.ratio=0.5,0.75", "tasks=pydocs", "tasks.limit=8", "tracking=off")
SLURM = ("launcher=submitit_slurm", "launcher.cpus_per_task=1", "launcher.timeout_min=30")
PATIENCE = 600  # seconds for what takes one or two minutes
MIDWAY = 3  # seconds that a job has been at work when it is killed


def main() -> None:
    """Run the test in a temporary folder, or in the one named as the argument, which then keeps the results."""
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1]).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        check_sweep(folder)
    else:
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)  # munge refuses a socket that others cannot reach, and Python makes this 700
            check_sweep(Path(name))


def check_sweep(folder: Path) -> None:
    """The whole story."""
    os.environ |= {"SLURM_CONF": str(folder / "slurm" / "slurm.conf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        cluster("up", folder)
        print(shown("sinfo"))
        killed = first_call(folder)
        second_call(folder, killed)
        compare(folder)
        print("$ sacct -X -o JobID,State")
        print(shown("sacct", "-X", "-o", "JobID,State"))
    finally:
        cluster("down", folder)
    print("test-cluster: passed")


def first_call(folder: Path) -> Path:
    """The sweep, one running job of it cancelled: exit code 1, that job named, the others whole. Its folder."""
    process = evaluate(folder, "sweep", *SLURM)
    job, place = running_job(folder / "sweep")
    time.sleep(MIDWAY)
    print(f"$ scancel {job}")
    shown("scancel", job)
    output, code = ended(process)
    print(output, f"exit code {code}", sep="\n")
    require(code == 1, f"exit code 1, not {code}")
    require(place.name_in(output), "the killed job is named")
    require(not place.complete, "the killed job has no result")
    others = [other for other in results(folder / "sweep") if other.folder != place.folder]
    require(len(others) == 3 and all(other.complete for other in others), "the three others are complete")
    return place.folder


def second_call(folder: Path, killed: Path) -> None:
    """The same command: three jobs are skipped, the killed one is run."""
    before = {result.folder: result.written for result in results(folder / "sweep") if result.complete}
    output, code = ended(evaluate(folder, "sweep", *SLURM))
    print(output, f"exit code {code}", sep="\n")
    require(code == 0, f"exit code 0, not {code}")
    after = {result.folder: result.written for result in results(folder / "sweep") if result.complete}
    require(after.keys() == before.keys() | {killed}, "all four are complete")
    require(all(after[place] == when for place, when in before.items()), "complete jobs were not run again")


def compare(folder: Path) -> None:
    """The same jobs in one process on this machine: equal metrics and densities."""
    output, code = ended(evaluate(folder, "local", "launcher=local"))
    require(code == 0, f"the local sweep ends well: {output}")
    ours, theirs = ({each.folder.name: each.content for each in results(folder / name)} for name in ("sweep", "local"))
    require(ours.keys() == theirs.keys() and len(ours) == 4, "the same four jobs")
    for name, content in ours.items():
        for key in ("metrics", "sparsity", "seed", "config_hash"):
            require(content[key] == theirs[name][key], f"{key} of {name} equal those of a local run")
    print(f"{len(ours)} results equal those of a local run: metrics, densities, seeds, config hashes")


class Result:
    """A job's folder and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "result.json"
        self.content = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.written = self.path.stat().st_mtime_ns if self.path.exists() else 0

    @property
    def complete(self) -> bool:
        return self.content.get("status") == "ok"

    def name_in(self, output: str) -> bool:
        """Whether the values that tell this job from the others stand in a line that says it has no result."""
        values = re.findall(r"(?:selector|ratio)=[^,]+", self.folder.name)
        return any(all(value in line for value in values) and "died" in line for line in output.splitlines())


def results(root: Path) -> list[Result]:
    """Every job of a sweep."""
    return [Result(path.parent) for path in sorted(root.glob("*/config.yaml"))]


def running_job(root: Path) -> tuple[str, Result]:
    """A job that Slurm runs and that is at work in its folder: (its number in Slurm, its folder)."""
    for _ in range(PATIENCE):
        for number in shown("squeue", "-h", "-t", "R", "-r", "-o", "%i").split():
            output = list((root / ".submitit" / number).glob("*_log.out"))
            places = [place for place in results(root) if owner(place.folder) == number]
            if output and places:
                return number, places[0]
        time.sleep(0.5)
    raise SystemExit("test-cluster: no job of the sweep was seen running")


def owner(folder: Path) -> str | None:
    """The Slurm number of the process that holds a job's folder, from the environment of that process."""
    lock = folder / "lock.json"
    try:
        process = json.loads(lock.read_text())["pid"]
        environment = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except (OSError, ValueError, KeyError):
        return None
    values = dict(entry.partition("=")[::2] for entry in environment)
    return f"{values.get('SLURM_ARRAY_JOB_ID')}_{values.get('SLURM_ARRAY_TASK_ID')}"


def evaluate(folder: Path, run_dir: str, *where: str) -> subprocess.Popen[str]:
    """Start `dejavu evaluate -m` in the folder."""
    arguments = ["evaluate", "-m", *JOBS, *where, f"run_dir={run_dir}"]
    print("$ dejavu", shlex.join(arguments), flush=True)
    return subprocess.Popen(
        [DEJAVU, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, int]:
    """(output, exit code) of a process that ends in time."""
    output, _ = process.communicate(timeout=PATIENCE)
    return output.strip(), process.returncode


def cluster(what: str, folder: Path) -> None:
    """Start or stop the cluster."""
    subprocess.run([HERE / "slurm.sh", what, folder / "slurm"], check=True)


def shown(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip()


def require(holds: bool, what: str) -> None:
    """An assertion that no option of Python's leaves out."""
    if not holds:
        raise SystemExit(f"test-cluster: failed: expected that {what}")


if __name__ == "__main__":
    main()
