"""Make the quickstart's data: which of three numbers is the largest?

    python jobs/largest_number.py --out DIR

writes sft.jsonl (3000 rows), train.jsonl (3000), validation.jsonl (500) and
heldout.jsonl (3000). No two rows hold the same three numbers in any order, so
the splits are disjoint in content, not just in wording. Same seed, same bytes.
"""

import argparse
import json
import random
from itertools import combinations
from pathlib import Path

SIZES = {"sft": 3000, "train": 3000, "validation": 500, "heldout": 3000}
NUMBERS = range(10, 100)


def rows(seed: int) -> dict[str, list[dict]]:
    """The rows of each split, {"prompt", "answer", "completion"} each, a function of the seed."""
    draw = random.Random(seed)
    triples = iter(draw.sample(list(combinations(NUMBERS, 3)), sum(SIZES.values())))
    splits = {}
    for split, size in SIZES.items():
        splits[split] = []
        for _ in range(size):
            a, b, c = draw.sample(next(triples), 3)
            answer = max(a, b, c)
            splits[split].append({"prompt": f"Which is the largest: {a}, {b} or {c}?",
                                  "answer": str(answer), "completion": f"\\boxed{{{answer}}}"})
    return splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="folder to write the four files to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for split, table in rows(options.seed).items():
        path = options.out / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
        print(f"{path}: {len(table)} rows")


if __name__ == "__main__":
    main()
