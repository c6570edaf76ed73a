"""How far the closed formula of memory (extensions/facts.py) is from the TPU compiler, over the table of plans.

No compile: the peer is what the compiler said when the table was made.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from extensions import facts

AIM = 0.10


def main() -> None:
    """Print the error of every row that has a size, and its spread for each kind of model."""
    errors: dict[str, list[float]] = defaultdict(list)
    print(f"{'model':<16}{'slice':<14}{'recipe':<18}{'batch':>5}{'compiler':>10}{'formula':>9}{'error':>8}")
    for row in facts.COMPILED:
        if not row["hbm_gib"]:
            continue
        model, generation, topology = row["model"], row["generation"], row["topology"]
        batch, compiler = float(row["per_device_batch_size"]), float(row["hbm_gib"])
        formula = facts.estimated_gib(model, generation, topology, batch, recipe=row["recipe"])
        error = formula / compiler - 1
        # Sizes of what does not fit are not fitted to: they show where the formula hopes too much.
        errors["does not fit" if row["problem"] else facts.MODELS[model]["kind"]].append(error)
        slices = "" if row["num_slices"] == "1" else f"{row['num_slices']}x"
        place = f"{slices}{generation} {topology}"
        print(f"{model:<16}{place:<14}{row['recipe']:<18}{batch:>5g}{compiler:>10.2f}{formula:>9.2f}{error:>+8.1%}")
    for kind, found in errors.items():
        print(
            f"{kind:<13}{len(found)} rows, median error {statistics.median(map(abs, found)):.1%}, "
            f"largest {max(found, key=abs):+.1%} (aim for dense: within {AIM:.0%})"
        )


if __name__ == "__main__":
    main()
