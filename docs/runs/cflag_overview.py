"""The tables of the presets cflag-DATA-ti and -ci side by side: ACC / Fgt, means over the seeds.

Reads results/cflag-*.md, the reproductions; writes results/cflag-overview-ti.md and -ci.md.
"""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DATA = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
SPLITS = {"iid": "even", "noniid": "skewed"}


def means(path: Path) -> dict[str, str]:
    """method -> ACC / Fgt, of the table with a row for each method."""
    out = {}
    for line in path.read_text().splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and all("±" in cell for cell in cells):
            out[name] = " / ".join(f"{float(cell.split('±')[0]):z.1f}" for cell in cells)
    return out


def main() -> None:
    for kind in ("ti", "ci"):
        found = {
            f"{title}, {split}": means(RESULTS / f"cflag-{data}-{kind}-{key}.md")
            for data, title in DATA.items()
            for key, split in SPLITS.items()
            if (RESULTS / f"cflag-{data}-{kind}-{key}.md").exists()
        }
        lines = [f"| method | {' | '.join(found)} |", "|---" + "|---:" * len(found) + "|"]
        methods = dict.fromkeys(name for own in found.values() for name in own)
        for name in methods:
            cells = (own.get(name, "") for own in found.values())
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
        (RESULTS / f"cflag-overview-{kind}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
