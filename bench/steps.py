"""Steps per second under Ray Train's JaxTrainer, against the same processes started by hand with jax.distributed.

The default job in small, as `make rehearse` trains it: one process a host, the same settings, data, checkpoints and
simulated devices. The sides take turns, and each is judged by its median step once compilation is over.
"""

import json
import statistics
from pathlib import Path

from rendered import repository, run

JOB = Path(__file__).with_name("job.py")
STEPS = 60
WARM_UP = 15
ROUNDS = 2
HOSTS = 4  # of the default slice, v6e 4x4
AIM = 0.97


def main() -> None:
    """Print steps a second of both and their ratio."""
    folder = repository("steps")
    sides = {
        "JaxTrainer": ["ray", str(STEPS)],
        "by hand": ["hand", str(STEPS), str(HOSTS)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, arguments in sides.items():
            steps = json.loads(run(folder, JOB, *arguments).splitlines()[-1])
            seconds[name] += steps[WARM_UP:]
    rate = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:<12} {rate[name]:.2f} steps/s, median of {len(values)} steps, {HOSTS} processes")
    print(f"ratio        {rate['JaxTrainer'] / rate['by hand']:.3f} (aim: at least {AIM})")


if __name__ == "__main__":
    main()
