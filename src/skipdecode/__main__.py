"""``python -m skipdecode``: the command line."""

import sys

from skipdecode.cli import main

sys.exit(main())
