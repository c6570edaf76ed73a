"""Wall time and memory of a rehearsal, against plain MaxText that trains the same small model in one process.

Both with an empty and with a filled compilation cache. The rehearsal starts the job twice, on one process a host, and
writes checkpoints and resumes; the peer trains the same number of steps with the same checkpoints in one go.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from rendered import RUN_PYTHON, repository, run

JOB = Path(__file__).with_name("job.py")
AIMS = {"cold": 3.0, "warm": 2.0}
AIM_GB = 6.0


def peak_of(command: list[str | Path], folder: Path) -> tuple[float, float]:
    """Seconds and the most memory (GB, resident, all processes of the tree together) that a command takes."""
    started = time.perf_counter()
    peak = 0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or []), daemon=True)
        reader.start()
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            total = 0
            try:
                for member in [tree, *tree.children(recursive=True)]:
                    total += member.memory_info().rss
            except psutil.Error:
                continue
            peak = max(peak, total)
            time.sleep(0.5)
        reader.join(5)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{''.join(lines)[-4000:]}")
    return time.perf_counter() - started, peak / 1e9


def main() -> None:
    """Print both times, their ratios, the share of each phase, and the peaks."""
    folder = repository("rehearsal")
    shutil.rmtree(folder / "build", ignore_errors=True)
    print(f"{'':<6}{'rehearsal':>11}{'plain':>10}{'ratio':>8}{'aim':>7}{'memory':>12}{'plain':>10}")
    for cache in ["cold", "warm"]:
        started = time.perf_counter()
        run(folder, "-m", "ops.rehearse")
        seconds = time.perf_counter() - started
        report = json.loads((folder / "build/rehearsal/report.json").read_text())
        steps = max(step["step"] for start in report["starts"] for step in start["steps"]) + 1
        shutil.rmtree(folder / "build/rehearsal/output")
        cache_of_plain = f"jax_cache_dir={folder / 'build/jax-cache-plain'}"
        plain, plain_memory = peak_of([RUN_PYTHON, JOB, "hand", str(steps), "1", cache_of_plain], folder)
        print(
            f"{cache:<6}{seconds:>9.0f} s{plain:>8.0f} s{seconds / plain:>8.2f}{AIMS[cache]:>7}"
            f"{report['peak_memory_gib'] * 2**30 / 1e9:>9.1f} GB{plain_memory:>7.1f} GB"
        )
        for number, start in enumerate(report["starts"], 1):
            before = 0.0
            for phase, at in start["seconds"].items():
                print(f"        start {number}, until {phase:<12}{at - before:>7.1f} s {(at - before) / seconds:>6.0%}")
                before = at
    print(f"aim for the rehearsal's memory: under {AIM_GB} GB")


if __name__ == "__main__":
    main()
