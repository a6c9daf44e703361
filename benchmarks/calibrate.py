"""Learns on records which layers to skip, with every setting of `skipdecode.calibrate` as an option.

    python benchmarks/calibrate.py MODEL --data train.jsonl --task e2e --nominal-speedup 2 --out learned

Writes schedule.json, its fit and calibration.json to --out; a killed run continues.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import skipdecode
from skipdecode.cli.arguments import Parser, add_options, config_from
from skipdecode.cli.options import NamedModel
from skipdecode.common.options import option
from skipdecode.learning.settings import CalibrateOptions


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, CalibrateOptions):
    """The arguments of `skipdecode.calibrate`."""

    data: str = option("JSONL or CSV file of records with prompts and responses")
    out: str = option("directory for the schedule, the measurements and the picture")
    cost: str | None = option("cost of a step: a file of skipdecode plan --json", default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate and print the losses."""
    parser = Parser(description=__doc__)
    add_options(parser, Config)
    config = config_from(Config, parser.read(list(sys.argv[1:] if argv is None else argv)))
    print(
        skipdecode.calibrate(
            config.ref, config.data, out=config.out, cost=config.cost, **asdict(config.part(CalibrateOptions))
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
