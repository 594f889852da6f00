"""Measure how close a correct engine comes to the bounds of `lockstep verify`, over seeds, models
and recipes.

Run `python benchmarks/bounds.py [SEEDS] [BACKEND]`. A bound should be several times the largest
difference of a correct engine.
"""

import sys

import lockstep
from lockstep.recipes.published import RECIPES
from measuring import record

MODELS = ("resnet50", "resnext101-32x4d", "resnet18", "resnet50-v1")


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    backend = sys.argv[2] if len(sys.argv) > 2 else "torch"
    most: dict[str, float] = {}
    limits: dict[str, float] = {}
    for seed in range(seeds):
        for i, model in enumerate(MODELS):
            # The recipes alternate, so that every kind of schedule, padding and MixUp is measured.
            recipe = list(RECIPES.values())[(seed + i) % len(RECIPES)]().replace(seed=seed)
            for row in lockstep.verify([backend], recipe=recipe, model=model)["engines"][backend][
                "rows"
            ]:
                most[row["quantity"]] = max(most.get(row["quantity"], 0.0), row["relative"])
                limits[row["quantity"]] = row["bound"]
        print(
            f"seed {seed}: largest share of a bound"
            f" {max(most[q] / limits[q] for q in most if limits[q]):.2f}",
            flush=True,
        )
    rows = {name: {"largest": float(f"{most[name]:.1e}"), "bound": limits[name]} for name in most}
    record(
        "bounds",
        {
            "what": (
                f"largest relative differences of {backend}, {seeds} seeds, {', '.join(MODELS)}"
            ),
            **rows,
        },
    )


if __name__ == "__main__":
    main()
